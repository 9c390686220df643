"""Turns rollout requests and events from and into protobuf."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from google.protobuf import struct_pb2

from services.rollout.engine.wire import bounds_from_proto, sampling_from_proto
from services.rollout.environments.environment import TaskRequest
from services.rollout.episodes.group import GroupSettings, GroupSpec
from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.api.rollout.v1 import trace_pb2
from sluice.runtime import wire
from sluice.runtime.errors import InvalidFieldError, ServiceError
from sluice.samples.blobs import BlobReference
from sluice.samples.sample import SCORE_PREFIX, Sample

DEFAULT_TIMEOUT_SECONDS = 600.0
LONGEST_ID = 200  # characters; ids name files


def finished_event(
    samples: Sequence[Sample], blob: BlobReference, trace: trace_pb2.GroupTrace | None = None
) -> pb.RolloutResponse:
    """Returns the event of a finished group: its figures, and where its samples lie."""
    versions = [span.version for sample in samples for span in sample.spans]
    first = samples[0]
    return pb.RolloutResponse(
        finished=pb.FinishedGroup(
            group_id=first.group_id,
            blob=wire.blob_to_proto(blob),
            rewards=[float(sample.columns["reward"]) for sample in samples],
            raw_rewards=[_raw_reward(sample) for sample in samples],
            response_lengths=[sample.response_length for sample in samples],
            min_version=min(versions, default=0),
            max_version=max(versions, default=0),
            prompt_length=first.prompt_length,
            finish_reasons=[wire.FINISH_REASONS[sample.finish_reason] for sample in samples],
            details=[_details(index, sample) for index, sample in enumerate(samples)],
            prompt_digest=digest_of(first.token_ids[: first.prompt_length]),
            trace=trace,
        )
    )


def failed_event(group_id: str, error: ServiceError) -> pb.RolloutResponse:
    """Returns the event of a group that could not be finished."""
    return pb.RolloutResponse(failed=pb.FailedGroup(group_id=group_id, error=error.to_status()))


def digest_of(token_ids: Sequence[int] | np.ndarray) -> str:
    """Returns the xxh3-128 of ids as int32 little-endian."""
    return xxhash.xxh3_128_hexdigest(np.asarray(token_ids, dtype="<i4").tobytes())


def _raw_reward(sample: Sample) -> float:
    return float(sample.columns.get("raw_reward", sample.columns["reward"]))


def _details(index: int, sample: Sample) -> pb.SampleDetails:
    raw, mask = sample.columns.get("raw_reward"), sample.columns.get("loss_mask")
    return pb.SampleDetails(
        raw_reward=None if raw is None else float(raw),
        scores={
            name.removeprefix(SCORE_PREFIX): float(value)
            for name, value in sample.columns.items()
            if name.startswith(SCORE_PREFIX)
        },
        episode=int(sample.columns.get("episode", index)),
        turn_count=1 if mask is None else _turns(np.asarray(mask)),
    )


def _turns(mask: np.ndarray) -> int:
    """Runs of sampled tokens."""
    return int(np.count_nonzero(np.diff(mask.astype(np.int8), prepend=0) == 1))


def settings_from_proto(request: pb.RolloutRequest) -> GroupSettings:
    """Decodes what all groups have in common. Raises InvalidFieldError."""
    if len(request.request_id) > LONGEST_ID:
        raise InvalidFieldError("request_id", f"must not exceed {LONGEST_ID} characters")
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
        kind = group.WhichOneof("task")
        if kind is None:
            raise InvalidFieldError(f"{field}.task", "needs an index or a row")
        task = (
            TaskRequest(index=group.index)
            if kind == "index"
            else TaskRequest(row=values_from_proto(group.row))
        )
        groups.append(GroupSpec(group_id=group.group_id, task=task, seeds=tuple(group.seeds)))
    return groups


def values_from_proto(struct: struct_pb2.Struct) -> Mapping[str, Any]:
    """Decodes JSON values. A Struct has floats only; whole numbers become integers again."""
    return {key: _plain(value) for key, value in struct.fields.items()}


def _plain(value: struct_pb2.Value) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "number_value":
        number = value.number_value
        return int(number) if number.is_integer() else number
    if kind == "struct_value":
        return values_from_proto(value.struct_value)
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
    if request.max_running_groups < 0:
        raise InvalidFieldError("max_running_groups", "must not be negative")
    return EvaluationSettings(
        pass_at=tuple(request.pass_at), threshold=threshold, limit=request.max_running_groups
    )
