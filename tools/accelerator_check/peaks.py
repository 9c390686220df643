"""What the device does at best: matrix products and copies, measured, beside data sheets."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from benchmarks.training import PEAK_TFLOPS
from sluice import platform

REPEATS = 5


def seconds_of(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """The best of some runs of `call`, its work on the device included, after one to warm up."""
    device, best = platform.current(), math.inf
    call()
    for _ in range(repeats):
        device.synchronize()
        began = time.perf_counter()
        call()
        device.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def matmul_tflops(size: int, count: int = 10) -> float:
    """Of square bfloat16 products, `count` after another."""
    left, right = (
        torch.randn((size, size), device=platform.current().device(), dtype=torch.bfloat16)
        for _ in range(2)
    )

    def products() -> None:
        for _ in range(count):
            left @ right

    return 2 * size**3 * count / seconds_of(products) / 1e12


def data_sheet_tflops() -> float:
    """Dense bfloat16 of the current device; nan where none is known."""
    name = platform.current().describe()["name"]
    return next((peak for known, peak in PEAK_TFLOPS.items() if known in name), math.nan)


def copy_peaks(size: int) -> dict[str, float]:
    """GB/s of one copy of `size` bytes: on the host, on the device, and each way between them.

    Bytes are counted once. Between host and device the host's memory is pinned where that is
    possible; on a CPU all are copies in its memory.
    """
    device = platform.current().device()
    host, other = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
    here, there = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    pinned = host if platform.current() is platform.CPU else host.pin_memory()
    return {
        "host_copy_gbs": size / seconds_of(lambda: other.copy_(host)) / 1e9,
        "device_copy_gbs": size / seconds_of(lambda: there.copy_(here)) / 1e9,
        "to_host_gbs": size / seconds_of(lambda: pinned.copy_(here)) / 1e9,
        "to_device_gbs": size / seconds_of(lambda: here.copy_(pinned)) / 1e9,
    }
