"""Where a rank of the fsdp backend stands: tensor ranks side by side, then those of context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.trainer.backends.fsdp.config import FsdpConfig
from services.trainer.mesh import LayoutError, Mesh
from sluice.model_types import layer_configs


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


def check_heads(hf_config: Any, plan: Mapping[str, str], size: int) -> None:
    """Raise LayoutError where a plan cuts attention over tensor ranks that its heads do not fill.

    hf_config: of transformers. plan: its own, by patterns of names.
    """
    if not any("attn" in pattern and style == "colwise" for pattern, style in plan.items()):
        return
    for layer in layer_configs(hf_config):
        for name in ("num_attention_heads", "num_key_value_heads"):
            count = getattr(layer, name, None)
            if count and count % size:
                raise LayoutError(f"fsdp.tensor {size} does not divide {name} {count}")
