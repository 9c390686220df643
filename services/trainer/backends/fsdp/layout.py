"""Where a rank of the fsdp backend stands: tensor ranks side by side, then those of context."""

from __future__ import annotations

from services.trainer.backend import LayoutError, Mesh
from services.trainer.backends.fsdp.config import FsdpConfig


def mesh_of(config: FsdpConfig, rank: int, world_size: int) -> Mesh:
    """Return where `rank` stands. Raises LayoutError when the world does not divide."""
    if world_size % config.replicas:
        raise LayoutError(f"{world_size} ranks do not divide into fsdp.replicas {config.replicas}")
    size = config.tensor * config.context
    if world_size % size:
        raise LayoutError(
            f"{world_size} ranks do not divide into fsdp.tensor {config.tensor} x fsdp.context "
            f"{config.context}"
        )
    if world_size // config.replicas % config.expert:
        raise LayoutError(
            f"{world_size} ranks do not divide into fsdp.replicas {config.replicas} x fsdp.expert "
            f"{config.expert}"
        )
    return Mesh(
        rank=rank,
        world_size=world_size,
        data_rank=rank // size,
        data_size=world_size // size,
        tensor_size=config.tensor,
        context_size=config.context,
        expert_size=config.expert,
        replicas=config.replicas,
        reports=rank % size == 0,
    )
