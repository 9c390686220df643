"""Layout of a torch_dist checkpoint, as the ranks of any parallel layout would write it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from sluice.weights.convert.envelope import envelope, save_object
from sluice.weights.convert.pieces import Content
from sluice.weights.convert.stored import CONFIG
from sluice.weights.convert.torch_dist_source import chunk_name
from sluice.weights.convert.work import Group, OutputFile, Task

COMMON = "common.pt"


@dataclass(frozen=True)
class ChunkPart:
    """A chunk of the tensor `key`, which has `shape`, at `offsets`, written by `rank`."""

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    rank: int
    content: Content

    @property
    def sizes(self) -> tuple[int, ...]:
        return (1,) * (len(self.shape) - len(self.content.shape)) + self.content.shape


@dataclass(frozen=True)
class StatePart:
    """An object that is no tensor, by its unique name."""

    name: str
    rank: int


class TorchDistLayout:
    """Files, work and metadata of chunks given in groups, each under a name."""

    def __init__(
        self,
        groups: Sequence[tuple[str, Sequence[ChunkPart]]],
        states: Sequence[StatePart],
        *,
        max_file_bytes: int,
    ) -> None:
        self._max = max_file_bytes
        self._open: dict[int, _Growing] = {}
        self._counts: dict[int, int] = {}
        self._made: list[_Growing] = []
        self._results: list[WriteResult] = []
        self._described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._empty = save_object([None])
        for state in states:
            self._add_state(state)
        self.groups = tuple(
            Group(name, tuple(self._add_chunk(part) for part in parts)) for name, parts in groups
        )
        self.files = tuple(
            OutputFile(file.name, file.size, tuple(file.frames)) for file in self._made
        )

    def write_metadata(self, directory: Path) -> None:
        """Write `.metadata` with torch's own writer."""
        metadata = Metadata(state_dict_metadata=dict(self._described))
        _MetadataWriter(directory, sync_files=True).finish(metadata, [self._results])

    def texts(self, common: Mapping[str, object]) -> dict[str, bytes]:
        """Megatron's small files: what is common to all ranks, and the format's name."""
        config = {
            "sharded_backend": "torch_dist",
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        return {COMMON: save_object(dict(common)), CONFIG: json.dumps(config).encode()}

    def _add_state(self, state: StatePart) -> None:
        name, offset = self._append(state.rank, len(self._empty), [(0, self._empty)])
        self._described[state.name] = BytesStorageMetadata()
        self._record(MetadataIndex(state.name), name, offset, len(self._empty))

    def _add_chunk(self, part: ChunkPart) -> Task:
        around = envelope(part.content.dtype, part.sizes)
        size = part.content.size
        length = len(around.prefix) + size + len(around.suffix)
        frames = [(0, around.prefix), (len(around.prefix) + size, around.suffix)]
        name, offset = self._append(part.rank, length, frames)
        entry = self._described.get(part.key)
        if entry is None:
            properties = TensorProperties(dtype=part.content.dtype)
            entry = TensorStorageMetadata(properties, torch.Size(part.shape), [])
            self._described[part.key] = entry
        assert isinstance(entry, TensorStorageMetadata)
        chunk = ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))
        index = MetadataIndex(part.key, part.offsets, len(entry.chunks))
        entry.chunks.append(chunk)
        self._record(index, name, offset, length)
        start = offset + len(around.prefix)
        return Task(chunk_name(part.key, part.offsets), part.content, name, start)

    def _record(self, index: MetadataIndex, name: str, offset: int, length: int) -> None:
        self._results.append(WriteResult(index, length, _StorageInfo(name, offset, length)))

    def _append(
        self, rank: int, length: int, frames: Sequence[tuple[int, bytes]]
    ) -> tuple[str, int]:
        """Room for `length` bytes in a file of `rank`: its name and the offset."""
        file = self._open.get(rank)
        if file is None or (file.size and file.size + length > self._max):
            number = self._counts.get(rank, 0)
            self._counts[rank] = number + 1
            file = self._open[rank] = _Growing(f"__{rank}_{number}.distcp")
            self._made.append(file)
        offset = file.size
        file.frames += [(offset + at, data) for at, data in frames]
        file.size += length
        return file.name, offset


@dataclass
class _Growing:
    """A file as it is laid out."""

    name: str
    size: int = 0
    frames: list[tuple[int, bytes]] = field(default_factory=list)


class _MetadataWriter(FileSystemWriter):
    """Leaves out where and when a checkpoint was written, so that equal ones are equal."""

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta()
