"""One Rollout call of the feed, seen through over lost workers and failed groups."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc

from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.loop.ledger import LedgerGroup
from sluice.loop.outage import Outage
from sluice.loop.workers import EpisodeWorkers, WorkerLostError

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
class GroupCall:
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
