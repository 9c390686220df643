"""What a preflight says that a rank holds is what it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.trainer.backends.megatron.layout import mesh_of
from services.trainer.config import TrainerConfig
from services.trainer.memory import held_bytes
from sluice.config import parse_config
from sluice.weights.checkpoint import map_shard
from tests.megatron.models import build_checkpoint
from tests.rank_pool import Pool

SPREAD = {"tensor": 2, "sequence_parallel": True}
CASES = [
    pytest.param("qwen3", 1, {}, id="one rank"),
    pytest.param("qwen3", 2, {"dtype": "bfloat16"}, id="DP2-bfloat16", marks=pytest.mark.fast),
    pytest.param("qwen3", 2, {"distributed_optimizer": False}, id="DP2-whole optimizer"),
    pytest.param("qwen3", 2, {"tensor": 2}, id="TP2"),
    pytest.param("qwen3", 2, {"pipeline": 2, "first_stage_layers": 1}, id="PP2-1+3"),
    pytest.param("qwen3_tied", 2, {"pipeline": 2, "last_stage_layers": 3}, id="tied-PP2-1+3"),
    pytest.param("qwen3_moe", 2, {"expert": 2}, id="EP2", marks=pytest.mark.fast),
    pytest.param("qwen3_moe", 4, {**SPREAD, "expert": 2}, id="TP2-EP2 of four"),
    pytest.param("qwen3", 2, {"context": 2, "dtype": "bfloat16"}, id="CP2-bfloat16"),
]


@pytest.mark.parametrize(("family", "world", "layout"), CASES)
def test_a_rank_holds_what_it_is_said_to(
    pool: Pool, tmp_path: Path, family: str, world: int, layout: dict[str, Any]
) -> None:
    model = build_checkpoint(family, tmp_path / "model")
    layout = {"dtype": "float32", "vocab_multiple": 8, **layout}
    arguments = {"model": str(model), "out": str(tmp_path), "layout": layout}
    found = pool.run("held", world, **arguments)
    values = {"backend": "megatron", "megatron": layout, "model": str(model), "store": "s"}
    config = parse_config(TrainerConfig, values)
    document = json.loads((model / "config.json").read_text())
    mapped, tensors = map_shard(model / "model.safetensors")
    mapped.close()
    said = held_bytes(config, mesh_of(config.megatron, 0, world), document, tensors)
    assert said is not None
    state = max(each["state"] for each in found)
    assert said.weights + said.optimizer == pytest.approx(state, rel=0.04)
    assert said.gradients == pytest.approx(max(each["gradients"] for each in found), rel=0.04)
