"""Weight decay leaves out what the training code of a family does: what its states go by.

`_no_weight_decay` is set of A_log, D and dt_bias by Mamba and Mamba-2 (state-spaces/mamba), as by
Jamba's, Bamba's and Falcon-H1's code, and of A_log and dt_bias by gated delta nets and Kimi's
(flash-linear-attention). Convolutions decay there, norms and biases do not as anywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.fsdp.jobs import OPTIM
from tests.models.families import CASES, build
from tests.rank_pool import Pool

fast = pytest.mark.fast
BY_NAME = {case.name: case for case in CASES}
UNDECAYED = (".A_log", ".D", ".dt_bias")
KEPT = 1 - OPTIM["learning_rate"] * OPTIM["weight_decay"]
HYBRIDS = [
    *("nemotron_h", "granitemoehybrid", "falcon_h1", "jamba", "bamba", "kimi_linear"),
    *("lfm2", "lfm2_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
]
MUON = {**OPTIM, "kind": "muon"}


def check(stored: dict[str, torch.Tensor], out: Path) -> None:
    """By names and shapes of the checkpoint, of a step whose gradients are zero."""
    found: dict[str, torch.Tensor] = {}
    for path in (out / "published").glob("*.safetensors"):
        found |= load_file(path)
    assert found.keys() == stored.keys()
    for name, tensor in stored.items():
        decays = tensor.ndim > 1 and not name.endswith(UNDECAYED)
        wanted = tensor * KEPT if decays else tensor
        torch.testing.assert_close(found[name], wanted, rtol=1e-6, atol=0, msg=name)
        assert decays or torch.equal(found[name], tensor), name


@pytest.mark.parametrize("optim", [OPTIM, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=fast if name == "jamba" else ()) for name in HYBRIDS]
)
def test_on_fsdp(pool: Pool, tmp_path: Path, name: str, optim: dict[str, Any]) -> None:
    model = build(BY_NAME[name], tmp_path / "model")
    arguments = {"model": str(model.directory), "out": str(tmp_path), "trainer": {"optim": optim}}
    (answer,) = pool.run("decay", 1, **arguments)
    assert answer == {"skipped": ""}
    check(load_file(model.directory / "model.safetensors"), tmp_path)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_on_megatron(ranks: Pool, tmp_path: Path, name: str) -> None:
    model = build(BY_NAME[name], tmp_path / "model")
    arguments = {"model": str(model.directory), "out": str(tmp_path), "layout": {}}
    (answer,) = ranks.run("decay", 1, **arguments)
    assert answer == {"skipped": ""}
    check(load_file(model.directory / "model.safetensors"), tmp_path)
