"""Routing replay of transformers models: their routers are told what to choose; see `routing`.

A pack stands before and after each pass: what rows bring goes to the places of their tokens, and
what routers chose comes back from there. A layer that is run again for its backward is told the
same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from services.trainer.backend import LayoutError, MicroBatch, Row
from services.trainer.backends.packing import PackedLayout
from services.trainer.backends.routing import (
    Mode,
    Purpose,
    RoutingRecord,
    RoutingShape,
    record_fault,
)
from services.trainer.errors import RoutingMissingError
from sluice.algo.collectives import Collectives, gather_tokens
from sluice.routers import Routers, UnknownRoutersError


@dataclass
class _Records:
    """By sample_id; stale once the policy has moved: the next scoring pass starts anew."""

    rows: dict[str, RoutingRecord] = field(default_factory=dict)
    stale: bool = False


class PackReplay:
    """Of the policy of one rank. `check` follows its first pass, which leaves routers free."""

    def __init__(
        self,
        mode: Mode,
        model: Any,
        *,
        setting: str,
        ranks: Collectives | None = None,
        context: Collectives | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Raise LayoutError for a model that it is not for, naming the `setting`.

        ranks: all that run the same passes. context: those that share rows, if any do. device: of
        what `ranks` exchange.
        """
        self._mode, self._setting = mode, setting
        self._ranks, self._context, self._device = ranks, context, device
        try:
            self._routers = Routers(model)
        except UnknownRoutersError as error:
            raise self._refusal(error) from error
        self._shape = RoutingShape(0, 0, 0)
        self._of: dict[str, _Records] = {}  # by adapter
        self.use("")
        self._recording = False

    def check(self) -> None:
        """Raise LayoutError unless the routers of the model can be told what to choose."""
        try:
            self._routers.check()
        except UnknownRoutersError as error:
            raise self._refusal(error) from error
        routers = self._routers
        self._shape = RoutingShape(len(routers), routers.experts, routers.count)

    def use(self, adapter: str) -> None:
        """Take the records of passes with an adapter from now on; each has its own."""
        self._records = self._of.setdefault(adapter, _Records())

    def forget(self, adapter: str) -> None:
        """Drop the records of an adapter that is gone."""
        self._of.pop(adapter, None)

    def begin(self, purpose: Purpose, micro_batches: Sequence[MicroBatch]) -> None:
        """Check the rows ahead of the passes over them; collective.

        Raises RoutingMissingError on every rank or on none, so that none waits inside a pass.
        """
        self._recording = self._mode == "recorded" and purpose == "score"
        if not self._recording:
            self._check_rows([row for rows in micro_batches for row in rows])
        elif self._records.stale:
            self._records.rows.clear()
            self._records.stale = False
        self._routers.record(on=self._recording)

    def experts_of(self, rows: MicroBatch) -> list[torch.Tensor] | None:
        """Return what is to be told for each row, int16[tokens, layers, choices].

        None where routers are free: they are recorded, or there is no row.
        """
        return None if self._recording or not rows else [self._experts_of(row) for row in rows]

    def place(
        self, experts: Sequence[torch.Tensor] | None, layout: PackedLayout
    ) -> torch.Tensor | None:
        """Return them for the tokens of a pack that this rank has, int16[layers, T, choices]."""
        if experts is None:
            return None
        length, rank, size = len(layout.token_ids), 0, 1
        if self._context is not None:
            rank, size = self._context.rank, self._context.size
        pack = self._shape.anything(length * size)
        pack[layout.row_places] = torch.cat([*experts])
        return pack.narrow(0, rank * length, length).transpose(0, 1).contiguous()

    def before(self, placed: torch.Tensor | None) -> None:
        """Tell the routers what to choose in the next pass, and in its backward."""
        self._routers.tell(placed)

    def after(self, rows: MicroBatch, layout: PackedLayout) -> None:
        """Keep what they chose, where it is recorded; collective over context ranks."""
        if not self._recording or not rows:
            return
        chosen = self._routers.take().to(torch.int32)  # NCCL has nothing narrower
        if self._context is not None:
            chosen = gather_tokens(chosen, self._context, gradient="none")
        found = chosen[layout.row_places].to("cpu", torch.int16)
        parts = found.split([len(row.token_ids) - 1 for row in rows])
        for row, part in zip(rows, parts, strict=True):
            self._records.rows[row.sample_id] = RoutingRecord(row.token_ids, part.clone())

    def end(self) -> None:
        """Leave the routers free behind a pass, also a failed one."""
        self._routers.tell(None)
        self._routers.record(on=False)

    def step(self) -> None:
        """Make the next scoring pass start a new set of records: the policy has moved."""
        self._records.stale = True

    def _check_rows(self, rows: Sequence[Row]) -> None:
        faults = [fault for fault in map(self._fault_of, rows) if fault]
        found = bool(faults)
        if self._ranks is not None:
            flag = torch.tensor(float(found), device=self._device)
            found = bool(self._ranks.all_reduce(flag, "max").item())
        if found:
            raise RoutingMissingError(faults[0] if faults else "rows of another rank lack experts")

    def _fault_of(self, row: Row) -> str:
        if self._mode == "rollout":
            return self._shape.fault_of(row)
        return record_fault(row, self._records.rows.get(row.sample_id))

    def _experts_of(self, row: Row) -> torch.Tensor:
        if self._mode == "recorded":
            return self._records.rows[row.sample_id].experts
        assert row.routed_experts is not None
        return row.routed_experts[: len(row.token_ids) - 1].to(torch.int16)

    def _refusal(self, error: Exception) -> LayoutError:
        return LayoutError(f"{self._setting}: {error}; leave it out")


@contextmanager
def replayed(
    replay: PackReplay | None, purpose: Purpose, micro_batches: Sequence[MicroBatch]
) -> Iterator[PackReplay | None]:
    """What passes within go by; None where routers are free."""
    if replay is None:
        yield None
        return
    replay.begin(purpose, micro_batches)
    try:
        yield replay
    finally:
        replay.end()
