"""Routing replay: training sends tokens to the experts that were chosen before.

R2 ("recorded"): the pass that computes old log-probs records the experts, training takes them
again until the next such pass after a step (arXiv 2507.18071). R3 ("rollout"): rows bring the
experts of the engine (`Row.routed_experts`), for old log-probs and for training (2510.11370).
Megatron's RouterReplay does the replaying.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from services.trainer.backend import Row
from services.trainer.backends.megatron.batch import PackedBatch
from services.trainer.backends.megatron.expert_load import routers_of
from services.trainer.backends.megatron.model_config import ModelSource
from services.trainer.backends.megatron.parallel import RankGroups
from services.trainer.errors import RoutingMissingError
from sluice.algo.collectives import gather_tokens

Mode = Literal["recorded", "rollout"]
Purpose = Literal["score", "train"]


@dataclass(frozen=True)
class _Record:
    """Experts int16[length, layers, k] and the tokens that they were recorded for."""

    token_ids: torch.Tensor
    experts: torch.Tensor


@dataclass
class _Chunk:
    """The routers of one model chunk and their places among all mixture layers."""

    routers: list[RouterReplay]
    layers: list[int]
    records: dict[str, _Record] = field(default_factory=dict)  # by sample_id


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
        self._experts = source.shape.experts
        self._choices: int = config.moe_router_topk
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
        named = f"sample {row.sample_id!r}"
        if self.mode == "recorded":
            for record in (c.records.get(row.sample_id) for c in self._chunks if c.layers):
                if record is None:
                    return (
                        f"{named}: no experts were recorded; compute its old log-probs first "
                        "(algorithm.loss.old_logprobs: old of a run)"
                    )
                if not torch.equal(record.token_ids, row.token_ids):
                    return f"{named}: experts were recorded for other tokens"
            return ""
        experts, length = row.routed_experts, len(row.token_ids)
        if experts is None:
            return f"{named} has no routed_experts; set engine.routed_experts: true of its engine"
        wanted = (len(self._sparse), self._choices)
        if len(experts) not in (length, length - 1) or tuple(experts.shape[1:]) != wanted:
            return (
                f"{named}: routed_experts are {tuple(experts.shape)} for {length} tokens, "
                f"{wanted[0]} mixture layers and {wanted[1]} choices"
            )
        if experts.numel() and not 0 <= int(experts.min()) <= int(experts.max()) < self._experts:
            return f"{named}: a routed expert is not among {self._experts}"
        return ""

    def _experts_of(self, row: Row, chunk: _Chunk) -> torch.Tensor:
        """int64[length, layers of the chunk, k]."""
        if self.mode == "recorded":
            return chunk.records[row.sample_id].experts.long()
        assert row.routed_experts is not None
        filled = self._anything(len(row.token_ids), len(self._sparse))
        filled[: len(row.routed_experts)] = row.routed_experts
        return filled[:, chunk.layers]

    def _anything(self, tokens: int, layers: int) -> torch.Tensor:
        """Distinct experts for tokens that no loss depends on."""
        return torch.arange(self._choices).repeat(tokens, layers, 1)

    def _place(
        self, experts: Sequence[torch.Tensor], batch: PackedBatch, layers: int
    ) -> list[torch.Tensor]:
        """For each layer int64[tokens of this rank's routers, k]."""
        layout = batch.layout
        pack = self._anything(layout.total, layers)
        for start, values in zip(layout.starts, experts, strict=False):
            pack[start : start + len(values)] = values
        rank, tensor = batch.context.rank, self._groups.tensor
        mine = layout.pack_of_place[rank * layout.local_length : (rank + 1) * layout.local_length]
        local = pack[mine]
        if self._sequence_parallel:
            local = local.chunk(tensor.size)[tensor.rank]
        return list(local.unbind(1))

    def _record(self, chunk: _Chunk, batch: PackedBatch) -> dict[str, _Record]:
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
            row.sample_id: _Record(row.token_ids, part.clone())
            for row, part in zip(batch.rows, parts, strict=True)
        }


def _act(chunk: _Chunk, action: RouterReplayAction) -> None:
    for router in chunk.routers:
        router.set_router_replay_action(action)
