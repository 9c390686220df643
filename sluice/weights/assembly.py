"""From what the writers of a version report to the files of a plain HF checkpoint."""

from __future__ import annotations

import json
import mmap
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from sluice.weights.checkpoint import INDEX_NAME, SINGLE_NAME
from sluice.weights.digest import digest_bytes, digest_file
from sluice.weights.errors import (
    DuplicateFileError,
    DuplicateTensorError,
    InvalidCheckpointError,
    MissingFileError,
    MissingTensorError,
    UnexpectedTensorError,
)
from sluice.weights.header import data_start, parse_header
from sluice.weights.manifest import MANIFEST_NAME, FileEntry, ShardFile, StoredTensor, TensorEntry

RESERVED = {MANIFEST_NAME, INDEX_NAME}


def collect_tensors(
    shards: Sequence[ShardFile], expected: Mapping[str, TensorEntry] | Collection[str] | None
) -> dict[str, StoredTensor]:
    """Tensors of all shards by name; every one in exactly one shard, all of `expected`."""
    tensors: dict[str, StoredTensor] = {}
    files: set[str] = set()
    for shard in shards:
        _check_name(shard.file_name, shard=True)
        if shard.file_name in files:
            raise DuplicateFileError(shard.file_name)
        files.add(shard.file_name)
        for name, entry in shard.tensors.items():
            if name in tensors:
                raise DuplicateTensorError(name, (tensors[name].file, shard.file_name))
            tensors[name] = StoredTensor(
                shard.file_name, entry.dtype, tuple(entry.shape), entry.digest
            )
    if SINGLE_NAME in files and len(files) > 1:  # transformers would read that one alone
        raise InvalidCheckpointError(f"{SINGLE_NAME!r} cannot lie beside other shards")
    if not tensors:
        raise MissingTensorError(("any",))
    if expected is not None:
        _check_expected(tensors, expected)
    return tensors


def check_shards(directory: Path, shards: Iterable[ShardFile]) -> None:
    """Each reported file is there, has its size, and its header names the reported tensors."""
    for shard in shards:
        path = directory / shard.file_name
        try:
            size = path.stat().st_size
        except FileNotFoundError as error:
            raise MissingFileError(shard.file_name) from error
        if size != shard.size:
            raise MissingFileError(shard.file_name, f"has {size} bytes, not {shard.size}")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            extents = parse_header(data, file_name=shard.file_name)
        found = {name: (extent.dtype, extent.shape) for name, extent in extents.items()}
        told = {name: (entry.dtype, tuple(entry.shape)) for name, entry in shard.tensors.items()}
        if found != told:
            names = sorted({name for name, _ in found.items() ^ told.items()})
            raise InvalidCheckpointError(
                f"{shard.file_name!r} and its report differ in: {', '.join(names[:8])}"
            )


def add_companions(directory: Path, paths: Iterable[Path]) -> dict[str, FileEntry]:
    """Copy companion files into `directory`; returns their sizes and digests by name."""
    entries: dict[str, FileEntry] = {}
    for path in paths:
        _check_name(path.name, shard=False)
        if path.name in entries:
            raise DuplicateFileError(path.name)
        target = directory / path.name
        if path != target:
            try:
                shutil.copyfile(path, target)
            except FileNotFoundError as error:
                raise MissingFileError(path.name) from error
        entries[path.name] = FileEntry(*digest_file(target))
    return entries


def write_index(directory: Path, shards: Sequence[ShardFile]) -> dict[str, FileEntry]:
    """Write the HF index; none for a lone `model.safetensors`, which HF finds by itself."""
    if [shard.file_name for shard in shards] == [SINGLE_NAME]:
        (directory / INDEX_NAME).unlink(missing_ok=True)  # of a commit that failed
        return {}
    weight_map = {name: shard.file_name for shard in shards for name in shard.tensors}
    total = sum(_data_size(directory / shard.file_name) for shard in shards)
    document = {
        "metadata": {"total_size": total},
        "weight_map": dict(sorted(weight_map.items())),
    }
    data = (json.dumps(document, indent=2) + "\n").encode()
    (directory / INDEX_NAME).write_bytes(data)
    return {INDEX_NAME: FileEntry(len(data), digest_bytes(data))}


def _data_size(path: Path) -> int:
    with path.open("rb") as file:
        return path.stat().st_size - data_start(file.read(8))


def _check_expected(
    tensors: Mapping[str, StoredTensor], expected: Mapping[str, TensorEntry] | Collection[str]
) -> None:
    if missing := sorted(set(expected) - set(tensors)):
        raise MissingTensorError(tuple(missing))
    surplus = set(tensors) - set(expected)
    if isinstance(expected, Mapping):
        surplus |= {
            name
            for name, entry in expected.items()
            if (entry.dtype, tuple(entry.shape)) != (tensors[name].dtype, tensors[name].shape)
        }
    if surplus:
        raise UnexpectedTensorError(tuple(sorted(surplus)))


def _check_name(file_name: str, *, shard: bool) -> None:
    plain = file_name == Path(file_name).name and file_name not in {"", ".", ".."}
    if not plain or file_name in RESERVED or file_name.endswith(".safetensors") is not shard:
        raise InvalidCheckpointError(f"{file_name!r} cannot be the name of a file of a version")
