"""Digests of tensors, files and whole versions: xxh3-128 as 32 hex digits.

They find damage and mix-ups, not forgers; whoever may write to the store is trusted.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path

import xxhash

Buffer = bytes | bytearray | memoryview | mmap.mmap


def digest_bytes(data: Buffer) -> str:
    """Digest of a C-contiguous buffer."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_file(path: Path) -> tuple[int, str]:
    """Size and digest of a file, read in pieces of 8 MiB."""
    hasher, size = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(1 << 23):
            hasher.update(piece)
            size += len(piece)
    return size, hasher.hexdigest()


def digest_version(tensors: Iterable[tuple[str, str, Sequence[int], str]]) -> str:
    """Digest of (name, dtype, shape, digest) of every tensor; free of order and of files.

    The same weights cut into other shards are therefore the same version digest.
    """
    lines = sorted(
        json.dumps([name, dtype, list(shape), digest]) for name, dtype, shape, digest in tensors
    )
    return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())
