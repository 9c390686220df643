"""Importing it, before Megatron, has Megatron run on the fake NPU, as the real one does on NPUs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch_npu.contrib import transfer_to_npu  # noqa: F401
from torch_npu.watch import count

if any(name.partition(".")[0] == "megatron" for name in sys.modules):
    raise RuntimeError("mindspeed.megatron_adaptor has to be imported before megatron")

PRECISIONS = ("FloatTensor", "HalfTensor", "BFloat16Tensor")


def _plain(function: Any = None, **_: Any) -> Any:
    """In place of compilers that do not know the device."""
    return function if function is not None else lambda decorated: decorated


def _named(type_of: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(type_of)
    def name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Megatron sorts gradients by these names; all tensors here are the NPU's."""
        found = type_of(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.partition(".")[0] == "megatron" and isinstance(found, str):
            prefix, _, kind = found.rpartition(".")
            return f"{prefix}.cuda.{kind}" if kind in PRECISIONS else found
        return found

    return name


torch.compile = _plain
torch.jit.script = _plain
torch.Tensor.type = _named(torch.Tensor.type)
_cuda = torch.get_device_module("cuda")
_cuda._lazy_call = lambda call, **_: call()
count("mindspeed")
