"""Serves one engine: its gRPC methods, and its state as metrics."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf import duration_pb2
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import Metric

from services.rollout import metrics
from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import (
    Delta,
    Engine,
    FinishReason,
    Generation,
    PauseMode,
    ProfileOrder,
    TokenScores,
    check_length,
    check_room,
)
from services.rollout.engine.versions import held_version
from services.rollout.engine.weights import EngineWeights, Transfer
from services.rollout.engine.wire import (
    MediaReader,
    VersionBounds,
    bounds_from_proto,
    check_spans,
    delta_to_proto,
    generation_from_proto,
    join_deltas,
    loads_to_proto,
    pause_mode_from_proto,
    profile_order_from_proto,
    profile_to_proto,
    top_to_proto,
    weights_to_proto,
)
from services.rollout.errors import VersionNotCommittedError, VersionUnavailableError
from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as pb
from sluice.api.rollout.v1 import engine_service_pb2_grpc as pb_grpc
from sluice.runtime.errors import InvalidFieldError
from sluice.runtime.idempotency import (
    RequestLog,
    RequestTable,
    cancel_all,
    has_failed,
    request_digest,
)
from sluice.runtime.metrics import StateCollector, observe_all
from sluice.runtime.server import Server
from sluice.runtime.waits import Waits
from sluice.runtime.wire import check_address, duration_of, seconds_of
from sluice.weights.transfer.plan import DEFAULT_BUCKET_BYTES, Membership

DEFAULT_SECONDS = 60.0
STAGE_SECONDS = 600.0
MAX_SECONDS = 3600.0


def members_from_proto(request: pb.JoinTransferGroupRequest) -> tuple[list[Membership], float]:
    """Returns the ranks to take and the seconds there are. Raises InvalidFieldError."""
    if not 1 <= request.first_rank < request.world_size:
        raise InvalidFieldError("first_rank", "must be at least 1 and below world_size")
    members = []
    for index, sender in enumerate(request.senders):
        check_address(sender.address, f"senders[{index}].address")
        if not sender.group:
            raise InvalidFieldError(f"senders[{index}].group", "is required")
        members.append(
            Membership(
                address=sender.address,
                group=sender.group,
                rank=request.first_rank,
                world_size=request.world_size,
                backend=request.backend,
            )
        )
    return members, _seconds(request.timeout, "timeout", given=request.HasField("timeout"))


def transfer_from_proto(request: pb.PrepareWeightsRequest) -> Transfer | None:
    """Returns how a version comes, None for the store. Raises InvalidFieldError."""
    if not request.HasField("transfer"):
        return None
    message = request.transfer
    mode = PauseMode.IN_PLACE
    if message.mode != pb.PAUSE_MODE_UNSPECIFIED:
        mode = pause_mode_from_proto(message.mode, "transfer.mode")
    return Transfer(
        group=message.transfer_group,
        files=tuple(tuple(sender.file_names) for sender in message.senders),
        bucket_bytes=message.bucket_bytes or DEFAULT_BUCKET_BYTES,
        seconds=_seconds(message.timeout, "transfer.timeout", given=message.HasField("timeout")),
        mode=mode,
    )


def _seconds(duration: duration_pb2.Duration, field: str, *, given: bool) -> float:
    seconds = seconds_of(duration) if given else DEFAULT_SECONDS
    if not 0 < seconds <= MAX_SECONDS:
        raise InvalidFieldError(field, f"must be above 0 and at most {MAX_SECONDS:g} s")
    return seconds


TOKEN_BYTES = 128  # about what a sampled token takes as Python numbers
DELTA_TOKENS, REQUEST_TOKENS = 8, 16  # what a delta and a request take beside, as so many more


def _weight(delta: Delta) -> int:
    """Returns sampled tokens; what else there is of it counts as so many more."""
    experts = delta.routed_experts
    more = 0 if experts is None else experts.nbytes // TOKEN_BYTES
    return DELTA_TOKENS + len(delta.token_ids) + more


async def counted(engine: Engine, generation: Generation) -> AsyncGenerator[Delta, None]:
    """Yields what the engine samples, and counts the samples that ended, whoever is told of them.

    Once, however often an answer is asked for, and whole, in however many deltas it comes.
    """
    lengths = Counter[int]()
    ended: list[tuple[FinishReason, int]] = []
    try:
        async with contextlib.aclosing(engine.generate(generation)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                lengths[delta.index] += len(delta.token_ids)
                if delta.finish_reason is not None:
                    ended.append((delta.finish_reason, lengths[delta.index]))
                yield delta
    finally:
        count_ended(ended)


def count_ended(ended: Sequence[tuple[FinishReason, int]]) -> None:
    """Counts samples by how they ended and how many tokens they have."""
    for reason, count in Counter(reason for reason, _ in ended).items():
        metrics.SAMPLES.labels(reason).inc(count)
    observe_all(metrics.SAMPLE_TOKENS, [length for _, length in ended])


def pick(engine: Engine, bounds: VersionBounds, adapter: str = "") -> int | None:
    """Returns the version that a request is to be served with; None: the one that serves.

    That is the one that `adapter` names or the bounds ask for exactly, if the engine holds it
    beside the serving one. Raises VersionUnavailableError or InvalidFieldError.
    """
    status, wanted = engine.status(), bounds.exact_version
    if adapter:
        named = held_version(adapter, status)
        if named is None:
            raise VersionUnavailableError(
                f"adapter {adapter!r} is not held", serving=status.version, adapter=adapter
            )
        if wanted is not None and wanted != named:
            raise InvalidFieldError("adapter", f"is not version {wanted}, which is asked for")
        wanted = named
    held = () if status.base is None else (status.base, *status.adapters)
    if wanted is None or wanted not in [weights.version for weights in held]:
        bounds.check(status.version)
        return None
    bounds.check(wanted)
    return wanted


async def complete(engine: Engine, generation: Generation, bounds: VersionBounds) -> list[Delta]:
    """Returns one whole delta per sample, for this process; cancelling aborts the request.

    Raises VersionUnavailableError, and what the engine raises.
    """
    generation = replace(generation, version=pick(engine, bounds))
    async with contextlib.aclosing(engine.generate(generation)) as stream:  # type: ignore[type-var]
        deltas = join_deltas([delta async for delta in stream])
    count_ended([(d.finish_reason, len(d.token_ids)) for d in deltas if d.finish_reason])
    check_spans(deltas, bounds)
    return deltas


async def stream(
    engine: Engine, generation: Generation, bounds: VersionBounds
) -> AsyncGenerator[Delta, None]:
    """Yields deltas as tokens come; closing it aborts the request."""
    generation = replace(generation, version=pick(engine, bounds))
    async with contextlib.aclosing(counted(engine, generation)) as deltas:
        async for delta in deltas:
            check_spans([delta], bounds)
            yield delta


async def score(
    engine: Engine,
    token_ids: Sequence[int],
    prompt_length: int,
    top_count: int,
    version: int | None = None,
) -> TokenScores:
    """Scores tokens[prompt_length:]. Raises NoTopTokensError, and what the engine raises."""
    if top_count:
        return await engine.score_top(token_ids, prompt_length, top_count, version)
    return TokenScores(logprobs=tuple(await engine.score(token_ids, prompt_length, version)))


class _Run:
    """One request in the engine and what it has answered so far."""

    def __init__(self, engine: Engine, generation: Generation) -> None:
        self.deltas: list[Delta] = []
        self.token_count = REQUEST_TOKENS
        self.caller_count = 0
        self._grown = asyncio.Event()
        self.task = asyncio.ensure_future(self._consume(engine, generation))
        self.task.add_done_callback(lambda _: self._grown.set())

    async def _consume(self, engine: Engine, generation: Generation) -> None:
        async with contextlib.aclosing(counted(engine, generation)) as deltas:
            async for delta in deltas:
                self.deltas.append(delta)
                self.token_count += _weight(delta)
                if generation.stream:
                    self._grown.set()

    async def wait(self) -> list[Delta]:
        await asyncio.shield(self.task)
        return self.deltas

    async def follow(self) -> AsyncIterator[Delta]:
        """Yields deltas from the first one on."""
        sent = 0
        while True:
            while sent < len(self.deltas):
                sent += 1
                yield self.deltas[sent - 1]
            if self.task.done():
                self.task.result()
                return
            self._grown.clear()
            await self._grown.wait()


class Generations:
    """Keeps the requests of one engine by request_id.

    A request whose callers have all gone away is aborted. Failures are not remembered. Answers
    are kept up to `remembered_tokens` in all.
    """

    def __init__(self, engine: Engine, remembered_tokens: int) -> None:
        self._engine = engine
        self._runs: RequestTable[_Run] = RequestTable(
            remembered_tokens, weigh=lambda run: run.token_count
        )

    async def generate(self, request: pb.GenerateRequest, generation: Generation) -> list[Delta]:
        """Returns one whole delta per sample, by index.

        Raises RequestIdReusedError, and what the engine raises.
        """
        with self._call(request, generation) as run:
            return join_deltas(await run.wait())

    async def stream(
        self, request: pb.GenerateRequest, generation: Generation
    ) -> AsyncIterator[Delta]:
        """Yields deltas as they come; a repeat gets them again from the first."""
        with self._call(request, generation) as run:
            async for delta in run.follow():
                yield delta

    async def close(self) -> None:
        """Aborts what still runs and waits for its end."""
        await cancel_all([run.task for run in self._runs])

    @contextlib.contextmanager
    def _call(self, request: pb.GenerateRequest, generation: Generation) -> Iterator[_Run]:
        run = self._find_or_start(request, generation)
        run.caller_count += 1
        try:
            yield run
        finally:
            run.caller_count -= 1
            if not run.caller_count and not run.task.done():
                self._runs.discard(request.request_id, run)
                run.task.cancel()

    def _find_or_start(self, request: pb.GenerateRequest, generation: Generation) -> _Run:
        name = request.request_id
        digest = request_digest(request) + ("/stream" if generation.stream else "")
        earlier = self._runs.find(name, digest)
        if earlier is not None:
            return earlier
        run = self._runs.add(name, digest, _Run(self._engine, generation))
        run.task.add_done_callback(lambda _: self._settle(name, run))
        return run

    def _settle(self, name: str, run: _Run) -> None:
        if has_failed(run.task):
            self._runs.discard(name, run)
        else:
            self._runs.done(name, run)


def bound_requests(server: Server, config: EngineConfig) -> None:
    """Have the server refuse requests that ask for more than this engine can serve."""
    samples = config.max_samples, "engine.max_samples"
    server.bound(pb.ScoreRequest, "top_count", config.max_top_tokens, "engine.max_top_tokens")
    server.bound(pb.GenerateRequest, "sample_count", *samples)
    server.bound(pb.SamplingParams, "seeds", *samples)
    stop = config.max_stop_tokens, "engine.max_stop_tokens"
    server.bound(pb.SamplingParams, "stop_token_ids", *stop)
    server.bound(pb.SamplingParams, "stop", config.max_stop_strings, "engine.max_stop_strings")
    server.bound(pb.GenerateRequest, "media", config.max_media, "engine.max_media")


def _completions_of(
    request: pb.GenerateRequest, generation: Generation
) -> Callable[[Delta], pb.Completion]:
    """Writes deltas in the form that the caller takes."""
    temperature, takes_columns = generation.sampling.temperature, request.takes_columns
    return partial(delta_to_proto, temperature=temperature, takes_columns=takes_columns)


class EngineServicer(pb_grpc.EngineServiceServicer):
    """Serves EngineService for one replica."""

    def __init__(
        self,
        engine: Engine,
        generations: Generations,
        weights: EngineWeights,
        waits: Waits,
        *,
        engine_id: str,
        backend: str,
        media: MediaReader,
        profiles: Path,
        vocabulary: str = "",
        settings: Mapping[str, str] | None = None,
        records_experts: bool = False,
    ) -> None:
        """`vocabulary`: digest of what token ids mean to whoever asks, empty where unknown.

        `settings`: those that its numbers depend on, as it tells them. `records_experts`: whether
        completions bring those of their tokens.
        """
        self._engine, self._generations, self._weights = engine, generations, weights
        self._waits, self._vocabulary = waits, vocabulary
        self._engine_id, self._backend, self._media = engine_id, backend, media
        self._profiles, self._requests = profiles, RequestLog()
        self._settings = dict(settings or {})
        self._records_experts = records_experts

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        bounds = bounds_from_proto(request.versions)
        generation = await self._generation(request, bounds, stream=False)
        deltas = await self._generations.generate(request, generation)
        check_spans(deltas, bounds)
        to_proto = _completions_of(request, generation)
        return pb.GenerateResponse(completions=[to_proto(delta) for delta in deltas])

    async def StreamGenerate(
        self, request: pb.StreamGenerateRequest, context: Any
    ) -> AsyncIterator[pb.StreamGenerateResponse]:
        bounds = bounds_from_proto(request.generate.versions)
        generation = await self._generation(request.generate, bounds, stream=True)
        to_proto = _completions_of(request.generate, generation)
        async for delta in self._generations.stream(request.generate, generation):
            check_spans([delta], bounds)
            yield pb.StreamGenerateResponse(delta=to_proto(delta))

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        version = pick(self._engine, bounds_from_proto(request.versions), request.adapter)
        check_length(len(request.token_ids), self._engine.status().max_model_length)
        before = self._weights_now(version)
        scores = await score(
            self._engine,
            tuple(request.token_ids),
            request.prompt_length,
            request.top_count,
            version,
        )
        if version is None and self._weights_now() != before:
            raise VersionUnavailableError("weights changed while scoring; ask again")
        return pb.ScoreResponse(
            logprobs=scores.logprobs, weights=before, top=top_to_proto(scores.top)
        )

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        aborted = await self._engine.abort(tuple(request.request_ids))
        return pb.AbortResponse(aborted_request_ids=aborted)

    async def Pause(self, request: pb.PauseRequest, context: Any) -> pb.PauseResponse:
        mode = pause_mode_from_proto(request.mode, "mode")
        with self._waits.waiting("Pause", on=[self._engine_id]):
            await self._engine.pause(mode)
        return pb.PauseResponse()

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.ResumeResponse:
        await self._engine.resume()
        return pb.ResumeResponse()

    async def CheckTransfer(
        self, request: pb.CheckTransferRequest, context: Any
    ) -> pb.CheckTransferResponse:
        await self._weights.check_transfer(*_weights_from_proto(request.weights))
        return pb.CheckTransferResponse()

    async def JoinTransferGroup(
        self, request: pb.JoinTransferGroupRequest, context: Any
    ) -> pb.JoinTransferGroupResponse:
        members, seconds = members_from_proto(request)
        with self._waits.waiting(
            f"members of transfer group {request.transfer_group}",
            on=[member.address for member in members],
            timeout=seconds,
        ):
            await self._weights.transfers.join(request.transfer_group, members, seconds)
        return pb.JoinTransferGroupResponse()

    async def StageWeights(
        self, request: pb.StageWeightsRequest, context: Any
    ) -> pb.StageWeightsResponse:
        if request.version < 1:
            raise InvalidFieldError("version", "must be at least 1")
        seconds = STAGE_SECONDS
        if request.HasField("timeout"):
            seconds = _seconds(request.timeout, "timeout", given=True)
        version = request.version
        with self._waits.waiting(
            f"StageWeights of version {version}", on=["its writers"], timeout=seconds
        ):
            try:
                count, size = await self._weights.stage(version, seconds)
            except TimeoutError:
                raise VersionNotCommittedError(
                    f"version {version} was not committed within {seconds:g} s", version=version
                ) from None
        return pb.StageWeightsResponse(file_count=count, size_bytes=size)

    async def PrepareWeights(
        self, request: pb.PrepareWeightsRequest, context: Any
    ) -> pb.PrepareWeightsResponse:
        version, digest = _weights_from_proto(request.weights)
        transfer = transfer_from_proto(request)
        with self._waits.waiting(
            f"PrepareWeights of version {version}",
            on=[f"transfer group {transfer.group}" if transfer else self._engine_id],
            timeout=transfer.seconds if transfer else None,
        ):
            seconds = await self._weights.prepare(
                version, digest, transfer, request.weights.adapter
            )
        return pb.PrepareWeightsResponse(duration=duration_of(seconds))

    async def CommitWeights(
        self, request: pb.CommitWeightsRequest, context: Any
    ) -> pb.CommitWeightsResponse:
        version, digest = _weights_from_proto(request.weights)
        mode = PauseMode.IN_PLACE
        if request.mode != pb.PAUSE_MODE_UNSPECIFIED:
            mode = pause_mode_from_proto(request.mode, "mode")
        with self._waits.waiting(f"CommitWeights of version {version}", on=[self._engine_id]):
            seconds = await self._weights.commit(version, digest, mode, request.weights.adapter)
        return pb.CommitWeightsResponse(pause=duration_of(seconds))

    async def Sleep(self, request: pb.SleepRequest, context: Any) -> pb.SleepResponse:
        with self._waits.waiting("Sleep", on=[self._engine_id]):
            await self._engine.sleep()
        await self._weights.announce()
        return pb.SleepResponse()

    async def Wake(self, request: pb.WakeRequest, context: Any) -> pb.WakeResponse:
        with self._waits.waiting("Wake", on=[self._engine_id]):
            await self._engine.wake()
        await self._weights.announce()
        return pb.WakeResponse()

    async def Profile(self, request: pb.ProfileRequest, context: Any) -> pb.ProfileResponse:
        order = profile_order_from_proto(request, self._profiles, self._engine_id)
        run = partial(self._profile, order)
        return await self._requests.once(request.request_id, request, run)

    async def _profile(self, order: ProfileOrder) -> pb.ProfileResponse:
        with self._waits.waiting("Profile", on=[self._engine_id]):
            profile = await self._engine.profile(order)
        return pb.ProfileResponse(profile=profile_to_proto(profile))

    async def GetEngine(self, request: pb.GetEngineRequest, context: Any) -> pb.GetEngineResponse:
        status = self._engine.status()
        return pb.GetEngineResponse(
            weights=self._weights_now(),
            prepared_versions=status.prepared_versions,
            paused=status.paused,
            rank_loads=loads_to_proto(status),
            max_running_count=status.max_running,
            max_model_length=status.max_model_length,
            backend=self._backend,
            engine_id=self._engine_id,
            last_pause=duration_of(status.last_pause_seconds),
            last_preparation=duration_of(status.last_prepare_seconds),
            decoded_token_count=status.decode_tokens_total,
            prefilled_token_count=status.prefill_tokens_total,
            deterministic=status.deterministic,
            takes_min_new_tokens=status.takes_min_new_tokens,
            transfer_rank_count=status.transfer_ranks,
            transfer_group=self._weights.transfers.group,
            vocabulary=self._vocabulary,
            settings=self._settings,
            records_experts=self._records_experts,
            base=None if status.base is None else weights_to_proto(status.base),
            adapters=[
                weights_to_proto(weights, status.lines.get(weights.version, ""))
                for weights in status.adapters
            ],
            asleep=status.asleep,
            profile=None if status.profile is None else profile_to_proto(status.profile),
        )

    async def _generation(
        self, request: pb.GenerateRequest, bounds: VersionBounds, *, stream: bool
    ) -> Generation:
        version = pick(self._engine, bounds, request.adapter)
        check_room(len(request.prompt_token_ids), self._engine.status().max_model_length)
        generation = replace(generation_from_proto(request, stream=stream), version=version)
        if not request.media:
            return generation
        return replace(generation, media=await self._media.read(request.media))

    def _weights_now(self, version: int | None = None) -> sample_pb2.WeightVersion | None:
        """The weights that serve, or those of a version that is held."""
        status = self._engine.status()
        for weights in () if version is None else (status.base, *status.adapters):
            if weights is not None and weights.version == version:
                return weights_to_proto(weights, status.lines.get(version, ""))
        if status.version is None:
            return None
        return sample_pb2.WeightVersion(version=status.version, digest=status.digest)


def _weights_from_proto(message: sample_pb2.WeightVersion) -> tuple[int, str]:
    if not message.digest:
        raise InvalidFieldError("weights.digest", "is required")
    return message.version, message.digest


class EngineCollector(StateCollector):
    """Reads the state of one engine whenever metrics are scraped."""

    def __init__(self, engine: Engine, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(registry)
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        status = self._engine.status()
        loads = status.rank_loads
        yield metrics.WEIGHT_VERSION.of(-1 if status.version is None else status.version)
        yield metrics.ADAPTERS.of(len(status.adapters))
        yield metrics.RUNNING.of(sum(load.running_count for load in loads))
        yield metrics.WAITING.of(sum(load.waiting_count for load in loads))
        yield metrics.CACHE.of(sum(load.used_tokens for load in loads))
        yield metrics.CACHE_LIMIT.of(sum(load.max_tokens for load in loads))
        yield metrics.PAUSED.of(status.paused)
        yield metrics.DECODED.of(status.decode_tokens_total)
        yield metrics.PREFILLED.of(status.prefill_tokens_total)
        yield metrics.PREFIX_HITS.of(status.prefix_hit_tokens_total)
        yield metrics.RESTARTS.of(status.restarts_total)
