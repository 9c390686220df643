"""Bit-exact difference of two arrays of bytes, of elements of one width. No torch.

Elements are taken as unsigned integers; what is kept is `new - old` modulo 2^width, zigzag coded
(0, -1, 1, -2 ... become 0, 1, 2, 3 ...), since a small optimizer step moves a floating-point
number to a neighbour in that order. Three forms, of which `encode` takes the smallest:

SPARSE  gaps between the elements that changed (one byte each, 255 and above in a second stream of
        8 bytes each), then the differences of these, byte plane by byte plane
DENSE   the differences of all elements, byte plane by byte plane
RAW     the new bytes

Streams are compressed with zstd. SAME has none. A payload is one byte of form, the counts of
elements, of changed ones and of long gaps (8 bytes each, little-endian), and the streams, each
behind its length.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np

from sluice.weights.checkpoint import BITS, encode_header

BLOCK = 1 << 17  # elements that are compared at a time: they stay in a core's cache
LONG_GAP = 255
SPARSE_LIMIT = 0.5  # of elements; a denser difference is hardly ever smaller in the sparse form
_HEAD = struct.Struct("<BQQQ")
_LENGTH = struct.Struct("<Q")

Bytes = np.ndarray  # uint8[n], contiguous


class Form(IntEnum):
    SAME = 0
    SPARSE = 1
    DENSE = 2
    RAW = 3


class DeltaError(ValueError):
    """A payload is damaged, or does not belong to the bytes it is applied to."""


@dataclass(frozen=True)
class Encoded:
    """A payload, and how many of the elements changed."""

    payload: bytes
    changed: int


def encode(old: Bytes, new: Bytes, width: int) -> Encoded:
    """Encode the difference from `old` to `new`, uint8[n] each, of elements of `width` bytes."""
    before, after = _elements(old, width), _elements(new, width)
    count, changed, last = len(after), 0, -1
    gaps, long, values = [np.empty(0, np.uint8)], [np.empty(0, "<u8")], [after[:0]]
    for start in range(0, count, BLOCK):
        moved = after[start : start + BLOCK] - before[start : start + BLOCK]
        at = np.flatnonzero(moved != 0)  # of numbers it is slower
        changed += len(at)
        if len(at) and changed <= SPARSE_LIMIT * count:
            gap = np.diff(at, prepend=last - start) - 1
            last = start + int(at[-1])
            gaps.append(np.minimum(gap, LONG_GAP).astype(np.uint8))
            long.append(gap[gap >= LONG_GAP].astype("<u8"))
            values.append(moved[at])
    if not changed:
        return Encoded(_pack(Form.SAME, count, 0, 0), 0)
    if changed <= SPARSE_LIMIT * count:
        streams = [*map(np.concatenate, (gaps, long)), _planes(_zigzag(np.concatenate(values)))]
        payload = _pack(Form.SPARSE, count, changed, len(streams[1]), *streams)
    else:
        payload = _pack(Form.DENSE, count, changed, 0, _planes(_zigzag(after - before)))
    if len(payload) >= new.nbytes:
        payload = _pack(Form.RAW, count, changed, 0, new)
    return Encoded(payload, changed)


@dataclass(frozen=True)
class Patch:
    """A decoded payload: what `count` elements become, to be applied block by block.

    SPARSE: `values` are added at `positions`. DENSE: they are added to all. RAW: they replace all.
    """

    form: Form
    values: np.ndarray
    positions: np.ndarray

    def apply(self, block: np.ndarray, start: int) -> bool:
        """Turn the old elements from `start` on into the new ones; whether any changes."""
        end = start + len(block)
        if self.form == Form.SPARSE:
            first, last = np.searchsorted(self.positions, (start, end))
            if first == last:
                return False
            np.add.at(block, self.positions[first:last] - start, self.values[first:last])
        elif self.form == Form.DENSE:
            block += self.values[start:end]
        elif self.form == Form.RAW:
            block[:] = self.values[start:end]
        return self.form != Form.SAME


def decode(payload: memoryview, count: int, width: int) -> Patch:
    """Decode a payload for `count` elements of `width` bytes. Raises DeltaError."""
    kind = np.dtype(f"<u{width}")
    values, positions = np.empty(0, kind), np.empty(0, np.int64)
    try:
        form, expected, changed, long_gaps = _HEAD.unpack_from(payload)
        if count != expected:
            raise DeltaError(f"is for {expected} elements, not {count}")
        if not long_gaps <= changed <= count:
            raise DeltaError("has counts that do not fit")
        streams = payload[_HEAD.size :]
        if form == Form.SPARSE:
            gaps, streams = _take(streams, changed)
            long, streams = _take(streams, 8 * long_gaps)
            planes, streams = _take(streams, width * changed)
            positions = _positions(gaps, long.view("<u8"), count)
            values = _unzigzag(_unplanes(planes, kind))
        elif form == Form.DENSE:
            planes, streams = _take(streams, width * count)
            values = _unzigzag(_unplanes(planes, kind))
        elif form == Form.RAW:
            raw, streams = _take(streams, width * count)
            values = raw.view(kind)
        elif form != Form.SAME:
            raise DeltaError(f"has the unknown form {form}")
        if streams:
            raise DeltaError(f"has {len(streams)} bytes too many")
        return Patch(Form(form), values, positions)
    except (struct.error, ValueError, IndexError, OSError, OverflowError) as error:
        if isinstance(error, DeltaError):
            raise
        raise DeltaError(f"is damaged: {error}") from error


def apply(payload: memoryview, target: Bytes, width: int) -> None:
    """Turn the old bytes in `target` into the new ones. Raises DeltaError, `target` undefined."""
    elements = _elements(target, width)
    decode(payload, len(elements), width).apply(elements, 0)


@cache
def _zstd() -> Any:
    import pyarrow

    return pyarrow.Codec("zstd", compression_level=1)


def _elements(data: Bytes, width: int) -> np.ndarray:
    return data.view(f"<u{width}")


def _positions(gaps: np.ndarray, long: np.ndarray, count: int) -> np.ndarray:
    steps = np.add(gaps, 1, dtype=np.int64)
    is_long = np.flatnonzero(gaps == LONG_GAP)
    if len(is_long) != len(long) or (len(long) and int(long.max()) >= count):
        raise DeltaError("has gaps that do not fit")
    steps[is_long] = long + 1
    steps[:1] -= 1
    positions = np.cumsum(steps, out=steps)
    if len(positions) and positions[-1] >= count:
        raise DeltaError("reaches beyond the tensor")
    return positions


def _zigzag(difference: np.ndarray) -> np.ndarray:
    sign = difference.view(difference.dtype.str.replace("u", "i")) < 0
    return np.where(sign, ~(difference << 1), difference << 1)


def _unzigzag(coded: np.ndarray) -> np.ndarray:
    half, sign = coded >> 1, coded & 1
    np.negative(sign, out=sign)  # all ones where the difference is negative
    half ^= sign
    return half


def _planes(values: np.ndarray) -> np.ndarray:
    """Order all first bytes, then all second ones and so on, as uint8."""
    width = values.dtype.itemsize
    return np.ascontiguousarray(values.view(np.uint8).reshape(-1, width).T).reshape(-1)


def _unplanes(planes: np.ndarray, dtype: np.dtype) -> np.ndarray:
    rows = planes.reshape(dtype.itemsize, -1)
    values = rows[-1].astype(dtype)
    for row in rows[-2::-1]:
        values <<= 8
        values |= row
    return values


def _pack(form: Form, count: int, changed: int, long_gaps: int, *streams: np.ndarray) -> bytes:
    parts = [_HEAD.pack(form, count, changed, long_gaps)]
    for stream in streams:
        data = _zstd().compress(stream.view(np.uint8), asbytes=True) if len(stream) else b""
        parts += [_LENGTH.pack(len(data)), data]
    return b"".join(parts)


def _take(streams: memoryview, size: int) -> tuple[np.ndarray, memoryview]:
    """Decompress the next stream, which has `size` bytes; returns it and what follows."""
    (length,) = _LENGTH.unpack_from(streams)
    data, rest = streams[_LENGTH.size :][:length], streams[_LENGTH.size + length :]
    if len(data) != length or (length == 0) is not (size == 0):
        raise DeltaError("is cut short")
    if not size:
        return np.empty(0, np.uint8), rest
    return np.frombuffer(_zstd().decompress(data, decompressed_size=size), np.uint8), rest


def element_width(dtype: str) -> int:
    """Return the bytes of the integers as which elements of a safetensors dtype are compared."""
    return min(8, BITS[dtype] // 8)


def encode_file(payloads: Mapping[str, bytes]) -> list[bytes]:
    """Lay out a delta file of these payloads by tensor name, in pieces."""
    header, order = encode_header({name: ("U8", (len(p),)) for name, p in payloads.items()})
    return [header, *(payloads[name] for name in order)]
