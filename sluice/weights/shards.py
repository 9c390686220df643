"""Tensors to and from safetensors files, digested on the way; the one module here with torch.

A rank keeps what it published, to write next only what has changed.
"""

from __future__ import annotations

import math
import mmap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import xxhash

from sluice import platform
from sluice.durable import sync_path, write_pieces
from sluice.priority import threads_beside
from sluice.side_copies import Downloads
from sluice.weights import delta as delta_module
from sluice.weights.checkpoint import BITS, Extent, byte_order, checked_tensors, encode_header
from sluice.weights.delta import element_width, encode_file
from sluice.weights.dtypes import DTYPE_NAMES, TORCH_DTYPES
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
    digest_shard,
)
from sluice.weights.transfer.plan import Bucket


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


def write_file(
    path: Path,
    pieces: Iterable[bytes | memoryview],
    *,
    sync: bool,
    written: Callable[[], None] = lambda: None,
) -> None:
    """Write a new file of a version in the making; raises DuplicateFileError where it exists.

    `written` is called when others can read it, before it is synced to the disk.
    """
    try:
        write_pieces(path, pieces, sync=False)
    except FileExistsError as error:
        raise DuplicateFileError(path.name) from error
    written()
    if sync:
        sync_path(path)


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
        tensor = mapped_tensor(mapped, extent)
        convert = dtype is not None and tensor.is_floating_point()
        yield name, tensor.to(dtype) if convert else tensor


def mapped_tensor(mapped: mmap.mmap, extent: Extent) -> torch.Tensor:
    """Return a tensor that lies in a mapped file."""
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
CHUNK_BYTES = 8 << 20  # that are cast, digested and written at a time

Layout = Mapping[str, tuple[str, tuple[int, ...]]]
PendingShard = Callable[[], ShardFile]  # waits until it is written
Casts = Mapping[str, torch.dtype]  # by name, of tensors that are written as another type
ShardWrite = Callable[[Path, str, Mapping[str, torch.Tensor], Casts], PendingShard]
Written = Callable[[ShardFile], None]


def _chunks(
    tensor: torch.Tensor, dtype: torch.dtype, downloads: Downloads, stream: Any
) -> Iterator[memoryview]:
    """Yield the bytes of a tensor as `dtype`, each chunk to be used before the next is taken."""
    flat = tensor.detach().reshape(-1)
    step = CHUNK_BYTES // dtype.itemsize
    parts = (flat[begin : begin + step] for begin in range(0, len(flat), step))
    if flat.device.type == "cpu" and flat.dtype == dtype:
        for part in parts:
            yield part.view(torch.uint8).numpy().data
    else:
        for data in downloads.read(((part, dtype) for part in parts), stream):
            yield data.data


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
        self._memory = platform.current().host_memory(end)
        self.data = self._memory.numpy()
        self.report = ShardFile(file_name, 0, "", {})

    def part(self, name: str) -> np.ndarray:
        """Return the bytes of a tensor, to be read and written."""
        begin, end = self._bounds[name]
        return self.data[begin:end]

    def fill(self, tensors: Mapping[str, torch.Tensor], stream: Any) -> None:
        """Take the bytes of all tensors, cast to the types of the layout; those are reported.

        stream: the one that is used here, of `side_stream`: what is there is digested meanwhile.
        """
        ends: dict[str, Any] = {}
        for name, (begin, end) in self._bounds.items():
            into = self._memory[begin:end].view(TORCH_DTYPES[self.layout[name][0]])
            source = tensors[name].detach().reshape(-1)
            if stream is None:
                into.copy_(source)
            else:
                ends[name] = platform.current().begin_copy(into, source, stream)
        entries: dict[str, TensorEntry] = {}
        for name in self._bounds:
            if name in ends:
                ends[name].synchronize()
            entries[name] = TensorEntry(*self.layout[name], digest_bytes(self.part(name).data))
        self.report = _report(self.report.file_name, self.header, entries)


def _report(file_name: str, header: bytes, entries: Mapping[str, TensorEntry]) -> ShardFile:
    size = len(header) + sum(
        math.prod(entry.shape) * BITS[entry.dtype] // 8 for entry in entries.values()
    )
    digest = digest_shard(header, [entries[name].digest for name in byte_order(_layout(entries))])
    return ShardFile(file_name, size, digest, entries)


def _layout(entries: Mapping[str, TensorEntry]) -> Layout:
    return {name: (entry.dtype, tuple(entry.shape)) for name, entry in entries.items()}


class PublishedShards:
    """The shards of one rank, version after version, `threads_beside` of them written at a time.

    With `keep` their bytes stay on the host, once: deltas are made against them, transfers read
    them, and files are written from them afterwards. Else no more than a chunk of each is there at
    a time. Use from one thread.
    """

    def __init__(self, *, keep: bool, sync: bool) -> None:
        self._keep, self._sync = keep, sync
        self._published: dict[str, _PublishedShard] = {}
        self._version: int | None = None  # that `_published` is of
        self._spare: dict[str, _PublishedShard] = {}  # of another version, to be filled again
        self._behind = False  # files come after the version is finished
        self._unfinished: dict[str, _PublishedShard] = {}
        self._names: list[str] = []  # of the version in the making, in their order
        writers = threads_beside()
        self._pool = ThreadPoolExecutor(writers, "weight-shards")
        self._room = threading.Semaphore(writers + 1)  # for tensors that wait to be written
        self._running: list[Future[ShardFile]] = []
        self._own = threading.local()  # of each writer: its buffers
        self._counting = threading.Lock()
        self.encode_seconds = 0.0  # of the last version, over all writers

    def begin(self, base: int | None, *, behind: bool = False) -> None:
        """Start a version, of deltas against `base` if that is the one kept.

        `behind`: no file is written before `write_kept`; needs `keep`.
        """
        assert self._keep or not behind, "what is not kept is written at once"
        self._behind = behind
        if base is None or base != self._version:
            self._published, self._spare = {}, self._published
        self._version = None  # until `finish`: what is kept becomes a mix of two versions
        self._unfinished, self._names = {}, []
        self.encode_seconds = 0.0

    def submit(
        self,
        directory: Path,
        file_name: str,
        tensors: Mapping[str, torch.Tensor],
        casts: Casts = MappingProxyType({}),
        written: Written = lambda shard: None,
    ) -> PendingShard:
        """Write one shard, whole or as a delta, beside others; waits while too many wait.

        Tensors are cast to the types that `casts` has for them. They must stay as they are until
        the answer was called, which raises like `write_shard`. `written` hears of the shard when
        others can read it, on another thread.
        """
        kinds = {name: casts.get(name, tensor.dtype) for name, tensor in tensors.items()}
        layout = {n: (DTYPE_NAMES[kinds[n]], tuple(t.shape)) for n, t in tensors.items()}
        stream = platform.current().side_stream()
        self._names.append(file_name)
        self._room.acquire()

        def run() -> ShardFile:
            try:
                with platform.current().on(stream):
                    return self._write(directory, file_name, dict(tensors), layout, written, stream)
            finally:
                self._room.release()

        future = self._pool.submit(run)
        self._running.append(future)
        return future.result

    def write(
        self,
        directory: Path,
        file_name: str,
        tensors: Mapping[str, torch.Tensor],
        casts: Casts = MappingProxyType({}),
    ) -> ShardFile:
        """Write one shard, and wait for it; raises like `write_shard`."""
        return self.submit(directory, file_name, tensors, casts)()

    def settle(self) -> None:
        """Wait until nothing is written any more, whatever came of it."""
        wait(self._running)
        self._running = []

    def finish(self, version: int) -> None:
        """End a version, of which all shards are written."""
        self.settle()
        if self._keep:
            self._published = {name: self._unfinished[name] for name in self._names}
            self._version = version
        self._unfinished, self._spare = {}, {}

    def write_kept(self, version: int, directory: Path, written: Written = lambda _: None) -> None:
        """Write the files of a version that was begun with `behind`, one after the other.

        On any thread, while no other version is begun; `written` hears of each. Raises
        StagingLostError for another version than the one kept, and like `write_shard`.
        """
        if version != self._version:
            raise StagingLostError(version)
        for shard in self._published.values():
            path = directory / shard.report.file_name
            self._write_file(path, [shard.header, shard.data.data], shard.report, written)

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

    def _downloads(self) -> Downloads:
        if not hasattr(self._own, "downloads"):
            self._own.downloads = Downloads()
        downloads: Downloads = self._own.downloads
        return downloads

    def _write(
        self,
        directory: Path,
        file_name: str,
        tensors: Mapping[str, torch.Tensor],
        layout: Layout,
        written: Written,
        stream: Any,
    ) -> ShardFile:
        header, _ = encode_header(layout)
        if not self._keep:
            return self._write_through(
                directory, file_name, tensors, layout, header, written, stream
            )
        last = self._published.get(file_name)
        if last is not None and last.header == header:
            report = self._write_delta(directory, last, tensors, written, stream)
        else:
            last, report = self._spare.pop(file_name, None), None
            if last is None or last.header != header:
                last = _PublishedShard(file_name, layout, header)
            last.fill(tensors, stream)
        if report is None and self._behind:
            report = last.report
        elif report is None:
            report = last.report
            pieces: list[bytes | memoryview] = [last.header, last.data.data]
            self._write_file(directory / file_name, pieces, report, written)
        self._unfinished[file_name] = last
        return report

    def _write_through(
        self,
        directory: Path,
        file_name: str,
        tensors: Mapping[str, torch.Tensor],
        layout: Layout,
        header: bytes,
        written: Written,
        stream: Any,
    ) -> ShardFile:
        """Cast, digest and write chunk by chunk; nothing of it is kept."""
        entries: dict[str, TensorEntry] = {}

        def pieces() -> Iterator[bytes | memoryview]:
            yield header
            for name in byte_order(layout):
                hasher = xxhash.xxh3_128()
                dtype = TORCH_DTYPES[layout[name][0]]
                for chunk in _chunks(tensors[name], dtype, self._downloads(), stream):
                    hasher.update(chunk)
                    yield chunk
                entries[name] = TensorEntry(*layout[name], hasher.hexdigest())

        path = directory / file_name
        write_file(
            path,
            pieces(),
            sync=self._sync,
            written=lambda: written(_report(file_name, header, entries)),
        )
        return _report(file_name, header, entries)

    def _write_delta(
        self,
        directory: Path,
        last: _PublishedShard,
        tensors: Mapping[str, torch.Tensor],
        written: Written,
        stream: Any,
    ) -> ShardFile | None:
        """Bring `last` up to date and write the difference; None where it is not worth it."""
        began = time.monotonic()
        payloads: dict[str, bytes] = {}
        entries: dict[str, TensorEntry] = {}
        changed = elements = 0
        wanted = (
            (tensors[name].detach(), TORCH_DTYPES[dtype])
            for name, (dtype, _) in last.layout.items()
        )
        read = self._downloads().read(wanted, stream)
        for (name, (dtype, shape)), new in zip(last.layout.items(), read, strict=True):
            old, width = last.part(name), element_width(dtype)
            encoded = delta_module.encode(old, new, width)
            payloads[name] = encoded.payload
            changed += encoded.changed
            elements += len(new) // width
            if encoded.changed:
                old[:] = new
            entries[name] = TensorEntry(dtype, shape, digest_bytes(new.data))
        last.report = _report(last.report.file_name, last.header, entries)
        pieces = encode_file(payloads)
        with self._counting:
            self.encode_seconds += time.monotonic() - began
        size = sum(len(piece) for piece in pieces)
        if size >= WHOLE_SHARE * last.report.size:
            return None
        hasher = xxhash.xxh3_128()
        for piece in pieces:
            hasher.update(piece)
        report = replace(last.report, delta=DeltaFile(size, hasher.hexdigest(), changed, elements))
        path = directory / delta_name(last.report.file_name)
        self._write_file(path, pieces, report, written)
        return report

    def _write_file(
        self,
        path: Path,
        pieces: Iterable[bytes | memoryview],
        report: ShardFile,
        written: Written,
    ) -> None:
        write_file(path, pieces, sync=self._sync, written=lambda: written(report))
