"""Tensors to and from safetensors files, digested on the way; the one module here with torch.

A rank keeps what it published, to write next only what has changed.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import xxhash

from sluice.durable import write_pieces
from sluice.weights import delta as delta_module
from sluice.weights.checkpoint import BITS, Extent, byte_order, checked_tensors, encode_header
from sluice.weights.delta import element_width, encode_file
from sluice.weights.errors import (
    DuplicateFileError,
    StagingLostError,
)
from sluice.weights.manifest import (
    DeltaFile,
    Manifest,
    ShardFile,
    TensorEntry,
    delta_name,
    digest_bytes,
)
from sluice.weights.transfer.plan import Bucket

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


WHOLE_SHARE = 0.8  # of a shard's bytes: a delta that is not smaller is not worth its base


ShardWrite = Callable[[Path, str, Mapping[str, torch.Tensor]], ShardFile]


Layout = Mapping[str, tuple[str, tuple[int, ...]]]


class _PublishedShard:
    """A shard as it was published last: header, and the bytes of all tensors in their order."""

    def __init__(self, file_name: str, layout: Layout, header: bytes) -> None:
        self.layout, self.header = layout, header
        self._bounds: dict[str, tuple[int, int]] = {}
        end = 0
        for name in byte_order(layout):
            dtype, shape = layout[name]
            begin, end = end, end + math.prod(shape) * BITS[dtype] // 8
            self._bounds[name] = begin, end
        self.data = np.empty(end, np.uint8)
        self.report = ShardFile(file_name, 0, "", {})

    def part(self, name: str) -> np.ndarray:
        """Return the bytes of a tensor, to be read and written."""
        begin, end = self._bounds[name]
        return self.data[begin:end]

    def describe(self) -> None:
        """Bring the report up to the bytes."""
        whole = xxhash.xxh3_128(self.header)
        entries = {}
        for name in self._bounds:
            piece = self.part(name).data
            entries[name] = TensorEntry(*self.layout[name], digest_bytes(piece))
            whole.update(piece)
        size = len(self.header) + self.data.nbytes
        self.report = ShardFile(self.report.file_name, size, whole.hexdigest(), entries)


class PublishedShards:
    """The shards of one rank, version after version.

    With `keep` their bytes stay on the host, once: deltas are made against them, and transfers
    read them. Use from one thread.
    """

    def __init__(self, *, keep: bool, sync: bool) -> None:
        self._keep, self._sync = keep, sync
        self._published: dict[str, _PublishedShard] = {}
        self._version: int | None = None  # that `_published` is of
        self._unfinished: dict[str, _PublishedShard] = {}
        self.encode_seconds = 0.0  # of the last version

    def begin(self, base: int | None) -> None:
        """Start a version, of deltas against `base` if that is the one kept."""
        if base is None or base != self._version:
            self._published = {}
        self._version = None  # until `finish`: what is kept becomes a mix of two versions
        self._unfinished = {}
        self.encode_seconds = 0.0

    def write(
        self, directory: Path, file_name: str, tensors: Mapping[str, torch.Tensor]
    ) -> ShardFile:
        """Write one shard, whole or as a delta; raises like `write_shard`."""
        if not self._keep:
            return write_shard(directory, file_name, tensors, sync=self._sync)
        layout = {name: (DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
        header, _ = encode_header(layout)
        last = self._published.get(file_name)
        if last is not None and last.header == header:
            report = self._write_delta(directory, last, tensors)
        else:
            last, report = _PublishedShard(file_name, layout, header), None
            for name in layout:
                last.part(name)[:] = _bytes(tensors[name])
            last.describe()
        if report is None:
            report = last.report
            write_file(directory / file_name, [last.header, last.data.data], sync=self._sync)
        self._unfinished[file_name] = last
        return report

    def finish(self, version: int) -> None:
        """End a version, of which all shards are written."""
        if self._keep:
            self._published, self._version = self._unfinished, version
        self._unfinished = {}

    @property
    def empty(self) -> bool:
        """Nothing is kept, so that nothing can be sent."""
        return not self._published

    def report(self, version: int) -> list[ShardFile]:
        """Return the shards of `version` as written. Raises StagingLostError if not kept."""
        if version != self._version:
            raise StagingLostError(version)
        return [shard.report for shard in self._published.values()]

    def read(self, bucket: Bucket) -> torch.Tensor:
        """Return the bytes of a bucket of the version kept, uint8[size]; a read-only view."""
        data = self._published[bucket.file_name].data
        return torch.from_numpy(data[bucket.offset : bucket.offset + bucket.size])

    def _write_delta(
        self, directory: Path, last: _PublishedShard, tensors: Mapping[str, torch.Tensor]
    ) -> ShardFile | None:
        """Bring `last` up to date and write the difference; None where it is not worth it."""
        began = time.monotonic()
        payloads: dict[str, bytes] = {}
        changed = elements = 0
        for name, (dtype, _) in last.layout.items():
            new, old, width = _bytes(tensors[name]), last.part(name), element_width(dtype)
            encoded = delta_module.encode(old, new, width)
            payloads[name] = encoded.payload
            changed += encoded.changed
            elements += len(new) // width
            old[:] = new
        last.describe()
        pieces = encode_file(payloads)
        self.encode_seconds += time.monotonic() - began
        size = sum(len(piece) for piece in pieces)
        if size >= WHOLE_SHARE * last.report.size:
            return None
        hasher = xxhash.xxh3_128()
        for piece in pieces:
            hasher.update(piece)
        path = directory / delta_name(last.report.file_name)
        write_file(path, pieces, sync=self._sync)
        delta = DeltaFile(size, hasher.hexdigest(), changed, elements)
        return replace(last.report, delta=delta)


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return np.frombuffer(host_bytes(tensor), np.uint8)
