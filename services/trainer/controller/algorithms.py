"""What the controller knows of losses and estimators: it reads settings, and imports no torch.

What a user names `package.module:Name` only the ranks import; they are asked, once a launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from services.trainer.config import TrainerConfig
from services.trainer.controller.incarnation import Build
from services.trainer.controller.rank_group import RankGroup
from services.trainer.controller.state import Batch
from sluice.algo.aggregation import merge_measured
from sluice.algo.spec import (
    AdvantageSpec,
    AdvantageTraits,
    LossSpec,
    LossTraits,
    advantage_traits,
    loss_traits,
)
from sluice.algo.surrogate import LossHead
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.runtime.errors import InvalidFieldError
from sluice.runtime.wire import advantage_to_proto, check_plugins, loss_to_proto

ROWS_PER_COMMAND = 50_000  # of at most 20 bytes; a command has 1 MiB


class Algorithms:
    """Losses and estimators by their specs."""

    def __init__(self, config: TrainerConfig, ranks: RankGroup) -> None:
        self._config, self._ranks = config, ranks
        self._known: dict[bytes, pb.AlgorithmTraits] = {}
        self._launch = -1  # that they are known of

    def check(self, spec: LossSpec | AdvantageSpec) -> None:
        """Raises InvalidFieldError for names of users that this trainer may not import."""
        field = "loss" if isinstance(spec, LossSpec) else "advantage"
        check_plugins(field, spec.plugins, self._config.user_modules)

    async def loss(self, spec: LossSpec) -> LossTraits:
        """Raises InvalidFieldError for settings that it does not read, and for another head."""
        self.check(spec)
        if spec.plugins:
            described = await self._describe(pb.DescribeCommand(loss=loss_to_proto(spec)))
            traits = LossTraits(
                columns=frozenset(described.columns),
                head=cast(LossHead, described.head),
                silent=described.silent,
                rounds=described.rounds,
            )
        else:
            traits = loss_traits(spec)
        if traits.head != self._config.loss_head:
            raise InvalidFieldError(
                "loss.name", f"{spec.name} has no effect on a trainer of head {self._config.head}"
            )
        return traits

    async def advantage(self, spec: AdvantageSpec) -> AdvantageTraits:
        """Raises InvalidFieldError for settings that it does not read."""
        self.check(spec)
        if not spec.plugins:
            return advantage_traits(spec)
        described = await self._describe(pb.DescribeCommand(advantage=advantage_to_proto(spec)))
        return AdvantageTraits(
            columns=frozenset(described.columns),
            compares_siblings=described.compares_siblings,
            whitens=described.whitens,
            width=described.width,
        )

    async def measure(
        self, batch: Batch, selection: np.ndarray, spec: LossSpec, rounds: int
    ) -> dict[str, float]:
        """Measure the rows of a pass on all ranks, round after round, and add up."""
        ranks, measured = self._ranks.incarnation, dict[str, float]()
        for number in range(rounds):
            command = pb.MeasureCommand(
                batch_id=batch.batch_id,
                loss=loss_to_proto(spec),
                number=number,
                measured=measured,
            )
            parts = []
            for build in _split(command, batch, selection):
                results = ranks.reporting(await ranks.run(build))
                parts += [result.measured for result in results]
            measured |= merge_measured(parts)
        return measured

    async def _describe(self, command: pb.DescribeCommand) -> pb.AlgorithmTraits:
        ranks = self._ranks.incarnation
        if ranks.number != self._launch:
            self._known.clear()
            self._launch = ranks.number
        key = command.SerializeToString(deterministic=True)
        if key not in self._known:
            results = await ranks.run(pb.FollowResponse(describe=command))
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[key] = results[0].traits
        return self._known[key]


MOST_KNOWN = 1024


def _split(command: pb.MeasureCommand, batch: Batch, selection: np.ndarray) -> Sequence[Build]:
    """Return commands that name each rank's own rows."""

    def part(rows: np.ndarray) -> Build:
        def build(data_rank: int) -> pb.FollowResponse:
            own = pb.MeasureCommand()
            own.CopyFrom(command)
            own.rows.extend(rows[batch.owners[rows] == data_rank].tolist())
            return pb.FollowResponse(measure=own)

        return build

    starts = range(0, len(selection), ROWS_PER_COMMAND)
    return [part(selection[start : start + ROWS_PER_COMMAND]) for start in starts]
