"""torch-npu's face over the CPU; the README beside this package says what it does."""

from __future__ import annotations

import torch

from . import devices, npu, watch
from .watch import calls

__all__ = ["calls", "npu", "npu_fusion_attention", "npu_rms_norm"]
__version__ = f"{torch.__version__}.fake"

devices.register(npu)
watch.watch_cuda()


def npu_fusion_attention(*args: object, **kwargs: object) -> None:
    """transformers imports it wherever torch_npu is installed; plain attention never calls it."""
    raise NotImplementedError("the fake NPU has no fused attention; use sdpa or eager")


def npu_rms_norm(
    tensor: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normed tensor, and one over the root mean square."""
    watch.count("npu_rms_norm")
    inverse = torch.rsqrt(tensor.square().mean(-1, keepdim=True) + epsilon)
    return tensor * inverse * gamma, inverse


def _autoload() -> None:
    """Called by `import torch`; importing this package has done everything."""
