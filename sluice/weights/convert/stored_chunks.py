"""Where the numbers of stored tensors lie, in chunks that ranks cut along any axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import combinations, product

import torch

from sluice.weights.convert.pieces import Content, FileRange, Files
from sluice.weights.convert.stored import Chunk, StoredKey, find_bytes
from sluice.weights.errors import UncoveredTensorError

Pieces = tuple[FileRange, ...]


class StoredChunks:
    """Parts of stored tensors: what is at `index` of the first axes of a key, all with no index."""

    def __init__(self, keys: Mapping[str, StoredKey], files: Files) -> None:
        self._keys, self._files = keys, files
        self._chunks: dict[tuple[str, int], dict[tuple[int, ...], list[Chunk]]] = {}
        self._offsets: dict[Chunk, int] = {}

    def stored(self) -> Iterator[tuple[str, Content]]:
        """Yield every chunk as it is stored, by key and offsets."""
        for stored in self._keys.values():
            for chunk in stored.chunks:
                start = self._data_offset(chunk, stored.dtype)
                piece = FileRange(chunk.path, start, math.prod(chunk.sizes) * stored.dtype.itemsize)
                content = Content(stored.dtype, chunk.sizes, (piece,))
                yield chunk_name(stored.key, chunk.offsets), content

    def rows(self, key: str, index: tuple[int, ...], first: int, last: int) -> Pieces | None:
        """Find rows first..last (exclusive) of a part; None where columns were cut.

        Raises UncoveredTensorError.
        """
        stored = self._keys[key]
        lead, parts = len(index), []
        width = math.prod(stored.shape[lead + 1 :]) * stored.dtype.itemsize
        for chunk in self._at(stored, index):
            if chunk.sizes[lead + 1 :] != stored.shape[lead + 1 :]:
                return None
            low, height = chunk.offsets[lead], chunk.sizes[lead]
            start, stop = max(first, low), min(last, low + height)
            if start >= stop:
                continue
            skip = _ravel(index, chunk.offsets, chunk.sizes) * height + start - low
            data = self._data_offset(chunk, stored.dtype)
            parts.append(
                (start, stop, FileRange(chunk.path, data + skip * width, (stop - start) * width))
            )
        at, pieces = first, []
        for start, stop, piece in sorted(parts, key=lambda item: item[:2]):
            if start != at:
                break
            pieces.append(piece)
            at = stop
        if at != last:
            raise UncoveredTensorError(stored.key, f"rows from {at} on are in no chunk, or in two")
        return tuple(pieces)

    def check_covered(self, key: str, index: tuple[int, ...]) -> None:
        """Raises UncoveredTensorError unless each number of a part is in one chunk."""
        stored, lead = self._keys[key], len(index)
        chunks = set(self._at(stored, index))
        count = sum(math.prod(chunk.sizes[lead:]) for chunk in chunks)
        overlap = any(_overlap(one, other, lead) for one, other in combinations(chunks, 2))
        if overlap or count != math.prod(stored.shape[lead:]):
            raise UncoveredTensorError(key, "some of it is in no chunk, or in two")

    def assemble(self, key: str, index: tuple[int, ...]) -> torch.Tensor:
        """Assemble a part in memory, from chunks cut along any axis."""
        stored, lead = self._keys[key], len(index)
        whole = torch.empty(stored.shape[lead:], dtype=stored.dtype)
        for chunk in self._at(stored, index):
            start = self._data_offset(chunk, stored.dtype)
            size = math.prod(chunk.sizes[lead:])
            skip = _ravel(index, chunk.offsets, chunk.sizes) * size
            piece = FileRange(
                chunk.path,
                start + skip * stored.dtype.itemsize,
                size * stored.dtype.itemsize,
            )
            part = self._files.load(Content(stored.dtype, chunk.sizes[lead:], (piece,)))
            where = tuple(
                slice(o, o + s)
                for o, s in zip(chunk.offsets[lead:], chunk.sizes[lead:], strict=True)
            )
            whole[where] = part
        return whole

    def _at(self, stored: StoredKey, index: tuple[int, ...]) -> list[Chunk]:
        """List the chunks that hold something of a part."""
        lead = len(index)
        if (stored.key, lead) not in self._chunks:
            found: dict[tuple[int, ...], list[Chunk]] = {}
            for chunk in stored.chunks:
                axes = (
                    range(o, o + s)
                    for o, s in zip(chunk.offsets[:lead], chunk.sizes[:lead], strict=True)
                )
                for position in product(*axes):
                    found.setdefault(position, []).append(chunk)
            self._chunks[stored.key, lead] = found
        return self._chunks[stored.key, lead].get(index, [])

    def _data_offset(self, chunk: Chunk, dtype: torch.dtype) -> int:
        """Find the bytes of a chunk in its file."""
        if chunk.is_bare:
            return chunk.offset
        if chunk not in self._offsets:
            expected = (dtype, torch.Size(chunk.sizes))
            self._offsets[chunk] = find_bytes(
                self._files, chunk.path, chunk.offset, chunk.length, expected
            )
        return self._offsets[chunk]


def chunk_name(key: str, offsets: tuple[int, ...]) -> str:
    """Name a part of a stored tensor, as digests are kept by."""
    return f"{key}@{','.join(map(str, offsets))}"


def _overlap(one: Chunk, other: Chunk, lead: int) -> bool:
    """Return whether two chunks hold a number of the same place behind the leading axes."""
    axes = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(max(o, p) < min(o + s, p + t) for o, s, p, t in list(axes)[lead:])


def _ravel(index: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """Return the position of `index` among the leading axes of a chunk."""
    at = 0
    for axis, position in enumerate(index):
        at = at * sizes[axis] + position - offsets[axis]
    return at
