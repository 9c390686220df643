"""Importing it has calls of torch.cuda, in this whole process, answered by the NPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from torch_npu import npu
from torch_npu.watch import count

FACTORIES = (
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "randn",
    "empty_like",
    "zeros_like",
)


def _to_npu(device: Any) -> Any:
    kind, _, index = str(device).partition(":")
    return f"npu:{index}" if kind == "cuda" and index else "npu" if kind == "cuda" else device


def _made_on_npu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is not None:
            kwargs["device"] = _to_npu(kwargs["device"])
        return factory(*args, **kwargs)

    return make


def _move(self: Any, device: Any = None, **_: Any) -> Any:
    count("transferred")
    return self.to("npu")


def _started(start: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(start)
    def call(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        start("hccl" if backend == "nccl" else backend, *args, **kwargs)

    return call


def _install() -> None:
    module = torch.get_device_module("cuda")
    for name in npu.__all__:
        setattr(module, name, getattr(npu, name))
    vars(module.random).update({name: getattr(npu, name) for name in npu.RANDOM})
    for name in FACTORIES:
        setattr(torch, name, _made_on_npu(getattr(torch, name)))
    for owner in (torch.Tensor, torch.nn.Module):
        owner.cuda = _move
    torch.Tensor.record_stream = lambda self, stream: None
    dist.init_process_group = _started(dist.init_process_group)


_install()
