"""Runs the rollouts of an episode worker: begun once, joined by repeats, stopped if orphaned."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from services.rollout import metrics
from services.rollout.config import EpisodesConfig
from services.rollout.environments.environment import (
    SettingError,
    TaskError,
    UnknownEnvironmentError,
)
from services.rollout.environments.runner import Environments, Runner
from services.rollout.episodes.group import (
    GroupResult,
    GroupRunner,
    GroupSettings,
    GroupSpec,
    GroupTools,
)
from services.rollout.episodes.spool import StoreFailedError
from services.rollout.episodes.wire import (
    EvaluationSettings,
    failed_event,
    finished_event,
    groups_from_proto,
    settings_from_proto,
    values_from_proto,
)
from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.runtime.errors import InvalidFieldError, NotFoundError, QueueFullError, ServiceError
from sluice.runtime.idempotency import (
    RequestTable,
    cancel_all,
    check_same_body,
    has_failed,
    request_digest,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _OpeningRollout:
    opening: asyncio.Task[Rollout]
    group_count: int


class CancelledGroupError(ServiceError):
    """CancelRollout named the group, or all of its rollout."""

    code = grpc.StatusCode.CANCELLED
    reason = "GROUP_CANCELLED"

    def __init__(self, group_id: str) -> None:
        super().__init__(f"group {group_id} was cancelled", group_id=group_id)


class InternalGroupError(ServiceError):
    """A bug; the log of the server has the trace."""


class WorkerDrainingError(ServiceError):
    """The worker stops; the same request goes on at another one."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "DRAINING"

    def __init__(self) -> None:
        super().__init__("this worker stops; ask another one for the rest")


class Rollout:
    """Runs the groups of one request; calls `on_settled` once, when every group has its event."""

    def __init__(self, request_id: str, on_settled: Callable[[Rollout], None]) -> None:
        self.request_id = request_id
        self._on_settled = on_settled
        self._events: list[pb.RolloutResponse] = []
        self._open: dict[str, asyncio.Task[GroupResult]] = {}
        self._tasks: set[asyncio.Task[GroupResult]] = set()  # cancelled ones too, till they end
        self._changed = asyncio.Event()
        self.settled = asyncio.Event()  # every group has its event
        self._is_stopped = False
        self.listener_count = 0

    @property
    def open_count(self) -> int:
        """Groups without an event."""
        return len(self._open)

    def add_event(self, event: pb.RolloutResponse) -> None:
        """Add the event of a group that was settled before."""
        self._events.append(event)

    def start(self, groups: Iterable[tuple[str, Coroutine[Any, Any, GroupResult]]]) -> None:
        """Run these groups."""
        for group_id, run in groups:
            task = asyncio.create_task(run, name=f"group {group_id}")
            self._open[group_id] = task
            self._tasks.add(task)
            task.add_done_callback(partial(self._settle, group_id))
        metrics.GROUPS_OPEN.inc(len(self._open))
        if not self._open:
            self._end()

    async def follow(self) -> AsyncIterator[pb.RolloutResponse]:
        """Yields every event from the first one; ends when all groups are settled.

        Traces are sent once: events stay in memory long after. Raises DrainingError when the
        rollout is stopped before: once its groups have ended, so that what was being stored is
        in the journal for whoever goes on.
        """
        sent = 0
        while True:
            for event in self._events[sent:]:
                sent += 1
                yield event
                if event.HasField("finished"):
                    event.finished.ClearField("trace")
            if sent < len(self._events):
                continue
            if self._is_stopped:
                await self._ended()
                raise WorkerDrainingError
            if not self._open:
                return
            self._changed.clear()
            await self._changed.wait()

    def cancel(self, group_ids: Sequence[str]) -> list[str]:
        """End open groups (all of them for an empty list); returns which, at once."""
        named = dict.fromkeys(group_ids or self._open)
        found = [name for name in named if name in self._open]
        for group_id in found:
            task = self._open[group_id]
            error = CancelledGroupError(group_id)
            self._close_group(group_id, failed_event(group_id, error), "cancelled")
            task.cancel()
        return found

    async def stop(self) -> None:
        """End all groups without an event: a later call of the same request runs them."""
        metrics.GROUPS_OPEN.dec(len(self._open))
        self._is_stopped |= bool(self._open)
        for task in self._open.values():  # the others were cancelled before; twice cuts a write off
            task.cancel()
        self._open.clear()
        self._changed.set()
        await self._ended()

    async def _ended(self) -> None:
        """Waits until no group runs any more; cancelling the wait cancels none of them."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _settle(self, group_id: str, task: asyncio.Task[GroupResult]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            if group_id in self._open:
                logger.error("group %s was cancelled from within", group_id)
                event = failed_event(group_id, CancelledGroupError(group_id))
                self._close_group(group_id, event, "failed")
            return
        error = task.exception()
        if group_id not in self._open:
            return
        if error is None:
            result = task.result()
            self._close_group(
                group_id, finished_event(result.samples, result.blob, result.trace), "finished"
            )
        else:
            logger.info("group %s: %s", group_id, error)
            self._close_group(group_id, failed_event(group_id, _typed(group_id, error)), "failed")

    def _close_group(self, group_id: str, event: pb.RolloutResponse, outcome: str) -> None:
        del self._open[group_id]
        self._events.append(event)
        metrics.GROUPS.labels(outcome).inc()
        metrics.GROUPS_OPEN.dec()
        self._changed.set()
        if not self._open:
            self._end()

    def _end(self) -> None:
        self.settled.set()
        self._on_settled(self)


def _typed(group_id: str, error: BaseException) -> ServiceError:
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, TaskError):
        return InvalidFieldError(f"groups[{group_id}].{error.key}", str(error))
    if isinstance(error, SettingError):
        return InvalidFieldError(f"environment.settings.{error.key}", str(error))
    logger.error("group %s failed", group_id, exc_info=error)
    return InternalGroupError(f"{type(error).__name__} in group {group_id}", group_id=group_id)


class Rollouts:
    """Owns every rollout of the process."""

    def __init__(
        self,
        config: EpisodesConfig,
        environments: Environments,
        tools: GroupTools,
    ) -> None:
        self._config, self._environments = config, environments
        self._tools, self._spool, self._waits = tools, tools.spool, tools.waits
        self._running = asyncio.Semaphore(config.max_running_groups)
        self._evaluating = asyncio.Semaphore(config.max_evaluated_groups)
        self._entries: RequestTable[_OpeningRollout] = RequestTable(config.kept_rollouts)
        self._orphans: dict[str, asyncio.TimerHandle] = {}
        self._chores: set[asyncio.Task[None]] = set()

    async def follow(
        self, request: pb.RolloutRequest, evaluation: EvaluationSettings | None = None
    ) -> AsyncIterator[pb.RolloutResponse]:
        """Yields the events of a rollout, which begins with the first call of its request_id.

        Raises RequestIdReusedError, InvalidFieldError, QueueFullError, StoreFailedError and
        DrainingError.
        """
        rollout = await self._open(request, evaluation)
        self._unwatch_orphan(rollout)
        rollout.listener_count += 1
        try:
            async for event in rollout.follow():
                yield event
        finally:
            rollout.listener_count -= 1
            if not rollout.listener_count and rollout.open_count:
                self._watch_orphan(rollout)

    async def cancel(self, request_id: str, group_ids: Sequence[str]) -> list[str]:
        """End groups that have not settled; returns which.

        Raises NotFoundError, and what ended the opening of the rollout.
        """
        entry = self._entries.get(request_id)
        if entry is None:
            raise NotFoundError("rollout", request_id)
        rollout = await _rollout_of(entry)
        cancelled = rollout.cancel(group_ids)
        if cancelled:
            await self._spool.cancel(request_id, cancelled)
        return cancelled

    async def drain(self, seconds: float) -> None:
        """Let rollouts settle for so long, then send their listeners to another worker."""
        begun = [rollout for rollout in self._begun() if rollout.open_count]
        waits = [asyncio.ensure_future(rollout.settled.wait()) for rollout in begun]
        if waits:
            _, pending = await asyncio.wait(waits, timeout=seconds)
            for wait in pending:
                wait.cancel()
        await self.close()

    async def close(self) -> None:
        """Stop all rollouts; what is finished stays in the store."""
        for timer in self._orphans.values():
            timer.cancel()
        await cancel_all([entry.opening for entry in self._entries])
        await asyncio.gather(*(rollout.stop() for rollout in self._begun()))
        await asyncio.gather(*self._chores, return_exceptions=True)

    async def _open(
        self, request: pb.RolloutRequest, evaluation: EvaluationSettings | None
    ) -> Rollout:
        name = request.request_id
        body = request_digest(request)
        entry = self._entries.find(name, body)
        if entry is None:
            self._check_room(len(request.groups))
            begin = self._begin(request, body, evaluation)
            opening = asyncio.create_task(begin, name=f"open {name}")
            entry = self._entries.add(name, body, _OpeningRollout(opening, len(request.groups)))
            opening.add_done_callback(lambda done: self._opened(name, done))
        return await _rollout_of(entry)

    async def _begin(
        self, request: pb.RolloutRequest, body: str, evaluation: EvaluationSettings | None
    ) -> Rollout:
        settings = settings_from_proto(request)
        groups = await asyncio.to_thread(groups_from_proto, request)  # there may be thousands
        runner = await self._create_runner(request.environment, groups)
        progress = await self._spool.open(request.request_id, body)
        check_same_body(request.request_id, body, progress.body)
        rollout = Rollout(request.request_id, self._on_settled)
        wanted = {group.group_id for group in groups}
        for group_id in progress.cancelled & wanted:
            rollout.add_event(failed_event(group_id, CancelledGroupError(group_id)))
        left = {k: v for k, v in progress.finished.items() if k not in progress.cancelled}
        finished = await self._spool.read(left) if left else {}
        for samples, blob in finished.values():
            rollout.add_event(finished_event(samples, blob))
        settled = progress.cancelled | finished.keys()
        group_runner = GroupRunner(runner, self._tools)
        slots = self._slots(evaluation)
        rollout.start(
            (group.group_id, _run(group_runner, group, settings, slots))
            for group in groups
            if group.group_id not in settled
        )
        return rollout

    async def _create_runner(self, spec: pb.EnvironmentSpec, groups: list[GroupSpec]) -> Runner:
        try:
            values = values_from_proto(spec.settings)
            runner = await self._environments.create_runner(spec.name, values)
            for index, group in enumerate(groups):
                try:
                    runner.check(group.task)
                except TaskError as error:
                    raise InvalidFieldError(f"groups[{index}].{error.key}", str(error)) from None
            with self._waits.waiting("settings of an environment", on=[spec.name]):
                await runner.open()
        except UnknownEnvironmentError as error:
            raise InvalidFieldError("environment.name", str(error)) from None
        except SettingError as error:
            raise InvalidFieldError(f"environment.settings.{error.key}", str(error)) from None
        return runner

    def _slots(self, evaluation: EvaluationSettings | None) -> tuple[asyncio.Semaphore, ...]:
        """Returns what a group must acquire to run; the request's own limit first."""
        if evaluation is None:
            return (self._running,)
        own = (asyncio.Semaphore(evaluation.limit),) if evaluation.limit else ()
        return (*own, self._evaluating)

    def _check_room(self, count: int) -> None:
        config = self._config
        if count > config.max_open_groups:
            raise InvalidFieldError("groups", f"must not exceed {config.max_open_groups}")
        rollouts = self._begun()
        opening = [e.group_count for e in self._entries if not e.opening.done()]
        open_rollouts = len(opening) + sum(rollout.open_count > 0 for rollout in rollouts)
        open_groups = sum(opening) + sum(rollout.open_count for rollout in rollouts)
        if open_rollouts >= config.max_open_rollouts:
            raise QueueFullError(
                f"{open_rollouts} rollouts run", limit=config.max_open_rollouts, kind="rollouts"
            )
        if open_groups + count > config.max_open_groups:
            raise QueueFullError(
                f"{open_groups} groups are open", limit=config.max_open_groups, kind="groups"
            )

    def _opened(self, name: str, opening: asyncio.Task[Rollout]) -> None:
        """Forgets a failure. Whoever asked may have gone away since; else they follow now."""
        if has_failed(opening):
            self._entries.discard(name)
        elif opening.result().open_count:
            self._watch_orphan(opening.result())

    def _on_settled(self, rollout: Rollout) -> None:
        self._unwatch_orphan(rollout)
        self._start_chore(self._settle(rollout))
        if (entry := self._entries.get(rollout.request_id)) is not None:
            self._entries.done(rollout.request_id, entry)

    def _begun(self) -> list[Rollout]:
        """Returns those that are neither opening nor were refused."""
        tasks = [entry.opening for entry in self._entries]
        return [task.result() for task in tasks if task.done() and not has_failed(task)]

    async def _settle(self, rollout: Rollout) -> None:
        try:
            await self._spool.settle(rollout.request_id, self._config.kept_rollouts)
        except StoreFailedError as error:
            logger.warning("rollout %s: %s", rollout.request_id, error)

    def _watch_orphan(self, rollout: Rollout) -> None:
        def stop() -> None:
            self._orphans.pop(rollout.request_id, None)
            self._start_chore(self._stop_orphan(rollout))

        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._config.orphan_seconds, stop)
        self._orphans[rollout.request_id] = timer

    def _unwatch_orphan(self, rollout: Rollout) -> None:
        if (timer := self._orphans.pop(rollout.request_id, None)) is not None:
            timer.cancel()

    async def _stop_orphan(self, rollout: Rollout) -> None:
        """Stops it; kept until its groups have ended, lest another run of them begins beside."""
        if rollout.listener_count or rollout.settled.is_set():  # in that very moment
            return
        await rollout.stop()
        self._entries.discard(rollout.request_id)
        logger.info("rollout %s has no listener; stopped", rollout.request_id)

    def _start_chore(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)


async def _run(
    runner: GroupRunner,
    group: GroupSpec,
    settings: GroupSettings,
    slots: Sequence[asyncio.Semaphore],
) -> GroupResult:
    async with contextlib.AsyncExitStack() as stack:
        for slot in slots:
            await stack.enter_async_context(slot)
        return await runner.run(group, settings)


async def _rollout_of(entry: _OpeningRollout) -> Rollout:
    """Returns the rollout once begun. Raises DrainingError when the worker closes before."""
    try:
        return await asyncio.shield(entry.opening)
    except asyncio.CancelledError:
        if entry.opening.cancelled():  # the caller was not, and waits for an answer
            raise WorkerDrainingError from None
        raise
