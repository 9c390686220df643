from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sluice.weights.convert.conversion import convert
from sluice.weights.convert.options import ConvertOptions
from tests.unit.weights_rules.models import build_model


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An HF checkpoint in bfloat16."""
    directory = tmp_path_factory.mktemp("qwen3") / "model"
    build_model("qwen3").to(torch.bfloat16).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def megatron(qwen3: Path) -> Path:
    """The same as torch_dist."""
    target = qwen3.with_name("megatron")
    convert(qwen3, target, ConvertOptions(vocab_multiple=8, sync=False))
    return target
