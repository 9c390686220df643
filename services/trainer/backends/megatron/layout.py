"""Where a rank stands in Megatron's order "tp-cp-ep-dp-pp"; imports no Megatron."""

from __future__ import annotations

from dataclasses import dataclass

from services.trainer.backends.megatron.config import MegatronConfig
from services.trainer.mesh import LayoutError, Mesh


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
    """Returns the position of `rank`. Raises LayoutError when `world_size` cannot be divided."""
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
    """Returns where `rank` stands. Raises LayoutError when the world does not divide."""
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
