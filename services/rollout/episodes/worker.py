"""An episode worker and its service: rollouts begin once, repeats join, orphans are stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from services.rollout import metrics
from services.rollout.config import EpisodesConfig, RolloutConfig
from services.rollout.engine.wire import MediaReader
from services.rollout.environments.environment import (
    SettingError,
    TaskError,
    UnknownEnvironmentError,
)
from services.rollout.environments.registry import Allowed
from services.rollout.environments.runner import Environments, Runner
from services.rollout.episodes.engines import EngineAccess, RouterLeases
from services.rollout.episodes.group import (
    GroupResult,
    GroupRunner,
    GroupSettings,
    GroupSpec,
    GroupTools,
)
from services.rollout.episodes.images import Images
from services.rollout.episodes.rollouts import (
    CancelledGroupError,
    EvaluationSettings,
    Rollout,
    WorkerDrainingError,
    evaluation_from_proto,
    failed_event,
    finished_event,
    groups_from_proto,
    put_together,
    settings_from_proto,
    values_from_proto,
)
from services.rollout.episodes.sampler import Sampler
from services.rollout.episodes.spool import DirectoryJournals, Journals, Spool, StoreFailedError
from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.api.rollout.v1 import rollout_service_pb2_grpc as pb_grpc
from sluice.config import ConfigError
from sluice.place import directory_of
from sluice.runtime.errors import InvalidFieldError, NotFoundError, QueueFullError
from sluice.runtime.idempotency import (
    RequestTable,
    cancel_all,
    check_same_body,
    has_failed,
    request_digest,
)
from sluice.runtime.waits import Waits
from sluice.runtime.wire import evaluation_report
from sluice.samples.blob_store import open_blobs
from sluice.samples.blobs import Blobs
from sluice.samples.tokenizer import TextTokenizer
from sluice.samples.vocabulary import vocabulary_digest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _OpeningRollout:
    opening: asyncio.Task[Rollout]
    group_count: int


async def open_environment(
    environments: Environments, spec: pb.EnvironmentSpec, groups: Sequence[GroupSpec], waits: Waits
) -> tuple[Runner, dict[str, InvalidFieldError]]:
    """Returns what is wrong with tasks too, by group: others are of use without those.

    Raises InvalidFieldError for a name or a setting, and what the code of users raises.
    """
    refused = dict[str, InvalidFieldError]()
    try:
        values = values_from_proto(spec.settings, spec.settings_order, "environment.settings_order")
        runner = await environments.create_runner(spec.name, values)
        for index, group in enumerate(groups):
            try:
                runner.check(group.task)
            except TaskError as error:
                field = f"groups[{index}].{error.key}"
                refused[group.group_id] = InvalidFieldError(field, str(error))
        with waits.waiting("settings of an environment", on=[spec.name]):
            await runner.open()
    except UnknownEnvironmentError as error:
        raise InvalidFieldError("environment.name", str(error)) from None
    except SettingError as error:
        raise InvalidFieldError(f"environment.settings.{error.key}", str(error)) from None
    return runner, refused


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
    ) -> AsyncIterator[Sequence[pb.RolloutResponse]]:
        """Yields the events of a rollout, which begins with the first call of its request_id.

        Raises RequestIdReusedError, InvalidFieldError, QueueFullError, StoreFailedError and
        DrainingError.
        """
        rollout = await self._open(request, evaluation)
        self._unwatch_orphan(rollout)
        rollout.listener_count += 1
        try:
            async for events in rollout.follow():
                yield events
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

    async def check_environment(self, spec: pb.EnvironmentSpec) -> None:
        """Open an environment by its settings. Raises InvalidFieldError, and what it raises."""
        await open_environment(self._environments, spec, [], self._waits)

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
        runner, refused = await open_environment(
            self._environments, request.environment, groups, self._waits
        )
        progress = await self._spool.open(request.request_id, body)
        check_same_body(request.request_id, body, progress.body)
        counters = [metrics.GROUPS] + [metrics.EVALUATED_GROUPS] * (evaluation is not None)
        rollout = Rollout(request.request_id, self._on_settled, counters)
        wanted = {group.group_id for group in groups}
        for group_id in progress.cancelled & wanted:
            rollout.add_event(failed_event(group_id, CancelledGroupError(group_id)))
        left = {k: v for k, v in progress.finished.items() if k not in progress.cancelled}
        finished = await self._spool.read(left) if left else {}
        for samples, blob in finished.values():
            rollout.add_event(finished_event(samples, blob))
        settled = progress.cancelled | finished.keys()
        for group_id, error in refused.items():
            if group_id not in settled:  # by the code of then, which may have been another
                rollout.add_event(failed_event(group_id, error))
        settled |= refused.keys()
        group_runner = GroupRunner(runner, self._tools)
        slots = self._slots(evaluation)
        rollout.start(
            (group.group_id, _run(group_runner, group, settings, slots))
            for group in groups
            if group.group_id not in settled
        )
        return rollout

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


class RolloutServicer(pb_grpc.RolloutServiceServicer):
    """Serves one episode worker."""

    def __init__(self, rollouts: Rollouts, environments: Environments, vocabulary: str) -> None:
        self._rollouts, self._environments = rollouts, environments
        self._vocabulary = vocabulary

    async def Rollout(
        self, request: pb.RolloutRequest, context: Any
    ) -> AsyncIterator[pb.RolloutResponse]:
        async for events in self._rollouts.follow(request):
            for message in put_together(events) if request.takes_more else events:
                yield message

    async def Evaluate(
        self, request: pb.EvaluateRequest, context: Any
    ) -> AsyncIterator[pb.EvaluateResponse]:
        """Sends settled groups, then the report over all of them."""
        settings = evaluation_from_proto(request)
        finished: list[pb.FinishedGroup] = []
        failed_count = 0
        async for events in self._rollouts.follow(request.rollout, settings):
            for event in events:
                outcome = event.WhichOneof("event") or ""
                if outcome == "finished":
                    finished.append(event.finished)
                    yield pb.EvaluateResponse(finished=event.finished)
                else:
                    failed_count += 1
                    yield pb.EvaluateResponse(failed=event.failed)
        report = evaluation_report(
            finished, failed_count, pass_at=settings.pass_at, threshold=settings.threshold
        )
        yield pb.EvaluateResponse(report=report)

    async def CancelRollout(
        self, request: pb.CancelRolloutRequest, context: Any
    ) -> pb.CancelRolloutResponse:
        cancelled = await self._rollouts.cancel(
            request.rollout_request_id, tuple(request.group_ids)
        )
        return pb.CancelRolloutResponse(cancelled_group_ids=cancelled)

    async def ListEnvironments(
        self, request: pb.ListEnvironmentsRequest, context: Any
    ) -> pb.ListEnvironmentsResponse:
        if request.HasField("checked"):
            await self._rollouts.check_environment(request.checked)
        schemas = {} if request.omits_schemas else await self._environments.settings_schemas()
        environments = [
            pb.Environment(name=name, settings_schema=schemas.get(name))
            for name in self._environments.names
        ]
        return pb.ListEnvironmentsResponse(environments=environments, vocabulary=self._vocabulary)


def create_environments(config: RolloutConfig, tokenizer: TextTokenizer) -> Environments:
    """Those that requests may name. Raises ConfigError."""
    episodes = config.episodes
    try:
        return Environments(
            episodes.environments,
            episodes.graders,
            tokenizer,
            Allowed(
                episodes.user_modules,
                episodes.reward_urls,
                config.services,
                episodes.tokenizer_roots,
            ),
        )
    except ValueError as error:
        raise ConfigError(f"episodes.environments: {error}") from None


class EpisodeWorker:
    """Owns environments, leases, channels to engines and the rollouts."""

    def __init__(self, config: RolloutConfig, router: grpc.aio.Channel, waits: Waits) -> None:
        """Raises ConfigError when the tokenizer cannot be loaded."""
        assert config.tokenizer_directory is not None
        self.tokenizer = TextTokenizer(config.tokenizer_directory)
        blobs = open_blobs(config.store, config.store_cache, sync=config.store_sync)
        self._spool = Spool(blobs, _open_journals(config, blobs))
        episodes = config.episodes
        self._environments = create_environments(config, self.tokenizer)
        self.images = Images.of_model(config.tokenizer_directory, blobs, config.images)
        self.engines = EngineAccess(
            config.server.security, MediaReader(blobs), self.images.processor
        )
        # The router ends the leases of this process by it, once another has taken its place.
        self.incarnation = str(uuid.uuid4())
        self.leases = RouterLeases(router, self.incarnation)
        self.sampler = Sampler(
            self.leases,
            self.engines,
            waits,
            attempts=episodes.engine_attempts,
            chunk_tokens=episodes.chunk_tokens,
        )
        tools = GroupTools(self.tokenizer, self.sampler, self._spool, waits, self.images)
        self._rollouts = Rollouts(episodes, self._environments, tools)
        vocabulary = vocabulary_digest(config.tokenizer_directory)
        self.servicer = RolloutServicer(self._rollouts, self._environments, vocabulary)

    async def drain(self, seconds: float) -> None:
        """Let rollouts end for so long; the rest goes on at another worker."""
        await self._rollouts.drain(seconds)

    async def close(self) -> None:
        """Stop the rollouts; what is finished stays in the store."""
        await self._rollouts.close()
        await self._spool.close()
        await asyncio.to_thread(self.images.close)
        await self._environments.close()
        await self.leases.close()
        await self.engines.close()


def _open_journals(config: RolloutConfig, blobs: Blobs) -> Journals:
    if (directory := directory_of(config.store)) is not None:
        return DirectoryJournals(directory, blobs, sync=config.store_sync)
    from services.rollout.episodes.bucket_journals import BucketJournals  # needs obstore

    return BucketJournals(str(config.store), blobs)
