"""What a torch_dist checkpoint holds: keys, and for each its chunks and where they lie.

`.metadata` is a pickle by the format's nature, written by torch and read by Megatron. It is read
here with a list of the classes that describe tensors, so a checkpoint from elsewhere cannot run
anything.
"""

from __future__ import annotations

import enum
import io
import pickle
import struct
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache, lru_cache
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np
import torch

from sluice.imports import uncollected
from sluice.json_values import load_json
from sluice.place import is_plain_name
from sluice.weights.convert.pieces import Files
from sluice.weights.errors import (
    DamagedFileError,
    ForbiddenObjectError,
    InvalidCheckpointError,
    MissingFileError,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

METADATA = ".metadata"
COMMON = "common.pt"  # Megatron's: what all ranks share
CONFIG = "metadata.json"  # Megatron's; written last
MALFORMED = (  # what readers of pickles and archives raise for bytes that make no sense
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
NOT_WEIGHTS = ("optimizer.", "rng/", "rng_state/", "rerun_state_machine_state/", "chained_")


def _memory_format(value: int) -> enum.Enum:
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    return _MEM_FORMAT_ENCODING(value)


def _member(kind: object, name: str) -> enum.Enum:
    """Return a memory format by name; Python 3.11.0 to 3.11.3 pickle it as a `getattr`."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    if kind is not _memory_format or name not in _MEM_FORMAT_ENCODING.__members__:
        raise ForbiddenObjectError("builtins.getattr")
    return _MEM_FORMAT_ENCODING[name]


def _layout(name: str) -> torch.layout:
    return torch.serialization._get_layout(name)


def _path(*parts: str) -> PurePosixPath:
    return PurePosixPath(*parts)


@cache
def _classes() -> dict[str, dict[str, Any]]:
    with uncollected():  # only here: these bring DTensor and sympy with them
        from torch.distributed.checkpoint import filesystem, metadata

    return {
        "torch.distributed.checkpoint.metadata": {
            name: getattr(metadata, name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
            )
        }
        | {"_MEM_FORMAT_ENCODING": _memory_format},
        "torch.distributed.checkpoint.filesystem": {
            name: getattr(filesystem, name) for name in ("_StorageInfo", "_StoragePrefix")
        },
        "torch": {"Size": torch.Size},
        "torch.serialization": {"_get_layout": _layout},
        "pathlib": dict.fromkeys(("PosixPath", "PurePosixPath", "Path"), _path),
        "builtins": {"set": set, "frozenset": frozenset, "getattr": _member},
        "collections": {"OrderedDict": dict},
    }


class _MetadataUnpickler(pickle._Unpickler):
    """Classes are its own: a pickle can set the attributes of any that it names.

    Python's reader, for that of C takes 16 bytes of memory times any number that a pickle says.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._own: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        kind = _classes().get(module, {}).get(name)
        if isinstance(kind, type) and is_dataclass(kind):
            return self._own.setdefault(name, type(name, (kind,), {}))
        if kind is not None:
            return kind
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.startswith("megatron.core.dist_checkpointing.") and name.startswith("MCore"):
            return type(name, (), {})  # of older versions; holds nothing that is needed
        raise ForbiddenObjectError(f"{module}.{name}")


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor at `offsets` of the whole; its container is bytes of `path`.

    is_bare: there is no container.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    offset: int
    length: int
    is_bare: bool = False


@dataclass(frozen=True)
class StoredKey:
    """A tensor of a torch_dist checkpoint."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def is_torch_dist(directory: Path) -> bool:
    """Return whether a directory holds a torch_dist checkpoint, be it unfinished or damaged."""
    if (directory / METADATA).is_file():
        return True
    try:
        return "sharded_backend" in load_json((directory / CONFIG).read_bytes())
    except (OSError, ValueError, TypeError):
        return False


def _check_finished(directory: Path) -> None:
    try:
        config = load_json((directory / CONFIG).read_bytes())
        backend = config["sharded_backend"]
    except FileNotFoundError as error:
        raise InvalidCheckpointError(f"{directory.name!r} is unfinished: no {CONFIG!r}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(CONFIG, f"is malformed: {error}") from error
    if backend != "torch_dist":
        raise InvalidCheckpointError(f"{directory.name!r} is of format {backend!r}, not torch_dist")


def read_metadata(directory: Path) -> Metadata:
    """Read what torch wrote of a checkpoint, as data: torch's own reader runs what a file says.

    Raises OSError, ForbiddenObjectError, and MALFORMED for anything else.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex

    with (directory / METADATA).open("rb") as file:
        document: Metadata = _MetadataUnpickler(file).load()
    document.storage_data = {
        MetadataIndex(index.fqn, index.offset, index.index): place
        for index, place in document.storage_data.items()
    }
    return document


def read_keys(directory: Path) -> dict[str, StoredKey]:
    """Read the weights of a checkpoint by key, without optimizer state and what is no tensor.

    Raises MissingFileError, InvalidCheckpointError, DamagedFileError or ForbiddenObjectError.
    """
    _check_finished(directory)
    return read_tensors(directory, lambda key: not key.startswith(NOT_WEIGHTS))


def read_tensors(directory: Path, is_wanted: Callable[[str], bool]) -> dict[str, StoredKey]:
    """Read the tensors of wanted keys, where torch alone has written what lies where.

    Raises MissingFileError, InvalidCheckpointError, DamagedFileError or ForbiddenObjectError.
    """
    tensor_kind = _classes()["torch.distributed.checkpoint.metadata"]["TensorStorageMetadata"]
    try:
        document = read_metadata(directory)
        described = document.state_dict_metadata
        stored: Mapping[Any, Any] = document.storage_data
        places: dict[tuple[str, tuple[int, ...]], Any] = {
            (index.fqn, tuple(index.offset)): place
            for index, place in stored.items()
            if index.offset is not None
        }
        return {
            key: _key(directory, key, entry, places)
            for key, entry in described.items()
            if isinstance(entry, tensor_kind) and is_wanted(key)
        }
    except FileNotFoundError as error:
        raise MissingFileError(METADATA) from error
    except MALFORMED as error:
        raise DamagedFileError(METADATA, f"is malformed: {error!r}") from error


def _key(
    directory: Path,
    key: str,
    entry: TensorStorageMetadata,
    places: Mapping[tuple[str, tuple[int, ...]], Any],
) -> StoredKey:
    chunks, shape, dtype = [], _counts(entry.size), entry.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"type of {key!r}")
    for chunk in entry.chunks:
        offsets, sizes = _counts(chunk.offsets), _counts(chunk.sizes)
        if any(o + s > whole for o, s, whole in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"chunk of {key!r} at {offsets}")
        place = places[key, tuple(chunk.offsets)]
        if getattr(place, "transform_descriptors", None):
            raise InvalidCheckpointError(f"tensor {key!r} is stored compressed or transformed")
        name = place.relative_path
        if not is_plain_name(name):
            raise InvalidCheckpointError(f"tensor {key!r} lies outside of its checkpoint: {name!r}")
        offset, length = _counts((place.offset, place.length))
        chunks.append(Chunk(offsets, sizes, directory / name, offset, length))
    return StoredKey(key, dtype, shape, tuple(chunks))


def _counts(numbers: Iterable[object]) -> tuple[int, ...]:
    """Return numbers of a file that are counts. Raises ValueError where one is not."""
    found = []
    for number in numbers:
        if type(number) is not int or not 0 <= number < 1 << 62:
            raise ValueError(f"{str(number)[:40]!r} is no count")
        found.append(number)
    return tuple(found)


_OPTIONS = threading.Lock()  # torch keeps the option of checksums for the whole process


@dataclass(frozen=True)
class Envelope:
    """What stands before and after the bytes of a tensor."""

    prefix: bytes
    suffix: bytes


@lru_cache(maxsize=4096)
def envelope(dtype: torch.dtype, shape: tuple[int, ...]) -> Envelope:
    """Make the container of a contiguous tensor; the same for the same arguments."""
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
    """Serialise a small object with torch.save."""
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
    """Find the bytes of a contiguous tensor in `path`, by the container at `offset`.

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
    """Return the length of the header before a record, which must be the one of `filename`.

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
