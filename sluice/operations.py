"""Which implementation of an operation runs: the first that this device and what is installed have.

Each is compared with the plain one in tests; `sluice_trainer_operation_info` and `sluice doctor`
say which run.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from sluice import platform
from sluice.platform import CPU, CUDA, NPU

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Implementation:
    """`device_types` that have it (none given: all), and the package beside torch, if any."""

    name: str
    device_types: tuple[str, ...] = ()
    package: str = ""

    def is_on(self, device_type: str) -> bool:
        """Returns whether it works on such a device, with what is installed."""
        if self.device_types and device_type not in self.device_types:
            return False
        return not self.package or importlib.util.find_spec(self.package) is not None


OPERATIONS: Mapping[str, Sequence[Implementation]] = {
    # over packed rows of several lengths
    "packed_attention": (
        Implementation("flash_attn", (CUDA.device_type,), "flash_attn"),
        Implementation("torch_sdpa"),
    ),
    "rms_norm": (
        Implementation("npu_rms_norm", (NPU.device_type,), "torch_npu"),
        Implementation("torch_rms_norm"),
    ),
    "adamw": (
        Implementation("torch_fused", (CPU.device_type, CUDA.device_type)),
        Implementation("torch_foreach"),
    ),
}


@cache
def chosen(operation: str, device_type: str) -> str:
    """Returns the name of the implementation that runs on such a device."""
    return next(each.name for each in OPERATIONS[operation] if each.is_on(device_type))


def of_torch(device_type: str) -> dict[str, str]:
    """Returns the operations of a model of transformers whose parameters are on such a device."""
    return {"packed_attention": "torch_sdpa", "adamw": chosen("adamw", device_type)}


def packed_attention(device_type: str) -> Any:
    """Returns flash-attn's kernel for packs, whose causal mask is lower right, or None."""
    if chosen("packed_attention", device_type) != "flash_attn":
        return None
    return importlib.import_module("flash_attn").flash_attn_varlen_func


def rms_norm(hidden: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Divides by the root of the mean square over the last dimension, in float32."""
    import torch

    wide, shape = hidden.float(), hidden.shape[-1:]
    if chosen("rms_norm", platform.current().device_type) != "npu_rms_norm":
        return torch.nn.functional.rms_norm(wide, shape, None, epsilon)
    kernel = importlib.import_module("torch_npu").npu_rms_norm
    normed: torch.Tensor = kernel(wide, wide.new_ones(shape), epsilon)[0]
    return normed


def adamw_options(device_type: str) -> dict[str, bool]:
    """Returns how torch's AdamW is to work through parameters on such a device."""
    is_fused = chosen("adamw", device_type) == "torch_fused"
    return {"fused": True} if is_fused else {"foreach": True}
