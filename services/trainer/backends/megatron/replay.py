"""Routing replay on Megatron, whose RouterReplay does the replaying: see `routing`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from services.trainer.backend import Row
from services.trainer.backends.megatron.batch import PackedBatch
from services.trainer.backends.megatron.expert_load import routers_of
from services.trainer.backends.megatron.model_config import ModelSource
from services.trainer.backends.megatron.parallel import RankGroups
from services.trainer.backends.routing import (
    Mode,
    Purpose,
    RoutingRecord,
    RoutingShape,
    record_fault,
)
from services.trainer.errors import RoutingMissingError
from sluice.algo.collectives import gather_tokens


@dataclass
class _Chunk:
    """The routers of one model chunk and their places among all mixture layers."""

    routers: list[RouterReplay]
    layers: list[int]
    records: dict[str, RoutingRecord] = field(default_factory=dict)  # by sample_id


class RoutingReplay:
    """Stands before and after every forward of a chunk; see Passes."""

    def __init__(
        self,
        mode: Mode,
        models: Sequence[torch.nn.Module],
        source: ModelSource,
        config: TransformerConfig,
        groups: RankGroups,
    ) -> None:
        self.mode, self._groups = mode, groups
        self._sparse = sorted(source.shape.sparse_layers)
        self._shape = RoutingShape(len(self._sparse), source.shape.experts, config.moe_router_topk)
        self._sequence_parallel: bool = config.sequence_parallel
        self._chunks = [
            self._find_routers(model, index, config) for index, model in enumerate(models)
        ]
        RouterReplay.clear_global_router_replay_instances()  # routers are found by chunk
        self._stale = False
        self._recording = False

    def begin(self, purpose: Purpose, batches: Sequence[PackedBatch]) -> None:
        """Checks the rows ahead of a pass; collective.

        Raises RoutingMissingError on every rank or on none, so that none waits inside the pass.
        """
        self._recording = self.mode == "recorded" and purpose == "score"
        if not self._recording:
            self._check([row for batch in batches for row in batch.rows])
        if self._recording and self._stale:
            for chunk in self._chunks:
                chunk.records.clear()
            self._stale = False

    def before(self, index: int, batch: PackedBatch) -> None:
        chunk = self._chunks[index]
        if not chunk.layers:
            return
        if self._recording:
            _act(chunk, RouterReplayAction.RECORD)
            return
        experts = [self._experts_of(row, chunk) for row in batch.rows]
        targets_of = self._place(experts, batch, len(chunk.layers))
        for router, targets in zip(chunk.routers, targets_of, strict=True):
            router.set_target_indices(targets)
        _act(chunk, RouterReplayAction.REPLAY_FORWARD)

    def after(self, index: int, batch: PackedBatch) -> None:
        chunk = self._chunks[index]
        if self._recording:
            chunk.records.update(self._record(chunk, batch))
        else:  # a recomputed forward takes the targets again, the oldest first
            _act(chunk, RouterReplayAction.REPLAY_BACKWARD)

    def end(self) -> None:
        """Clears the routers behind a pass, also a failed one."""
        for chunk in self._chunks:
            for router in chunk.routers:
                router.clear_indices()
                router.clear_router_replay_action()

    def step(self) -> None:
        """Makes the next scoring pass start a new set of records: the policy has moved."""
        self._stale = True

    def _find_routers(
        self, model: torch.nn.Module, index: int, config: TransformerConfig
    ) -> _Chunk:
        chunk = _Chunk([], [])
        for place, router in routers_of(model, index, self._sparse, config):
            chunk.routers.append(router.router_replay)
            chunk.layers.append(place)
        return chunk

    def _check(self, rows: Sequence[Row]) -> None:
        faults = [fault for fault in map(self._fault_of, rows) if fault]
        if self._groups.any_rank(bool(faults)):
            raise RoutingMissingError(faults[0] if faults else "rows of another rank lack experts")

    def _fault_of(self, row: Row) -> str:
        """What keeps a row from being replayed; empty if nothing does."""
        if self.mode == "rollout":
            return self._shape.fault_of(row)
        records = (chunk.records.get(row.sample_id) for chunk in self._chunks if chunk.layers)
        return next(filter(None, (record_fault(row, record) for record in records)), "")

    def _experts_of(self, row: Row, chunk: _Chunk) -> torch.Tensor:
        """int16[length, layers of the chunk, k]."""
        if self.mode == "recorded":
            return chunk.records[row.sample_id].experts
        assert row.routed_experts is not None
        filled = self._shape.anything(len(row.token_ids))
        filled[: len(row.routed_experts)] = row.routed_experts
        return filled[:, chunk.layers]

    def _place(
        self, experts: Sequence[torch.Tensor], batch: PackedBatch, layers: int
    ) -> list[torch.Tensor]:
        """For each layer int64[tokens of this rank's routers, k]."""
        layout = batch.layout
        pack = self._shape.anything(layout.total, layers)
        for start, values in zip(layout.starts, experts, strict=False):
            pack[start : start + len(values)] = values
        rank, tensor = batch.context.rank, self._groups.tensor
        mine = layout.pack_of_place[rank * layout.local_length : (rank + 1) * layout.local_length]
        local = pack[mine]
        if self._sequence_parallel:
            local = local.chunk(tensor.size)[tensor.rank]
        return list(local.long().unbind(1))

    def _record(self, chunk: _Chunk, batch: PackedBatch) -> dict[str, RoutingRecord]:
        """What the routers chose, gathered over the ranks that hold the rows' other tokens."""
        if not chunk.routers:
            return {}
        chosen = [router.get_recorded_indices() for router in chunk.routers]
        local = torch.stack([indices for indices in chosen if indices is not None], dim=1)
        local = local.to(torch.int32)
        if self._sequence_parallel:
            local = gather_tokens(local, self._groups.tensor, gradient="none")
        whole = gather_tokens(local, batch.context, gradient="none")
        parts = batch.layout.assemble(whole.cpu().to(torch.int16))
        return {
            row.sample_id: RoutingRecord(row.token_ids, part.clone())
            for row, part in zip(batch.rows, parts, strict=True)
        }


def _act(chunk: _Chunk, action: RouterReplayAction) -> None:
    for router in chunk.routers:
        router.set_router_replay_action(action)
