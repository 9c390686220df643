"""One Rollout call of the feed, seen through over lost workers and failed groups."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import grpc

from sluice import faults
from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.client import RemoteError
from sluice.loop.filters import GroupFilters
from sluice.loop.ledger import Ledger, LedgerGroup
from sluice.loop.recovery import Outage, RolloutFailedError, told
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

GroupRequests = Callable[[Sequence[LedgerGroup], int], pb.RolloutRequest]


class CallEvents(Protocol):
    """Who hears what becomes of groups."""

    async def version_known(self, version: int) -> None:
        """Wait until the ledger knows the step of a weight version."""

    def finished(self, group: LedgerGroup, told: pb.FinishedGroup) -> None:
        """A group is generated and durable."""

    def hopeless(self, group: LedgerGroup, why: str) -> None:
        """It would fail again."""

    def failed(self, group: LedgerGroup, why: str) -> LedgerGroup | None:
        """It failed; what to ask for next, None if that was the last attempt."""


@dataclass(eq=False)
class RolloutCall:
    """`waiting`: the groups that it still owes. `build_request` makes the call of some groups."""

    workers: EpisodeWorkers
    build_request: GroupRequests
    events: CallEvents
    waiting: dict[str, LedgerGroup]
    patience_seconds: float
    request_id: str = ""

    def release(self, group_ids: Iterable[str]) -> list[str]:
        """Owe these no more; those that it owed."""
        return [group_id for group_id in group_ids if self.waiting.pop(group_id, None)]

    async def see_through(self) -> None:
        """Until it owes nothing. Raises RolloutFailedError and RemoteError for what is refused."""
        outage, trial = Outage(self.patience_seconds), 0
        while self.waiting:
            request = self.build_request(list(self.waiting.values()), trial)
            self.request_id = request.request_id
            failed = await self._follow(request, outage)
            passing = {name: why for name, (code, why) in failed.items() if code in _PASSING}
            for group_id in [name for name in self.waiting if name not in passing]:
                self._ask_again(group_id, failed.get(group_id, (0, "not told of"))[1])
            if self.waiting and self.waiting.keys() <= passing.keys():
                await outage.endure(next(iter(passing.values())))
            trial += 1

    def _ask_again(self, group_id: str, why: str) -> None:
        group = self.events.failed(self.waiting.pop(group_id), why)
        if group is not None:
            self.waiting[group_id] = group

    async def _follow(
        self, request: pb.RolloutRequest, outage: Outage
    ) -> dict[str, tuple[int, str]]:
        """A Rollout to its end, on one worker after another; (code, message) of failed groups.

        A worker that goes on with the same request tells again what is finished already.
        """
        failed: dict[str, tuple[int, str]] = {}
        while self.waiting:
            failed.clear()
            try:
                async for response in self.workers.rollout(request):
                    if response.WhichOneof("event") == "finished":
                        outage.end()
                        await self._record_finished(response.finished)
                    else:
                        self._record_failed(response.failed, failed)
                return failed
            except WorkerLostError as error:
                logger.warning("%s; %d groups go to another", error, len(self.waiting))
                await outage.endure(str(error), error.retry_seconds)
        return failed

    async def _record_finished(self, told: pb.FinishedGroup) -> None:
        if told.group_id in self.waiting:
            await self.events.version_known(told.max_version)
        group = self.waiting.pop(told.group_id, None)
        if group is not None:  # else it was announced twice, or settled
            self.events.finished(group, told)

    def _record_failed(self, failure: pb.FailedGroup, failed: dict[str, tuple[int, str]]) -> None:
        if failure.group_id not in self.waiting:
            return
        code, message = failure.error.code, failure.error.message
        if code in _HOPELESS:
            self.events.hopeless(self.waiting.pop(failure.group_id), message)
        else:
            logger.warning("group %s failed: %s", failure.group_id, message)
            failed[failure.group_id] = (code, message)


@dataclass(frozen=True, kw_only=True)
class FeedConfig:
    """`patience_seconds`: how long workers or engines may be down before the run ends.

    `steps`: of the whole run.
    `dropped_in_a_row`: without one finished group between, so that the task must be broken.
    """

    groups_per_step: int
    max_staleness: int
    attempts: int
    patience_seconds: float = 300.0
    dropped_in_a_row: int = 64
    filtered_in_a_row: int = 512
    over_sampling: float = 1.0
    drops_surplus: bool = False
    steps: int = sys.maxsize


@dataclass
class FeedCounts:
    """What became of groups since the last step; rewards of all that finished."""

    finished: int = 0
    filtered: int = 0
    surplus: int = 0
    reward_sum: float = 0.0


class RolloutDispatcher:
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
        filters: GroupFilters | None = None,
    ) -> None:
        self._config, self._ledger, self._workers = config, ledger, workers
        self._build_request, self._hold = build_request, hold
        self._filters = filters or GroupFilters()
        self._counts = FeedCounts()
        self._calls: set[RolloutCall] = set()
        self._cancelling: set[asyncio.Task[None]] = set()
        self._spared: set[str] = set()  # cancelled once; a step waits for them
        self._ready = {g.group_id: g for g in ledger.groups("generated")}
        self._pending: dict[str, LedgerGroup] = {}
        self._unsent = ledger.groups("issued")  # by a run that ended
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._recorded = asyncio.Event()  # a further version of weights; replaced when set
        self._failure: BaseException | None = None
        self._dropped_in_a_row = self._filtered_in_a_row = 0
        self._step, self._consumed = -1, 0  # groups that the steps before `_step` took
        self._depth = 1 + config.max_staleness  # steps' worth of groups in flight or ready

    @property
    def in_flight_count(self) -> int:
        return len(self._pending)

    @property
    def ready_count(self) -> int:
        return len(self._ready)

    async def fill(self, step: int) -> None:
        """Issue what the schedule allows when `step` steps are done."""
        if step != self._step:
            self._step, self._consumed = step, self._ledger.consumed_count()
        self._drop_stale(step)
        limit = self._limit()
        again = [replace(g, issue_step=step) for g in self._unsent if g.position < limit]
        self._unsent = [group for group in self._unsent if group.position >= limit]
        held = len(self._pending) + len(again) + len(self._usable())
        first = self._ledger.next_position()
        wanted = self._depth * self._config.groups_per_step * self._config.over_sampling
        last = min(limit, first + math.ceil(wanted) - held)
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

    def _limit(self) -> int:
        """The first position that may not be in flight now."""
        config = self._config
        ahead = (1 + config.max_staleness) * config.groups_per_step
        spare = math.ceil((config.over_sampling - 1) * ahead)
        limit = base = spare + min(self._consumed + ahead, config.steps * config.groups_per_step)
        # A run that went back to a cut has dropped groups of later steps besides.
        while (further := base + self._ledger.dropped_count(below=limit)) > limit:
            limit = further
        return limit

    async def take(self, step: int) -> list[LedgerGroup]:
        """The groups of a step, by position; waits for them. Raises RolloutFailedError."""
        waited = False
        while (chosen := self._choose(step)) is None:
            if self._failure is not None:
                raise RolloutFailedError(told(self._failure)) from self._failure
            if not self._tasks:
                raise RolloutFailedError("no rollout is in flight and too few groups are ready")
            waited = True
            await self._changed.wait()
            self._changed.clear()
            await self.fill(step)  # replaces dropped groups
        for group in chosen:
            del self._ready[group.group_id]
            self._spared.discard(group.group_id)
        self._adapt(step, waited)
        if self._config.over_sampling > 1:
            self._settle_surplus(step + 1 - self._config.max_staleness)
        return chosen

    def take_counts(self) -> FeedCounts:
        """Counts since the last call."""
        counts, self._counts = self._counts, FeedCounts()
        return counts

    def _adapt(self, step: int, waited: bool) -> None:
        """Training that waits wants more in flight; a step's worth left over is one too many."""
        if waited:
            self._depth = min(self._depth + 1, 1 + self._config.max_staleness)
        elif len(self._usable()) >= self._config.groups_per_step:
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
        tasks = (*self._tasks, *self._cancelling)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _choose(self, step: int) -> list[LedgerGroup] | None:
        """The oldest of those that finished; None while it has to wait for others."""
        size = self._config.groups_per_step
        ready = sorted(self._usable(), key=lambda group: (group.oldest_step, group.position))
        if len(ready) < size or self._crowds_out(step, ready[size:]):
            return None
        return sorted(ready[:size], key=lambda group: group.position)

    def _crowds_out(self, step: int, left: Sequence[LedgerGroup]) -> bool:
        """Whether groups in flight would grow too old if this step left `left` to later ones.

        Groups as old as `step + later - max_staleness` have `later` steps behind this one. With
        over-sampling that is the surplus, and only what was spared has to be waited for.
        """
        config = self._config
        takes_first = config.over_sampling > 1
        waited_for = self._spared if takes_first else self._pending.keys()
        pending = [group for name, group in self._pending.items() if name in waited_for]
        for later in range(1 if takes_first else config.max_staleness + 1):
            oldest = step + later - config.max_staleness
            flying = sum(group.issue_step <= oldest for group in pending)
            lying = sum(group.oldest_step <= oldest for group in left)
            if flying and flying + lying > later * config.groups_per_step:
                return True
        return False

    def _usable(self) -> list[LedgerGroup]:
        """Ready groups; a run that went back to a cut holds some of later steps besides."""
        limit = self._limit()
        return [group for group in self._ready.values() if group.position < limit]

    def _drop_stale(self, step: int) -> None:
        for group in self._stale(step - self._config.max_staleness):
            self._settle(group)

    def _stale(self, oldest_allowed: int) -> list[LedgerGroup]:
        return [g for g in self._ready.values() if g.oldest_step < oldest_allowed]

    def _settle_surplus(self, oldest_allowed: int) -> None:
        """Cancel or put back what the next step could not use."""
        late = [g for g in self._pending.values() if g.issue_step < oldest_allowed]
        for group in (*late, *self._stale(oldest_allowed)):
            self._settle(group)
            faults.point("surplus")
        self._unsent.sort(key=lambda group: group.position)
        for call in self._calls:
            named = call.release(group.group_id for group in late)
            if named and call.request_id:  # a worker may know of them
                task = asyncio.create_task(self._cancel(call.request_id, named))
                self._cancelling.add(task)
                task.add_done_callback(self._cancelling.discard)

    def _settle(self, group: LedgerGroup) -> None:
        """Drop what came too late, or ask for it again."""
        self._counts.surplus += (is_surplus := self._config.over_sampling > 1)
        if self._config.drops_surplus or not is_surplus:
            self._ledger.drop(group.group_id, "surplus" if is_surplus else "stale")
        else:
            self._ledger.put_back(group.group_id)
            self._unsent.append(replace(group, state="issued", blob=None))
            self._spared.add(group.group_id)
        self._pending.pop(group.group_id, None)
        self._ready.pop(group.group_id, None)

    async def _cancel(self, request_id: str, group_ids: Sequence[str]) -> None:
        """What cannot be told to a worker costs it some work and nothing else."""
        try:
            await self._workers.cancel(request_id, group_ids)
        except (WorkerLostError, RemoteError) as error:
            logger.warning("%d groups were not cancelled: %s", len(group_ids), error)

    def _start(self, groups: Sequence[LedgerGroup]) -> None:
        waiting = {group.group_id: group for group in groups}
        patience = self._config.patience_seconds
        call = RolloutCall(self._workers, self._build_request, self, waiting, patience)
        self._calls.add(call)  # a step may settle its groups before its task begins
        task = asyncio.create_task(call.see_through())
        task.add_done_callback(lambda _: self._calls.discard(call))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error  # what came first; others may follow from it
        self._changed.set()

    async def version_known(self, version: int) -> None:
        """Wait until the ledger knows a version.

        An engine that cannot hold two serves a version before its publication has ended. Raises
        RolloutFailedError for one that is not of this run.
        """
        try:
            async with asyncio.timeout(self._config.patience_seconds):
                while not self._ledger.knows_version(version):
                    await self._recorded.wait()
        except TimeoutError:
            raise RolloutFailedError(
                f"weight version {version}, which an engine serves, is not of this run"
            ) from None

    def version_recorded(self) -> None:
        """The ledger knows another version."""
        self._recorded.set()
        self._recorded = asyncio.Event()

    def finished(self, group: LedgerGroup, told: pb.FinishedGroup) -> None:
        """Record a group whose blob is durable."""
        group = replace(
            group,
            state="generated",
            blob=wire.blob_from_proto(told.blob),
            sample_count=len(told.rewards),
            reward_mean=sum(told.rewards) / max(1, len(told.rewards)),
            response_tokens=sum(told.response_lengths),
            oldest_step=self._ledger.step_of_version(told.min_version),
            newest_step=self._ledger.step_of_version(told.max_version),
        )
        rejected = self._filters.rejected_by(told)
        if self._ledger.generated(group, f"filtered: {rejected}" if rejected else None):
            assert group.blob is not None
            self._count_finished(group, rejected)
            if not rejected:
                self._ready[group.group_id] = group
                self._hold(group.blob)
        faults.point("generated")
        self._pending.pop(group.group_id, None)
        self._dropped_in_a_row = 0
        self._changed.set()

    def _count_finished(self, group: LedgerGroup, rejected: str) -> None:
        counts = self._counts
        counts.finished += 1
        counts.reward_sum += group.reward_mean
        self._filtered_in_a_row = self._filtered_in_a_row + 1 if rejected else 0
        counts.filtered += bool(rejected)
        if self._filtered_in_a_row >= self._config.filtered_in_a_row:
            raise RolloutFailedError(
                f"{self._filtered_in_a_row} groups in a row were filtered, the last one by "
                f"{rejected}: too hard, too easy, or learned (max_filtered_in_a_row)"
            )

    def failed(self, group: LedgerGroup, why: str) -> LedgerGroup | None:
        """Count an attempt; the group as it is asked for again, None if it is dropped."""
        if group.attempts >= self._config.attempts:
            self._drop(group.group_id, f"failed {group.attempts} times: {why}")
            return None
        group = replace(group, attempts=group.attempts + 1)
        self._ledger.reissue(group.group_id, group.issue_step, group.attempts)
        self._pending[group.group_id] = group
        return group

    def hopeless(self, group: LedgerGroup, why: str) -> None:
        """Drop a group that would fail again."""
        self._drop(group.group_id, why)

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
