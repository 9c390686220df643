"""Serves one engine: its gRPC methods, and its state as metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

from google.protobuf import duration_pb2
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import Metric

from services.rollout import metrics
from services.rollout.engine.generations import Generations, count_generation, score
from services.rollout.engine.interface import Engine, Generation, PauseMode
from services.rollout.engine.weights import EngineWeights, Transfer
from services.rollout.engine.wire import (
    MediaReader,
    VersionBounds,
    VersionUnavailableError,
    bounds_from_proto,
    check_spans,
    delta_to_proto,
    generation_from_proto,
    loads_to_proto,
    pause_mode_from_proto,
    top_to_proto,
)
from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as pb
from sluice.api.rollout.v1 import engine_service_pb2_grpc as pb_grpc
from sluice.runtime.errors import InvalidFieldError
from sluice.runtime.metrics import StateCollector
from sluice.runtime.waits import Waits
from sluice.runtime.wire import duration_of, seconds_of
from sluice.weights.transfer.plan import DEFAULT_BUCKET_BYTES, Membership

DEFAULT_SECONDS = 60.0
MAX_SECONDS = 3600.0


def members_from_proto(request: pb.JoinTransferGroupRequest) -> tuple[list[Membership], float]:
    """Returns the ranks to take and the seconds there are. Raises InvalidFieldError."""
    if not 1 <= request.first_rank < request.world_size:
        raise InvalidFieldError("first_rank", "must be at least 1 and below world_size")
    members = []
    for index, sender in enumerate(request.senders):
        host, _, port = sender.address.rpartition(":")
        if not (host and port.isdecimal() and sender.group):
            raise InvalidFieldError(f"senders[{index}]", "needs host:port and a group")
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
    if message.bucket_bytes < 0:
        raise InvalidFieldError("transfer.bucket_bytes", "must not be negative")
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
    ) -> None:
        self._engine, self._generations, self._weights = engine, generations, weights
        self._waits = waits
        self._engine_id, self._backend, self._media = engine_id, backend, media

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        bounds = self._checked_bounds(request.versions)
        generation = await self._generation(request, stream=False)
        deltas = await self._generations.generate(request, generation)
        check_spans(deltas, bounds)
        count_generation(deltas)
        temperature = generation.sampling.temperature
        return pb.GenerateResponse(
            completions=[delta_to_proto(delta, temperature=temperature) for delta in deltas]
        )

    async def StreamGenerate(
        self, request: pb.StreamGenerateRequest, context: Any
    ) -> AsyncIterator[pb.StreamGenerateResponse]:
        bounds = self._checked_bounds(request.generate.versions)
        generation = await self._generation(request.generate, stream=True)
        temperature = generation.sampling.temperature
        async for delta in self._generations.stream(request.generate, generation):
            check_spans([delta], bounds)
            count_generation([delta])
            yield pb.StreamGenerateResponse(delta=delta_to_proto(delta, temperature=temperature))

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        self._checked_bounds(request.versions)
        if request.top_count < 0:
            raise InvalidFieldError("top_count", "must not be negative")
        before = self._weights_now()
        scores = await score(
            self._engine, tuple(request.token_ids), request.prompt_length, request.top_count
        )
        if self._weights_now() != before:
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
            seconds = await self._weights.prepare(version, digest, transfer)
        return pb.PrepareWeightsResponse(duration=duration_of(seconds))

    async def CommitWeights(
        self, request: pb.CommitWeightsRequest, context: Any
    ) -> pb.CommitWeightsResponse:
        version, digest = _weights_from_proto(request.weights)
        mode = PauseMode.IN_PLACE
        if request.mode != pb.PAUSE_MODE_UNSPECIFIED:
            mode = pause_mode_from_proto(request.mode, "mode")
        with self._waits.waiting(f"CommitWeights of version {version}", on=[self._engine_id]):
            seconds = await self._weights.commit(version, digest, mode)
        return pb.CommitWeightsResponse(pause=duration_of(seconds))

    async def Sleep(self, request: pb.SleepRequest, context: Any) -> pb.SleepResponse:
        with self._waits.waiting("Sleep", on=[self._engine_id]):
            await self._engine.sleep()
        await self._weights.announce()
        return pb.SleepResponse()

    async def Wake(self, request: pb.WakeRequest, context: Any) -> pb.WakeResponse:
        with self._waits.waiting("Wake", on=[self._engine_id]):
            await self._engine.wake()
        return pb.WakeResponse()

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
            transfer_rank_count=status.transfer_ranks,
            transfer_group=self._weights.transfers.group,
        )

    async def _generation(self, request: pb.GenerateRequest, *, stream: bool) -> Generation:
        generation = generation_from_proto(request, stream=stream)
        if not request.media:
            return generation
        return replace(generation, media=await self._media.read(request.media))

    def _weights_now(self) -> sample_pb2.WeightVersion | None:
        status = self._engine.status()
        if status.version is None:
            return None
        return sample_pb2.WeightVersion(version=status.version, digest=status.digest)

    def _checked_bounds(self, message: pb.VersionBounds) -> VersionBounds:
        """Returns the bounds of a request once the serving weights have satisfied them."""
        bounds = bounds_from_proto(message)
        bounds.check(self._engine.status().version)
        return bounds


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
        yield metrics.RUNNING.of(sum(load.running_count for load in loads))
        yield metrics.WAITING.of(sum(load.waiting_count for load in loads))
        yield metrics.CACHE.of(sum(load.used_tokens for load in loads))
        yield metrics.CACHE_LIMIT.of(sum(load.max_tokens for load in loads))
        yield metrics.PAUSED.of(status.paused)
        yield metrics.DECODED.of(status.decode_tokens_total)
        yield metrics.PREFILLED.of(status.prefill_tokens_total)
