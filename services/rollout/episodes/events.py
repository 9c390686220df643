"""What a rollout stream says about a group."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.runtime import wire
from sluice.runtime.errors import ServiceError
from sluice.samples.blobs import BlobReference
from sluice.samples.sample import Sample


def finished_event(samples: Sequence[Sample], blob: BlobReference) -> pb.RolloutResponse:
    """A group and where its samples lie."""
    versions = [span.version for sample in samples for span in sample.spans]
    return pb.RolloutResponse(
        finished=pb.FinishedGroup(
            group_id=samples[0].group_id,
            blob=wire.blob_to_proto(blob),
            rewards=[float(sample.columns["reward"]) for sample in samples],
            raw_rewards=[float(sample.columns["raw_reward"]) for sample in samples],
            response_lengths=[sample.response_length for sample in samples],
            min_version=min(versions, default=0),
            max_version=max(versions, default=0),
            prompt_length=samples[0].prompt_length,
            finish_reasons=[wire.FINISH_REASONS[sample.finish_reason] for sample in samples],
        )
    )


def failed_event(group_id: str, error: ServiceError) -> pb.RolloutResponse:
    """A group and why it could not be finished."""
    return pb.RolloutResponse(failed=pb.FailedGroup(group_id=group_id, error=error.to_status()))
