"""HF tensors to the chunks of a torch_dist checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from sluice.weights.convert.hf_source import HfSource
from sluice.weights.convert.keys import Naming, Place
from sluice.weights.convert.options import ConvertOptions
from sluice.weights.convert.pieces import Content, Files, Piece
from sluice.weights.convert.torch_dist_target import ChunkPart, StatePart
from sluice.weights.errors import InvalidCheckpointError
from sluice.weights.rules import (
    Binding,
    Cut,
    Pack,
    Partition,
    Run,
    Stage,
    WeightMap,
    pack,
    padded_rows,
    row_runs,
    share_shape,
    source_slices,
)


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
        self._naming = Naming(weights, stacking=options.stacking, fused=options.fused_norms)
        self._padded = padded_rows(
            weights.shape.vocab, multiple=options.vocab_multiple, size=self._layout.tensor
        )
        self._check_layout()

    def groups(self) -> Iterator[tuple[str, list[ChunkPart]]]:
        """(Megatron name, chunks) of every tensor."""
        for binding in self._bindings():
            yield binding.megatron, list(self._chunks(binding))

    def states(self) -> Iterator[StatePart]:
        """The empty states that Megatron reads beside linear layers."""
        for binding in self._bindings():
            name = self._naming.extra_state(binding)
            if name is not None:
                yield StatePart(name, self._rank(binding, 0))

    def _bindings(self) -> Iterator[Binding]:
        return (binding for binding in self._weights.bindings() if not binding.alias)

    def _chunks(self, binding: Binding) -> Iterator[ChunkPart]:
        place = self._naming.place(binding)
        experts = binding.expert is not None
        size = 1 if experts or binding.cut is Cut.NONE else self._layout.tensor
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
        if binding.pack not in (Pack.GATED, Pack.SECTIONS):
            share = share_shape(binding, partition)
            axis = 1 if binding.cut is Cut.COLUMNS else 0
            start = [0] * len(whole)
            start[axis] = partition.rank * share[axis] if partition.size > 1 else 0
            yield place.key, whole, tuple(start), self._content(binding, runs, partition, share)
            return
        row = 0
        for index, ((_, _, rows), run) in enumerate(zip(binding.sections(), runs, strict=True)):
            first = partition.rank * run.rows
            content = self._content(binding, (run,), partition, (run.rows, *whole[1:]))
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
        runs: tuple[Run, ...],
        partition: Partition,
        shape: tuple[int, ...],
    ) -> Content:
        sources = self._sources(binding)
        stored = sources[0].stored or sources[0].dtype
        plain = binding.pack is not Pack.SHIFTED and (
            binding.cut is not Cut.COLUMNS or partition.size == 1
        )
        if not plain or any(source.compute is not None for source in sources):
            content = self._computed(binding, sources, runs, partition, shape)
        else:
            row = math.prod(shape[1:]) * stored.itemsize
            parts = [sources[r.source].rows(r.start, r.start + r.rows).pieces for r in runs]
            pieces = tuple(piece for part in parts for piece in part)
            missing = shape[0] * row - sum(piece.length for piece in pieces)
            if missing:
                pieces += (Piece(None, 0, missing),)
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
        runs: tuple[Run, ...],
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
        found = []
        for source in binding.sources:
            content = self._source.content(source.name)
            if source.index is not None:
                content = _expert(content, source.index)
            found.append(content)
        if len({content.dtype for content in found}) > 1:
            names = ", ".join(source.name for source in binding.sources)
            raise InvalidCheckpointError(f"tensors of several types become one: {names}")
        return found

    def _rank(self, binding: Binding, rank: int) -> int:
        """The number of the rank that writes a share: pipeline stages apart, then the others."""
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


def _expert(content: Content, index: int) -> Content:
    """The part of one expert of a tensor that holds all of them."""
    part = content.rows(index, index + 1)
    return Content(part.dtype, part.shape[1:], part.pieces, part.stored)
