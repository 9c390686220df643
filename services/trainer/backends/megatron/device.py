"""This rank's device, by the platform's word alone."""

from __future__ import annotations

import torch
import torch.distributed as dist

from sluice import platform


def on_cpu() -> bool:
    return platform.current().device_type == platform.CPU.device_type


def current_device() -> torch.device:
    """The one that the rank's process made current."""
    chosen = platform.current()
    if on_cpu():
        return chosen.device()
    return torch.device(chosen.device_type, chosen.module.current_device())


def any_rank(flag: bool) -> bool:
    """Whether `flag` is set on any rank of the world; collective."""
    found = torch.tensor(float(flag), device=current_device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found.item())
