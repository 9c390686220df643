"""Where a rank stands among the others, and how they meet."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from services.trainer.backend import Mesh
from services.trainer.config import TrainerConfig
from sluice import platform

OPEN_PORTS = (
    (
        "where ranks meet, and collectives between them (gloo, NCCL ...)",
        "loopback for ranks of one host; else `MASTER_ADDR` and what the libraries choose",
        "nothing: libraries open them. Over several hosts give them a network of their own",
    ),
)


def find_mesh(config: TrainerConfig, rank: int, world_size: int) -> Mesh:
    """Return the place of a rank under the backend's layout; raises ValueError if none fits."""
    if config.backend == "megatron":
        from services.trainer.backends.megatron.layout import mesh_of

        return mesh_of(config.megatron, rank, world_size)
    if config.backend == "fsdp":
        from services.trainer.backends.fsdp import layout

        return layout.mesh_of(config.fsdp, rank, world_size)
    return Mesh(rank=rank, world_size=world_size, data_rank=rank, data_size=world_size)


def join_group(config: TrainerConfig, mesh: Mesh, meeting: Callable[[], str] | None = None) -> None:
    """Meet the other ranks at MASTER_ADDR:MASTER_PORT. Collectives end with the command timeout.

    A single rank of the reference backend needs no group.
    """
    if mesh.world_size == 1 and config.backend == "reference":
        return
    timeout = datetime.timedelta(seconds=config.ranks.command_timeout)
    if meeting is None:
        store = _local_store(mesh, timeout)
    else:
        store = _launcher_store(mesh, timeout, meeting())
    dist.init_process_group(
        platform.current().collective,
        timeout=timeout,
        rank=mesh.rank,
        world_size=mesh.world_size,
        store=store,
    )


def _local_store(mesh: Mesh, timeout: datetime.timedelta) -> dist.Store:
    """Return where ranks of one host meet: at a socket of the controller's, for loopback alone."""
    listener = int(os.environ["MASTER_LISTEN_FD"]) if mesh.rank == 0 else None
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        mesh.world_size,
        is_master=mesh.rank == 0,
        timeout=timeout,
        master_listen_fd=listener,
    )


def _launcher_store(mesh: Mesh, timeout: datetime.timedelta, meeting: str) -> dist.Store:
    """Return where ranks that others launch meet, at MASTER_ADDR:MASTER_PORT.

    torch.distributed.run keeps one store for all its rounds, in which the addresses of ranks that
    are gone still stand: each round has keys of its own.
    """
    store, _, _ = next(rendezvous("env://", mesh.rank, mesh.world_size, timeout=timeout))
    return dist.PrefixStore(meeting, store)


def leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
