"""A rollout: the request decoded, its groups run at once, an event for each that is settled."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any
from urllib.parse import quote

import grpc
import numpy as np
import xxhash
from google.protobuf import struct_pb2
from prometheus_client import Counter

from services.rollout import metrics
from services.rollout.engine.wire import bounds_from_proto, sampling_from_proto
from services.rollout.environments.environment import (
    SettingError,
    TaskError,
    TaskRequest,
)
from services.rollout.episodes.group import (
    GroupResult,
    GroupSettings,
    GroupSpec,
)
from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.api.rollout.v1 import trace_pb2
from sluice.json_values import in_order, plain_number
from sluice.runtime import wire
from sluice.runtime.errors import InvalidFieldError, ServiceError
from sluice.samples.blobs import BlobReference
from sluice.samples.sample import MOST_TOP, SCORE_PREFIX, Sample, media_of

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_SECONDS = 600.0
LONGEST_ID = 200  # bytes as a file is named: with others than letters and digits escaped


def finished_event(
    samples: Sequence[Sample], blob: BlobReference, trace: trace_pb2.GroupTrace | None = None
) -> pb.RolloutResponse:
    """Returns the event of a finished group: its figures, and where its samples lie."""
    versions = [span.version for sample in samples for span in sample.spans]
    first, columns = samples[0], [sample.columns for sample in samples]
    return pb.RolloutResponse(
        finished=pb.FinishedGroup(
            group_id=first.group_id,
            blob=wire.blob_to_proto(blob),
            rewards=[float(each["reward"]) for each in columns],
            raw_rewards=[float(each.get("raw_reward", each["reward"])) for each in columns],
            response_lengths=[sample.response_length for sample in samples],
            min_version=min(versions, default=0),
            max_version=max(versions, default=0),
            prompt_length=first.prompt_length,
            finish_reasons=[wire.FINISH_REASONS[sample.finish_reason] for sample in samples],
            details=[_details(index, each) for index, each in enumerate(columns)],
            prompt_digest=digest_of(first.token_ids[: first.prompt_length]),
            media=[wire.blob_to_proto(blob) for blob in media_of(samples).values()],
            trace=trace,
        )
    )


MESSAGE_BYTES = 1 << 20  # of events, after which a message is full


def put_together(events: Sequence[pb.RolloutResponse]) -> Iterator[pb.RolloutResponse]:
    """Yields messages of several events each, in order."""
    message, size = pb.RolloutResponse(), 0
    for event in events:
        if size > MESSAGE_BYTES:
            yield message
            message, size = pb.RolloutResponse(), 0
        (message.more.add() if size else message).CopyFrom(event)
        size += event.ByteSize()
    if size:
        yield message


def failed_event(group_id: str, error: ServiceError) -> pb.RolloutResponse:
    """Returns the event of a group that could not be finished."""
    return pb.RolloutResponse(failed=pb.FailedGroup(group_id=group_id, error=error.to_status()))


def digest_of(token_ids: Sequence[int] | np.ndarray) -> str:
    """Returns the xxh3-128 of ids as int32 little-endian."""
    return xxhash.xxh3_128_hexdigest(np.asarray(token_ids, dtype="<i4").tobytes())


def _details(index: int, columns: Mapping[str, np.ndarray | float]) -> pb.SampleDetails:
    raw, mask, scores = columns.get("raw_reward"), columns.get("loss_mask"), None
    if names := _score_names(tuple(columns)):
        scores = {name.removeprefix(SCORE_PREFIX): float(columns[name]) for name in names}
    return pb.SampleDetails(
        raw_reward=None if raw is None else float(raw),
        scores=scores,  # an empty one takes as long as the rest
        episode=int(columns.get("episode", index)),
        turn_count=1 if mask is None else _turns(np.asarray(mask)),
    )


@lru_cache(maxsize=64)  # samples of an environment have the same columns
def _score_names(columns: Sequence[str]) -> Sequence[str]:
    return [name for name in columns if name.startswith(SCORE_PREFIX)]


def _turns(mask: np.ndarray) -> int:
    """Runs of sampled tokens."""
    return int(np.count_nonzero(np.diff(mask.astype(np.int8), prepend=0) == 1))


def settings_from_proto(request: pb.RolloutRequest) -> GroupSettings:
    """Decodes what all groups have in common. Raises InvalidFieldError."""
    if len(quote(request.request_id, safe="")) > LONGEST_ID:
        raise InvalidFieldError(
            "request_id", f"must not exceed {LONGEST_ID} characters, escaped as in a URL"
        )
    if request.sample_count < 1:
        raise InvalidFieldError("sample_count", "must be at least 1")
    if request.sampling.seeds:
        raise InvalidFieldError("sampling.seeds", "come from the groups")
    timeout = DEFAULT_TIMEOUT_SECONDS
    if request.HasField("group_timeout"):
        timeout = wire.seconds_of(request.group_timeout)
        if timeout <= 0:
            raise InvalidFieldError("group_timeout", "must be positive")
    return GroupSettings(
        request_id=request.request_id,
        environment=request.environment.name,
        sampling=sampling_from_proto(request.sampling, request.sample_count),
        sample_count=request.sample_count,
        bounds=bounds_from_proto(request.versions),
        pool=request.pool,
        timeout=timeout,
    )


def groups_from_proto(request: pb.RolloutRequest) -> list[GroupSpec]:
    """Decodes the groups, in order. Raises InvalidFieldError naming the one that is wrong."""
    seen: set[str] = set()
    groups = []
    for index, group in enumerate(request.groups):
        field = f"groups[{index}]"
        if group.group_id in seen:
            raise InvalidFieldError(f"{field}.group_id", f"{group.group_id!r} comes twice")
        seen.add(group.group_id)
        if len(group.seeds) not in (0, request.sample_count):
            raise InvalidFieldError(f"{field}.seeds", f"must be none or {request.sample_count}")
        if not 0 <= group.teacher_top_count <= MOST_TOP:
            raise InvalidFieldError(f"{field}.teacher_top_count", f"must be within 0..{MOST_TOP}")
        if group.teacher_top_count and not group.teacher_pool:
            raise InvalidFieldError(
                f"{field}.teacher_top_count", "has no effect without teacher_pool"
            )
        kind = group.WhichOneof("task")
        if kind is None:
            raise InvalidFieldError(f"{field}.task", "needs an index or a row")
        task = (
            TaskRequest(index=group.index)
            if kind == "index"
            else TaskRequest(
                row=values_from_proto(group.row, group.row_order, f"{field}.row_order")
            )
        )
        groups.append(
            GroupSpec(
                group_id=group.group_id,
                task=task,
                seeds=tuple(group.seeds),
                teacher_pool=group.teacher_pool,
                teacher_top_count=group.teacher_top_count,
            )
        )
    return groups


def values_from_proto(struct: struct_pb2.Struct, order: bytes, field: str) -> Mapping[str, Any]:
    """Decodes JSON values; their keys are in an order of `field`, and without one by name.

    A Struct has its own in another order in each process, and prompts are made of them. It has
    floats only; whole ones become integers again. Raises InvalidFieldError for what is no order.
    """
    try:
        keys = json.loads(order) if order else 0
    except (ValueError, RecursionError):
        raise InvalidFieldError(field, "is not JSON") from None
    values: Mapping[str, Any] = in_order(_values(struct), keys)
    return values


def _values(struct: struct_pb2.Struct) -> dict[str, Any]:
    return {key: _plain(value) for key, value in struct.fields.items()}


def _plain(value: struct_pb2.Value) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "number_value":
        return plain_number(value.number_value)
    if kind == "struct_value":
        return _values(value.struct_value)
    if kind == "list_value":
        return [_plain(item) for item in value.list_value.values]
    return None if kind in (None, "null_value") else getattr(value, kind)


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """How an evaluation runs and is summed up.

    pass_at: the k of pass@k. threshold: raw reward that passes. limit: groups of it that run at
    once, 0 for any number.
    """

    pass_at: tuple[int, ...]
    threshold: float
    limit: int


def evaluation_from_proto(request: pb.EvaluateRequest) -> EvaluationSettings:
    """Decodes how an evaluation runs. Raises InvalidFieldError."""
    count = request.rollout.sample_count
    if any(not 1 <= k <= count for k in request.pass_at):
        raise InvalidFieldError("pass_at", f"must be within 1..{count}, the samples of a task")
    threshold = request.pass_threshold if request.HasField("pass_threshold") else 1.0
    if not math.isfinite(threshold):
        raise InvalidFieldError("pass_threshold", "must be finite")
    return EvaluationSettings(
        pass_at=tuple(request.pass_at), threshold=threshold, limit=request.max_running_groups
    )


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

    def __init__(
        self,
        request_id: str,
        on_settled: Callable[[Rollout], None],
        counters: Sequence[Counter] = (metrics.GROUPS,),
    ) -> None:
        """`counters` count groups that settle, by outcome."""
        self.request_id = request_id
        self._on_settled, self._counters = on_settled, counters
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

    async def follow(self) -> AsyncIterator[Sequence[pb.RolloutResponse]]:
        """Yields every event from the first one, those that are there together; ends when all
        groups are settled.

        Traces are sent once: events stay in memory long after. Raises DrainingError when the
        rollout is stopped before: once its groups have ended, so that what was being stored is
        in the journal for whoever goes on.
        """
        sent = 0
        while True:
            if events := self._events[sent:]:
                sent += len(events)
                yield events
                for event in events:
                    if event.HasField("finished"):
                        event.finished.ClearField("trace")
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
        cancelled = [name for name in named if name in self._open]
        for group_id in cancelled:
            task = self._open[group_id]
            error = CancelledGroupError(group_id)
            self._close_group(group_id, failed_event(group_id, error), "cancelled")
            task.cancel()
        return cancelled

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
        for counter in self._counters:
            counter.labels(outcome).inc()
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
