"""One rollout: its groups run at once, its events are told to whoever listens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

import grpc

from services.rollout import metrics
from services.rollout.environments.environment import SettingError, TaskError
from services.rollout.episodes.events import failed_event, finished_event
from services.rollout.episodes.group import GroupResult
from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.runtime.errors import InvalidFieldError, ServiceError

logger = logging.getLogger(__name__)


class CancelledGroupError(ServiceError):
    """CancelRollout named the group, or all of its rollout."""

    code = grpc.StatusCode.CANCELLED
    reason = "GROUP_CANCELLED"


class InternalGroupError(ServiceError):
    """A bug; the log of the server has the trace."""


class DrainingError(ServiceError):
    """The worker stops; the same request goes on at another one."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "DRAINING"

    def __init__(self) -> None:
        super().__init__("this worker stops; ask another one for the rest")


class Rollout:
    """Groups of one request. `on_settled` is called once, when every group has its event."""

    def __init__(self, request_id: str, body: str, on_settled: Callable[[Rollout], None]) -> None:
        self.request_id, self.body = request_id, body
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
        """An event that was settled before."""
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
        """Every event from the first one; ends when all groups are settled.

        Traces are told once: events stay in memory long after. Raises DrainingError when the
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
                raise DrainingError
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
            error = CancelledGroupError(f"group {group_id} was cancelled", group_id=group_id)
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
        """Until no group runs any more; cancelling the wait cancels none of them."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _settle(self, group_id: str, task: asyncio.Task[GroupResult]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            if group_id in self._open:
                logger.error("group %s was cancelled from within", group_id)
                cancelled = CancelledGroupError("cancelled from within", group_id=group_id)
                self._close_group(group_id, failed_event(group_id, cancelled), "failed")
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
