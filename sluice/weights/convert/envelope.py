"""The container of one tensor in a `.distcp` file: what `torch.save` writes around its bytes.

Every tensor of a torch_dist checkpoint is a zip archive of its own. The archive is made by torch
around memory that is never touched, so that the bytes themselves can be written elsewhere; its
checksums are left out, which torch's reader does not look at.
"""

from __future__ import annotations

import io
import threading
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch

from sluice.weights.convert.pieces import Files
from sluice.weights.convert.stored import MALFORMED
from sluice.weights.errors import DamagedFileError

_OPTIONS = threading.Lock()  # torch keeps the option of checksums for the whole process


@dataclass(frozen=True)
class Envelope:
    """What stands before and after the bytes of a tensor."""

    prefix: bytes
    suffix: bytes


@lru_cache(maxsize=4096)
def envelope(dtype: torch.dtype, shape: tuple[int, ...]) -> Envelope:
    """The container of a contiguous tensor; the same for the same arguments."""
    sink = _Sink(torch.empty(shape, dtype=dtype))
    with _OPTIONS:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(sink.tensor, cast(IO[bytes], sink))
        finally:
            torch.serialization.set_crc32_options(before)
    return Envelope(bytes(sink.prefix), bytes(sink.suffix))


def save_object(value: object) -> bytes:
    """What torch.save makes of a small object."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class _Sink(io.RawIOBase):
    """Keeps what is written but for the tensor's own memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.prefix, self.suffix = bytearray(), bytearray()
        self._found = tensor.nbytes == 0

    def writable(self) -> bool:
        return True

    def write(self, data: memoryview) -> int:  # type: ignore[override]
        view = np.frombuffer(data, dtype=np.uint8)
        if not self._found and view.ctypes.data == self.tensor.data_ptr():
            assert len(view) == self.tensor.nbytes
            self._found = True
        else:
            (self.suffix if self._found else self.prefix).extend(data)
        return len(data)


def find_bytes(
    files: Files, path: Path, offset: int, length: int, expected: tuple[torch.dtype, torch.Size]
) -> int:
    """Where in `path` the bytes of a contiguous tensor lie, by the container at `offset`.

    `expected` are dtype and shape. Raises DamagedFileError for anything else, or where
    the file is too short.
    """
    if files.size(path) < offset + length:
        raise DamagedFileError(path.name, f"ends before byte {offset + length}")
    view = _FileView(files, path, offset, length)
    try:
        described = torch.load(  # reads no bytes of it
            cast(IO[bytes], view), map_location="meta", weights_only=True
        )
        with zipfile.ZipFile(view) as archive:
            (record,) = (i for i in archive.infolist() if i.filename.endswith("/data/0"))
    except MALFORMED as error:
        raise DamagedFileError(path.name, f"is damaged at byte {offset}") from error
    found = (described.dtype, described.shape)
    if found != expected or not described.is_contiguous() or described.storage_offset():
        raise DamagedFileError(path.name, f"has another tensor at byte {offset}")
    if record.file_size != described.nbytes or record.compress_type != zipfile.ZIP_STORED:
        raise DamagedFileError(path.name, f"holds a part of a tensor at byte {offset}")
    length = _local_header(files, path, offset + record.header_offset, record.filename)
    return offset + record.header_offset + length


def _local_header(files: Files, path: Path, offset: int, filename: str) -> int:
    """Length of the header before a record, which must be the one of `filename`.

    It stands there a second time, and alone says where the bytes begin: a wrong length would
    move the whole tensor. Raises DamagedFileError.
    """
    header = bytearray(30)
    files.read_at(path, offset, memoryview(header))
    name, extra = (int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
    rest = bytearray(name + extra)
    files.read_at(path, offset + 30, memoryview(rest))
    at = name
    while at + 4 <= len(rest):  # fields of an id, a size and so many bytes
        at += 4 + int.from_bytes(rest[at + 2 : at + 4], "little")
    if header[:4] != b"PK\3\4" or rest[:name] != filename.encode() or at != len(rest):
        raise DamagedFileError(path.name, f"is damaged at byte {offset}")
    return 30 + len(rest)


class _FileView(io.RawIOBase):
    """Part of a file as a file, for readers of archives."""

    def __init__(self, files: Files, path: Path, offset: int, length: int) -> None:
        self._files, self._path, self._offset, self._length = files, path, offset, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        view = memoryview(buffer).cast("B")
        view = view[: max(0, min(len(view), self._length - self._at))]
        self._files.read_at(self._path, self._offset + self._at, view)
        self._at += len(view)
        return len(view)
