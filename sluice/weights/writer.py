"""What a rank publishes: shard files, or what changed in them since the version before."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import xxhash

from sluice.weights import delta as delta_module
from sluice.weights.checkpoint import BITS, byte_order, encode_header
from sluice.weights.delta import element_width, encode_file
from sluice.weights.errors import StagingLostError
from sluice.weights.manifest import DeltaFile, ShardFile, TensorEntry, delta_name, digest_bytes
from sluice.weights.shards import DTYPE_NAMES, host_bytes, write_file, write_shard
from sluice.weights.transfer.plan import Bucket

WHOLE_SHARE = 0.8  # of a shard's bytes: a delta that is not smaller is not worth its base

ShardWrite = Callable[[Path, str, Mapping[str, torch.Tensor]], ShardFile]


Layout = Mapping[str, tuple[str, tuple[int, ...]]]


class _Kept:
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
        self._kept: dict[str, _Kept] = {}
        self._version: int | None = None  # that `_kept` is of
        self._unfinished: dict[str, _Kept] = {}
        self.encode_seconds = 0.0  # of the last version

    def begin(self, base: int | None) -> None:
        """Start a version, of deltas against `base` if that is the one kept."""
        if base is None or base != self._version:
            self._kept = {}
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
        kept = self._kept.get(file_name)
        if kept is not None and kept.header == header:
            report = self._write_delta(directory, kept, tensors)
        else:
            kept, report = _Kept(file_name, layout, header), None
            for name in layout:
                kept.part(name)[:] = _bytes(tensors[name])
            kept.describe()
        if report is None:
            report = kept.report
            write_file(directory / file_name, [kept.header, kept.data.data], sync=self._sync)
        self._unfinished[file_name] = kept
        return report

    def finish(self, version: int) -> None:
        """End a version, of which all shards are written."""
        if self._keep:
            self._kept, self._version = self._unfinished, version
        self._unfinished = {}

    @property
    def empty(self) -> bool:
        """Nothing is kept, so that nothing can be sent."""
        return not self._kept

    def report(self, version: int) -> list[ShardFile]:
        """Return the shards of `version` as written. Raises StagingLostError if not kept."""
        if version != self._version:
            raise StagingLostError(version)
        return [kept.report for kept in self._kept.values()]

    def read(self, bucket: Bucket) -> torch.Tensor:
        """Return the bytes of a bucket of the version kept, uint8[size]; a read-only view."""
        data = self._kept[bucket.file_name].data
        return torch.from_numpy(data[bucket.offset : bucket.offset + bucket.size])

    def _write_delta(
        self, directory: Path, kept: _Kept, tensors: Mapping[str, torch.Tensor]
    ) -> ShardFile | None:
        """Bring `kept` up to date and write the difference; None where it is not worth it."""
        began = time.monotonic()
        payloads: dict[str, bytes] = {}
        changed = elements = 0
        for name, (dtype, _) in kept.layout.items():
            new, old, width = _bytes(tensors[name]), kept.part(name), element_width(dtype)
            encoded = delta_module.encode(old, new, width)
            payloads[name] = encoded.payload
            changed += encoded.changed
            elements += len(new) // width
            old[:] = new
        kept.describe()
        pieces = encode_file(payloads)
        self.encode_seconds += time.monotonic() - began
        size = sum(len(piece) for piece in pieces)
        if size >= WHOLE_SHARE * kept.report.size:
            return None
        hasher = xxhash.xxh3_128()
        for piece in pieces:
            hasher.update(piece)
        path = directory / delta_name(kept.report.file_name)
        write_file(path, pieces, sync=self._sync)
        delta = DeltaFile(size, hasher.hexdigest(), changed, elements)
        return replace(kept.report, delta=delta)


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return np.frombuffer(host_bytes(tensor), np.uint8)
