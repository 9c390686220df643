"""Keeps rollouts in flight as the schedule allows, and gives a step its groups."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sluice import faults
from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.client import RemoteError
from sluice.loop.filters import FilterError, GroupFilters
from sluice.loop.ledger import Ledger, LedgerGroup
from sluice.loop.workers import EpisodeWorkers, RolloutCall, RolloutFailedError, WorkerLostError
from sluice.runtime import wire
from sluice.samples.blobs import BlobReference

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DispatcherConfig:
    """`outage_seconds`: how long workers or engines may be down before the run ends.

    `steps`: of the whole run.
    `dropped_in_a_row`: without one finished group between, so that the task must be broken.
    """

    groups_per_step: int
    max_staleness: int
    attempts: int
    outage_seconds: float = 300.0
    dropped_in_a_row: int = 64
    filtered_in_a_row: int = 512
    over_sampling: float = 1.0
    drops_surplus: bool = False
    steps: int = sys.maxsize


@dataclass
class GroupCounts:
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
        config: DispatcherConfig,
        ledger: Ledger,
        workers: EpisodeWorkers,
        build_request: Callable[[Sequence[LedgerGroup], int], pb.RolloutRequest],
        hold: Callable[[BlobReference], None] = lambda _: None,
        filters: GroupFilters | None = None,
    ) -> None:
        self._config, self._ledger, self._workers = config, ledger, workers
        self._build_request, self._hold = build_request, hold
        self._filters = filters or GroupFilters()
        self._counts = GroupCounts()
        self._calls: set[RolloutCall[LedgerGroup]] = set()
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
        left = max(0, config.steps - self._step) * config.groups_per_step
        limit = base = spare + self._consumed + min(ahead, left)
        # A run that went back to a run checkpoint has dropped groups of later steps too.
        while (further := base + self._ledger.dropped_count(below=limit)) > limit:
            limit = further
        return limit

    async def take(self, step: int) -> list[LedgerGroup]:
        """The groups of a step, by position; waits for them. Raises RolloutFailedError."""
        waited = False
        while (chosen := self._choose(step)) is None:
            if self._failure is not None:
                raise _rollout_error(self._failure) from self._failure
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

    def take_counts(self) -> GroupCounts:
        """Counts since the last call."""
        counts, self._counts = self._counts, GroupCounts()
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
            in_flight = sum(group.issue_step <= oldest for group in pending)
            ready = sum(group.oldest_step <= oldest for group in left)
            if in_flight and in_flight + ready > later * config.groups_per_step:
                return True
        return False

    def _usable(self) -> list[LedgerGroup]:
        """Ready groups; without those of later steps that a run which went back has besides."""
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
        """Asks a worker to stop; one that does not hear of it does some work in vain."""
        try:
            await self._workers.cancel(request_id, group_ids)
        except (WorkerLostError, RemoteError) as error:
            logger.warning("%d groups were not cancelled: %s", len(group_ids), error)

    def _start(self, groups: Sequence[LedgerGroup]) -> None:
        waiting = {group.group_id: group for group in groups}
        seconds = self._config.outage_seconds
        call = RolloutCall(self._workers, self._build_request, self, waiting, seconds)
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

    async def wait_for_version(self, version: int) -> None:
        """Wait until the ledger knows a version.

        An engine that cannot hold two serves a version before its publication has ended. Raises
        RolloutFailedError for one that is not of this run.
        """
        try:
            async with asyncio.timeout(self._config.outage_seconds):
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

    def finished(self, group: LedgerGroup, finished: pb.FinishedGroup) -> None:
        """Record a group whose blob is durable."""
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
        rejected = self._filters.rejected_by(finished) if self._filters else ""
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


def _rollout_error(error: BaseException) -> RolloutFailedError:
    """Of an exception that nobody foresaw the type says more than the text."""
    foreseen = isinstance(error, RolloutFailedError | RemoteError | FilterError)
    return RolloutFailedError(str(error) if foreseen else f"{type(error).__name__}: {error}")
