"""Where a rank stands in Megatron's order "tp-cp-ep-dp-pp". Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from services.trainer.backend import Mesh
from services.trainer.backends.megatron.config import MegatronConfig
from sluice.weights.rules import Partition


class LayoutError(ValueError):
    """The world does not divide into the parallel sizes asked for."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Indices of one rank in the parallel dimensions; `data_size` is what the others leave."""

    tensor: int
    context: int
    data: int
    pipeline: int
    data_size: int
    reports: bool  # exactly one rank of each data index: last stage, first in tensor and context


def position_of(config: MegatronConfig, rank: int, world_size: int) -> Position:
    """The position of `rank`. Raises LayoutError when `world_size` cannot be divided."""
    model_size = config.tensor * config.context * config.pipeline
    if world_size % model_size:
        raise LayoutError(
            f"{world_size} ranks do not divide into tensor {config.tensor} x context "
            f"{config.context} x pipeline {config.pipeline}"
        )
    stage_size = world_size // config.pipeline
    expert_size = config.expert * config.expert_tensor_size
    if stage_size % expert_size:
        raise LayoutError(
            f"{stage_size} ranks of a pipeline stage do not divide into expert {config.expert} "
            f"x expert_tensor {config.expert_tensor_size}"
        )
    data_size = world_size // model_size
    tensor = rank % config.tensor
    context = rank // config.tensor % config.context
    pipeline = rank // stage_size
    return Position(
        tensor=tensor,
        context=context,
        data=rank // (config.tensor * config.context) % data_size,
        pipeline=pipeline,
        data_size=data_size,
        reports=tensor == 0 and context == 0 and pipeline == config.pipeline - 1,
    )


def mesh_of(config: MegatronConfig, rank: int, world_size: int) -> Mesh:
    """Where `rank` stands. Raises LayoutError when the world does not divide."""
    position = position_of(config, rank, world_size)
    return Mesh(
        rank=rank,
        world_size=world_size,
        data_rank=position.data,
        data_size=position.data_size,
        tensor_size=config.tensor,
        pipeline_size=config.pipeline,
        context_size=config.context,
        expert_size=config.expert,
        virtual_pipeline_size=config.virtual_pipeline,
        reports=position.reports,
    )


_users: list[MegatronConfig] = []  # Megatron keeps one set of groups a process


def start(config: MegatronConfig, *, seed: int) -> None:
    """Make all groups; collective over the default group, which must exist.

    Backends of one process share them. Raises LayoutError when theirs are of another layout.
    """
    if _users:
        if _sizes(_users[0]) != _sizes(config):
            raise LayoutError("a backend of another layout is open in this process")
        _users.append(config)
        return
    interleaved = config.virtual_pipeline > 1
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor,
        pipeline_model_parallel_size=config.pipeline,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline if interleaved else None,
        context_parallel_size=config.context,
        expert_model_parallel_size=config.expert,
        expert_tensor_parallel_size=config.expert_tensor_size,
        order="tp-cp-ep-dp-pp",
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    _users.append(config)


def stop() -> None:
    """Undo one `start`; the last one ends the groups."""
    if _users:
        _users.pop()
    if not _users and parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


def _sizes(config: MegatronConfig) -> tuple[int, ...]:
    return (
        config.tensor,
        config.pipeline,
        config.virtual_pipeline,
        config.context,
        config.expert,
        config.expert_tensor_size,
    )


def partition(*, expert: bool, padded_vocab: int) -> Partition:
    """This rank's tensor-parallel share of an ordinary tensor or of an expert's."""
    if expert:
        return Partition(
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
            padded_vocab,
        )
    return Partition(
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
        padded_vocab,
    )


def tensor_group(*, expert: bool) -> dist.ProcessGroup:
    """Ranks that hold the shares of one tensor."""
    if expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()
