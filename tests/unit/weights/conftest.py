"""A small checkpoint as HF writes it, and a store to put it into."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sluice.weights.checkpoint import companion_files
from sluice.weights.store import WeightStore
from tests.contract.weight_store.policy import Policy


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {
        "embed.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
        "norm.weight": torch.linspace(-1, 1, 5).to(torch.bfloat16),
        "router.bias": torch.tensor([True, False, True]),
        "step": torch.tensor(7, dtype=torch.int64),
    }


@pytest.fixture
def checkpoint(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        (directory / name).write_text(f'{{"name": "{name}"}}')
    (directory / "optimizer.pt").write_bytes(b"not a companion")
    return directory


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "store", durable=False)


@pytest.fixture
def policy(store: WeightStore, checkpoint: Path) -> Policy:
    made = Policy(store)
    made.companions = companion_files(checkpoint)
    return made
