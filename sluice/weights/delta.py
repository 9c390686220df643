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
CHANGES = 1 << 15  # of a sparse form that are expanded at a time
LONG_GAP = 255
SPARSE_LIMIT = 0.5  # of elements; a denser difference is hardly ever smaller in the sparse form
_HEAD = struct.Struct("<BQQQ")
_LENGTH = struct.Struct("<Q")
_NOTHING = np.empty(0, np.uint8)

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


class Patch:
    """A decoded payload: what elements become, to be applied block by block, in their order."""

    def __init__(
        self,
        form: Form,
        values: np.ndarray,
        gaps: np.ndarray = _NOTHING,
        long: np.ndarray = _NOTHING,
    ) -> None:
        """`values`: RAW the new elements, else byte planes of differences, uint8[width, n]."""
        self._form, self._given = form, values
        self._gaps, self._long = gaps, long
        self._taken, self._position = 0, -1  # of the changes: how many, and where the last is
        self._positions, self._values = np.empty(0, np.int64), _NOTHING  # that are next

    def apply(self, block: np.ndarray, start: int) -> bool:
        """Turn the old elements from `start` on into the new ones; whether any changes."""
        if self._form == Form.SPARSE:
            return self._add(block, start)
        if self._form == Form.DENSE:
            block += _differences(self._given[:, start : start + len(block)])
        elif self._form == Form.RAW:
            block[:] = self._given[start : start + len(block)]
        return self._form != Form.SAME

    def _add(self, block: np.ndarray, start: int) -> bool:
        has_changed = False
        while len(self._positions) or self._take_more():
            count = int(np.searchsorted(self._positions, start + len(block)))
            if not count:
                break
            np.add.at(block, self._positions[:count] - start, self._values[:count])
            self._positions, self._values = self._positions[count:], self._values[count:]
            has_changed = True
        return has_changed

    def _take_more(self) -> bool:
        """Expand some more changes: few enough to stay in a core's cache."""
        gaps = self._gaps[self._taken : self._taken + CHANGES]
        if not len(gaps):
            return False
        steps = np.add(gaps, 1, dtype=np.int64)
        is_long = np.flatnonzero(gaps == LONG_GAP)
        steps[is_long] = self._long[: len(is_long)] + 1
        self._long = self._long[len(is_long) :]
        steps[0] += self._position
        self._positions = np.cumsum(steps, out=steps)
        self._position = int(steps[-1])
        self._values = _differences(self._given[:, self._taken : self._taken + len(gaps)])
        self._taken += len(gaps)
        return True


def decode(payload: memoryview, count: int, width: int) -> Patch:
    """Decode a payload for `count` elements of `width` bytes. Raises DeltaError."""
    try:
        form, expected, changed, long_gaps = _HEAD.unpack_from(payload)
        if count != expected:
            raise DeltaError(f"is for {expected} elements, not {count}")
        if not long_gaps <= changed <= count:
            raise DeltaError("has counts that do not fit")
        streams = payload[_HEAD.size :]
        patch = Patch(Form.SAME, _NOTHING)
        if form == Form.SPARSE:
            gaps, streams = _take(streams, changed)
            long, streams = _take(streams, 8 * long_gaps)
            planes, streams = _take(streams, width * changed)
            patch = Patch(Form.SPARSE, planes.reshape(width, -1), gaps, long.view("<u8"))
            _check_gaps(gaps, long.view("<u8"), count)
        elif form == Form.DENSE:
            planes, streams = _take(streams, width * count)
            patch = Patch(Form.DENSE, planes.reshape(width, -1))
        elif form == Form.RAW:
            raw, streams = _take(streams, width * count)
            patch = Patch(Form.RAW, raw.view(f"<u{width}"))
        elif form != Form.SAME:
            raise DeltaError(f"has the unknown form {form}")
        if streams:
            raise DeltaError(f"has {len(streams)} bytes too many")
        return patch
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


def _check_gaps(gaps: np.ndarray, long: np.ndarray, count: int) -> None:
    if np.count_nonzero(gaps == LONG_GAP) != len(long) or (len(long) and long.max() >= count):
        raise DeltaError("has gaps that do not fit")
    end = gaps.sum(dtype=np.float64) + len(gaps) + long.sum(dtype=np.float64)
    if end - LONG_GAP * len(long) > count:
        raise DeltaError("reaches beyond the tensor")


def _zigzag(difference: np.ndarray) -> np.ndarray:
    sign = difference.view(difference.dtype.str.replace("u", "i")) < 0
    return np.where(sign, ~(difference << 1), difference << 1)


def _planes(values: np.ndarray) -> np.ndarray:
    """Order all first bytes, then all second ones and so on, as uint8."""
    width = values.dtype.itemsize
    return np.ascontiguousarray(values.view(np.uint8).reshape(-1, width).T).reshape(-1)


def _differences(planes: np.ndarray) -> np.ndarray:
    """Return the differences of which these are the byte planes, uint8[width, n], zigzag coded."""
    coded = planes[-1].astype(f"<u{len(planes)}")
    for plane in planes[-2::-1]:
        coded <<= 8
        coded |= plane
    sign = coded & 1
    np.negative(sign, out=sign)  # all ones where the difference is negative
    coded >>= 1
    coded ^= sign
    return coded


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
