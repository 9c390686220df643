"""Layout of a torch_dist checkpoint, as the ranks of any parallel layout would write it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
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

from sluice.weights.convert.hf import HfSource
from sluice.weights.convert.options import ConvertOptions
from sluice.weights.convert.pieces import Content, FileRange, Files
from sluice.weights.convert.stored import COMMON, CONFIG, envelope, save_object
from sluice.weights.convert.stored_chunks import chunk_name
from sluice.weights.convert.torch_dist_source import Naming, Place
from sluice.weights.convert.work import Group, OutputFile, TensorTask
from sluice.weights.errors import InvalidCheckpointError, MixedTypesError
from sluice.weights.rules.packing import (
    BY_SECTION,
    Partition,
    RowCopy,
    pack,
    padded_rows,
    row_runs,
    share_shape,
    source_slices,
)
from sluice.weights.rules.rule import ALTERED, ShardAxis, Stage
from sluice.weights.rules.weight_map import Binding, WeightMap


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

    def _add_chunk(self, part: ChunkPart) -> TensorTask:
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
        assert entry.properties.dtype == part.content.dtype, part.key
        chunk = ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))
        index = MetadataIndex(part.key, part.offsets, len(entry.chunks))
        entry.chunks.append(chunk)
        self._record(index, name, offset, length)
        start = offset + len(around.prefix)
        return TensorTask(chunk_name(part.key, part.offsets), part.content, name, start)

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


class ToTorchDist:
    """Chunks of every tensor of `weights`, made of the tensors of `source`."""

    def __init__(
        self, source: HfSource, weights: WeightMap, options: ConvertOptions, files: Files
    ) -> None:
        self._source, self._weights, self._files = source, weights, files
        self._layout = options.layout
        self._dtype: torch.dtype | None = None
        if options.dtype != "keep":
            self._dtype = getattr(torch, options.dtype)
        self.notes: tuple[str, ...] = ()
        self._naming = self._find_naming(options)
        self._padded = padded_rows(
            weights.shape.vocab, multiple=options.vocab_multiple, size=self._layout.tensor
        )
        self._check_layout()

    def _find_naming(self, options: ConvertOptions) -> Naming:
        """Name keys such that each has one type. Raises MixedTypesError where none does.

        Layers may lie apart where the options leave it open; experts of a layer cannot.
        """
        fused, stacking = not options.plain_norms, options.stacking
        naming = Naming(self._weights, stacking=stacking, fused=fused)
        found = list(self._find_mixed(naming))
        if found and stacking == "auto":
            self.notes = tuple(
                f"layers are not stacked: they differ in the type of {key!r}: {text}"
                for key, _, text, block in found
                if block is not None
            )
            blocks = {block for *_, block in found if block is not None}
            naming = Naming(self._weights, stacking=stacking, fused=fused, apart=blocks)
            found = list(self._find_mixed(naming))
        for key, names, _, _ in found:
            raise MixedTypesError(key, names)
        return naming

    def _find_mixed(self, naming: Naming) -> Iterator[tuple[str, tuple[str, ...], str, str | None]]:
        """Yield every key of several types, its odd tensors, these in words, and their block."""
        keys: dict[str, dict[torch.dtype, list[Binding]]] = {}
        for binding in self._bindings():
            kind = self._type(binding)
            keys.setdefault(naming.place(binding).key, {}).setdefault(kind, []).append(binding)
        for key, kinds in keys.items():
            if len(kinds) > 1:
                usual = max(kinds, key=lambda kind: len(kinds[kind]))
                odd = [(kind, b) for kind, bs in kinds.items() if kind != usual for b in bs]
                names = tuple(source.name for _, b in odd for source in b.sources)
                text = f"{names[0]} is {str(odd[0][0]).removeprefix('torch.')}"
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                yield key, names, text + more, naming.stacked_block(odd[0][1])

    def _type(self, binding: Binding) -> torch.dtype:
        """Return the type that a tensor is written in. Raises MixedTypesError."""
        if self._dtype is not None and not self._keeps_type(binding):
            return self._dtype
        kinds = [self._source.content(source.name).dtype for source in binding.sources]
        if len(set(kinds)) > 1:
            usual = max(kinds, key=kinds.count)
            pairs = zip(binding.sources, kinds, strict=True)
            odd = tuple(source.name for source, kind in pairs if kind != usual)
            raise MixedTypesError(binding.megatron, odd)
        return kinds[0]

    def groups(self) -> Iterator[tuple[str, list[ChunkPart]]]:
        """(Megatron name, chunks) of every tensor."""
        for binding in self._bindings():
            yield binding.megatron, list(self._chunks(binding))

    def states(self) -> Iterator[StatePart]:
        """Yield the empty states that Megatron reads beside linear layers."""
        for binding in self._bindings():
            name = self._naming.extra_state(binding)
            if name is not None:
                yield StatePart(name, self._rank(binding, 0))

    def _bindings(self) -> Iterator[Binding]:
        return (binding for binding in self._weights.bindings() if not binding.alias)

    def _chunks(self, binding: Binding) -> Iterator[ChunkPart]:
        place = self._naming.place(binding)
        experts = binding.expert is not None
        size = 1 if experts or binding.cut is ShardAxis.NONE else self._layout.tensor
        for rank in range(size):
            partition = Partition(rank, size, self._padded)
            for key, shape, start, content in self._share(binding, place, partition):
                yield ChunkPart(
                    key=key,
                    shape=(*place.lead, *shape),
                    offsets=(*place.index, *start),
                    rank=self._rank(binding, rank),
                    content=content,
                )

    def _share(
        self, binding: Binding, place: Place, partition: Partition
    ) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], Content]]:
        """(key, shape of the whole, offsets, content) of a rank's share; one for each section."""
        whole = (self._padded if binding.padded else binding.shape[0], *binding.shape[1:])
        runs = row_runs(binding, partition)
        if binding.pack not in BY_SECTION:
            share = share_shape(binding, partition)
            axis = 1 if binding.cut is ShardAxis.COLUMNS else 0
            start = [0] * len(whole)
            start[axis] = partition.rank * share[axis] if partition.size > 1 else 0
            yield place.key, whole, tuple(start), self._content(binding, runs, partition, share)
            return
        row, sections = 0, binding.sections()
        count = len(runs) // len(sections)
        for index, (_, _, rows) in enumerate(sections):
            own = runs[index * count : (index + 1) * count]
            height = rows // partition.size
            first = partition.rank * height
            content = self._content(binding, own, partition, (height, *whole[1:]))
            rest = (0,) * (len(whole) - 1)
            if binding.section_keys:
                key = f"{place.key}.{binding.section_keys[index]}"
                yield key, (rows, *whole[1:]), (first, *rest), content
            else:
                yield place.key, whole, (row + first, *rest), content
            row += rows

    def _content(
        self,
        binding: Binding,
        runs: tuple[RowCopy, ...],
        partition: Partition,
        shape: tuple[int, ...],
    ) -> Content:
        sources = self._sources(binding)
        stored = sources[0].stored or sources[0].dtype
        alike = len({(source.stored, source.dtype) for source in sources}) == 1
        plain = (
            alike
            and binding.pack not in ALTERED
            and not binding.rearranged
            and (binding.cut is not ShardAxis.COLUMNS or partition.size == 1)
        )
        if not plain or any(source.compute is not None for source in sources):
            content = self._computed(binding, sources, runs, partition, shape)
        else:
            row = math.prod(shape[1:]) * stored.itemsize
            parts = [sources[r.source].rows(r.start, r.start + r.rows).pieces for r in runs]
            pieces = tuple(piece for part in parts for piece in part)
            missing = shape[0] * row - sum(piece.length for piece in pieces)
            if missing:
                pieces += (FileRange(None, 0, missing),)
            content = Content(stored, shape, pieces)
        if self._dtype is None or self._keeps_type(binding):
            return content
        return content.cast(self._dtype)

    def _keeps_type(self, binding: Binding) -> bool:
        names = (source.name for source in binding.sources)
        return any(map(self._weights.is_full_precision, names))

    def _computed(
        self,
        binding: Binding,
        sources: list[Content],
        runs: tuple[RowCopy, ...],
        partition: Partition,
        shape: tuple[int, ...],
    ) -> Content:
        whole = row_runs(binding, partition)
        first = sum(run.rows for run in whole[: whole.index(runs[0])]) if runs else 0

        def compute() -> torch.Tensor:
            parts = []
            for content, part in zip(sources, source_slices(binding, partition), strict=True):
                tensor = self._files.load(content)
                bounds = slice(part.start, part.stop)
                parts.append(tensor[:, bounds] if part.axis == 1 else tensor[bounds])
            return pack(binding, parts, partition)[first : first + shape[0]]

        size = sum(content.size + content.working_bytes for content in sources)
        return Content(sources[0].dtype, shape, compute=compute, working_bytes=2 * size)

    def _sources(self, binding: Binding) -> list[Content]:
        contents = []
        for source in binding.sources:
            if source.index is None:
                contents.append(self._source.content(source.name))
            else:
                contents.append(self._source.expert(source.name, source.index))
        if len({content.dtype for content in contents}) > 1:
            kind = self._type(binding)
            return [content.cast(kind) for content in contents]
        return contents

    def _rank(self, binding: Binding, rank: int) -> int:
        """Number the rank that writes a share: pipeline stages apart, then the others."""
        width = max(self._layout.tensor, self._layout.expert)
        if binding.expert is not None:
            rank = binding.expert * self._layout.expert // self._weights.shape.experts
        stage = {Stage.FINAL: self._layout.pipeline - 1, Stage.HEAD: self._layout.pipeline - 1}.get(
            binding.stage, 0
        )
        if binding.stage is Stage.LAYER and binding.layer is not None:
            stage = binding.layer * self._layout.pipeline // self._weights.shape.layers
        return stage * width + rank

    def _check_layout(self) -> None:
        shape, layout = self._weights.shape, self._layout
        if layout.expert > 1 and (not shape.experts or shape.experts % layout.expert):
            raise InvalidCheckpointError(
                f"{shape.experts} experts do not divide over {layout.expert} ranks"
            )
        if shape.layers % layout.pipeline:
            raise InvalidCheckpointError(
                f"{shape.layers} layers do not divide into {layout.pipeline} stages"
            )
