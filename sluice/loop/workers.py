"""What is asked of episode workers: groups in calls that outlive a worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc
import xxhash
from google.protobuf.struct_pb2 import Struct

from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.client import ClientCache, RemoteError, RolloutClient, RouterClient
from sluice.config import ConfigError
from sluice.json_values import key_order
from sluice.loop import trace
from sluice.loop.config import (
    EnvironmentConfig,
    EnvironmentShare,
    EvaluationSetConfig,
    RunConfig,
    SamplingConfig,
)
from sluice.loop.prompts import PromptSource, Task
from sluice.runtime.idempotency import all_of
from sluice.runtime.recovery import NotReadyError, Retries, is_passing, wait_until_ready
from sluice.runtime.security import SecurityConfig
from sluice.runtime.wire import duration_of


def sample_seed(run_seed: int, group_id: str, index: int) -> int:
    """A non-negative 63-bit seed, the same in every run with this seed."""
    return xxhash.xxh3_64_intdigest(f"{run_seed}/{group_id}/{index}".encode()) >> 1


logger = logging.getLogger(__name__)

T = TypeVar("T")
G = TypeVar("G")
Request = pb.RolloutRequest | pb.EvaluateRequest
Response = pb.RolloutResponse | pb.EvaluateResponse

LISTED_SECONDS = 1.0  # that a list of workers is taken for, unless one of them is lost
END_SECONDS = 5  # that a worker has to hear that a call is given up
CALL_BYTES = 16 << 20  # of one call; servers take 64 MiB, where they are not told otherwise

# The task itself is at fault: issuing it again would fail again.
_HOPELESS = {grpc.StatusCode.INVALID_ARGUMENT.value[0], grpc.StatusCode.NOT_FOUND.value[0]}
# Engines or the store are at fault, not the group: it loses no attempt.
_BLAMELESS = {
    code.value[0]
    for code in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
    )
}


def build_request(
    config: RunConfig,
    share: EnvironmentShare,
    tasks: Sequence[tuple[str, Task]],
    versions: engine_pb.VersionBounds,
    trial: int,
) -> pb.RolloutRequest:
    """Builds the call of training groups of one of `config.shares`: (group id, task).

    One content and trial has one id: a repeat of it resumes, another trial runs again what the
    first one answered as failed.
    """
    count, seconds = share.samples_per_group, share.group_timeout_seconds
    assert count is not None and seconds is not None
    groups = []
    for name, task in tasks:
        group = _group(config, name, name, task, count)
        teacher = teacher_of(config, share, task)
        group.teacher_pool = config.teachers[teacher].pool if teacher else ""
        if group.teacher_pool:
            group.teacher_top_count = config.algorithm.teacher_top_count
        groups.append(group)
    sampling = config.training_sampling(share)
    return _request(share.environment, sampling, versions, groups, seconds, trial, takes_more=True)


def build_evaluation(
    config: RunConfig,
    data: EvaluationSetConfig,
    tasks: Sequence[tuple[str, Task]],
    versions: engine_pb.VersionBounds,
    trial: int | str,
) -> pb.EvaluateRequest:
    """Builds the call of held-out groups of one data set. `trial` as for `build_request`.

    Seeds come from the task, not from the step: scores of two steps differ by the weights.
    """
    assert config.evaluation is not None
    groups = [
        _group(config, name, f"eval-{name.split('-', 2)[2]}", task, data.samples)  # without step
        for name, task in tasks
    ]
    environment, seconds = config.environment_of(data), config.timeout_of(data)
    return pb.EvaluateRequest(
        rollout=_request(environment, config.sampling_of(data), versions, groups, seconds, trial),
        pass_at=data.pass_at,
        pass_threshold=data.pass_threshold,
        max_running_groups=config.evaluation.max_running_groups,
    )


def _request(
    environment: EnvironmentConfig,
    sampling: SamplingConfig,
    versions: engine_pb.VersionBounds,
    groups: Sequence[pb.GroupRequest],
    group_timeout_seconds: float,
    trial: int | str,
    *,
    takes_more: bool = False,
) -> pb.RolloutRequest:
    request = pb.RolloutRequest(
        environment=spec_of(environment),
        sampling=engine_pb.SamplingParams(**sampling.model_dump()),
        sample_count=len(groups[0].seeds),
        group_timeout=duration_of(group_timeout_seconds),
        versions=versions,
        groups=groups,
        takes_more=takes_more,
    )
    content = request.SerializeToString(deterministic=True).hex()
    request.request_id = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{content}/{trial}"))
    return request


def spec_of(environment: EnvironmentConfig) -> pb.EnvironmentSpec:
    spec = pb.EnvironmentSpec(name=environment.name)
    spec.settings.update(environment.settings)
    spec.settings_order = _order_of(environment.settings)
    return spec


def _group(
    config: RunConfig, group_id: str, seed_name: str, task: Task, count: int
) -> pb.GroupRequest:
    seeds = [sample_seed(config.seed, seed_name, index) for index in range(count)]
    if isinstance(task, int):
        return pb.GroupRequest(group_id=group_id, seeds=seeds, index=task)
    row = Struct()
    row.update(dict(task))
    return pb.GroupRequest(group_id=group_id, seeds=seeds, row=row, row_order=_order_of(task))


def _order_of(values: Mapping[str, Any]) -> bytes:
    """As `row_order` has it; empty where no order is to be kept."""
    order = key_order(values)
    return json.dumps(order, separators=(",", ":")).encode() if order else b""


def teacher_of(config: RunConfig, share: EnvironmentShare, task: Task) -> str:
    """Names the teacher of a task: its row's, or its environment's; empty where a run has none.

    Raises ConfigError for a row that names another.
    """
    if not config.teachers:
        return ""
    name = share.teacher
    if isinstance(task, Mapping) and task.get("teacher") is not None:
        name = str(task["teacher"])
    if name not in config.teachers:
        what = f"names the teacher {name!r}" if name else "names no teacher"
        known = ", ".join(config.teachers)
        raise ConfigError(f"teachers: a task {what}, and the run has several: {known}")
    return name


def check_teachers(config: RunConfig, share: EnvironmentShare, source: PromptSource) -> None:
    """Raise ConfigError unless every task of an environment has its teacher."""
    alike = isinstance(source.tasks, range)  # no row, so none that names another
    for task in source.tasks[:1] if alike else source.tasks:
        teacher_of(config, share, task)


def refused(key: str, message: str) -> ConfigError:
    """What a worker says of an environment, by the setting `key` that gives it."""
    return ConfigError(key + message.removeprefix("environment"))


class WorkerLostError(Exception):
    """An episode worker went away, or was too busy, in the middle of a call.

    `retry_seconds`: when to ask again, 0 where nobody says.
    """

    def __init__(self, message: str, retry_seconds: float) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


@contextlib.contextmanager
def _typed_loss(client: RolloutClient) -> Iterator[None]:
    """Raises WorkerLostError where a repeat may help: after a deadline the request goes on too."""
    try:
        yield
    except RemoteError as error:
        is_busy = error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and not error.is_too_large
        if not is_busy and not is_passing(error):
            raise
        message = f"episode worker {client.address}: {error}"
        raise WorkerLostError(message, error.retry_seconds) from error


class NoWorkerError(Exception):
    """The router knows no episode worker."""


class EpisodeWorkers:
    """Chooses a worker for every call, in turn."""

    def __init__(
        self,
        router: RouterClient,
        security: SecurityConfig,
        wait_seconds: float,
        *,
        ends_calls: bool = False,
    ) -> None:
        """`ends_calls`: what is given up is cancelled at its worker, since nobody comes back."""
        self._router, self._wait_seconds = router, wait_seconds
        self._ends_calls = ends_calls
        self._clients = ClientCache(RolloutClient, security)
        self._asked: dict[str, RolloutClient] = {}  # by the request_id of a call under way
        self._worker_count = 1
        self._turn = 0
        self._active: list[str] = []  # addresses when workers were last asked for
        self._listed = -math.inf  # when that was
        self._listing: asyncio.Task[list[router_pb.Engine]] | None = None

    async def close(self) -> None:
        if self._listing is not None:
            self._listing.cancel()
            await asyncio.gather(self._listing, return_exceptions=True)
        await self._clients.close()

    def split(self, groups: Sequence[T]) -> list[Sequence[T]]:
        """Returns one share a worker, as even as can be; no empty ones."""
        shares = [groups[i :: self._worker_count] for i in range(self._worker_count)]
        return [share for share in shares if share]

    async def refresh(self) -> list[str]:
        """Returns addresses of the workers; waits for the first one. Raises NoWorkerError."""
        addresses = await wait_until_ready(
            "an episode worker", self._addresses, self._wait_seconds, NoWorkerError
        )
        self._worker_count, self._active = len(addresses), addresses
        self._listed = time.monotonic()
        return addresses

    async def _recent(self) -> list[str]:
        """Returns addresses as they were a moment ago: a worker that comes is asked a bit later."""
        is_recent = time.monotonic() - self._listed < LISTED_SECONDS
        return self._active if is_recent else await self.refresh()

    async def vocabularies(self) -> dict[str, str]:
        """Returns digests of what the workers encode prompts with, of those that answer.

        Waits for the first worker. Raises NoWorkerError.
        """
        found = {}
        for address in await self.refresh():
            try:
                found[address] = await self._clients[address].vocabulary()
            except RemoteError as error:
                if not is_passing(error):
                    raise
                logger.warning("episode worker %s was not asked for its tokens: %s", address, error)
        return found

    async def check(self, environments: Mapping[str, EnvironmentConfig]) -> None:
        """Have those workers that answer open environments, by the key that gives each.

        All at once: one may take long to open. Raises ConfigError for one that is wrong,
        NoWorkerError, and RemoteError where its code fails.
        """
        if environments:
            await all_of(self._open(each, environments) for each in await self.refresh())

    async def _open(self, address: str, environments: Mapping[str, EnvironmentConfig]) -> None:
        for key, environment in environments.items():
            try:
                await self._clients[address].check_environment(spec_of(environment))
            except RemoteError as error:
                if error.code is grpc.StatusCode.INVALID_ARGUMENT:
                    raise refused(key, error.message) from None
                if not is_passing(error):
                    raise
                logger.warning("episode worker %s did not open %s: %s", address, key, error)

    async def _addresses(self) -> list[str]:
        workers = await self._list()
        active = [w.address for w in workers if w.state == router_pb.ENGINE_STATE_ACTIVE]
        if not active:
            raise NotReadyError(f"router {self._router.address} knows none")
        return active

    async def _list(self) -> list[router_pb.Engine]:
        """Asks the router once for all who ask together: a step begins a call for each worker."""
        if self._listing is None or self._listing.done():
            listing = self._router.list_engines(router_pb.ROLE_EPISODES)
            self._listing = asyncio.create_task(listing, name="list episode workers")
        return await asyncio.shield(self._listing)

    async def ask(self, request: Request) -> AsyncIterator[Response]:
        """Streams the answers to a call. Raises WorkerLostError where another may do better."""
        addresses = await self._recent()
        self._turn += 1
        client = self._clients[addresses[self._turn % len(addresses)]]
        request_id = request_id_of(request)
        self._asked[request_id] = client
        try:
            with _typed_loss(client):
                if isinstance(request, pb.EvaluateRequest):
                    async for scored in client.evaluate(request):
                        yield scored
                    return
                async for response in client.rollout(request):
                    if response.HasField("finished"):
                        trace.add_group(response.finished)
                    yield response
        except WorkerLostError:
            self._listed = -math.inf  # who is there now is asked for first
            raise
        except asyncio.CancelledError:
            if self._ends_calls:
                await self._end(request_id)
            raise
        finally:
            if self._asked.get(request_id) is client:
                del self._asked[request_id]

    async def _end(self, request_id: str) -> None:
        try:
            async with asyncio.timeout(END_SECONDS):
                await self.cancel(request_id, ())
        except (WorkerLostError, RemoteError, TimeoutError) as error:
            logger.warning("what a worker was asked for goes on: %s", error)

    async def cancel(self, request_id: str, group_ids: Sequence[str]) -> None:
        """Ends groups, or all, of a call that is under way; does nothing where none has this id.

        Raises WorkerLostError; what runs there then is not waited for.
        """
        client = self._asked.get(request_id)
        if client is None:
            return
        try:
            with _typed_loss(client):
                await client.cancel(request_id, group_ids)
        except RemoteError as error:
            if error.code is not grpc.StatusCode.NOT_FOUND:  # it settled meanwhile
                raise


def cut_into_calls(
    groups: Sequence[G], build_request: Callable[[Sequence[G], int], Request]
) -> Iterator[tuple[Sequence[G], Request]]:
    """Yield groups in calls that servers take, and the request of each: of CALL_BYTES, unless one
    group alone is larger."""
    request = build_request(groups, 0)
    if len(groups) < 2 or request.ByteSize() <= CALL_BYTES:
        yield groups, request
        return
    half = len(groups) // 2
    for part in (groups[:half], groups[half:]):
        yield from cut_into_calls(part, build_request)


def request_id_of(request: Request) -> str:
    """Returns the id of a call."""
    rollout = request.rollout if isinstance(request, pb.EvaluateRequest) else request
    return rollout.request_id


class RolloutFailedError(Exception):
    """Rollouts cannot go on; the message says why."""


class CallEvents(Protocol[G]):
    """Hears what becomes of the groups of a call."""

    async def wait_for_version(self, version: int) -> None:
        """Returns once the caller can place samples of a weight version."""

    def finished(self, group: G, finished: pb.FinishedGroup) -> None:
        """Takes a group that is generated and durable."""

    def hopeless(self, group: G, why: str) -> None:
        """Takes a group that would fail again."""

    def failed(self, group: G, why: str) -> G | None:
        """Returns what to ask for after a failure; None if that was the last attempt."""


@dataclass(eq=False)
class RolloutCall(Generic[G]):
    """Asks for groups until none is owed, over lost workers and failed groups.

    waiting: the groups still owed, by id. build_request: makes the call of some groups; another
    trial is another request. seconds: how long workers or engines may be down. first: the request
    of all that wait, where it is made already.
    """

    workers: EpisodeWorkers
    build_request: Callable[[Sequence[G], int], Request]
    events: CallEvents[G]
    waiting: dict[str, G]
    seconds: float
    request_id: str = ""
    first: Request | None = None

    def release(self, group_ids: Iterable[str]) -> list[str]:
        """Owes these no more; returns those that it owed."""
        released = [group_id for group_id in group_ids if self.waiting.pop(group_id, None)]
        if released:
            self.first = None
        return released

    async def see_through(self) -> None:
        """Returns when it owes nothing. Raises RolloutFailedError; RemoteError for a refusal."""
        retries, trial = Retries(self.seconds, RolloutFailedError), 0
        while self.waiting:
            first, self.first = self.first, None
            request = first or self.build_request(list(self.waiting.values()), trial)
            self.request_id = request_id_of(request)
            try:
                failed = await self._follow(request, retries)
            except RemoteError as error:
                if not error.is_too_large or len(self.waiting) > 1:
                    raise
                _, group = self.waiting.popitem()
                self.events.hopeless(group, str(error))
                return
            blameless = {name: why for name, (code, why) in failed.items() if code in _BLAMELESS}
            for group_id in [name for name in self.waiting if name not in blameless]:
                _, why = failed.get(group_id, (0, "the worker gave no answer for it"))
                again = self.events.failed(self.waiting.pop(group_id), why)
                if again is not None:
                    self.waiting[group_id] = again
            if self.waiting and self.waiting.keys() <= blameless.keys():
                await retries.pause(next(iter(blameless.values())))
            trial += 1

    async def _follow(self, request: Request, retries: Retries) -> dict[str, tuple[int, str]]:
        """Follows a call to its end, on one worker after another; (code, message) of failed groups.

        A worker that goes on with the same request repeats what is finished already.
        """
        failed: dict[str, tuple[int, str]] = {}
        while self.waiting:
            failed.clear()
            try:
                async for response in self.workers.ask(request):
                    if response.HasField("finished"):
                        retries.succeeded()
                        await self._record_finished(response.finished)
                    elif response.HasField("failed"):
                        self._record_failed(response.failed, failed)
                return failed
            except WorkerLostError as error:
                logger.warning(
                    "%s; %d groups go to the next one that answers", error, len(self.waiting)
                )
                await retries.pause(str(error), error.retry_seconds)
        return failed

    async def _record_finished(self, finished: pb.FinishedGroup) -> None:
        if finished.group_id in self.waiting:
            await self.events.wait_for_version(finished.max_version)
        group = self.waiting.pop(finished.group_id, None)
        if group is not None:  # else it was announced twice, or settled
            self.events.finished(group, finished)

    def _record_failed(self, failure: pb.FailedGroup, failed: dict[str, tuple[int, str]]) -> None:
        if failure.group_id not in self.waiting:
            return
        code, message = failure.error.code, failure.error.message
        if code in _HOPELESS:
            self.events.hopeless(self.waiting.pop(failure.group_id), message)
        else:
            logger.warning("group %s failed: %s", failure.group_id, message)
            failed[failure.group_id] = (code, message)
