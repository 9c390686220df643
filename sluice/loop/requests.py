"""The Rollout call of some groups."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from google.protobuf.struct_pb2 import Struct

from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.loop.config import EnvironmentConfig, RunConfig, SamplingConfig
from sluice.loop.prompts import Task
from sluice.loop.seeds import sample_seed


def build_request(
    config: RunConfig,
    tasks: Sequence[tuple[str, Task]],
    versions: engine_pb.VersionBounds,
    trial: int,
) -> pb.RolloutRequest:
    """Training groups: (group id, task). One content and trial has one request_id.

    A repeat of it resumes; another trial runs again what the first one answered as failed.
    """
    request = _request(config, config.environment, config.sampling, config.samples_per_group)
    request.versions.CopyFrom(versions)
    for group_id, task in tasks:
        seeds = [sample_seed(config.seed, group_id, i) for i in range(config.samples_per_group)]
        request.groups.append(_group(group_id, task, seeds))
    request.request_id = _content_id(request, trial)
    return request


def build_evaluation(
    config: RunConfig, tasks: Sequence[tuple[str, Task]], version: int, trial: int
) -> pb.RolloutRequest:
    """Held-out groups: one greedy sample each. `trial` as for `build_request`."""
    assert config.evaluation is not None
    environment = config.evaluation.environment or config.environment
    sampling = config.sampling.model_copy(update={"temperature": 0.0, "top_p": 1.0, "top_k": 0})
    request = _request(config, environment, sampling, 1)
    request.versions.exact_version = version
    for group_id, task in tasks:
        request.groups.append(_group(group_id, task, [0]))
    request.request_id = _content_id(request, trial)
    return request


def _request(
    config: RunConfig, environment: EnvironmentConfig, sampling: SamplingConfig, sample_count: int
) -> pb.RolloutRequest:
    request = pb.RolloutRequest(
        environment=pb.EnvironmentSpec(name=environment.name),
        sampling=engine_pb.SamplingParams(**sampling.model_dump()),
        sample_count=sample_count,
    )
    request.environment.settings.update(environment.settings)
    request.group_timeout.FromMilliseconds(int(config.group_timeout_seconds * 1000))
    return request


def _group(group_id: str, task: Task, seeds: Sequence[int]) -> pb.GroupRequest:
    group = pb.GroupRequest(group_id=group_id, seeds=seeds)
    if isinstance(task, int):
        group.index = task
    else:
        row = Struct()
        row.update(dict(task))
        group.row.CopyFrom(row)
    return group


def _content_id(request: pb.RolloutRequest, trial: int) -> str:
    body = request.SerializeToString(deterministic=True)
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{body.hex()}/{trial}"))
