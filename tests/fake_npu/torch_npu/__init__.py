"""torch-npu's face over the CPU; the README beside this package says what it does."""

from __future__ import annotations

import torch

from . import devices, fused, npu, optim, profiler, watch
from .fused import (
    npu_fusion_attention,
    npu_rms_norm,
    npu_rotary_mul,
    npu_swiglu,
)
from .watch import calls

__all__ = [
    "calls",
    "fused",
    "npu",
    "npu_fusion_attention",
    "npu_rms_norm",
    "npu_rotary_mul",
    "npu_swiglu",
    "optim",
    "profiler",
]
__version__ = f"{torch.__version__}.fake"

devices.register(npu)
watch.watch_cuda()


def _autoload() -> None:
    """Called by `import torch`; importing this package has done everything."""
