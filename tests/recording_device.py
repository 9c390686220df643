"""Capture and replay as an accelerator does them, on the host.

What is recorded are operations with the addresses and the numbers of the host that they were
given. A replay runs them again into the memory of the first time, whatever has become of what they
were made of; memory from outside that nobody holds any more is somebody else's by then, and raises.
So does what an accelerator cannot capture.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

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


class _Outside:
    """A tensor whose memory was there before the capture, which does not hold it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._type, self._place = tensor.dtype, tensor.storage_offset()
        self._shape, self._stride = tensor.shape, tensor.stride()

    def tensor(self) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise CaptureError("a replay reads memory that is free")
        empty = torch.empty(0, dtype=self._type)
        return empty.set_(storage, self._place, self._shape, self._stride)


class Recorder(TorchDispatchMode):
    """The operations of a block, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self._inside: dict[int, torch.UntypedStorage] = {}  # made here, by address

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
            given = _places((args, kwargs))
            for each in tree_leaves(made):
                if isinstance(each, torch.Tensor):
                    storage = each.untyped_storage()
                    if storage.data_ptr() not in given:
                        self._inside[storage.data_ptr()] = storage
            held = tree_map(self._held, (args, kwargs or {}, made))
            self.calls.append((func, *held))
        return made

    def _held(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        inside = value.untyped_storage().data_ptr() in self._inside
        return value if inside else _Outside(value)

    def replay(self) -> None:
        for func, *held in self.calls:
            args, kwargs, made = tree_map(_present, tuple(held))
            again = func(*args, **kwargs)
            for memory, value in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if isinstance(memory, torch.Tensor) and memory is not value:
                    memory.copy_(value)


def _present(value: Any) -> Any:
    return value.tensor() if isinstance(value, _Outside) else value


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
