"""Keeps groups in flight and hands finished ones to the training step.

At most `groups_per_step * (steps done + 1 + max_staleness)` groups are ever issued (dropped ones
aside), and a group that would become too old waits for no one, so that no group is trained on
with weights more than `max_staleness` steps older than the policy (the rule of AReaL,
arXiv 2505.24298, made exact). Within the bound no more is issued than keeps training busy: groups
that would only lie and age are issued later, under newer weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import grpc

from sluice import faults
from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.loop.ledger import Ledger, LedgerGroup
from sluice.loop.workers import EpisodeWorkers, WorkerLostError
from sluice.runtime import wire
from sluice.samples.blobs import BlobReference

logger = logging.getLogger(__name__)

# The task itself is at fault: issuing it again would fail again.
_HOPELESS = {grpc.StatusCode.INVALID_ARGUMENT.value[0], grpc.StatusCode.NOT_FOUND.value[0]}
# Engines or the store are at fault, not the group: it loses no attempt.
_PASSING = {
    code.value[0]
    for code in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
    )
}
_LONGEST_PAUSE = 2.0  # seconds between two tries while something is down
_FEWEST_FAILURES = 5  # of long calls two may fail for two reasons


class RolloutFailedError(Exception):
    """Rollouts cannot go on; the message says why."""


@dataclass(frozen=True, kw_only=True)
class FeedConfig:
    """`patience_seconds`: how long workers or engines may be down before the run ends.

    `dropped_in_a_row`: without one finished group between, so that the task must be broken.
    """

    groups_per_step: int
    max_staleness: int
    attempts: int
    patience_seconds: float = 300.0
    dropped_in_a_row: int = 64


GroupRequests = Callable[[Sequence[LedgerGroup], int], pb.RolloutRequest]


@dataclass
class _Outage:
    """Failures in a row that are nobody's fault but of what is down."""

    patience_seconds: float
    count: int = 0
    since: float = 0.0

    def end(self) -> None:
        self.count = 0

    async def endure(self, error: str, retry_seconds: float = 0.0) -> None:
        """Wait a moment. Raises RolloutFailedError when it has lasted too long."""
        now = time.monotonic()
        if not self.count:
            self.since = now
        if self.count >= _FEWEST_FAILURES and now - self.since > self.patience_seconds:
            raise RolloutFailedError(f"nothing went on for {now - self.since:.0f} s: {error}")
        self.count += 1
        longest = min(_LONGEST_PAUSE, self.patience_seconds / _FEWEST_FAILURES)
        await asyncio.sleep(max(retry_seconds, min(longest, 0.1 * 2 ** min(self.count, 5))))


class GroupFeed:
    """Owns the rollouts in flight. `build_request` makes the Rollout call of some groups.

    `hold` hears of every blob that is generated.
    """

    def __init__(
        self,
        config: FeedConfig,
        ledger: Ledger,
        workers: EpisodeWorkers,
        build_request: GroupRequests,
        hold: Callable[[BlobReference], None] = lambda _: None,
    ) -> None:
        self._config, self._ledger, self._workers = config, ledger, workers
        self._build_request, self._hold = build_request, hold
        self._ready = {g.group_id: g for g in ledger.groups("generated")}
        self._pending: dict[str, LedgerGroup] = {}
        self._unsent = ledger.groups("issued")  # by a run that ended
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._dropped_in_a_row = 0
        self._depth = 1 + config.max_staleness  # steps' worth of groups in flight or ready

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
        again = [replace(g, issue_step=step) for g in self._unsent if g.position < limit]
        self._unsent = [group for group in self._unsent if group.position >= limit]
        held = len(self._pending) + len(again) + len(self._usable(step))
        first = self._ledger.next_position()
        last = min(limit, first + self._depth * self._config.groups_per_step - held)
        fresh = [
            LedgerGroup(
                position=position, group_id=f"g{position:07}", state="issued", issue_step=step
            )
            for position in range(first, last)
        ]
        if fresh:
            self._ledger.issue([(group.position, group.group_id) for group in fresh], step)
            faults.point("issued")
        for group in again:
            self._ledger.reissue(group.group_id, step, group.attempts)
        self._pending.update({group.group_id: group for group in (*again, *fresh)})
        for share in self._workers.split([*again, *fresh]):
            self._start(share)

    def _limit(self, step: int) -> int:
        """The first position that may not be in flight when `step` steps are done."""
        steps = step + 1 + self._config.max_staleness
        return self._config.groups_per_step * steps + self._ledger.dropped_count()

    async def take(self, step: int) -> list[LedgerGroup]:
        """The groups of a step, by position; waits for them. Raises RolloutFailedError."""
        waited = False
        while (chosen := self._choose(step)) is None:
            if self._failure is not None:
                raise RolloutFailedError(str(self._failure)) from self._failure
            if not self._tasks and not self._pending:
                raise RolloutFailedError("no rollout is in flight and too few groups are ready")
            waited = True
            await self._changed.wait()
            self._changed.clear()
            await self.fill(step)  # replaces dropped groups
        for group in chosen:
            del self._ready[group.group_id]
        self._adapt(step, waited)
        return chosen

    def _adapt(self, step: int, waited: bool) -> None:
        """Training that waits wants more in flight; a step's worth left over is one too many."""
        if waited:
            self._depth = min(self._depth + 1, 1 + self._config.max_staleness)
        elif len(self._usable(step)) >= self._config.groups_per_step:
            self._depth = max(self._depth - 1, min(2, 1 + self._config.max_staleness))

    def put_back(self, groups: Sequence[LedgerGroup]) -> None:
        """Offer groups again whose step did not happen."""
        self._ready.update({group.group_id: group for group in groups})

    def lose_blob(self, digest: str) -> bool:
        """A blob is gone or damaged: generate its group again. Whether it was ready here."""
        group_id = self._ledger.lose_blob(digest)
        group = self._ready.pop(group_id or "", None)
        if group is None:
            return False
        logger.warning("blob %s of group %s is lost", digest, group.group_id)
        self._unsent.append(replace(group, state="issued", blob=None))
        return True

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
        ready = self._usable(step)
        ready.sort(key=lambda group: (group.oldest_step, group.position))
        if len(ready) < self._config.groups_per_step:
            return None
        return sorted(ready[: self._config.groups_per_step], key=lambda group: group.position)

    def _usable(self, step: int) -> list[LedgerGroup]:
        """Ready groups; a run that went back to a cut holds some of later steps besides."""
        limit = self._limit(step)
        return [group for group in self._ready.values() if group.position < limit]

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
        waiting = {group.group_id: group for group in groups}
        outage, trial = _Outage(self._config.patience_seconds), 0
        while waiting:
            request = self._build_request(list(waiting.values()), trial)
            failed = await self._follow(request, waiting, outage)
            passing = {name: why for name, (code, why) in failed.items() if code in _PASSING}
            for group_id in [name for name in waiting if name not in passing]:
                self._count_attempt(waiting, group_id)
            if waiting and len(passing) == len(waiting):
                await outage.endure(next(iter(passing.values())))
            trial += 1

    async def _follow(
        self, request: pb.RolloutRequest, waiting: dict[str, LedgerGroup], outage: _Outage
    ) -> dict[str, tuple[int, str]]:
        """A Rollout to its end, on one worker after another; (code, message) of failed groups.

        A worker that goes on with the same request tells again what is finished already.
        """
        while True:
            failed: dict[str, tuple[int, str]] = {}
            try:
                async for response in self._workers.rollout(request):
                    if response.WhichOneof("event") == "finished":
                        outage.end()
                        self._record_finished(response.finished, waiting)
                    else:
                        self._record_failed(response.failed, waiting, failed)
                return failed
            except WorkerLostError as error:
                logger.warning("%s; %d groups go to another", error, len(waiting))
                await outage.endure(str(error), error.retry_seconds)

    def _record_failed(
        self,
        failure: pb.FailedGroup,
        waiting: dict[str, LedgerGroup],
        failed: dict[str, tuple[int, str]],
    ) -> None:
        if failure.group_id not in waiting:
            return
        code, message = failure.error.code, failure.error.message
        if code in _HOPELESS:
            del waiting[failure.group_id]
            self._drop(failure.group_id, message)
        else:
            logger.warning("group %s failed: %s", failure.group_id, message)
            failed[failure.group_id] = (code, message)

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
            assert group.blob is not None
            self._ready[group.group_id] = group
            self._hold(group.blob)
        faults.point("generated")
        self._pending.pop(group.group_id, None)
        self._dropped_in_a_row = 0
        self._changed.set()

    def _count_attempt(self, waiting: dict[str, LedgerGroup], group_id: str) -> None:
        group = waiting[group_id]
        if group.attempts >= self._config.attempts:
            del waiting[group_id]
            self._drop(group_id, f"failed {group.attempts} times")
            return
        group = replace(group, attempts=group.attempts + 1)
        self._ledger.reissue(group_id, group.issue_step, group.attempts)
        waiting[group_id] = self._pending[group_id] = group

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
