"""Rollout requests as the episode worker's own types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import struct_pb2

from services.rollout.environments.environment import TaskRequest
from services.rollout.episodes.group import GroupSettings, GroupSpec
from services.rollout.wire import bounds_from_proto, sampling_from_proto
from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.runtime.errors import InvalidFieldError

DEFAULT_TIMEOUT_SECONDS = 600.0
LONGEST_ID = 200  # characters; ids name files


def settings_from_proto(request: pb.RolloutRequest) -> GroupSettings:
    """What all groups have in common. Raises InvalidFieldError."""
    if len(request.request_id) > LONGEST_ID:
        raise InvalidFieldError("request_id", f"must not exceed {LONGEST_ID} characters")
    if request.sample_count < 1:
        raise InvalidFieldError("sample_count", "must be at least 1")
    if request.sampling.seeds:
        raise InvalidFieldError("sampling.seeds", "come from the groups")
    timeout = DEFAULT_TIMEOUT_SECONDS
    if request.HasField("group_timeout"):
        timeout = request.group_timeout.ToNanoseconds() / 1e9
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
    """The groups, in order. Raises InvalidFieldError naming the one that is wrong."""
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
    """JSON values. A Struct knows floats only; whole numbers become integers again."""
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
