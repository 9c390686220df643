"""Models that the reference engine cannot run are refused by name, before anything is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from services.rollout.engine.reference.loading import open_model
from services.rollout.errors import UnsupportedModelError
from tests.contract.engine.cases import SIZES, Model

FIRST = 32  # tokens, of the first training


def test_a_model_of_longrope_is_refused_by_name(tmp_path: Path) -> None:
    half = SIZES["hidden_size"] // SIZES["num_attention_heads"] // 2
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0 + index / 7 for index in range(half)],
        "long_factor": [3.0 + index for index in range(half)],
    }
    torch.manual_seed(0)
    config = Phi3Config(**sizes, original_max_position_embeddings=FIRST, rope_parameters=rope)
    module = Phi3ForCausalLM(config).eval()
    module.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"longrope .* longer than 32") as told:
        open_model(tmp_path, torch.float32, torch.device("cpu"))
    assert told.value.metadata["rope_type"] == "longrope"
    model, text = Model(module, tmp_path), [*range(FIRST + 1)]
    short, long = (model.logprobs(text[:3], tuple(text[3:end])) for end in (FIRST, FIRST + 1))
    assert short != pytest.approx(long[: len(short)], abs=1e-2), "or a cache could hold its tokens"
