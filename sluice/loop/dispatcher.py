"""Keeps rollouts in flight as the schedule allows, and gives a step its groups."""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import sqlite3
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sluice import faults
from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.client import RemoteError
from sluice.loop.filters import FilterError, GroupFilters
from sluice.loop.ledger import Ledger, LedgerGroup, lost_reason
from sluice.loop.metrics import LOST_GROUPS
from sluice.loop.mixture import Mixture
from sluice.loop.workers import (
    EpisodeWorkers,
    Request,
    RolloutCall,
    RolloutFailedError,
    WorkerLostError,
    cut_into_calls,
)
from sluice.runtime import wire

logger = logging.getLogger(__name__)

TOGETHER_SECONDS = 0.005  # groups that finish within it are recorded in one transaction


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
    """What became of groups since the last step; rewards of all episodes that finished."""

    finished: int = 0
    filtered: int = 0
    surplus: int = 0
    dropped: int = 0  # as their tasks failed
    drop_reason: str = ""  # of the last one
    episodes: int = 0
    reward_sum: float = 0.0

    def row(self) -> dict[str, float]:
        """For `metrics.jsonl`; where no episode finished there is no mean of them."""
        row = {"filtered_groups": float(self.filtered), "surplus_groups": float(self.surplus)}
        if self.episodes:
            row["reward_mean_unfiltered"] = self.reward_sum / self.episodes
        return row


@dataclass(frozen=True)
class _Arrival:
    """A group that finished, what filter rejected it, and why it is dropped, both empty if not."""

    group: LedgerGroup
    episodes: int
    rejected: str
    drop_reason: str

    @property
    def is_of_lost_weights(self) -> bool:
        return bool(self.drop_reason) and not self.rejected


class Frontier:
    """The first position that may not be in flight: below it, so many are not dropped."""

    def __init__(self, dropped: Iterable[int]) -> None:
        self.position = 0
        self._allowed = self._kept = 0  # positions below it that may be, and are, not dropped
        self._dropped = set(dropped)  # those that are not below it

    def allow(self, count: int) -> None:
        """Let so many positions lie below it that are not dropped; never fewer than before."""
        self._allowed = count
        self._advance()

    def drop(self, position: int) -> None:
        """A position is dropped, so that another may take its place."""
        if position < self.position:
            self._kept -= 1
            self._advance()
        else:
            self._dropped.add(position)

    def _advance(self) -> None:
        while self._kept < self._allowed:
            if self.position in self._dropped:
                self._dropped.remove(self.position)
            else:
                self._kept += 1
            self.position += 1


class GroupsByStep:
    """Groups by id, counted by a step of each."""

    def __init__(self, step_of: Callable[[LedgerGroup], int]) -> None:
        self._step_of = step_of
        self._groups: dict[str, LedgerGroup] = {}
        self._by_step: dict[int, dict[str, LedgerGroup]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._groups

    def add(self, group: LedgerGroup) -> None:
        self.pop(group.group_id)
        self._groups[group.group_id] = group
        self._by_step.setdefault(self._step_of(group), {})[group.group_id] = group

    def pop(self, group_id: str) -> LedgerGroup | None:
        group = self._groups.pop(group_id, None)
        if group is not None:
            step = self._step_of(group)
            del self._by_step[step][group_id]
            if not self._by_step[step]:
                del self._by_step[step]
        return group

    def count_until(self, step: int) -> int:
        """Groups of this step and earlier ones."""
        return sum(len(groups) for each, groups in self._by_step.items() if each <= step)

    def before(self, step: int) -> list[LedgerGroup]:
        """Groups of earlier steps."""
        steps = [each for each in self._by_step if each < step]
        return [group for each in steps for group in self._by_step[each].values()]

    def first(self, count: int) -> list[LedgerGroup]:
        """So many of the earliest steps; within a step by position."""
        found: list[LedgerGroup] = []
        for step in sorted(self._by_step):
            left, groups = count - len(found), self._by_step[step].values()
            found += heapq.nsmallest(left, groups, key=lambda group: group.position)
        return found


class RolloutDispatcher:
    """Owns the rollouts in flight. `build_request` makes the Rollout call of some groups.

    `hold` hears of every blob that is generated, by digest, and of what its samples were shown.
    `mixture` says which environment and task each new group is of; a call is of one environment.
    `place` says where the task of a group is from, for messages.
    """

    def __init__(
        self,
        config: DispatcherConfig,
        ledger: Ledger,
        workers: EpisodeWorkers,
        build_request: Callable[[Sequence[LedgerGroup], int], pb.RolloutRequest],
        hold: Callable[..., None] = lambda *_: None,
        filters: GroupFilters | None = None,
        mixture: Mixture | None = None,
        place: Callable[[LedgerGroup], str] = lambda group: group.group_id,
    ) -> None:
        self._mixture, self._place = mixture, place
        self._config, self._ledger, self._workers = config, ledger, workers
        self._build_request, self._hold = build_request, hold
        self._filters = filters or GroupFilters()
        self._counts = GroupCounts()
        self._calls: set[RolloutCall[LedgerGroup]] = set()
        self._cancelling: set[asyncio.Task[None]] = set()
        self._spared: set[str] = set()  # cancelled once; a step waits for them
        self._frontier = Frontier(ledger.dropped())
        self._ready = GroupsByStep(lambda group: group.oldest_step)
        self._usable = GroupsByStep(lambda group: group.oldest_step)  # those before the frontier
        self._beyond = deque(ledger.groups("generated"))  # the others, by position; some are gone
        for group in self._beyond:
            self._ready.add(group)
        self._pending = GroupsByStep(lambda group: group.issue_step)
        self._awaited = GroupsByStep(lambda group: group.issue_step)  # those a step waits for
        self._arrived: list[_Arrival] = []
        # By a run that ended; a heap by position.
        self._unsent = [(group.position, group) for group in ledger.groups("issued")]
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._recorded = asyncio.Event()  # a further version of weights; replaced when set
        self._failure: BaseException | None = None
        self._dropped_in_a_row = self._filtered_in_a_row = 0
        self._step = -1
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
            self._step = step
            self._frontier.allow(self._allowed())
            self._open_up()
        self._settle_all(self._ready.before(step - self._config.max_staleness))
        limit = self._frontier.position
        again = []
        while self._unsent and self._unsent[0][0] < limit:
            again.append(replace(heapq.heappop(self._unsent)[1], issue_step=step))
        held = len(self._pending) + len(again) + len(self._usable)
        first = self._ledger.next_position()
        wanted = self._depth * self._config.groups_per_step * self._config.over_sampling
        last = min(limit, first + math.ceil(wanted) - held)
        fresh = [
            LedgerGroup(
                position=position, group_id=f"g{position:07}", state="issued", issue_step=step
            )
            for position in range(first, last)
        ]
        if not fresh and not again:
            return
        with self._ledger.transaction():
            self._ledger.issue([(group.position, group.group_id) for group in fresh], step)
            if fresh and self._mixture is not None:
                fresh = self._mixture.assign(fresh)
            self._ledger.reissue(again)
        if fresh:
            faults.point("issued")
        for group in (*again, *fresh):
            self._pending.add(group)
            if self._config.over_sampling <= 1 or group.group_id in self._spared:
                self._awaited.add(group)
        by_environment: dict[str, list[LedgerGroup]] = {}
        for group in (*again, *fresh):
            by_environment.setdefault(group.environment, []).append(group)
        for groups in by_environment.values():
            for share in self._workers.split(groups):
                for call, request in cut_into_calls(share, self._build_request):
                    self._start(call, request)

    def _allowed(self) -> int:
        """How many groups the run may have had, besides those dropped, while this step waits.

        A run that went back to a run checkpoint has groups of later steps too, some of them
        dropped.
        """
        config = self._config
        ahead = (1 + config.max_staleness) * config.groups_per_step
        spare = math.ceil((config.over_sampling - 1) * ahead)
        left = max(0, config.steps - self._step) * config.groups_per_step
        return spare + self._ledger.consumed_count() + min(ahead, left)

    def _add_ready(self, group: LedgerGroup) -> None:
        self._ready.add(group)
        self._usable.add(group)  # what was asked for is before the frontier

    def _pop_ready(self, group_id: str) -> LedgerGroup | None:
        self._usable.pop(group_id)
        return self._ready.pop(group_id)

    def _open_up(self) -> None:
        """The frontier has advanced."""
        while self._beyond and self._beyond[0].position < self._frontier.position:
            group = self._beyond.popleft()
            if group.group_id in self._ready:
                self._usable.add(group)

    def _record_drop(self, group: LedgerGroup, reason: str) -> None:
        self._ledger.drop(group.group_id, reason)
        self._frontier.drop(group.position)
        self._open_up()

    async def take(self, step: int) -> list[LedgerGroup]:
        """The groups of a step, by position; waits for them.

        Raises RolloutFailedError, and sqlite3.Error where the ledger cannot be written.
        """
        waited = False
        while (chosen := self._choose(step)) is None:
            if isinstance(self._failure, sqlite3.Error):
                raise self._failure  # no rollout's: who owns the run directory names the file
            if self._failure is not None:
                raise _rollout_error(self._failure) from self._failure
            if not self._tasks:
                raise RolloutFailedError("no rollout is in flight and too few groups are ready")
            waited = True
            await self._changed.wait()
            self._changed.clear()
            await self.fill(step)  # replaces dropped groups
        for group in chosen:
            self._pop_ready(group.group_id)
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
        elif len(self._usable) >= self._config.groups_per_step:
            self._depth = max(self._depth - 1, min(2, 1 + self._config.max_staleness))

    def put_back(self, groups: Sequence[LedgerGroup]) -> None:
        """Offer groups again whose step did not happen."""
        for group in groups:
            self._add_ready(group)

    def lose_blob(self, digest: str) -> bool:
        """A blob is gone or damaged: generate its groups again. Whether any was ready here.

        An image may be of several.
        """
        popped = [self._pop_ready(group_id) for group_id in self._ledger.lose_blob(digest)]
        lost = [group for group in popped if group is not None]
        for group in lost:
            logger.warning("blob %s of group %s is lost", digest, group.group_id)
            self._ask_again(group)
        return bool(lost)

    def _ask_again(self, group: LedgerGroup) -> None:
        group = replace(group, state="issued", blob=None)
        heapq.heappush(self._unsent, (group.position, group))

    async def close(self) -> None:
        """Cancel what is in flight and wait for its end."""
        tasks = (*self._tasks, *self._cancelling)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _choose(self, step: int) -> list[LedgerGroup] | None:
        """The oldest of those that finished; None while it has to wait for others."""
        if len(self._usable) < self._config.groups_per_step or self._crowds_out(step):
            return None
        chosen = self._usable.first(self._config.groups_per_step)
        return sorted(chosen, key=lambda group: group.position)

    def _crowds_out(self, step: int) -> bool:
        """Whether groups in flight would grow too old if this step left the others to later ones.

        Groups as old as `step + later - max_staleness` have `later` steps behind this one. With
        over-sampling that is the surplus, and only what was spared has to be waited for.
        """
        config = self._config
        first = max(0, config.max_staleness - step)  # nothing was issued before step 0
        held = len(self._awaited) + len(self._usable)
        last = min(config.max_staleness, held // config.groups_per_step)  # later steps take all
        if config.over_sampling > 1:
            last = 0
        for later in range(first, last + 1):
            oldest = step + later - config.max_staleness
            in_flight = self._awaited.count_until(oldest)
            left = max(0, self._usable.count_until(oldest) - config.groups_per_step)
            if in_flight and in_flight + left > later * config.groups_per_step:
                return True
        return False

    def _settle_surplus(self, oldest_allowed: int) -> None:
        """Cancel or put back what the next step could not use."""
        self._record()
        late = self._pending.before(oldest_allowed)
        for _ in self._settle_all([*late, *self._ready.before(oldest_allowed)]):
            faults.point("surplus")
        names = {group.group_id for group in late}
        for call in self._calls if names else ():
            named = call.release([name for name in call.waiting if name in names])
            if named and call.request_id:  # a worker may know of them
                task = asyncio.create_task(self._cancel(call.request_id, named))
                self._cancelling.add(task)
                task.add_done_callback(self._cancelling.discard)

    def _settle_all(self, groups: Sequence[LedgerGroup]) -> Sequence[LedgerGroup]:
        if groups:
            with self._ledger.transaction():
                for group in groups:
                    self._settle(group)
        return groups

    def _settle(self, group: LedgerGroup) -> None:
        """Drop what came too late, or ask for it again."""
        self._counts.surplus += (is_surplus := self._config.over_sampling > 1)
        if self._config.drops_surplus or not is_surplus:
            self._record_drop(group, "surplus" if is_surplus else "stale")
        else:
            self._ledger.put_back(group.group_id)
            self._ask_again(group)
            self._spared.add(group.group_id)
        self._pop_pending(group.group_id)
        self._pop_ready(group.group_id)

    def _pop_pending(self, group_id: str) -> None:
        self._pending.pop(group_id)
        self._awaited.pop(group_id)

    async def _cancel(self, request_id: str, group_ids: Sequence[str]) -> None:
        """Asks a worker to stop; one that does not hear of it does some work in vain."""
        try:
            await self._workers.cancel(request_id, group_ids)
        except (WorkerLostError, RemoteError) as error:
            logger.warning("%d groups were not cancelled: %s", len(group_ids), error)

    def _start(self, groups: Sequence[LedgerGroup], request: Request) -> None:
        waiting = {group.group_id: group for group in groups}
        seconds = self._config.outage_seconds
        call = RolloutCall(
            self._workers, self._build_request, self, waiting, seconds, first=request
        )
        self._calls.add(call)  # a step may settle its groups before its task begins
        task = self._begin(call.see_through())
        task.add_done_callback(lambda _: self._calls.discard(call))

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Work that groups come of; where it fails, so does the run."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error  # what came first; others may follow from it
        self._changed.set()

    async def wait_for_version(self, version: int) -> None:
        """Wait until the ledger knows a version.

        An engine that cannot hold two serves a version before its publication has ended. Of one
        that is lost the publication may never have. Raises RolloutFailedError for one that is not
        of this run.
        """
        if self._ledger.lost_version(version, version) is not None:
            return
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
        """Record a group whose blob is durable, with those that finish together."""
        first, last = finished.min_version, finished.max_version
        rewards = episode_rewards(finished)
        lost = self._ledger.lost_version(first, last)
        group = replace(
            group,
            state="generated",
            blob=wire.blob_from_proto(finished.blob),
            sample_count=len(finished.rewards),
            reward_mean=sum(rewards) / max(1, len(rewards)),
            response_tokens=sum(finished.response_lengths),
            oldest_step=group.issue_step if lost else self._ledger.step_of_version(first),
            newest_step=group.issue_step if lost else self._ledger.step_of_version(last),
            media=tuple(blob.digest for blob in finished.media),
            min_version=first,
            max_version=last,
        )
        rejected = self._filters.rejected_by(finished) if self._filters and not lost else ""
        self._dropped_in_a_row = 0
        reason = f"filtered: {rejected}" if rejected else ""
        drop_reason = lost_reason(lost) if lost else reason
        arrival = _Arrival(group, len(rewards), rejected, drop_reason)
        self._arrived.append(arrival)
        if len(self._arrived) == 1:
            self._begin(self._record_soon())

    async def _record_soon(self) -> None:
        await asyncio.sleep(TOGETHER_SECONDS)
        self._record()

    def _record(self) -> None:
        """Until then they count as in flight: a run that ends before asks for them again."""
        arrived, self._arrived = self._arrived, []
        if not arrived:
            return
        with self._ledger.transaction():
            new = [self._ledger.generated(each.group, each.drop_reason or None) for each in arrived]
        for arrival, is_new in zip(arrived, new, strict=True):
            group = arrival.group
            self._pop_pending(group.group_id)
            if is_new and arrival.drop_reason:
                self._frontier.drop(group.position)
                self._open_up()
            elif is_new:
                assert group.blob is not None
                self._add_ready(group)
                self._hold(group.blob.digest, *group.media)
            faults.point("generated")
            if is_new and arrival.is_of_lost_weights:
                LOST_GROUPS.inc()
                logger.warning("group %s is dropped: %s", group.group_id, arrival.drop_reason)
            elif is_new:
                self._count_finished(arrival)
        self._changed.set()

    def _count_finished(self, arrival: _Arrival) -> None:
        counts, rejected = self._counts, arrival.rejected
        counts.finished += 1
        counts.episodes += arrival.episodes
        counts.reward_sum += arrival.group.reward_mean * arrival.episodes
        self._filtered_in_a_row = self._filtered_in_a_row + 1 if rejected else 0
        counts.filtered += bool(rejected)
        count, most = self._filtered_in_a_row, self._config.filtered_in_a_row
        told = f"{count} groups in a row were filtered, the last one by {rejected}: "
        if count >= most:
            why = "too hard, too easy, or learned (max_filtered_in_a_row)"
            raise RolloutFailedError(told + why)
        if rejected and count in (most // 8, most // 4, most // 2):
            logger.warning("%sthe run ends at %d (max_filtered_in_a_row)", told, most)

    def failed(self, group: LedgerGroup, why: str) -> LedgerGroup | None:
        """Count an attempt; the group as it is asked for again, None if it is dropped."""
        if group.attempts >= self._config.attempts:
            self._drop(group, f"failed {group.attempts} times: {why}")
            return None
        group = replace(group, attempts=group.attempts + 1)
        self._ledger.reissue([group])
        self._pending.add(group)
        return group

    def hopeless(self, group: LedgerGroup, why: str) -> None:
        """Drop a group that would fail again."""
        self._drop(group, why)

    def _drop(self, group: LedgerGroup, why: str) -> None:
        reason = f"{self._place(group)}: {why}"
        logger.warning("group %s is dropped: %s", group.group_id, reason)
        self._record_drop(group, reason)
        self._pop_pending(group.group_id)
        self._dropped_in_a_row += 1
        self._counts.dropped += 1
        self._counts.drop_reason = reason
        self._changed.set()
        if self._dropped_in_a_row >= self._config.dropped_in_a_row:
            raise RolloutFailedError(
                f"{self._dropped_in_a_row} groups in a row were dropped (max_dropped_in_a_row), "
                f"the last one: {reason}"
            )


def episode_rewards(finished: pb.FinishedGroup) -> list[float]:
    """Mean reward of each episode of a group over its samples."""
    episodes = [each.episode for each in finished.details]
    if len({*episodes}) == len(episodes):  # one sample each, or no details
        return list(finished.rewards)
    rewards: dict[int, list[float]] = {}
    for episode, reward in zip(episodes, finished.rewards, strict=True):
        rewards.setdefault(episode, []).append(reward)
    return [sum(own) / len(own) for own in rewards.values()]


def _rollout_error(error: BaseException) -> RolloutFailedError:
    """Of an exception that nobody foresaw the type says more than the text."""
    foreseen = isinstance(error, RolloutFailedError | RemoteError | FilterError)
    return RolloutFailedError(str(error) if foreseen else f"{type(error).__name__}: {error}")
