"""The safetensors file format without torch: where each tensor lies in a file.

Format: 8 bytes little-endian header length, JSON header, data. The header maps a tensor name
to {dtype, shape, data_offsets} relative to the data; `__metadata__` holds strings.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from sluice.weights.digest import Buffer
from sluice.weights.errors import DamagedFileError

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
    """Names in the order in which our files hold the tensors: wide types first, then by name."""
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


def parse_header(data: Buffer, *, file_name: str) -> dict[str, Extent]:
    """Tensors of a safetensors file in the order of their bytes, which they tile exactly."""
    extents = parse_extents(data, file_name=file_name)
    end = max((extent.end for extent in extents.values()), default=data_start(data))
    if end != len(memoryview(data)):
        raise DamagedFileError(file_name, f"has {len(memoryview(data))} bytes, not {end}")
    return extents


def parse_extents(data: Buffer, *, file_name: str) -> dict[str, Extent]:
    """The same from a header alone, whatever follows it."""
    start = data_start(data)
    with memoryview(data) as view:  # an error must not keep a map from being closed
        if len(view) < 8 or start > min(len(view), MAX_HEADER):
            raise DamagedFileError(file_name, "is cut short or is no safetensors file")
        text = bytes(view[8:start])
    try:
        document = json.loads(text)
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
    """Where the tensors begin: the length of the header with its own eight bytes."""
    return 8 + int.from_bytes(memoryview(data)[:8], "little")


def _size(extent: Extent) -> int:
    if extent.dtype not in BITS:
        raise ValueError(f"unknown dtype {extent.dtype!r}")
    if not all(isinstance(length, int) and length >= 0 for length in extent.shape):
        raise ValueError(f"shape {list(extent.shape)}")
    return math.prod(extent.shape) * BITS[extent.dtype] // 8


def _absolute(entry: Mapping[str, list[int]], start: int) -> tuple[int, int]:
    begin, end = entry["data_offsets"]
    return start + begin, start + end
