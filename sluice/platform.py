"""The only module that knows which accelerator this process runs on.

Imports torch only when a device is touched, so that processes without torch may ask for the
name of the variable that masks devices.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"


class PlatformError(RuntimeError):
    """The accelerator asked for cannot be used; the message says what to do."""


@dataclass(frozen=True)
class Platform:
    device_type: str  # torch device type
    collective: str  # torch.distributed backend
    visible_env: str  # variable that masks devices; empty on cpu

    @property
    def module(self) -> ModuleType:
        """`torch.cuda`, `torch.npu` or `torch.cpu`."""
        module: ModuleType = _torch().get_device_module(self.device_type)
        return module

    def device(self, local_rank: int = 0) -> torch.device:
        """The device of a local rank; all ranks share the one cpu."""
        torch = _torch()
        return torch.device(self.device_type, 0 if self.device_type == "cpu" else local_rank)

    def set_device(self, local_rank: int = 0) -> None:
        """Make the device of `local_rank` current for this process."""
        if self.device_type != "cpu":
            self.module.set_device(local_rank)

    def synchronize(self) -> None:
        """Wait for all work queued on the current device."""
        self.module.synchronize()

    def seed_all(self, seed: int) -> None:
        """Seed torch on the cpu and on every device."""
        _torch().manual_seed(seed)

    def memory_used_bytes(self) -> int:
        return 0 if self.device_type == "cpu" else self.module.memory_allocated()


CPU = Platform("cpu", "gloo", "")
CUDA = Platform("cuda", "nccl", "CUDA_VISIBLE_DEVICES")
NPU = Platform("npu", "hccl", "ASCEND_RT_VISIBLE_DEVICES")


@cache
def current() -> Platform:
    """SLUICE_DEVICE (auto, cpu, cuda or npu); auto is the first accelerator found, else cpu.

    Raises PlatformError when the device asked for is not usable.
    """
    wanted = os.environ.get("SLUICE_DEVICE", "auto")
    if wanted not in ("auto", "cpu", "cuda", "npu"):
        raise PlatformError(f"SLUICE_DEVICE must be auto, cpu, cuda or npu, got {wanted!r}")
    if wanted == "cpu":
        return CPU
    if wanted in ("auto", "npu") and _has_npu():
        return NPU
    if wanted in ("auto", "cuda") and _torch().cuda.is_available():
        return CUDA
    if wanted == "auto":
        return CPU
    raise PlatformError(f"SLUICE_DEVICE={wanted}, but no such device is visible")


@cache
def _torch() -> ModuleType:
    return importlib.import_module("torch")


def _has_npu() -> bool:
    if importlib.util.find_spec("torch_npu") is None:
        return False
    importlib.import_module("torch_npu")  # registers torch.npu
    return bool(_torch().npu.is_available())
