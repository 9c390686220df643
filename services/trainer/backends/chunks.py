"""Chunks of tensors in files of torch.distributed.checkpoint: cut from flat ranges, written, read.

A chunk is a box of a global tensor. What a rank holds of a tensor, be it a range of its elements in
their order, is a few boxes: whole rows, and parts of a row at either end. Any other ranks read from
them what they need, by torch's own resharding. No more than a piece of a tensor is copied at once.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from services.trainer.staging import LiveTensors, StagedCheckpoint
from sluice import faults
from sluice.durable import naming, write_new
from sluice.weights.convert.stored import METADATA, read_metadata
from sluice.weights.errors import ForbiddenObjectError
from sluice.weights.manifest import FileEntry, digest_file

PIECE_BYTES = 16 << 20  # of one entry of a file, and so of what is copied at a time

Shape = tuple[int, ...]


class CheckpointWriteError(OSError):
    """Files of a checkpoint could not be written; `filename` as the failure has it."""

    def __init__(self, checkpoint: str, failure: Exception) -> None:
        super().__init__(f"checkpoint {checkpoint!r} was not written: {failure}")
        self.filename = getattr(failure, "filename", None)

    def __str__(self) -> str:
        return str(self.args[0])


class UncoveredChunkError(ValueError):
    """A checkpoint does not hold what is asked of it."""


@dataclass(frozen=True)
class Box:
    """A box of a global tensor. Where `padded`, what lies beyond a shorter global one is zero."""

    key: str
    shape: Shape  # of the global tensor
    offset: Shape
    sizes: Shape
    padded: bool = False


@dataclass(frozen=True)
class BoxData:
    """A box and its elements, contiguous and of the box's shape."""

    place: Box
    data: torch.Tensor


def boxes(sizes: Shape, begin: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield (offset, sizes) of the boxes that make up elements [begin, end), in their order.

    Elements are counted in row-major order; there are at most 2 boxes an axis.
    """
    if begin >= end:
        return
    if len(sizes) < 2:
        yield ((begin,), (end - begin,)) if sizes else ((), ())
        return
    row = math.prod(sizes[1:])
    first, last = -(-begin // row), end // row  # of the rows that are whole
    if first > last:
        yield from _within(sizes, last, begin % row, end % row)
        return
    if begin % row:
        yield from _within(sizes, first - 1, begin % row, row)
    if first < last:
        yield (first, *(0 for _ in sizes[1:])), (last - first, *sizes[1:])
    yield from _within(sizes, last, 0, end % row)


def _within(sizes: Shape, row: int, begin: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    for offset, inner in boxes(sizes[1:], begin, end):
        yield (row, *offset), (1, *inner)


def _pieces(offset: Shape, sizes: Shape, limit: int) -> Iterator[tuple[Shape, Shape]]:
    """Cut a box along its first axes into boxes of `limit` elements at most, in their order."""
    if math.prod(sizes) <= max(limit, 1):
        yield offset, sizes
        return
    axis = next(axis for axis, size in enumerate(sizes) if size > 1)
    step = max(1, limit // math.prod(sizes[axis + 1 :]))
    for start in range(0, sizes[axis], step):
        here = (*offset[:axis], offset[axis] + start, *offset[axis + 1 :])
        count = min(step, sizes[axis] - start)
        yield from _pieces(here, (*sizes[:axis], count, *sizes[axis + 1 :]), limit)


def cut(
    place: Box, flat_N: torch.Tensor, begin: int = 0, piece_bytes: int | None = None
) -> list[BoxData]:
    """Cut elements [begin, begin + N) of what lies at `place`, given in order, into chunks.

    Chunks are views of `flat_N`, of `piece_bytes` at most where that is given.
    """
    limit = len(flat_N) if piece_bytes is None else piece_bytes // flat_N.element_size()
    chunks, at = [], 0
    for box in boxes(place.sizes, begin, begin + len(flat_N)):
        for offset, sizes in _pieces(*box, limit):
            size = math.prod(sizes)
            where = tuple(a + b for a, b in zip(place.offset, offset, strict=True))
            data = flat_N[at : at + size].view(sizes)
            chunks.append(BoxData(replace(place, offset=where, sizes=sizes), data))
            at += size
    return chunks


@dataclass(frozen=True)
class WrittenChunks:
    """What a rank wrote: its plan and results, for the metadata, and the files by name."""

    plan: SavePlan
    results: list[WriteResult]
    files: dict[str, FileEntry]


class RankFiles:
    """The chunks and objects of one rank, to be written into `__<rank>_<n>.distcp`."""

    def __init__(self, rank: int, chunks: Iterable[BoxData], objects: Mapping[str, bytes]) -> None:
        self._rank = rank
        self._objects = {MetadataIndex(name): content for name, content in objects.items()}
        items = [WriteItem(index, WriteItemType.BYTE_IO) for index in self._objects]
        tensors = {}
        for chunk in chunks:
            items.append(_write_item(chunk))
            tensors[items[-1].index] = chunk.data
        self._tensors, self._plan = LiveTensors(tensors), SavePlan(items)

    def keep(self) -> None:
        """Copy what is not written yet: the tensors are about to change."""
        self._tensors.keep()

    def write(self, directory: Path, *, threads: int, sync: bool) -> WrittenChunks:
        """Write the files, one a thread. Raises OSError or RuntimeError; data are gone then."""
        sizes = {index: tensor.nbytes for index, tensor in self._tensors.items()}
        shares: list[list[WriteItem]] = [[] for _ in range(threads)]
        loads = [0] * threads
        for item in self._plan.items:
            least = loads.index(min(loads))
            shares[least].append(item)
            loads[least] += sizes.get(item.index, 0)
        paths = [directory / f"__{self._rank}_{number}.distcp" for number in range(threads)]
        try:
            with ThreadPoolExecutor(threads, "write-checkpoint") as pool:
                written = list(pool.map(self._write_file, paths, shares, itertools.repeat(sync)))
        finally:
            self._tensors.clear()
        return WrittenChunks(
            self._plan,
            [result for _, results in written for result in results],
            {path.name: entry for path, (entry, _) in zip(paths, written, strict=True)},
        )

    def _write_file(
        self, path: Path, items: Sequence[WriteItem], sync: bool
    ) -> tuple[FileEntry, list[WriteResult]]:
        results = []
        with naming(path), path.open("xb") as file:
            stream = _DigestedStream(file)
            for item in items:
                start = stream.size
                if item.index in self._objects:
                    stream.write(self._objects[item.index])
                else:
                    stream.save(self._tensors[item.index])
                length = stream.size - start
                place = _StorageInfo(path.name, start, length)
                results.append(WriteResult(item.index, length, place))
                faults.point(f"rank{self._rank}.chunk")
            file.flush()
            if sync:
                os.fsync(file.fileno())
        return stream.entry(), results


def _write_item(chunk: BoxData) -> WriteItem:
    place = chunk.place
    offset, sizes = torch.Size(place.offset), torch.Size(place.sizes)
    return WriteItem(
        MetadataIndex(place.key, offset),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offset, sizes),
            properties=TensorProperties(dtype=chunk.data.dtype),
            size=torch.Size(place.shape),
        ),
    )


class _DigestedStream(io.RawIOBase):
    """A file that is hashed and counted as it is written, from its beginning to its end."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self._file, self._hasher, self.size = file, xxhash.xxh3_128(), 0
        self._failure: OSError | None = None

    def save(self, tensor: torch.Tensor) -> None:
        """Raises OSError."""
        try:
            torch.save(tensor, self)  # type: ignore[arg-type]
        except RuntimeError as error:  # torch does not tell what became of a write
            raise (self._failure or error) from None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._hasher.update(view)
        try:
            self._file.write(view)
        except OSError as error:
            self._failure = error
            raise
        self.size += len(view)
        return len(view)

    def entry(self) -> FileEntry:
        return FileEntry(self.size, self._hasher.hexdigest())


def write_metadata(directory: Path, written: Sequence[WrittenChunks], *, sync: bool) -> None:
    """Say what lies where in the files of all ranks, given in rank order.

    Raises ValueError unless their chunks make up every tensor, each element once.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    _, metadata = planner.create_global_plan([each.plan for each in written])
    results = [result for each in written for result in each.results]
    metadata.storage_data = {result.index: result.storage_data for result in results}
    metadata.storage_meta = StorageMeta()
    write_new(directory / METADATA, pickle.dumps(metadata), sync=sync)


class StagedChunks(StagedCheckpoint):
    """What one rank writes, and the first one beside it: `small` files, once all others are there.

    `write` is collective over `group`, of hosts, which nobody else may use.
    """

    def __init__(
        self,
        directory: Path,
        files: RankFiles,
        small: Mapping[str, bytes],
        group: dist.ProcessGroup,
        *,
        threads: int,
        durable: bool,
    ) -> None:
        self._directory, self._files, self._small = directory, files, small
        self._group, self._threads, self._durable = group, threads, durable

    def keep(self) -> None:
        self._files.keep()

    def write(self) -> dict[str, FileEntry]:
        """Raises CheckpointWriteError on every rank when any rank's files cannot be written."""
        mine: WrittenChunks | Exception
        try:
            mine = self._files.write(self._directory, threads=self._threads, sync=self._durable)
        except (OSError, RuntimeError) as error:
            mine = error
        every = self._gather(mine)
        written = [each for each in every if isinstance(each, WrittenChunks)]
        entries = dict(mine.files) if isinstance(mine, WrittenChunks) else {}
        failure = next((each for each in every if isinstance(each, Exception)), None)
        if every and failure is None:
            try:
                entries |= self._write_small(written)
            except OSError as error:
                failure = error
        if (failure := self._tell(failure)) is not None:
            own = mine if isinstance(mine, Exception) else failure
            raise CheckpointWriteError(self._directory.name, own) from failure
        return entries

    def _write_small(self, every: Sequence[WrittenChunks]) -> dict[str, FileEntry]:
        write_metadata(self._directory, every, sync=self._durable)
        for name, content in self._small.items():
            write_new(self._directory / name, content, sync=self._durable)
        names = (METADATA, *self._small)
        return {name: FileEntry(*digest_file(self._directory / name)) for name in names}

    def _gather(self, mine: WrittenChunks | Exception) -> list[WrittenChunks | Exception]:
        """What each rank wrote or failed with, on the first rank; none on others."""
        is_first = dist.get_rank() == 0
        every: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(mine, every if is_first else None, dst=0, group=self._group)
        return every if is_first else []

    def _tell(self, failure: Exception | None) -> Exception | None:
        """Return what the first rank says."""
        told = [failure]
        dist.broadcast_object_list(told, src=0, group=self._group)
        return told[0]


class ChunkReader:
    """Reads chunks of any layout, straight into the tensors that are given for them."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError, UncoveredChunkError, and MALFORMED for a damaged checkpoint."""
        self._directory, self._reader = directory, FileSystemReader(directory)
        try:
            metadata = read_metadata(directory)
        except ForbiddenObjectError as error:
            raise UncoveredChunkError(str(error)) from None
        self._reader.set_up_storage_reader(metadata, is_coordinator=False)
        self._described = metadata.state_dict_metadata
        self._stored = metadata.storage_data
        self._wanted: dict[str, list[BoxData]] = defaultdict(list)

    def __contains__(self, key: str) -> bool:
        return key in self._described

    def keys(self) -> Iterable[str]:
        """Return the keys of all tensors and objects."""
        return self._described.keys()

    def fill(self, chunks: Iterable[BoxData], key: str = "") -> None:
        """Note what `read` shall read, under `key` or else under the keys of the chunks."""
        for chunk in chunks:
            self._wanted[key or chunk.place.key].append(chunk)

    def read(self) -> None:
        """Read all that was noted.

        Raises UncoveredChunkError where the checkpoint has no such tensor, or a part of it.
        """
        plan = LoadPlan([item for key in self._wanted for item in self._plan(key)])
        planner: Any = SimpleNamespace(resolve_tensor=self._find, commit_tensor=lambda *_: None)
        self._reader.read_data(plan, planner).wait()

    def read_object(self, name: str) -> bytes | None:
        """Read an object; None where there is no such."""
        place = self._stored.get(MetadataIndex(name))
        if place is None:
            return None
        with (self._directory / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            content: bytes = file.read(place.length)
            return content

    def _plan(self, key: str) -> list[ReadItem]:
        saved, wanted = self._described.get(key), self._wanted[key]
        if not isinstance(saved, TensorStorageMetadata):
            raise UncoveredChunkError(f"it has no tensor {key!r}")
        for chunk in wanted:
            shape, padded = chunk.place.shape, chunk.place.padded
            if len(saved.size) != len(shape) or not (padded or tuple(saved.size) == shape):
                raise UncoveredChunkError(f"{key!r} is {tuple(saved.size)}, {shape} is needed")
        areas = [
            ChunkStorageMetadata(torch.Size(chunk.place.offset), torch.Size(chunk.place.sizes))
            for chunk in wanted
        ]
        items = create_read_items_for_chunk_list(key, saved, areas)
        found = [0] * len(wanted)
        for item in items:
            found[item.dest_index.index or 0] += math.prod(item.lengths)
        for chunk, count in zip(wanted, found, strict=True):
            place = chunk.place
            within = math.prod(
                max(0, min(start + size, whole) - start)
                for start, size, whole in zip(place.offset, place.sizes, saved.size, strict=True)
            )
            if count != within:
                raise UncoveredChunkError(f"parts of tensor {key!r} are missing or doubled")
            if within != math.prod(place.sizes):
                chunk.data.detach().zero_()
        return items

    def _find(self, item: ReadItem) -> torch.Tensor:
        target = self._wanted[item.dest_index.fqn][item.dest_index.index or 0].data.detach()
        for axis, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(axis, start, length)
        return target
