"""Keeps groups in flight and hands finished ones to the training step.

At most `groups_per_step * (steps done + 1 + max_staleness)` groups are ever issued (dropped ones
aside), and a group that would become too old waits for no one, so that no group is trained on
with weights more than `max_staleness` steps older than the policy (the rule of AReaL,
arXiv 2505.24298, made exact).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import grpc

from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.loop.ledger import Ledger, LedgerGroup
from sluice.loop.workers import EpisodeWorkers, WorkerLostError
from sluice.runtime import wire

logger = logging.getLogger(__name__)

# The task itself is at fault: issuing it again would fail again.
_HOPELESS = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}


class RolloutFailedError(Exception):
    """Rollouts cannot go on; the message says why."""


@dataclass(frozen=True, kw_only=True)
class FeedConfig:
    groups_per_step: int
    max_staleness: int
    attempts: int
    lost_workers: int = 20  # by one Rollout call
    dropped_in_a_row: int = 64  # without one finished group between: the task is broken


GroupRequests = Callable[[Sequence[LedgerGroup]], pb.RolloutRequest]


class GroupFeed:
    """Owns the rollouts in flight. `build_request` makes the Rollout call of some groups."""

    def __init__(
        self,
        config: FeedConfig,
        ledger: Ledger,
        workers: EpisodeWorkers,
        build_request: GroupRequests,
    ) -> None:
        self._config, self._ledger, self._workers = config, ledger, workers
        self._build_request = build_request
        self._ready = {g.group_id: g for g in ledger.groups("generated")}
        self._pending: dict[str, LedgerGroup] = {}
        self._unsent = ledger.groups("issued")  # by a run that ended
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._dropped_in_a_row = 0

    @property
    def in_flight_count(self) -> int:
        return len(self._pending)

    @property
    def ready_count(self) -> int:
        return len(self._ready)

    async def fill(self, step: int) -> None:
        """Issue what the schedule allows when `step` steps are done."""
        self._drop_stale(step)
        limit = self._limit(step)
        first = self._ledger.next_position()
        fresh = [
            LedgerGroup(
                position=position, group_id=f"g{position:07}", state="issued", issue_step=step
            )
            for position in range(first, limit)
        ]
        self._ledger.issue([(group.position, group.group_id) for group in fresh], step)
        again = [replace(g, issue_step=step) for g in self._unsent if g.position < limit]
        self._unsent = [group for group in self._unsent if group.position >= limit]
        for group in again:
            self._ledger.reissue(group.group_id, step)
        self._pending.update({group.group_id: group for group in (*again, *fresh)})
        for share in self._workers.split([*again, *fresh]):
            self._start(share)

    def _limit(self, step: int) -> int:
        """The first position that may not be in flight when `step` steps are done."""
        steps = step + 1 + self._config.max_staleness
        return self._config.groups_per_step * steps + self._ledger.dropped_count()

    async def take(self, step: int) -> list[LedgerGroup]:
        """The groups of a step, by position; waits for them. Raises RolloutFailedError."""
        while (chosen := self._choose(step)) is None:
            if self._failure is not None:
                raise RolloutFailedError(str(self._failure)) from self._failure
            if not self._tasks and not self._pending:
                raise RolloutFailedError("no rollout is in flight and too few groups are ready")
            await self._changed.wait()
            self._changed.clear()
            await self.fill(step)  # replaces dropped groups
        for group in chosen:
            del self._ready[group.group_id]
        return chosen

    def put_back(self, groups: Sequence[LedgerGroup]) -> None:
        """Offer groups again whose step did not happen."""
        self._ready.update({group.group_id: group for group in groups})

    async def close(self) -> None:
        """Cancel what is in flight and wait for its end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _choose(self, step: int) -> list[LedgerGroup] | None:
        """Groups that must not wait longer first, then those that finished, oldest first."""
        oldest_allowed = step - self._config.max_staleness
        if any(group.issue_step <= oldest_allowed for group in self._pending.values()):
            return None
        limit = self._limit(step)  # a run that went back to a cut holds groups of later steps
        ready = [group for group in self._ready.values() if group.position < limit]
        ready.sort(key=lambda group: (group.oldest_step, group.position))
        if len(ready) < self._config.groups_per_step:
            return None
        return sorted(ready[: self._config.groups_per_step], key=lambda group: group.position)

    def _drop_stale(self, step: int) -> None:
        oldest_allowed = step - self._config.max_staleness
        for group in [g for g in self._ready.values() if g.oldest_step < oldest_allowed]:
            self._ledger.drop(group.group_id, "stale")
            del self._ready[group.group_id]

    def _start(self, groups: Sequence[LedgerGroup]) -> None:
        task = asyncio.create_task(self._roll_out(groups))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
        self._changed.set()

    async def _roll_out(self, groups: Sequence[LedgerGroup]) -> None:
        waiting, lost = {group.group_id: group for group in groups}, 0
        while waiting:
            request = self._build_request(list(waiting.values()))
            try:
                async for response in self._workers.rollout(request):
                    self._record(response, waiting)
            except WorkerLostError as error:
                lost += 1  # not the groups' fault: no attempt of theirs
                if lost >= self._config.lost_workers:
                    raise RolloutFailedError(
                        f"gave up after {lost} lost workers: {error}"
                    ) from None
                logger.warning("%s; %d groups go to another", error, len(waiting))
                await asyncio.sleep(min(2.0, 0.1 * 2**lost))
                continue
            waiting = {name: self._count_attempt(group) for name, group in waiting.items()}
            waiting = {name: group for name, group in waiting.items() if name in self._pending}

    def _record(self, response: pb.RolloutResponse, waiting: dict[str, LedgerGroup]) -> None:
        if response.WhichOneof("event") == "finished":
            self._record_finished(response.finished, waiting)
            return
        failed = response.failed
        if failed.error.code in {code.value[0] for code in _HOPELESS}:
            waiting.pop(failed.group_id, None)
            self._drop(failed.group_id, failed.error.message)
        else:
            logger.warning("group %s failed: %s", failed.group_id, failed.error.message)

    def _record_finished(self, finished: pb.FinishedGroup, waiting: dict[str, LedgerGroup]) -> None:
        group = waiting.pop(finished.group_id, None)
        if group is None:
            return  # announced twice
        group = replace(
            group,
            state="generated",
            blob=wire.blob_from_proto(finished.blob),
            sample_count=len(finished.rewards),
            reward_mean=sum(finished.rewards) / max(1, len(finished.rewards)),
            response_tokens=sum(finished.response_lengths),
            oldest_step=self._ledger.step_of_version(finished.min_version),
            newest_step=self._ledger.step_of_version(finished.max_version),
        )
        if self._ledger.generated(group):
            self._ready[group.group_id] = group
        self._pending.pop(group.group_id, None)
        self._dropped_in_a_row = 0
        self._changed.set()

    def _count_attempt(self, group: LedgerGroup) -> LedgerGroup:
        if group.attempts >= self._config.attempts:
            self._drop(group.group_id, f"failed {group.attempts} times")
            return group
        self._ledger.reissue(group.group_id, group.issue_step)
        group = replace(group, attempts=group.attempts + 1)
        self._pending[group.group_id] = group
        return group

    def _drop(self, group_id: str, reason: str) -> None:
        logger.warning("group %s is dropped: %s", group_id, reason)
        self._ledger.drop(group_id, reason)
        self._pending.pop(group_id, None)
        self._dropped_in_a_row += 1
        self._changed.set()
        if self._dropped_in_a_row >= self._config.dropped_in_a_row:
            raise RolloutFailedError(
                f"{self._dropped_in_a_row} groups in a row were dropped, the last one: {reason}"
            )
