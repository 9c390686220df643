"""Where this rank stands among the others, and the process group they share."""

from __future__ import annotations

import datetime
import os

import torch.distributed as dist

from services.trainer.backend import Mesh
from services.trainer.config import TrainerConfig
from sluice import platform


def find_mesh(config: TrainerConfig, rank: int, world_size: int) -> Mesh:
    """The place of a rank under the backend's layout; raises ValueError if none fits."""
    if config.backend == "megatron":
        from services.trainer.backends.megatron.mesh import mesh_of

        return mesh_of(config.megatron, rank, world_size)
    return Mesh(rank=rank, world_size=world_size, data_rank=rank, data_size=world_size)


def join_group(config: TrainerConfig, mesh: Mesh) -> None:
    """Meet the other ranks at MASTER_ADDR:MASTER_PORT. Collectives end with the command timeout.

    A single rank of the reference backend needs no group.
    """
    if mesh.world_size == 1 and config.backend == "reference":
        return
    timeout = datetime.timedelta(seconds=config.ranks.command_timeout)
    dist.init_process_group(
        platform.current().collective,
        timeout=timeout,
        rank=mesh.rank,
        world_size=mesh.world_size,
        store=_local_store(mesh, timeout) if config.ranks.launch == "local" else None,
    )


def _local_store(mesh: Mesh, timeout: datetime.timedelta) -> dist.Store:
    """Where ranks of one host meet: at a socket of the front's, for loopback alone."""
    listener = int(os.environ["MASTER_LISTEN_FD"]) if mesh.rank == 0 else None
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        mesh.world_size,
        is_master=mesh.rank == 0,
        timeout=timeout,
        master_listen_fd=listener,
    )


def leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
