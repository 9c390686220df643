"""Sleep of a trainer: its state leaves the devices of all ranks, and comes back."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from services.trainer import metrics
from services.trainer.controller.checkpoints import TrainerCheckpoints
from services.trainer.controller.incarnation import RankIncarnation
from services.trainer.controller.rank_group import RankGroup
from services.trainer.controller.state import SleepReport, TrainerState, Turns, in_turn
from services.trainer.errors import CallExpiredError
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.runtime.errors import ServiceError

logger = logging.getLogger(__name__)


class TrainerSleep:
    """Has the ranks give up their devices' memory, and take it back."""

    def __init__(
        self, state: TrainerState, ranks: RankGroup, checkpoints: TrainerCheckpoints, turns: Turns
    ) -> None:
        self.turns = turns
        self._state, self._ranks, self._checkpoints = state, ranks, checkpoints

    @in_turn
    async def sleep(self, deadline: float) -> SleepReport:
        """Free the devices, after what runs and a checkpoint that is being written.

        `deadline` by the monotonic clock: later nothing happens, and CallExpiredError is raised. A
        trainer that sleeps answers what it did when it fell asleep.
        """
        state, ranks = self._state, self._ranks.incarnation
        if state.asleep is not None:
            return state.asleep
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())) as limit:
            with suppress(TimeoutError):
                await self._checkpoints.settle()
        if limit.expired() or time.monotonic() >= deadline:
            raise CallExpiredError("the trainer was busy for longer than the call to sleep waited")
        with metrics.SLEEP_SECONDS.labels("sleep").time():
            state.asleep = await self._put_to_sleep(ranks)
        metrics.ASLEEP.set(1)
        metrics.FREED_BYTES.set(state.asleep.freed_bytes)
        return state.asleep

    @in_turn
    async def wake(self, deadline: float) -> None:
        """Take the devices back, with all that was on them. Raises CallExpiredError as `sleep`."""
        ranks = self._ranks.incarnation
        if self._state.asleep is None:
            return
        if time.monotonic() >= deadline:
            raise CallExpiredError("the trainer was busy for longer than the call to wake waited")
        try:
            with metrics.SLEEP_SECONDS.labels("wake").time():
                await ranks.run(pb.FollowResponse(wake=pb.WakeCommand()))
        except ServiceError as error:  # what the ranks hold now is not what they had
            ranks.fail(error)
            raise
        finally:
            self._state.asleep = None  # ranks that are started anew are wanted awake
            metrics.ASLEEP.set(0)

    async def resume(self, ranks: RankIncarnation) -> None:
        """Put fresh ranks to sleep where the lost ones slept."""
        if self._state.asleep is not None:
            self._state.asleep = await self._put_to_sleep(ranks)

    async def _put_to_sleep(self, ranks: RankIncarnation) -> SleepReport:
        gathered = any(policy.ledger.parts for policy in self._state.policies)
        command = pb.SleepCommand(keep_gradients=gathered)
        try:
            results = await ranks.run(pb.FollowResponse(sleep=command))
        except ServiceError as error:
            if not ranks.lost.done():  # a disk was full: those that sleep are woken again
                logger.warning("the trainer stays awake: %s", error)
                try:
                    await ranks.run(pb.FollowResponse(wake=pb.WakeCommand()))
                except ServiceError as another:
                    ranks.fail(another)
            raise
        return SleepReport(
            state_bytes=sum(result.slept.state_bytes for result in results),
            freed_bytes=sum(result.slept.freed_bytes for result in results),
        )
