"""HF checkpoint directories without torch: their files, and where tensors lie in safetensors.

Format: 8 bytes little-endian header length, JSON header, data. The header maps a tensor name
to {dtype, shape, data_offsets} relative to the data; `__metadata__` holds strings.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import fnmatch
import json
import math
import mmap
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from sluice.json_values import load_json
from sluice.place import is_plain_name
from sluice.weights.errors import (
    DamagedFileError,
    FileDigestError,
    InvalidCheckpointError,
    MissingFileError,
    TensorDigestError,
)
from sluice.weights.manifest import (
    Buffer,
    Manifest,
    ShardFile,
    TensorEntry,
    digest_bytes,
    digest_file,
    digest_version,
)

MAX_HEADER = 100_000_000  # as the safetensors library has it

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Extent:
    """A tensor in a file: bytes begin..end (exclusive) of the whole file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def byte_order(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[str]:
    """Sort names as our files hold the tensors: wide types first, then by name."""
    return sorted(tensors, key=lambda name: (-BITS[tensors[name][0]], name))


def encode_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, list[str]]:
    """Header bytes for name -> (dtype, shape), and the order in which the data must follow.

    Wide types come first, so that every tensor starts at a multiple of its item size.
    """
    order = byte_order(tensors)
    document: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        dtype, shape = tensors[name]
        end = offset + math.prod(shape) * BITS[dtype] // 8
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def parse_header(data: Buffer, *, file_name: str, size: int | None = None) -> dict[str, Extent]:
    """Read the tensors of a safetensors file in the order of their bytes, which they tile exactly.

    `data` is the file, or its beginning of a file of `size` bytes.
    """
    extents = parse_extents(data, file_name=file_name)
    size = len(memoryview(data)) if size is None else size
    end = max((extent.end for extent in extents.values()), default=data_start(data))
    if end != size:
        raise DamagedFileError(file_name, f"has {size} bytes, not {end}")
    return extents


def parse_extents(data: Buffer, *, file_name: str) -> dict[str, Extent]:
    """Read the same from a header alone, whatever follows it."""
    start = data_start(data)
    with memoryview(data) as view:  # an error must not keep a map from being closed
        if len(view) < 8 or start > min(len(view), MAX_HEADER):
            raise DamagedFileError(file_name, "is cut short or is no safetensors file")
        text = bytes(view[8:start])
    try:
        document = load_json(text, pairs=_each_once)
        extents = {
            name: Extent(entry["dtype"], tuple(entry["shape"]), *_absolute(entry, start))
            for name, entry in document.items()
            if name != "__metadata__"
        }
        sizes = {name: _size(extent) for name, extent in extents.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(file_name, f"has a malformed header: {error}") from error
    position = start
    extents = dict(sorted(extents.items(), key=lambda item: (item[1].begin, item[1].end)))
    for name, extent in extents.items():
        if extent.begin != position or extent.end != position + sizes[name]:
            raise DamagedFileError(file_name, f"has tensor {name!r} misplaced")
        position = extent.end
    return extents


def data_start(data: Buffer) -> int:
    """Return where the tensors begin: the length of the header with its own eight bytes."""
    return 8 + int.from_bytes(memoryview(data)[:8], "little")


def _size(extent: Extent) -> int:
    if extent.dtype not in BITS:
        raise ValueError(f"unknown dtype {extent.dtype!r}")
    lengths = all(type(length) is int and length >= 0 for length in extent.shape)
    # strides of a tensor without elements have to be numbers too
    if not lengths or math.prod(length or 1 for length in extent.shape) >= 1 << 63:
        raise ValueError(f"shape {str(list(extent.shape))[:80]}")
    return math.prod(extent.shape) * BITS[extent.dtype] // 8


def _absolute(entry: Mapping[str, list[int]], start: int) -> tuple[int, int]:
    begin, end = entry["data_offsets"]
    if type(begin) is not int or type(end) is not int:
        raise ValueError(f"offsets {str([begin, end])[:80]}")
    return start + begin, start + end


INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

COMPANION_PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",  # sentencepiece
    "*.tiktoken",
    "chat_template*",
    "*processor_config.json",
    "*.py",  # code of models that transformers does not have
)


def companion_files(directory: Path) -> list[Path]:
    """List config, tokenizer, chat template and processor files of a model directory."""
    listed = os.listdir(directory)
    names = {name for each in COMPANION_PATTERNS for name in fnmatch.filter(listed, each)}
    return [path for name in sorted(names) if (path := directory / name).is_file()]


@dataclass(frozen=True)
class ShardIndex:
    """The HF index of a model of several files: the file of each tensor, and the bytes of all.

    `total_size` should be the bytes of all tensors; None where it is not said.
    """

    weight_map: Mapping[str, str]
    total_size: object = None

    @property
    def files(self) -> list[str]:
        return sorted(set(self.weight_map.values()))

    def check(self, found: Mapping[str, str], size: int) -> tuple[list[str], list[str]]:
        """Compare with the file of each tensor that was found and the bytes of all.

        Returns names of tensors that no file has, and notes on what else is wrong.
        """
        ghosts = sorted(self.weight_map.keys() - found.keys())
        notes = []
        if self.total_size is not None and self.total_size != size:
            said = repr(self.total_size)[:40]
            notes.append(f"{INDEX_NAME!r} says {said} bytes, the tensors have {size}")
        unlisted = sorted(found.keys() - self.weight_map.keys())
        moved = sorted(n for n in found.keys() & self.weight_map if self.weight_map[n] != found[n])
        for names, text in (
            (unlisted, "does not name tensors of its files"),
            (moved, "names other files than those that hold"),
        ):
            if names:
                more = ", ..." if len(names) > 8 else ""
                notes.append(f"{INDEX_NAME!r} {text}: {', '.join(names[:8])}{more}")
        return ghosts, notes


def read_index(directory: Path) -> ShardIndex | None:
    """Read the index of a model of several files; None where it is one file.

    Like transformers, a `model.safetensors` is taken before an index. Raises DamagedFileError, or
    InvalidCheckpointError where it names a file that lies elsewhere.
    """
    index = directory / INDEX_NAME
    if (directory / SINGLE_NAME).is_file() or not index.is_file():
        return None
    try:
        document = load_json(index.read_bytes())
        weight_map = dict(document["weight_map"])
        metadata = document.get("metadata") or {}
        found = ShardIndex(weight_map, metadata.get("total_size"))
        strays = [name for name in found.files if not is_plain_name(name)]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamagedFileError(INDEX_NAME, f"is malformed: {error}") from error
    if strays:
        raise InvalidCheckpointError(
            f"{INDEX_NAME!r} names {strays[0][:80]!r}, which lies elsewhere or is no file"
        )
    return found


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):  # of two, each reader would take another one
        (twice, _), *_ = (Counter(key for key, _ in pairs)).most_common(1)
        raise ValueError(f"{twice[:80]!r} is there twice")
    return found


def shard_paths(directory: Path) -> list[Path]:
    """List the safetensors files that make up the model; raises MissingFileError if incomplete.

    Raises as `read_index` besides.
    """
    index = read_index(directory)
    names = [SINGLE_NAME] if index is None else index.files
    for name in names:
        if not (directory / name).is_file():
            raise MissingFileError(name, place=str(directory))
    return [directory / name for name in names]


def encode_index(total_size: int, weight_map: Mapping[str, str]) -> bytes:
    """Encode the HF index of a model of several files: the file of each tensor."""
    document = {
        "metadata": {"total_size": total_size},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(document, indent=2) + "\n").encode()


def map_shard(path: Path, access: int = mmap.ACCESS_READ) -> tuple[mmap.mmap, dict[str, Extent]]:
    """Map a safetensors file and read its header; raises MissingFileError or DamagedFileError."""
    try:
        with path.open("r+b" if access == mmap.ACCESS_WRITE else "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=access)
    except FileNotFoundError as error:
        raise MissingFileError(path.name) from error
    except ValueError as error:
        raise DamagedFileError(path.name, "is empty") from error
    return mapped, parse_header(mapped, file_name=path.name)


def read_extents(directory: Path) -> dict[str, Extent]:
    """Read the headers of a model's files: its tensors by name. Raises as those above."""
    tensors: dict[str, Extent] = {}
    for path in shard_paths(directory):
        mapped, extents = map_shard(path)
        mapped.close()
        tensors |= extents
    return tensors


def describe_shard(path: Path) -> ShardFile:
    """Digest a safetensors file and every tensor in it, in one pass."""
    mapped, extents = map_shard(path)
    view = memoryview(mapped)
    whole = xxhash.xxh3_128(view[: data_start(mapped)])
    tensors: dict[str, TensorEntry] = {}
    for name, extent in extents.items():
        piece = view[extent.begin : extent.end]
        tensors[name] = TensorEntry(extent.dtype, extent.shape, digest_bytes(piece))
        whole.update(piece)
    return ShardFile(path.name, len(view), whole.hexdigest(), tensors)


class ShardCheck:
    """Checks the tensors of a shard, in their order, against what its writer reported.

    Each byte is hashed once: a header is compared with the one that our writers make of the
    tensors. Only where another program wrote the file is all of it hashed besides.
    """

    def __init__(self, expected: ShardFile, header: bytes, extents: Mapping[str, Extent]) -> None:
        """Raises DamagedFileError unless the header names the tensors that are expected."""
        self._expected = expected
        stored = {n: (t.dtype, tuple(t.shape)) for n, t in expected.tensors.items()}
        layout = {name: (extent.dtype, extent.shape) for name, extent in extents.items()}
        if layout != stored:
            different = sorted({name for name, _ in layout.items() ^ stored.items()})
            raise DamagedFileError(
                expected.file_name, f"and its manifest differ in: {', '.join(different[:8])}"
            )
        ours, _ = encode_header(stored)
        self._whole = None if header == ours else xxhash.xxh3_128(header)
        self._tensor = xxhash.xxh3_128()

    def check(self, name: str, data: memoryview) -> None:
        """Raises TensorDigestError."""
        self.update(data)
        self.end(name)

    def update(self, data: memoryview) -> None:
        """Takes the next bytes of a tensor."""
        self._tensor.update(data)
        if self._whole is not None:
            self._whole.update(data)

    def end(self, name: str) -> None:
        """Ends a tensor, all bytes of which were taken. Raises TensorDigestError."""
        expected, actual = self._expected.tensors[name].digest, self._tensor.hexdigest()
        self._tensor.reset()
        if actual != expected:
            raise TensorDigestError(name, expected, actual, self._expected.file_name)

    def finish(self) -> None:
        """Raises FileDigestError; to be called after all tensors."""
        expected = self._expected.digest
        if self._whole is not None and self._whole.hexdigest() != expected:
            raise FileDigestError(self._expected.file_name, expected, self._whole.hexdigest())


CheckedTensor = tuple[str, mmap.mmap, Extent]


def checked_shard(
    path: Path, expected: ShardFile, access: int = mmap.ACCESS_READ
) -> Iterator[CheckedTensor]:
    """Yield every tensor of a shard, each checked before: its name, the map of the file, where.

    Use the tensors only after the iterator has ended without TensorDigestError, FileDigestError,
    MissingFileError or DamagedFileError.
    """
    if path.is_file() and (size := path.stat().st_size) != expected.size:
        raise MissingFileError(expected.file_name, f"has {size} bytes, not {expected.size}")
    mapped, extents = map_shard(path, access)
    view = memoryview(mapped)
    checking = ShardCheck(expected, bytes(view[: data_start(mapped)]), extents)
    for name, extent in extents.items():
        checking.check(name, view[extent.begin : extent.end])
        yield name, mapped, extent
    checking.finish()


def checked_tensors(
    directory: Path, manifest: Manifest, access: int = mmap.ACCESS_READ
) -> Iterator[CheckedTensor]:
    """Yield every tensor of a version as `checked_shard` does, and check all other files."""
    check_companions(directory, manifest)
    for shard in manifest.shards():
        yield from checked_shard(directory / shard.file_name, shard, access)


@dataclass(frozen=True)
class FileIdentity:
    """Which file it is, as it was last written to; a rename changes nothing."""

    device: int
    inode: int
    size: int
    modified: int  # ns

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        """Raises MissingFileError."""
        try:
            found = path.stat()
        except FileNotFoundError as error:
            raise MissingFileError(path.name) from error
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


class CheckedShards:
    """Shards that were checked before their version was committed. For any thread."""

    def __init__(self) -> None:
        self._checked: dict[FileIdentity, Mapping[str, TensorEntry]] = {}

    def check(self, path: Path, expected: ShardFile) -> None:
        """Check every byte of a shard, and note it; raises as `checked_shard`."""
        identity = FileIdentity.of(path)
        for _ in checked_shard(path, expected):
            pass
        self._checked[identity] = expected.tensors

    def has(self, path: Path, expected: ShardFile) -> bool:
        """Return whether this very file was checked, against these digests."""
        return self._checked.get(FileIdentity.of(path)) == expected.tensors

    def clear(self) -> None:
        self._checked.clear()


def verify_files(directory: Path, manifest: Manifest, checked: CheckedShards | None = None) -> None:
    """Check every byte of a version but of shards `checked` before; raises as `checked_tensors`."""
    check_companions(directory, manifest)
    for shard in manifest.shards():
        path = directory / shard.file_name
        if checked is None or not checked.has(path, shard):
            for _ in checked_shard(path, shard):
                pass


def check_companions(directory: Path, manifest: Manifest) -> None:
    """Check every file of a version that holds no tensors; raises as `checked_tensors`."""
    shards = {tensor.file for tensor in manifest.tensors.values()}
    for file_name in manifest.files.keys() - shards:
        check_file(directory / file_name, manifest.files[file_name].digest)


def check_header(path: Path, expected: str) -> None:
    """Check the digest of a safetensors header; raises as `check_file` or DamagedFileError."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            header = start + file.read(length if length <= MAX_HEADER else 0)
    except FileNotFoundError as error:
        raise MissingFileError(path.name) from error
    if (actual := digest_bytes(header)) != expected:
        raise FileDigestError(path.name, expected, actual)


def check_file(path: Path, expected: str) -> None:
    """Check the digest of a file; raises MissingFileError or FileDigestError."""
    try:
        _, actual = digest_file(path)
    except FileNotFoundError as error:
        raise MissingFileError(path.name) from error
    if actual != expected:
        raise FileDigestError(path.name, expected, actual)


def digest_base(directory: Path) -> str:
    """Hash a model directory: the digest of the version that it is, whatever files hold it.

    Every byte of it is read. Raises WeightStoreError or OSError.
    """
    shards = [describe_shard(path) for path in shard_paths(directory)]
    return digest_version(
        (name, entry.dtype, entry.shape, entry.digest)
        for shard in shards
        for name, entry in shard.tensors.items()
    )
