"""`torch.npu`: the functions that Sluice, torch and transformers ask of a device module."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

import torch
from torch.cpu import Event, Stream, StreamContext

from .watch import count

RANDOM = ["get_rng_state", "manual_seed", "manual_seed_all", "set_rng_state"]
__all__ = [
    *RANDOM,
    "Event",
    "Stream",
    "StreamContext",
    "current_device",
    "current_stream",
    "default_generators",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "get_device_name",
    "is_available",
    "is_initialized",
    "max_memory_allocated",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "reset_peak_memory_stats",
    "set_device",
    "stream",
    "synchronize",
]

DEVICES = 2
MEMORY = 64 << 30
_current = 0


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    return DEVICES if visible is None else len([one for one in visible.split(",") if one])


def current_device() -> int:
    return _current


def set_device(device: Any) -> None:
    global _current
    count("npu.set_device")
    index = device if isinstance(device, int) else torch.device(device).index or 0
    if not 0 <= index < device_count():
        raise RuntimeError(f"Invalid device ID {index}: {device_count()} devices are visible")
    _current = index


class device:  # noqa: N801 (torch names it so)
    """`with torch.npu.device(1):`"""

    def __init__(self, index: Any) -> None:
        self._index = index

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self._index)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        set_device(self._before)


def get_device_name(device: Any = None) -> str:
    return "fake NPU"


def synchronize(device: Any = None) -> None:
    count("npu.synchronize")


def stream(stream: Any) -> StreamContext:
    count("npu.stream")
    return torch.cpu.stream(stream)


def current_stream(device: Any = None) -> Stream:
    return torch.cpu.current_stream()


def default_stream(device: Any = None) -> Stream:
    return torch.cpu.current_stream()


class _Generators:
    """All devices are the host, so their random numbers are its."""

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.random.default_generator


default_generators = _Generators()


def manual_seed(seed: int) -> None:
    count("npu.manual_seed")


def manual_seed_all(seed: int) -> None:
    count("npu.manual_seed_all")


def get_rng_state(device: Any = None) -> torch.Tensor:
    count("npu.get_rng_state")
    return torch.random.default_generator.get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    count("npu.set_rng_state")


def memory_allocated(device: Any = None) -> int:
    count("npu.memory_allocated")
    return 1 << 30


def memory_reserved(device: Any = None) -> int:
    return 2 << 30


def max_memory_allocated(device: Any = None) -> int:
    return 3 << 30


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return MEMORY - memory_reserved(), MEMORY


def empty_cache() -> None:
    count("npu.empty_cache")


def reset_peak_memory_stats(device: Any = None) -> None:
    count("npu.reset_peak_memory_stats")


def is_bf16_supported() -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]
