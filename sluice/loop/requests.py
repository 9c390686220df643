"""The Rollout call of some groups."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from google.protobuf.struct_pb2 import Struct

from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.loop.config import EnvironmentConfig, EvaluationSetConfig, RunConfig, SamplingConfig
from sluice.loop.prompts import Task, sample_seed


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
    config: RunConfig,
    data: EvaluationSetConfig,
    tasks: Sequence[tuple[str, Task]],
    versions: engine_pb.VersionBounds,
    trial: int,
) -> pb.EvaluateRequest:
    """Held-out groups of one data set. `trial` as for `build_request`.

    Seeds come from the task, not from the step: scores of two steps differ by the weights.
    """
    assert config.evaluation is not None
    greedy = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
    sampling = data.sampling or config.sampling.model_copy(update=greedy)
    rollout = _request(config, data.environment or config.environment, sampling, data.samples)
    rollout.versions.CopyFrom(versions)
    for group_id, task in tasks:
        name = group_id.split("-", 2)[2]  # without the step
        seeds = [sample_seed(config.seed, f"eval-{name}", i) for i in range(data.samples)]
        rollout.groups.append(_group(group_id, task, seeds))
    rollout.request_id = _content_id(rollout, trial)
    return pb.EvaluateRequest(
        rollout=rollout,
        pass_at=data.pass_at,
        pass_threshold=data.pass_threshold,
        max_running_groups=config.evaluation.max_running_groups,
    )


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
