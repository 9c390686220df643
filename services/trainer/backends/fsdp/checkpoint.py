"""Checkpoints in torch's distributed form: every rank writes and reads its own parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from services.trainer.backends.fsdp.model import ShardedModel
from services.trainer.backends.fsdp.optimizer import MOMENTS, ShardedOptimizer
from services.trainer.errors import CheckpointMismatchError
from sluice.durable import write_new
from sluice.weights.manifest import FileEntry, digest_file

DESCRIPTION = "sluice.json"
FORMAT = 1


class ForeignCheckpointError(CheckpointMismatchError, ValueError):
    """A checkpoint is of another backend or model than it is read into."""


def save(
    sharded: ShardedModel, optimizer: ShardedOptimizer, directory: Path, *, durable: bool
) -> dict[str, FileEntry]:
    """Write into the existing, empty `directory`; collective. The files of this rank.

    Raises OSError on every rank when any rank's files could not be written.
    """
    rank = dist.get_rank()
    state = _state(sharded, optimizer, has_stepped=bool(optimizer.adam.state))
    state[_random_key(rank)] = torch.get_rng_state()
    writer = dcp.FileSystemWriter(directory, single_file_per_rank=True, sync_files=durable)
    try:
        dcp.save(state, storage_writer=writer)
    except CheckpointException as error:  # of whatever rank; no subclass of Exception
        raise OSError(f"checkpoint {directory.name!r} was not written: {_cause(error)}") from error
    if rank == 0:
        description = {
            "format": FORMAT,
            "backend": "fsdp",
            "model": _fingerprint(sharded),
            "has_stepped": bool(optimizer.adam.state),
        }
        write_new(directory / DESCRIPTION, json.dumps(description).encode())
    dist.barrier()
    names = {path.name for path in directory.glob(f"__{rank}_*.distcp")}
    if rank == 0:
        names |= {DESCRIPTION, ".metadata"}
    return {name: FileEntry(*digest_file(directory / name)) for name in names}


def load(sharded: ShardedModel, optimizer: ShardedOptimizer, directory: Path) -> None:
    """Read a checkpoint of any count of ranks; collective. Raises ForeignCheckpointError."""
    description = _read_description(directory)
    if description["model"] != _fingerprint(sharded):
        raise ForeignCheckpointError(f"the checkpoint {directory.name!r} is of another model")
    has_stepped = bool(description["has_stepped"])
    optimizer.adam.state.clear()
    if has_stepped:
        _create_moments(optimizer)
    state = _state(sharded, optimizer, has_stepped=has_stepped)
    reader = dcp.FileSystemReader(directory)
    key = _random_key(dist.get_rank())
    try:
        if key in reader.read_metadata().state_dict_metadata:
            state[key] = torch.get_rng_state()
        dcp.load(state, storage_reader=reader)
    except CheckpointException as error:
        message = f"{directory.name!r} cannot be read: {_cause(error)}"
        raise ForeignCheckpointError(message) from error
    if has_stepped:
        for local in optimizer.locals.values():
            optimizer.adam.state[local]["step"] = state["optimizer/step"].clone()
    if key in state:
        torch.set_rng_state(state[key])
    optimizer.clear()


def _state(
    sharded: ShardedModel, optimizer: ShardedOptimizer, *, has_stepped: bool
) -> dict[str, Any]:
    """Model and optimizer by name, in the memory that they are in."""
    state: dict[str, Any] = {f"model/{n}": p.detach() for n, p in sharded.parameters().items()}
    state |= {f"model/{name}": buffer for name, buffer in sharded.buffers().items()}
    if not has_stepped:
        return state
    for name, local in optimizer.locals.items():
        moments = optimizer.adam.state[local]
        for kind in MOMENTS:
            state[f"optimizer/{name}/{kind}"] = _as_part(moments[kind], optimizer.parameters[name])
        state["optimizer/step"] = moments["step"]  # the same of all
    return state


def _create_moments(optimizer: ShardedOptimizer) -> None:
    for local in optimizer.locals.values():
        moments = {kind: torch.zeros_like(local.detach()) for kind in MOMENTS}
        optimizer.adam.state[local] = {
            **moments,
            "step": torch.zeros((), device=_step_device(local)),
        }


def _step_device(local: torch.Tensor) -> torch.device:
    return local.device  # as the fused optimizer keeps it


def _as_part(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _read_description(directory: Path) -> dict[str, Any]:
    try:
        description: dict[str, Any] = json.loads((directory / DESCRIPTION).read_bytes())
        is_ours = description["backend"] == "fsdp" and description["format"] == FORMAT
        description["model"], description["has_stepped"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ForeignCheckpointError(
            f"{directory.name!r} is no complete checkpoint of the fsdp backend"
        ) from error
    if not is_ours:
        raise ForeignCheckpointError(f"{directory.name!r} is of another backend or format")
    return description


def _fingerprint(sharded: ShardedModel) -> str:
    """The same for models of equal tensors, by names and shapes."""
    tensors = {**sharded.parameters(), **sharded.buffers()}
    shapes = sorted((name, tuple(tensor.shape)) for name, tensor in tensors.items())
    digest: str = xxhash.xxh3_128_hexdigest(json.dumps(shapes).encode())
    return digest


def _random_key(rank: int) -> str:
    return f"random/{rank}"


def _cause(error: CheckpointException) -> object:
    return next(iter(error.failures.values()))[0]
