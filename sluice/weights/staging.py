"""Versions in the making: a directory beside a lock file that its owner holds, and the manifest
of what its writers report.

The kernel frees the lock when the owner dies, however it dies, so a free lock means that
nobody will finish the directory. The lock file lies beside it: the rename that commits the
directory must not carry the lock along. A file system shared by hosts must therefore keep
flock coherent among them (NFS on Linux does).
"""

from __future__ import annotations

import contextlib
import datetime
import math
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from sluice.durable import naming, try_lock
from sluice.weights.adapter import ADAPTER_CONFIG, AdapterSpec, encode_adapter_config
from sluice.weights.checkpoint import BITS, INDEX_NAME, SINGLE_NAME, Extent, encode_index
from sluice.weights.errors import (
    DuplicateFileError,
    DuplicateTensorError,
    InvalidAdapterError,
    InvalidCheckpointError,
    MissingFileError,
    MissingTensorError,
    UnexpectedTensorError,
)
from sluice.weights.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    ShardFile,
    StoredTensor,
    TensorEntry,
    delta_name,
    digest_bytes,
    version_digest,
)

LOCK_SUFFIX = ".lock"
GONE_SUFFIX = ".gone"


@dataclass(frozen=True)
class Staging:
    """A version in the making: write its shards into `directory`, then commit or abort.

    The lock lives as long as this object, and in forked children; ranks need only the directory.
    """

    directory: Path
    version: int
    parent: int | None
    lock: IO[bytes] = field(repr=False)  # an open file that holds the flock


def open_staging(root: Path, version: int, parent: int | None) -> Staging:
    """Make a staging directory below `root` and lock it."""
    root.mkdir(parents=True, exist_ok=True)
    while True:
        directory = root / f"{version:08d}-{secrets.token_hex(8)}"
        lock = directory.with_name(directory.name + LOCK_SUFFIX).open("xb")
        if try_lock(lock.fileno()):
            directory.mkdir()
            return Staging(directory, version, parent, lock)
        lock.close()  # a sweep was faster


def close_staging(staging: Staging) -> None:
    """Remove what is left of a staging directory and free its lock; may be repeated."""
    _remove(staging.directory)
    staging.lock.close()


def sweep_staging(root: Path) -> list[Path]:
    """Remove what owners left that are gone, or done; returns the directories that now are gone."""
    removed = []
    for lock_path in root.glob("*" + LOCK_SUFFIX):
        try:
            with lock_path.open("r+b") as lock:
                directory = lock_path.with_suffix("")
                if try_lock(lock.fileno()) and _remove(directory):
                    removed.append(directory)
        except FileNotFoundError:
            continue  # committed or swept meanwhile
    return removed


def is_owned(root: Path, version: int) -> bool:
    """Return whether somebody lives who makes this version, or has just ended it."""
    for path in root.glob(f"{version:08d}-*{LOCK_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError), path.open("r+b") as lock:
            if not try_lock(lock.fileno()):
                return True
    return False


def _remove(directory: Path) -> bool:
    """Remove a directory, then its lock file, without which no sweep finds it; whether it is gone.

    Ranks may still write: under another name they do not find it.
    """
    renamed = directory.with_name(directory.name + GONE_SUFFIX)
    with contextlib.suppress(OSError):
        directory.rename(renamed)
    shutil.rmtree(renamed, ignore_errors=True)
    if directory.exists() or renamed.exists():
        return False
    directory.with_name(directory.name + LOCK_SUFFIX).unlink(missing_ok=True)
    return True


RESERVED = {MANIFEST_NAME, INDEX_NAME, ADAPTER_CONFIG}


def _collect_tensors(
    shards: Sequence[ShardFile], expected: Mapping[str, TensorEntry] | Collection[str] | None
) -> dict[str, StoredTensor]:
    """Collect the tensors of all shards by name; each in exactly one shard, all of `expected`."""
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


ReadHeader = Callable[[str, int], dict[str, Extent]]  # of a stored file of this name and size


def assemble(
    staging: Staging,
    shards: Sequence[ShardFile],
    companions: Iterable[Path],
    step: int,
    expected: Mapping[str, TensorEntry] | Collection[str] | None,
    base: Manifest | None,
    read_header: ReadHeader | None,
    adapter: AdapterSpec | None = None,
    line: str = "",
) -> Manifest:
    """Check what writers report, put companions and index beside it, and return the manifest.

    `base` is the version that deltas among the shards are against. `read_header` is None for
    shards that are not written yet. An `adapter` gets its `adapter_config.json`; `line` names it
    where there are several. Raises DuplicateTensorError, DuplicateFileError, MissingTensorError,
    UnexpectedTensorError, MissingFileError, InvalidCheckpointError or InvalidAdapterError.
    """
    tensors = _collect_tensors(shards, expected)
    if adapter is not None:
        _check_adapter(adapter, shards, tensors)
    if read_header is not None:
        check_shards(shards, read_header)
    deltas = {s.file_name: FileEntry(s.delta.size, s.delta.digest) for s in shards if s.delta}
    base = base if deltas else None
    _check_base(shards, base)
    files = {shard.file_name: FileEntry(shard.size, shard.digest) for shard in shards}
    for name, entry in _add_companions(staging.directory, companions).items():
        if name in files:
            raise DuplicateFileError(name)
        files[name] = entry
    if adapter is None:
        files.update(_write_index(staging.directory, shards))
    else:
        config = encode_adapter_config(adapter)
        _write(staging.directory / ADAPTER_CONFIG, config)
        files[ADAPTER_CONFIG] = FileEntry(len(config), digest_bytes(config))
    own = {shard.file_name for shard in shards}
    processor = _processor_of(staging.directory)  # before anything that is the base's is dropped
    return Manifest(
        version=staging.version,
        parent=staging.parent,
        step=step,
        created=datetime.datetime.now(datetime.UTC).isoformat(),
        digest=version_digest(tensors, adapter),
        tensors=tensors,
        files=files,
        base=base.version if base else None,
        deltas=deltas,
        inherited=_drop_inherited(staging.directory, files, own, base),
        processor=processor,
        adapter=adapter,
        line=line,
    )


def _check_adapter(
    adapter: AdapterSpec, shards: Iterable[ShardFile], tensors: Mapping[str, StoredTensor]
) -> None:
    adapter.check_tensors({name: (t.dtype, t.shape) for name, t in tensors.items()})
    if changed := [shard.file_name for shard in shards if shard.delta]:
        raise InvalidAdapterError(f"{changed[0]!r} is a delta: an adapter is always whole")


def _processor_of(directory: Path) -> str | None:
    try:
        if b"vision_config" not in (directory / "config.json").read_bytes():
            return None
    except FileNotFoundError:
        return None
    from sluice.samples.images import processor_digest  # models of text need no Pillow

    return processor_digest(directory)


def check_shards(shards: Iterable[ShardFile], read_header: ReadHeader) -> None:
    """Check that each reported file is there, has its size, and names the reported tensors."""
    for shard in shards:
        if shard.delta is None:
            extents = read_header(shard.file_name, shard.size)
            reported = {n: (entry.dtype, tuple(entry.shape)) for n, entry in shard.tensors.items()}
        else:
            extents = read_header(delta_name(shard.file_name), shard.delta.size)
            reported = {n: ("U8", extents[n].shape) for n in shard.tensors if n in extents}
        stored = {name: (extent.dtype, extent.shape) for name, extent in extents.items()}
        if stored != reported or stored.keys() != shard.tensors.keys():
            names = {name for name, _ in stored.items() ^ reported.items()}
            names |= stored.keys() ^ shard.tensors.keys()
            raise InvalidCheckpointError(
                f"{shard.file_name!r} and its report differ in: {', '.join(sorted(names)[:8])}"
            )


def _check_base(shards: Iterable[ShardFile], base: Manifest | None) -> None:
    """Check that the base has what deltas are against, under the same names, dtypes and shapes."""
    for shard in shards:
        if shard.delta is None:
            continue
        based = {
            name: (tensor.dtype, tensor.shape)
            for name, tensor in (base.tensors if base else {}).items()
            if tensor.file == shard.file_name
        }
        reported = {
            name: (entry.dtype, tuple(entry.shape)) for name, entry in shard.tensors.items()
        }
        if based != reported:
            names = sorted({name for name, _ in based.items() ^ reported.items()})
            raise InvalidCheckpointError(
                f"{shard.file_name!r} is a delta of other tensors than the base has: "
                f"{', '.join(names[:8])}"
            )


def _drop_inherited(
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


def _add_companions(directory: Path, paths: Iterable[Path]) -> dict[str, FileEntry]:
    """Copy companion files into `directory`; returns their sizes and digests by name.

    Each is read once: they are small, and what is digested is what is written.
    """
    entries: dict[str, FileEntry] = {}
    for path in paths:
        _check_name(path.name, shard=False)
        if path.name in entries:
            raise DuplicateFileError(path.name)
        try:
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise MissingFileError(path.name) from error
        if path.parent != directory:
            _write(directory / path.name, data)
        entries[path.name] = FileEntry(len(data), digest_bytes(data))
    return entries


def _write_index(directory: Path, shards: Sequence[ShardFile]) -> dict[str, FileEntry]:
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
    data = encode_index(total, weight_map)
    _write(directory / INDEX_NAME, data)
    return {INDEX_NAME: FileEntry(len(data), digest_bytes(data))}


def _write(path: Path, data: bytes) -> None:
    with naming(path):
        path.write_bytes(data)


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
