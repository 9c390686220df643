"""Where a rank of the fsdp backend stands: tensor ranks side by side."""

from __future__ import annotations

from services.trainer.backend import LayoutError, Mesh
from services.trainer.backends.fsdp.config import FsdpConfig


def mesh_of(config: FsdpConfig, rank: int, world_size: int) -> Mesh:
    """Return where `rank` stands. Raises LayoutError when the world does not divide."""
    if world_size % config.tensor:
        raise LayoutError(f"{world_size} ranks do not divide into fsdp.tensor {config.tensor}")
    return Mesh(
        rank=rank,
        world_size=world_size,
        data_rank=rank // config.tensor,
        data_size=world_size // config.tensor,
        tensor_size=config.tensor,
        reports=rank % config.tensor == 0,
    )
