"""Makes `npu` a device of torch whose memory is the host's, and `hccl` a name of gloo."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from .watch import count

_accelerator = torch._C._acc  # lets Python stand in for a vendor's C++
_library = torch.library.Library("aten", "IMPL")  # alive as long as the registrations


def register(module: ModuleType) -> None:
    """Do what torch-npu does when imported: name the device, its module and its collectives."""
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", module)
    _accelerator.register_python_privateuseone_hook(_Hooks())
    _accelerator.register_python_privateuseone_device_guard(_Guard())
    _library.impl("empty.memory_format", _empty, "PrivateUse1")
    _library.impl("empty_strided", _empty_strided, "PrivateUse1")
    _library.impl("tril_indices", _on_host(torch.tril_indices), "PrivateUse1")
    _library.impl("triu_indices", _on_host(torch.triu_indices), "PrivateUse1")
    torch.Generator = _Generator
    torch.Tensor.pin_memory = _pinned
    torch.empty = _empty_pinned(torch.empty)
    if dist.is_available():
        dist.Backend.register_backend("hccl", _create_hccl, devices=["npu", "cpu"])


class _Hooks(_accelerator.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, device_index: int) -> bool:
        return True


class _Guard(_accelerator.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


def _empty(
    size: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> torch.Tensor:
    count("allocate")
    return torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format)


def _empty_strided(
    size: Any,
    stride: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> torch.Tensor:
    count("allocate")
    return torch.empty_strided(size, stride, dtype=dtype)


def _on_host(function: Any) -> Any:
    def call(*args: Any, dtype: Any = None, **placement: Any) -> torch.Tensor:
        return function(*args, dtype=dtype or torch.int64)

    return call


class _Generator(torch._C.Generator):
    """Random numbers of an NPU come from a generator of the host, since its tensors do."""

    def __new__(cls, device: Any = "cpu") -> Any:
        on_host = torch.device(device).type == "npu"
        return super().__new__(cls, device="cpu" if on_host else device)


def _pinned(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    count("pin_memory")
    return tensor


def _empty_pinned(empty: Any) -> Any:
    """A device of Python has no allocator of pinned memory."""

    @functools.wraps(empty)
    def make(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            count("pin_memory")
        return empty(*size, **options)

    return make


def _create_hccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
    count("hccl")
    return dist.ProcessGroupGloo(store, rank, size, timeout)
