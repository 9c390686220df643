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
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from services.trainer.backends.chunks import (
    PIECE_BYTES,
    Box,
    BoxData,
    RankFiles,
    StagedChunks,
    cut,
)
from services.trainer.backends.fsdp.model import ShardedModel
from services.trainer.backends.fsdp.optimizer import MOMENTS, ShardedOptimizer
from services.trainer.errors import CheckpointMismatchError
from services.trainer.staging import StagedCheckpoint

DESCRIPTION = "sluice.json"
FORMAT = 1


class ForeignCheckpointError(CheckpointMismatchError, ValueError):
    """A checkpoint is of another backend or model than it is read into."""


def stage(
    sharded: ShardedModel,
    optimizer: ShardedOptimizer,
    directory: Path,
    group: dist.ProcessGroup,
    *,
    durable: bool,
) -> StagedCheckpoint:
    """Take in what is to be written into the existing, empty `directory`."""
    rank, has_stepped = dist.get_rank(), bool(optimizer.adam.state)
    chunks: list[BoxData] = []
    for key, tensor in _state(sharded, optimizer, has_stepped=has_stepped).items():
        chunks += _own_boxes(key, tensor, is_first=rank == 0)
    chunks += _own_boxes(_random_key(rank), torch.get_rng_state(), is_first=True)
    description = {
        "format": FORMAT,
        "backend": "fsdp",
        "model": _fingerprint(sharded),
        "has_stepped": has_stepped,
    }
    small = {DESCRIPTION: json.dumps(description).encode()}
    files = RankFiles(rank, chunks, {})
    return StagedChunks(directory, files, small, group, threads=1, durable=durable)


def _own_boxes(key: str, tensor: torch.Tensor, *, is_first: bool) -> list[BoxData]:
    """Cut this rank's part of a tensor; one that is not cut over ranks is the first one's."""
    shape, local = tuple(tensor.shape), tensor.detach()
    sizes, offset = shape, (0,) * len(shape)
    if isinstance(local, DTensor):
        sizes, offset = compute_local_shape_and_global_offset(
            tensor.shape, local.device_mesh, local.placements
        )
        local = local.to_local()
    elif not is_first:
        return []
    return cut(Box(key, shape, tuple(offset), tuple(sizes)), local.reshape(-1), 0, PIECE_BYTES)


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
