"""From what the writers of a version report to the files of a plain HF checkpoint."""

from __future__ import annotations

import datetime
import json
import math
import mmap
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

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
from sluice.weights.header import BITS, Extent, parse_header
from sluice.weights.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    ShardFile,
    StoredTensor,
    TensorEntry,
    delta_name,
    version_digest,
)
from sluice.weights.staging import Staging

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


@dataclass(frozen=True, kw_only=True)
class Draft:
    """What a commit is given; `base` is the version that deltas among the shards are against."""

    staging: Staging
    shards: Sequence[ShardFile]
    companions: Iterable[Path]
    step: int
    expected: Mapping[str, TensorEntry] | Collection[str] | None
    base: Manifest | None


ReadHeader = Callable[[str, int], dict[str, Extent]]  # of a stored file of this name and size


def assemble(draft: Draft, read_header: ReadHeader) -> Manifest:
    """Check a draft, and put companions and index into its directory.

    Raises DuplicateTensorError, DuplicateFileError, MissingTensorError, UnexpectedTensorError,
    MissingFileError or InvalidCheckpointError.
    """
    staging, shards = draft.staging, draft.shards
    tensors = collect_tensors(shards, draft.expected)
    check_shards(shards, read_header)
    deltas = {s.file_name: FileEntry(s.delta.size, s.delta.digest) for s in shards if s.delta}
    base = draft.base if deltas else None
    check_base(shards, base)
    files = {shard.file_name: FileEntry(shard.size, shard.digest) for shard in shards}
    for name, entry in add_companions(staging.directory, draft.companions).items():
        if name in files:
            raise DuplicateFileError(name)
        files[name] = entry
    files.update(write_index(staging.directory, shards))
    own = {shard.file_name for shard in shards}
    return Manifest(
        version=staging.version,
        parent=staging.parent,
        step=draft.step,
        created=datetime.datetime.now(datetime.UTC).isoformat(),
        digest=version_digest(tensors),
        tensors=tensors,
        files=files,
        base=base.version if base else None,
        deltas=deltas,
        inherited=drop_inherited(staging.directory, files, own, base),
    )


class HasManifests(Protocol):
    """A store."""

    def manifest(self, version: int) -> Manifest: ...


def base_of(store: HasManifests, shards: Sequence[ShardFile], base: int | None) -> Manifest | None:
    """The manifest of `base` where shards are deltas; raises like `store.get`."""
    needed = base is not None and any(shard.delta for shard in shards)
    return store.manifest(base) if needed and base is not None else None


def check_shards(shards: Iterable[ShardFile], read_header: ReadHeader) -> None:
    """Each reported file is there, has its size, and its header names the reported tensors."""
    for shard in shards:
        if shard.delta is None:
            extents = read_header(shard.file_name, shard.size)
            told = {n: (entry.dtype, tuple(entry.shape)) for n, entry in shard.tensors.items()}
        else:
            extents = read_header(delta_name(shard.file_name), shard.delta.size)
            told = {n: ("U8", extents[n].shape) for n in shard.tensors if n in extents}
        found = {name: (extent.dtype, extent.shape) for name, extent in extents.items()}
        if found != told or found.keys() != shard.tensors.keys():
            names = {name for name, _ in found.items() ^ told.items()}
            names |= found.keys() ^ shard.tensors.keys()
            raise InvalidCheckpointError(
                f"{shard.file_name!r} and its report differ in: {', '.join(sorted(names)[:8])}"
            )


def check_base(shards: Iterable[ShardFile], base: Manifest | None) -> None:
    """What deltas are against is in the base, under the same names, dtypes and shapes."""
    for shard in shards:
        if shard.delta is None:
            continue
        held = {
            name: (tensor.dtype, tensor.shape)
            for name, tensor in (base.tensors if base else {}).items()
            if tensor.file == shard.file_name
        }
        told = {name: (entry.dtype, tuple(entry.shape)) for name, entry in shard.tensors.items()}
        if held != told:
            names = sorted({name for name, _ in held.items() ^ told.items()})
            raise InvalidCheckpointError(
                f"{shard.file_name!r} is a delta of other tensors than the base has: "
                f"{', '.join(names[:8])}"
            )


def drop_inherited(
    directory: Path, files: Mapping[str, FileEntry], shards: set[str], base: Manifest | None
) -> tuple[str, ...]:
    """Remove from `directory` the companions that are the same in `base`; their names."""
    same = {
        name
        for name, entry in files.items()
        if base is not None and name not in shards and base.files.get(name) == entry
    }
    for name in same:
        (directory / name).unlink()
    return tuple(sorted(same))


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
    total = sum(
        math.prod(entry.shape) * BITS[entry.dtype] // 8
        for shard in shards
        for entry in shard.tensors.values()
    )
    document = {
        "metadata": {"total_size": total},
        "weight_map": dict(sorted(weight_map.items())),
    }
    data = (json.dumps(document, indent=2) + "\n").encode()
    (directory / INDEX_NAME).write_bytes(data)
    return {INDEX_NAME: FileEntry(len(data), digest_bytes(data))}


def file_header(path: Path, size: int) -> dict[str, Extent]:
    """The tensors of a safetensors file of `size` bytes. Raises MissingFileError."""
    try:
        found = path.stat().st_size
    except FileNotFoundError as error:
        raise MissingFileError(path.name) from error
    if found != size:
        raise MissingFileError(path.name, f"has {found} bytes, not {size}")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return parse_header(data, file_name=path.name)


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
