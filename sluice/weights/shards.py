"""Tensors to and from safetensors files, digested on the way; the one module here with torch."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
import xxhash

from sluice.durable import write_pieces
from sluice.weights.checkpoint import Extent, checked_tensors, encode_header
from sluice.weights.errors import (
    DuplicateFileError,
)
from sluice.weights.manifest import Manifest, ShardFile, TensorEntry, digest_bytes

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def write_shard(
    directory: Path, file_name: str, tensors: Mapping[str, torch.Tensor], *, sync: bool = True
) -> ShardFile:
    """Write `tensors` (any device, any strides) as one safetensors file and digest its bytes.

    At most one tensor at a time is copied, and only where it is not contiguous on the host.
    The file is synced before the return. Raises DuplicateFileError where it exists.
    """
    layout = {name: (DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
    header, order = encode_header(layout)
    whole, size = xxhash.xxh3_128(header), len(header)
    entries: dict[str, TensorEntry] = {}

    def pieces() -> Iterator[bytes | memoryview]:
        nonlocal size
        yield header
        for name in order:
            view = host_bytes(tensors[name])
            entries[name] = TensorEntry(*layout[name], digest_bytes(view))
            whole.update(view)
            size += len(view)
            yield view

    write_file(directory / file_name, pieces(), sync=sync)
    return ShardFile(file_name, size, whole.hexdigest(), entries)


def write_file(path: Path, pieces: Iterable[bytes | memoryview], *, sync: bool) -> None:
    """Write a new file of a version in the making; raises DuplicateFileError where it exists."""
    try:
        write_pieces(path, pieces, sync=sync)
    except FileExistsError as error:
        raise DuplicateFileError(path.name) from error


def load_verified(
    directory: Path, manifest: Manifest, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a version by HF name, each checked before.

    Tensors are memory-mapped; writing to them never reaches the file. With `dtype` the
    floating-point ones are converted (a copy). Files are checked as well, headers and
    companions included: serve the weights only after the iterator has ended without
    TensorDigestError, FileDigestError, MissingFileError or DamagedFileError.
    """
    for name, mapped, extent in checked_tensors(directory, manifest, mmap.ACCESS_COPY):
        tensor = _tensor(mapped, extent)
        convert = dtype is not None and tensor.is_floating_point()
        yield name, tensor.to(dtype) if convert else tensor


def _tensor(mapped: mmap.mmap, extent: Extent) -> torch.Tensor:
    dtype = TORCH_DTYPES[extent.dtype]
    if extent.begin == extent.end:
        return torch.empty(extent.shape, dtype=dtype)
    if extent.begin % dtype.itemsize:  # files of other writers may be unaligned
        piece = bytearray(memoryview(mapped)[extent.begin : extent.end])
        return torch.frombuffer(piece, dtype=dtype).reshape(extent.shape)
    count = (extent.end - extent.begin) // dtype.itemsize
    flat = torch.frombuffer(mapped, dtype=dtype, count=count, offset=extent.begin)
    return flat.reshape(extent.shape)


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, row-major; copied only where it is not so on the host."""
    flat = tensor.detach().cpu().reshape(-1).view(torch.uint8)
    return flat.numpy().data
