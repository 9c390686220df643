"""Delta files, and the shards that they make out of older ones. No torch.

A delta file is a safetensors file: under the name of each tensor a U8 payload of `codec`.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from sluice import faults
from sluice.durable import write_all
from sluice.weights.delta import codec
from sluice.weights.delta.codec import DeltaError
from sluice.weights.digest import digest_bytes
from sluice.weights.errors import (
    DamagedFileError,
    FileDigestError,
    MissingFileError,
    TensorDigestError,
)
from sluice.weights.header import BITS, Extent, data_start, encode_header, parse_header
from sluice.weights.manifest import FileEntry, Manifest


def element_width(dtype: str) -> int:
    """Bytes of the integers as which elements of a safetensors dtype are compared."""
    return min(8, BITS[dtype] // 8)


def encode_file(payloads: Mapping[str, bytes]) -> list[bytes]:
    """The pieces of a delta file of these payloads by tensor name."""
    header, order = encode_header({name: ("U8", (len(p),)) for name, p in payloads.items()})
    return [header, *(payloads[name] for name in order)]


@dataclass(frozen=True)
class ShardSource:
    """Where a shard comes from: a whole file, and deltas on it, oldest first."""

    path: Path
    deltas: Sequence[tuple[Path, FileEntry]] = ()


def build_shard(source: ShardSource, file_name: str, manifest: Manifest, target: Path) -> int:
    """Write the shard `file_name` of `manifest` to `target`, checking every tensor; its size.

    At most one tensor is held in memory. Raises TensorDigestError naming a tensor that does
    not come out as the manifest says, FileDigestError, MissingFileError or
    DamagedFileError; `target` is then to be thrown away.
    """
    whole, extents = _open(source.path)
    deltas = [_open(path) for path, _ in source.deltas]
    stored = {name for name, tensor in manifest.tensors.items() if tensor.file == file_name}
    for found in (extents, *(names for _, names in deltas)):
        if set(found) != stored:
            different = ", ".join(sorted(stored ^ set(found))[:8])
            raise DamagedFileError(
                file_name, f"or a delta of it, and the manifest differ in: {different}"
            )
    header = bytes(memoryview(whole)[: data_start(whole)])
    hasher = xxhash.xxh3_128(header)
    with target.open("xb", buffering=0) as file:
        write_all(file, header)
        for name, extent in extents.items():
            data = np.frombuffer(whole, np.uint8)[extent.begin : extent.end]
            if deltas:
                data = data.copy()
                for delta, found in deltas:
                    _apply(delta, found[name], data, name, manifest)
            _check_tensor(name, extent, data, manifest)
            hasher.update(data.data)
            write_all(file, data.data)
            faults.point("weights.building")
        size = file.tell()
    expected = manifest.files[file_name].digest
    if hasher.hexdigest() != expected:
        raise FileDigestError(file_name, expected, hasher.hexdigest())
    for (path, entry), (delta, _) in zip(source.deltas, deltas, strict=True):
        if (actual := digest_bytes(delta)) != entry.digest:  # though it did no harm
            raise FileDigestError(path.name, entry.digest, actual)
    return size


def _apply(
    delta: mmap.mmap, extent: Extent, data: np.ndarray, name: str, manifest: Manifest
) -> None:
    payload = memoryview(delta)[extent.begin : extent.end]
    try:
        codec.apply(payload, data, element_width(manifest.tensors[name].dtype))
    except DeltaError as error:
        expected = manifest.tensors[name].digest
        raise TensorDigestError(name, expected, f"none: its delta {error}") from error


def _check_tensor(name: str, extent: Extent, data: np.ndarray, manifest: Manifest) -> None:
    entry = manifest.tensors[name]
    if (entry.dtype, entry.shape) != (extent.dtype, extent.shape):
        raise DamagedFileError(
            entry.file, f"has tensor {name!r} with another dtype or shape than stated"
        )
    actual = digest_bytes(data.data)
    if actual != entry.digest:
        raise TensorDigestError(name, entry.digest, actual)


def _open(path: Path) -> tuple[mmap.mmap, dict[str, Extent]]:
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise MissingFileError(path.name) from error
    except ValueError as error:
        raise DamagedFileError(path.name, "is empty") from error
    return mapped, parse_header(mapped, file_name=path.name)
