"""What a rollout stream says about a group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.api.rollout.v1 import trace_pb2
from sluice.runtime import wire
from sluice.runtime.errors import ServiceError
from sluice.samples.blobs import BlobReference
from sluice.samples.columns import SCORE_PREFIX
from sluice.samples.sample import Sample


def finished_event(
    samples: Sequence[Sample], blob: BlobReference, trace: trace_pb2.GroupTrace | None = None
) -> pb.RolloutResponse:
    """A group and where its samples lie."""
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
    """A group and why it could not be finished."""
    return pb.RolloutResponse(failed=pb.FailedGroup(group_id=group_id, error=error.to_status()))


def digest_of(token_ids: Sequence[int] | np.ndarray) -> str:
    """xxh3-128 of ids as int32 little-endian."""
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
