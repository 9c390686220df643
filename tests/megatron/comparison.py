"""What a layout gave beside what the oracle says, in the two numbers of the summary line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

LOGPROB_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-3  # of the largest element of the tensor
LOSS_TOLERANCE = 1e-3

Tensors = dict[str, torch.Tensor]


@dataclass
class Summary:
    """The line that a whole run ends with."""

    layouts: set[str] = field(default_factory=set)
    logprob: float = 0.0
    gradient: float = 0.0

    def line(self) -> str:
        return (
            f"megatron: layouts={len(self.layouts)} max_logprob_diff={self.logprob:.2e} "
            f"max_grad_rel={self.gradient:.2e}"
        )


def read_ranks(out: Path, kind: str) -> Tensors:
    """The files of all ranks; every tensor must come from exactly one."""
    found: Tensors = {}
    for path in sorted(out.glob(f"{kind}-*.safetensors")):
        for name, tensor in load_file(path).items():
            assert name not in found, f"{name} was written by two ranks"
            found[name] = tensor
    return found


def logprob_difference(found: Tensors, expected: Tensors) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def relative_difference(found: Tensors, expected: Tensors) -> float:
    """Largest difference of any tensor, relative to the tensor's largest element."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    worst = 0.0
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        scale = float(tensor.abs().max())
        assert scale > 0, f"{name} has no gradient to compare"
        worst = max(worst, float((found[name].float() - tensor).abs().max()) / scale)
    return worst
