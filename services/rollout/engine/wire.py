"""Converts between the rollout protos and the engine's own types."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from services.rollout.engine.interface import (
    MIN_TOKENS,
    Delta,
    EngineProfile,
    EngineStatus,
    FinishReason,
    Generation,
    Media,
    MediaKind,
    Numbers,
    PauseMode,
    ProfileOrder,
    Sampling,
    ServedWeights,
    Timing,
    TokenScores,
    as_array,
    check_stop,
)
from services.rollout.errors import VersionUnavailableError
from sluice.api.common.v1 import profile_pb2, sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as pb
from sluice.profiler import NAME, ProfileOptions, new_name
from sluice.runtime import wire
from sluice.runtime.errors import DataLossError, InvalidFieldError, NotFoundError
from sluice.samples.blobs import BlobDigestError, BlobNotFoundError, BlobReference, Blobs
from sluice.samples.sample import TEMPERATURES, MediaSpan, VersionSpan, is_temperature

PAUSE_MODES = {
    pb.PAUSE_MODE_WAIT: PauseMode.WAIT,
    pb.PAUSE_MODE_ABORT: PauseMode.ABORT,
    pb.PAUSE_MODE_IN_PLACE: PauseMode.IN_PLACE,
}


@dataclass(frozen=True, kw_only=True)
class VersionBounds:
    """Which weights may serve; None is any."""

    min_version: int | None = None
    exact_version: int | None = None

    def check(self, version: int | None) -> None:
        """Raises VersionUnavailableError unless `version` is inside; None passes."""
        if version is None:
            return
        if self.exact_version is not None and version != self.exact_version:
            raise VersionUnavailableError(
                f"version {version} serves, not {self.exact_version}",
                serving=version,
                exact_version=self.exact_version,
            )
        if self.min_version is not None and version < self.min_version:
            raise VersionUnavailableError(
                f"version {version} serves, older than {self.min_version}",
                serving=version,
                min_version=self.min_version,
            )


def bounds_from_proto(message: pb.VersionBounds) -> VersionBounds:
    return VersionBounds(
        min_version=message.min_version if message.HasField("min_version") else None,
        exact_version=message.exact_version if message.HasField("exact_version") else None,
    )


def bounds_to_proto(bounds: VersionBounds) -> pb.VersionBounds:
    return pb.VersionBounds(min_version=bounds.min_version, exact_version=bounds.exact_version)


def check_spans(deltas: Iterable[Delta], bounds: VersionBounds) -> None:
    """Checks what really sampled, since a commit may have come in between."""
    for delta in deltas:
        for span in delta.spans:
            bounds.check(span.version)


def sampling_from_proto(
    message: pb.SamplingParams, sample_count: int, field: str = "sampling"
) -> Sampling:
    """Reads sampling parameters. Raises InvalidFieldError naming one that is out of range."""
    temperature = message.temperature if message.HasField("temperature") else 1.0
    top_p = message.top_p if message.HasField("top_p") else 1.0
    checks = (
        ("max_new_tokens", message.max_new_tokens >= 1, "must be at least 1"),
        (
            "min_new_tokens",
            0 <= message.min_new_tokens <= max(message.max_new_tokens, 0),
            MIN_TOKENS,
        ),
        ("temperature", not temperature or is_temperature(temperature), f"{TEMPERATURES}, or 0"),
        ("top_p", 0 < top_p <= 1, "must be in (0, 1]"),
        ("top_k", message.top_k >= 0, "must not be negative"),
        ("seeds", len(message.seeds) in (0, sample_count), f"must be none or {sample_count}"),
    )
    for name, is_good, rule in checks:
        if not is_good:
            raise InvalidFieldError(f"{field}.{name}", rule)
    check_stop(message.stop, f"{field}.stop")
    return Sampling(
        max_new_tokens=message.max_new_tokens,
        temperature=temperature,
        top_k=message.top_k,
        top_p=top_p,
        stop_token_ids=tuple(message.stop_token_ids),
        seeds=tuple(message.seeds),
        stop=tuple(message.stop),
        min_new_tokens=message.min_new_tokens,
        ignore_eos=message.ignore_eos,
    )


def sampling_to_proto(sampling: Sampling) -> pb.SamplingParams:
    return pb.SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=sampling.stop_token_ids,
        seeds=sampling.seeds,
        stop=sampling.stop,
        min_new_tokens=sampling.min_new_tokens,
        ignore_eos=sampling.ignore_eos,
    )


def generation_from_proto(message: pb.GenerateRequest, *, stream: bool) -> Generation:
    """Reads a request. Raises InvalidFieldError naming what is out of range."""
    if message.dp_rank < 0:
        raise InvalidFieldError("dp_rank", "must not be negative")
    if message.sampled_count > len(message.prompt_token_ids):
        raise InvalidFieldError("sampled_count", "must be of the prompt's tokens")
    sample_count = message.sample_count or 1
    return Generation(
        request_id=message.request_id,
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=sampling_from_proto(message.sampling, sample_count),
        sample_count=sample_count,
        dp_rank=message.dp_rank,
        stream=stream,
        processor=message.processor,
        sampled_count=message.sampled_count,
    )


def weights_to_proto(weights: ServedWeights, line: str = "") -> sample_pb2.WeightVersion:
    return sample_pb2.WeightVersion(version=weights.version, digest=weights.digest, adapter=line)


def pause_mode_from_proto(value: int, field: str) -> PauseMode:
    """Reads a mode. Raises InvalidFieldError for one that this build does not know."""
    if value not in PAUSE_MODES:
        raise InvalidFieldError(field, f"mode {value} is unknown")
    return PAUSE_MODES[value]  # type: ignore[index]


def top_to_proto(top: Sequence[Sequence[tuple[int, float]]]) -> list[pb.TopTokens]:
    """Writes the likeliest tokens, place by place."""
    return [
        pb.TopTokens(
            token_ids=[token for token, _ in place], logprobs=[value for _, value in place]
        )
        for place in top
    ]


def scores_from_proto(message: pb.ScoreResponse) -> TokenScores:
    """Reads the answer of Score."""
    top = (tuple(zip(each.token_ids, each.logprobs, strict=True)) for each in message.top)
    return TokenScores(logprobs=tuple(message.logprobs), top=tuple(top))


DEFAULT_PASSES, MOST_PASSES = 20, 1000


def profile_order_from_proto(
    request: pb.ProfileRequest, directory: Path, engine_id: str
) -> ProfileOrder:
    """Reads what to record into a directory below this one. Raises InvalidFieldError."""
    count = request.pass_count if request.HasField("pass_count") else DEFAULT_PASSES
    if not 1 <= count <= MOST_PASSES:
        raise InvalidFieldError("pass_count", f"must be 1 to {MOST_PASSES}")
    if request.name and not NAME.fullmatch(request.name):
        raise InvalidFieldError("name", f"does not match {NAME.pattern}")
    name, options = request.name or new_name(), request.options
    return ProfileOrder(
        name=name,
        directory=directory / name,
        prefix=f"engine-{quote(engine_id, safe='')}",
        pass_count=count,
        options=ProfileOptions(stacks=options.stacks, memory=options.memory),
    )


def profile_to_proto(profile: EngineProfile) -> profile_pb2.Profile:
    return profile_pb2.Profile(
        name=profile.name,
        directory=str(profile.directory),
        left_count=profile.left_count,
        files=profile.files,
        failure=profile.failure,
    )


def loads_to_proto(status: EngineStatus) -> list[pb.RankLoad]:
    """Writes loads by data-parallel rank."""
    return [
        pb.RankLoad(
            running_count=load.running_count,
            waiting_count=load.waiting_count,
            used_tokens=load.used_tokens,
            max_tokens=load.max_tokens,
        )
        for load in status.rank_loads
    ]


def delta_to_proto(
    delta: Delta, *, temperature: float, takes_columns: bool = False
) -> pb.Completion:
    """Writes a delta; `logprobs_t1` is left out where it would repeat `logprobs`."""
    reason, plain = delta.finish_reason, () if temperature == 1.0 else delta.logprobs_t1
    tokens: dict[str, Any] = {
        "token_ids": delta.token_ids,
        "logprobs": delta.logprobs,
        "logprobs_t1": plain,
    }
    if takes_columns:
        kinds = ("<i4", "<f4", "<f4")
        columns = [
            np.asarray(values, kind).tobytes()
            for values, kind in zip(tokens.values(), kinds, strict=True)
        ]
        tokens = {"columns": pb.TokenColumns(**dict(zip(tokens, columns, strict=True)))}
    return pb.Completion(
        **tokens,
        index=delta.index,
        finish_reason=wire.FINISH_REASONS["" if reason is None else reason.value],
        spans=wire.spans_to_proto(delta.spans),
        timing=_timing_to_proto(delta.timing),
        routed_experts=wire.experts_to_proto(delta.routed_experts),
    )


def _timing_to_proto(timing: Timing | None) -> pb.SampleTiming | None:
    if timing is None:
        return None
    return pb.SampleTiming(
        queue=wire.duration_of(timing.queue),
        prefill=wire.duration_of(timing.prefill),
        decode=wire.duration_of(timing.decode),
    )


def join_deltas(deltas: Iterable[Delta]) -> list[Delta]:
    """Joins deltas to one per sample, by index."""
    parts: dict[int, list[Delta]] = {}
    for delta in deltas:
        parts.setdefault(delta.index, []).append(delta)
    return [_join(parts[index]) for index in sorted(parts)]


def _join(parts: Sequence[Delta]) -> Delta:
    if len(parts) == 1:
        return parts[0]
    return Delta(
        index=parts[0].index,
        token_ids=join_numbers([part.token_ids for part in parts], np.int32),
        logprobs=join_numbers([part.logprobs for part in parts], np.float32),
        logprobs_t1=join_numbers([part.logprobs_t1 for part in parts], np.float32),
        spans=_join_spans([span for part in parts for span in part.spans]),
        finish_reason=parts[-1].finish_reason,
        timing=parts[-1].timing,
        routed_experts=parts[-1].routed_experts,
    )


def join_numbers(parts: Sequence[Sequence[Any]], dtype: type[np.generic]) -> Numbers:
    """Joins sequences, whether they are arrays or not."""
    return Numbers(np.concatenate([as_array(part, dtype) for part in parts]))


def join_experts(earlier: np.ndarray | None, later: np.ndarray | None) -> np.ndarray | None:
    """Joins the experts of two answers, the second to the prompt and tokens of the first.

    Tokens keep the experts that they had when what follows them was sampled first.
    """
    if earlier is None or later is None:
        return later
    return np.concatenate([earlier, later[len(earlier) :]])


def _join_spans(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    joined: list[VersionSpan] = []
    for span in spans:
        if joined and _weights_of(joined[-1]) == _weights_of(span):
            joined[-1] = replace(joined[-1], last_token=span.last_token)
        else:
            joined.append(span)
    return tuple(joined)


def _weights_of(span: VersionSpan) -> tuple[int, str, str]:
    return span.version, span.digest, span.base_digest


def delta_from_proto(message: pb.Completion, *, temperature: float) -> Delta:
    """Reads a sample, or what was added to it, of a request at `temperature`."""
    reason = wire.finish_reason_name(message.finish_reason)
    token_ids, logprobs, plain = _columns_of(message)
    return Delta(
        index=message.index,
        token_ids=token_ids,
        logprobs=logprobs,
        logprobs_t1=plain or (logprobs if temperature == 1.0 else ()),
        spans=wire.spans_from_proto(message.spans),
        finish_reason=FinishReason(reason) if reason else None,
        timing=_timing_from_proto(message.timing) if message.HasField("timing") else None,
        routed_experts=wire.experts_from_proto(message.routed_experts, "routed_experts")
        if message.HasField("routed_experts")
        else None,
    )


_IDS, _LOGPROBS = np.dtype("<i4"), np.dtype("<f4")


def _columns_of(message: pb.Completion) -> tuple[Numbers, Numbers, Numbers]:
    """Reads tokens and log-probs, in whichever form an engine has sent them."""
    if not message.HasField("columns"):
        return (
            Numbers(np.array(message.token_ids[:], _IDS)),
            Numbers(np.array(message.logprobs[:], _LOGPROBS)),
            Numbers(np.array(message.logprobs_t1[:], _LOGPROBS)),
        )
    columns = message.columns
    sizes = {len(columns.token_ids), len(columns.logprobs), len(columns.logprobs_t1)} - {0}
    if len(sizes) > 1 or any(size % 4 for size in sizes):
        raise DataLossError(f"columns of a completion differ in length: {sorted(sizes)} bytes")
    return (
        Numbers(np.frombuffer(columns.token_ids, _IDS)),
        Numbers(np.frombuffer(columns.logprobs, _LOGPROBS)),
        Numbers(np.frombuffer(columns.logprobs_t1, _LOGPROBS)),
    )


def _timing_from_proto(message: pb.SampleTiming) -> Timing:
    return Timing(
        queue=wire.seconds_of(message.queue),
        prefill=wire.seconds_of(message.prefill),
        decode=wire.seconds_of(message.decode),
    )


KINDS = {pb.MEDIA_KIND_IMAGE: MediaKind.IMAGE}
_KIND_NUMBERS = {kind: number for number, kind in KINDS.items()}


def media_to_proto(media: Iterable[MediaSpan]) -> list[pb.Media]:
    """Writes what a prompt shows, in order."""
    return [
        pb.Media(
            kind=_KIND_NUMBERS[MediaKind(span.kind)],
            blob=wire.blob_to_proto(BlobReference(span.digest, span.size)),
        )
        for span in media
    ]


class MediaReader:
    """Reads blobs off the event loop."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    async def read(self, messages: Iterable[pb.Media]) -> tuple[Media, ...]:
        """Reads files. Raises InvalidFieldError, NotFoundError, or DataLossError for damage."""
        return await asyncio.to_thread(lambda: tuple(self._read(one) for one in messages))

    def _read(self, message: pb.Media) -> Media:
        if message.kind not in KINDS:
            raise InvalidFieldError("media.kind", f"kind {message.kind} is unknown")
        reference = BlobReference(message.blob.digest, message.blob.size_bytes)
        try:
            data = self._blobs.get(reference)
        except BlobNotFoundError:
            raise NotFoundError("blob", reference.digest) from None
        except BlobDigestError as error:
            raise DataLossError(str(error), blob=reference.digest) from None
        return Media(KINDS[message.kind], reference.digest, data)
