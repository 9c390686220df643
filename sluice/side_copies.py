"""Copies between a device and pinned memory of its host, beside what the device computes.

Two buffers take turns each way, so that one is filled while the other is copied. Where there is no
side stream (`sluice.platform`), copies are plain ones and nothing is begun ahead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

import numpy as np
import torch

from sluice import platform

BUFFERS = 2
ALIGNMENT = 256  # bytes; as an allocator's
LEAST_BYTES = 1 << 16
PIECE_BYTES = 16 << 20  # of what is copied to a tensor that exists

T = TypeVar("T")
U = TypeVar("U")


def map_tensors(value: T, change: Callable[[torch.Tensor], torch.Tensor]) -> T:
    """Return dataclasses, mappings and sequences with what `change` makes of their tensors.

    What has none is itself again, and no copy.
    """
    changed: Any = value
    if isinstance(value, torch.Tensor):
        return cast(T, change(value))
    if isinstance(value, Mapping):
        changed = {name: map_tensors(each, change) for name, each in value.items()}
        same = all(changed[name] is each for name, each in value.items())
    elif isinstance(value, tuple | list):
        changed = type(value)(map_tensors(each, change) for each in value)
        same = all(new is each for new, each in zip(changed, value, strict=True))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        mapped = map_tensors(fields, change)
        same = mapped is fields
        changed = value if same else dataclasses.replace(value, **mapped)
    else:
        return value
    return value if same else cast(T, changed)


def to_device(value: T, device: torch.device) -> T:
    """Return `map_tensors` with plain copies."""
    return value if device.type == "cpu" else map_tensors(value, lambda t: t.to(device))


class _Pinned:
    """Pinned memory, and the end of the copy that uses it."""

    def __init__(self) -> None:
        self.copied: Any = None  # an event
        self._memory = torch.empty(0, dtype=torch.uint8)

    def free(self, size: int) -> torch.Tensor:
        """Return uint8[size] that no copy uses any more."""
        self.settle()
        if len(self._memory) < size:
            self._memory = platform.current().host_memory(max(size, LEAST_BYTES))
        return self._memory[:size]

    def settle(self) -> None:
        """Wait for the copy, if there is one."""
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None


class Uploads:
    """What passes compute with, on its way to the device. Of one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pinned = device, [_Pinned() for _ in range(BUFFERS)]
        self._next = 0

    def ahead(self, items: Iterable[T], make: Callable[[T], U]) -> Iterator[tuple[T, U]]:
        """Yield items with what `make` makes of each, on the device; the next one is under way.

        Tensors that `make` returns are left alone from then on: it makes them anew.
        """
        waiting: list[tuple[T, Callable[[], U]]] = []
        for item in items:
            stream = platform.current().side_stream()
            if stream is None:
                yield item, to_device(make(item), self._device)
                continue
            waiting.append((item, self._begin(make(item), stream)))
            if len(waiting) > 1:
                first, take = waiting.pop(0)
                yield first, take()
        for item, take in waiting:
            yield item, take()

    def _begin(self, value: U, stream: Any) -> Callable[[], U]:
        """Begin to copy; what is returned waits for it on the device."""
        found: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            found.append(tensor)
            return tensor

        map_tensors(value, note)
        offsets, size = [], 0
        for tensor in found:
            offsets.append(size)
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        buffer = self._pinned[self._next]
        self._next = (self._next + 1) % BUFFERS
        memory = buffer.free(size)
        for tensor, offset in zip(found, offsets, strict=True):
            _view(memory, offset, tensor).copy_(tensor)
        flat = torch.empty(size, dtype=torch.uint8, device=self._device)
        buffer.copied = ended = platform.current().begin_copy(flat, memory, stream)

        def take() -> U:
            platform.current().await_event(ended)
            views = iter([_view(flat, o, t) for t, o in zip(found, offsets, strict=True)])
            return map_tensors(value, lambda _: next(views))

        return take


def _view(flat: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    return flat[offset : offset + like.nbytes].view(like.dtype).view(like.shape)


class Fills:
    """Tensors of the host that are copied to memory of a device, piece by piece. Of one thread."""

    def __init__(self) -> None:
        self._pinned = [_Pinned() for _ in range(BUFFERS)]
        self._next = 0

    def begin(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Begin to fill `into`, contiguous, from `source`, which may go away after the return."""
        stream = platform.current().side_stream()
        if stream is None:
            into.copy_(source)
            return
        to, flat = into.view(-1), source.reshape(-1)
        step = PIECE_BYTES // into.itemsize
        for first in range(0, len(flat), step):
            part, piece = to[first : first + step], flat[first : first + step]
            buffer = self._pinned[self._next]
            self._next = (self._next + 1) % BUFFERS
            memory = buffer.free(part.nbytes).view(part.dtype)
            memory.copy_(piece)
            buffer.copied = platform.current().begin_copy(part, memory, stream)

    def settle(self) -> None:
        """Wait until all is there, for any thread and stream."""
        for buffer in self._pinned:
            buffer.settle()


class Downloads:
    """Bytes of tensors, read on the host one after the other. Of one thread."""

    def __init__(self) -> None:
        self._pinned = [_Pinned() for _ in range(BUFFERS)]

    def read(
        self, tensors: Iterable[tuple[torch.Tensor, torch.dtype]], stream: Any
    ) -> Iterator[np.ndarray]:
        """Yield the bytes of each as that dtype, to be used before the next is taken.

        stream: the one that is used here, of `side_stream`; the next tensor is copied meanwhile.
        """
        waiting: list[tuple[_Pinned, torch.Tensor]] = []
        for number, (tensor, dtype) in enumerate(tensors):
            buffer = self._pinned[0 if stream is None else number % BUFFERS]
            memory = buffer.free(tensor.numel() * dtype.itemsize)
            into, source = memory.view(dtype), tensor.reshape(-1)
            if stream is None:
                into.copy_(source)
                yield memory.numpy()
                continue
            buffer.copied = platform.current().begin_copy(into, source, stream)
            waiting.append((buffer, memory))
            if len(waiting) > 1:
                yield _settled(*waiting.pop(0))
        for buffer, memory in waiting:
            yield _settled(buffer, memory)


def _settled(buffer: _Pinned, memory: torch.Tensor) -> np.ndarray:
    buffer.settle()
    return memory.numpy()
