"""`torch_npu.profiler`: the host's profiler with NPU among its activities."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch.profiler
from torch.profiler import tensorboard_trace_handler

from .watch import count

__all__ = ["ProfilerActivity", "profile", "tensorboard_trace_handler"]


class ProfilerActivity(Enum):
    CPU = 0
    NPU = 1


def profile(*, activities: Sequence[ProfilerActivity], on_trace_ready: Any) -> Any:
    count("npu.profile")
    assert set(activities) == set(ProfilerActivity)
    return torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], on_trace_ready=on_trace_ready
    )
