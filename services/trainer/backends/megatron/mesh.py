"""The Mesh of a Megatron layout, as the trainer's rank process asks for it."""

from __future__ import annotations

from services.trainer.backend import Mesh
from services.trainer.backends.megatron.config import MegatronConfig
from services.trainer.backends.megatron.layout import position_of


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
