"""The bytes of a tensor as pieces of files, read through small buffers.

Most conversions move rows without changing them, so a tensor of any size passes through a
buffer of some MiB. What must be computed names the memory that it needs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import xxhash

from sluice.weights.errors import DamagedFileError, MissingFileError

BUFFER_BYTES = 2 << 20


@dataclass(frozen=True)
class FileRange:
    """`length` bytes of a file; zeros where there is no file."""

    path: Path | None
    offset: int
    length: int


@dataclass(frozen=True)
class Content:
    """A tensor that can be read: C-contiguous bytes of `dtype`, as pieces or computed.

    `stored` is the dtype of the pieces where it differs. `compute` is called where there are no
    pieces and needs `working_bytes` of memory, its result included.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[FileRange, ...] = ()
    stored: torch.dtype | None = None
    compute: Callable[[], torch.Tensor] | None = None
    working_bytes: int = 0

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def is_copy(self) -> bool:
        """Whether the bytes are those of the pieces."""
        return self.compute is None and self.stored in (None, self.dtype)

    def rows(self, start: int, stop: int) -> Content:
        """Cut rows start..stop (exclusive). Raises ValueError for what is computed."""
        if self.compute is not None:
            raise ValueError("computed tensors have no rows in files")
        row = torch.Size(self.shape[1:]).numel() * (self.stored or self.dtype).itemsize
        pieces = tuple(cut_pieces(self.pieces, start * row, stop * row))
        return replace(self, shape=(stop - start, *self.shape[1:]), pieces=pieces)

    def cast(self, dtype: torch.dtype) -> Content:
        """Return the same numbers in another floating-point type."""
        if dtype == self.dtype:
            return self
        if self.compute is None:
            return replace(self, dtype=dtype, stored=self.stored or self.dtype)
        compute, more = self.compute, torch.Size(self.shape).numel() * dtype.itemsize
        return replace(
            self,
            dtype=dtype,
            compute=lambda: compute().to(dtype),
            working_bytes=self.working_bytes + more,
        )


def cut_pieces(pieces: tuple[FileRange, ...], start: int, stop: int) -> Iterator[FileRange]:
    """Cut bytes start..stop out of what the pieces make up together."""
    at = 0
    for piece in pieces:
        low, high = max(at, start), min(at + piece.length, stop)
        if low < high:
            yield FileRange(piece.path, piece.offset + low - at, high - low)
        at += piece.length


class Files:
    """Open files, read from any thread at given offsets."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._buffers = threading.local()
        self.bytes_read = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def stream(self, content: Content) -> Iterator[memoryview]:
        """Yield the bytes in order. A view is good until the same thread asks for the next one.

        Raises DamagedFileError where a file ends early.
        """
        if content.compute is not None:
            yield from _split(_bytes_of(content.compute()))
            return
        stored = content.stored or content.dtype
        for piece in content.pieces:
            for view in self._read(piece):
                if stored == content.dtype:
                    yield view
                else:
                    yield _bytes_of(torch.frombuffer(view, dtype=stored).to(content.dtype))

    def load(self, content: Content) -> torch.Tensor:
        """Read the whole tensor into memory."""
        if content.compute is not None:
            return content.compute()
        raw = torch.empty(content.size, dtype=torch.uint8)
        target, at = raw.numpy().data, 0
        for view in self.stream(content):
            target[at : at + len(view)] = view
            at += len(view)
        return raw.view(content.dtype).reshape(content.shape)

    def digest(self, content: Content) -> str:
        """Hash the bytes (xxh3-128)."""
        hasher = xxhash.xxh3_128()
        for view in self.stream(content):
            hasher.update(view)
        return hasher.hexdigest()

    def size(self, path: Path) -> int:
        """Return the bytes of a file. Raises MissingFileError."""
        return os.fstat(self._descriptor(path)).st_size

    def read_at(self, path: Path, offset: int, view: memoryview) -> None:
        """Fill `view` from `offset` on. Raises DamagedFileError where it ends early."""
        descriptor = self._descriptor(path)
        while view:
            count = os.preadv(descriptor, [view], offset)
            if not count:
                raise DamagedFileError(path.name, f"ends at byte {offset}")
            self.bytes_read += count
            view, offset = view[count:], offset + count

    def _read(self, piece: FileRange) -> Iterator[memoryview]:
        buffer = self._buffer()
        for start in range(0, piece.length, BUFFER_BYTES):
            view = buffer[: min(BUFFER_BYTES, piece.length - start)]
            if piece.path is None:
                view[:] = bytes(len(view))
            else:
                self.read_at(piece.path, piece.offset + start, view)
            yield view

    def _buffer(self) -> memoryview:
        if not hasattr(self._buffers, "view"):
            self._buffers.view = memoryview(bytearray(BUFFER_BYTES))
        view: memoryview = self._buffers.view
        return view

    def _descriptor(self, path: Path) -> int:
        with self._lock:
            if path not in self._open:
                try:
                    self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError as error:
                    raise MissingFileError(path.name) from error
            return self._open[path]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    view: memoryview = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return view


def _split(view: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(view), BUFFER_BYTES):
        yield view[start : start + BUFFER_BYTES]
