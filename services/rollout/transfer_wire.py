"""Requests about transfers of weights, as the engine takes them."""

from __future__ import annotations

from google.protobuf import duration_pb2

from services.rollout.engine import PauseMode
from services.rollout.engine_transfers import Transfer
from services.rollout.wire import pause_mode_from_proto
from sluice.api.rollout.v1 import engine_service_pb2 as pb
from sluice.runtime.errors import InvalidFieldError
from sluice.weights.transfer.plan import DEFAULT_BUCKET_BYTES, Membership

DEFAULT_SECONDS = 60.0
MAX_SECONDS = 3600.0


def members_from_proto(request: pb.JoinTransferGroupRequest) -> tuple[list[Membership], float]:
    """The places to take, and the seconds there are. Raises InvalidFieldError."""
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
    """Raises InvalidFieldError."""
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
    seconds = duration.ToNanoseconds() / 1e9 if given else DEFAULT_SECONDS
    if not 0 < seconds <= MAX_SECONDS:
        raise InvalidFieldError(field, f"must be above 0 and at most {MAX_SECONDS:g} s")
    return seconds
