"""Capture and replay as an accelerator does them, on the host.

What is recorded are operations with the tensors, and so the addresses, and the numbers of the host
that they were given. A replay runs them again into the memory of the first time, whatever has
become of what they were made of. What an accelerator cannot capture raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sluice.platform import Platform

WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "unique")


class CaptureError(RuntimeError):
    """The host would wait for the device in the middle of a capture, or its pool has ended."""


class Pool:
    """Memory of captures, which CUDA's allocator takes no more of once the last one is gone."""

    def __init__(self) -> None:
        self.recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()
        self.is_used = False

    def add(self, recorder: Recorder) -> None:
        if self.is_used and not self.recorders:
            raise CaptureError("use_count > 0 INTERNAL ASSERT FAILED")
        self.is_used = True
        self.recorders.add(recorder)


class Recorder(TorchDispatchMode):
    """The operations of a block, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.overloadpacket.__name__
        if any(name.startswith(wait) for wait in WAITS):
            raise CaptureError(f"{name} while capturing")
        indices = args[1] if name == "index" else ()
        if any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in indices):
            raise CaptureError("an index of booleans while capturing")
        made = func(*args, **(kwargs or {}))
        if not _is_view(func, args, made):
            self.calls.append((func, args, kwargs or {}, made))
        return made

    def replay(self) -> None:
        for func, args, kwargs, made in self.calls:
            again = func(*args, **kwargs)
            for memory, value in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if isinstance(memory, torch.Tensor) and memory is not value:
                    memory.copy_(value)


def _is_view(func: Any, args: Any, made: Any) -> bool:
    """Whether what it returns lies on what it was given, and nothing was written."""
    if any(r.alias_info is None or r.alias_info.is_write for r in func._schema.returns):
        return False
    return _places(made) <= _places(args)  # some copy where they have to


def _places(values: Any) -> set[int]:
    return {
        each.untyped_storage().data_ptr()
        for each in tree_leaves(values)
        if isinstance(each, torch.Tensor)
    }


@dataclass(frozen=True)
class RecordingDevice(Platform):
    """The host, with captures."""

    def device(self, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    def capture_pool(self) -> Pool:
        return Pool()

    def capture(
        self, run: Callable[[], torch.Tensor], pool: Pool
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        run()
        recorder = Recorder()
        pool.add(recorder)
        with recorder:
            answer = run()
        answer.fill_(float("nan"))
        return answer, recorder.replay


def recording_device() -> RecordingDevice:
    return RecordingDevice("cpu", "gloo", "", can_capture=True)
