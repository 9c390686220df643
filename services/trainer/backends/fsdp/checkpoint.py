"""Checkpoints in torch's distributed form: every rank writes and reads its own parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from services.trainer.backends.chunks import (
    PIECE_BYTES,
    Box,
    BoxData,
    ChunkReader,
    RankFiles,
    StagedChunks,
    UncoveredChunkError,
    cut,
)
from services.trainer.backends.fsdp.model import ShardedModel
from services.trainer.backends.fsdp.optimizer import MOMENTS, ShardedOptimizer
from services.trainer.backends.fsdp.tensor_parallel import tensor_cut
from services.trainer.backends.muon import MOMENTUM, other_kind
from services.trainer.backends.trainable import other_trained
from services.trainer.errors import CheckpointMismatchError
from services.trainer.staging import StagedCheckpoint
from sluice.weights.convert.stored import MALFORMED

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
    rank, has_stepped = dist.get_rank(), optimizer.has_stepped
    chunks: list[BoxData] = []
    for key, tensor in _state(sharded, optimizer, has_stepped=has_stepped).items():
        if sharded.is_counted(tensor) if isinstance(tensor, DTensor) else rank == 0:
            chunks += _own_boxes(key, tensor)
    chunks += _own_boxes(_random_key(rank), torch.get_rng_state())
    description = {
        "format": FORMAT,
        "backend": "fsdp",
        "model": _fingerprint(sharded),
        "has_stepped": has_stepped,
    }
    small = {DESCRIPTION: json.dumps(description).encode()}
    files = RankFiles(rank, chunks, {})
    return StagedChunks(directory, files, small, group, threads=1, durable=durable)


def _own_boxes(key: str, tensor: torch.Tensor) -> list[BoxData]:
    """Cut this rank's part of a tensor into chunks in its memory."""
    shape, local = tuple(tensor.shape), tensor.detach()
    sizes, offset = shape, (0,) * len(shape)
    if isinstance(local, DTensor):
        cut_over = tensor_cut(local)
        if cut_over is not None and cut_over.matrices > 1:
            return _packed_boxes(key, local, cut_over.matrices)
        sizes, offset = compute_local_shape_and_global_offset(
            tensor.shape, local.device_mesh, local.placements
        )
        local = local.to_local()
    return cut(Box(key, shape, tuple(offset), tuple(sizes)), local.view(-1), 0, PIECE_BYTES)


def _packed_boxes(key: str, tensor: DTensor, matrices: int) -> list[BoxData]:
    """Of each expert, [experts, matrices x rows, columns], this rank's rows of every matrix."""
    mesh = tensor.device_mesh
    whole = (tensor.placements[0], Replicate())
    _, (first, *_) = compute_local_shape_and_global_offset(tensor.shape, mesh, whole)
    matrix = tensor.shape[1] // matrices
    local = tensor.to_local()
    rows = matrix // mesh.size(1)
    chunks = []
    for expert, part in enumerate(local):
        for number, own in enumerate(part.split(rows)):
            at = number * matrix + rows * mesh.get_local_rank(1)
            place = Box(key, tuple(tensor.shape), (first + expert, at, 0), (1, *own.shape))
            chunks.append(BoxData(place, own[None]))
    return chunks


def load(
    sharded: ShardedModel, optimizer: ShardedOptimizer, directory: Path, group: dist.ProcessGroup
) -> None:
    """Read a checkpoint of any count of ranks; collective. Raises ForeignCheckpointError on all."""
    description = _read_description(directory)
    if description["model"] != _fingerprint(sharded):
        raise ForeignCheckpointError(f"the checkpoint {directory.name!r} is of another model")
    has_stepped = bool(description["has_stepped"])
    optimizer.forget()
    if has_stepped:
        optimizer.start()
    state = _state(sharded, optimizer, has_stepped=has_stepped)
    key = _random_key(dist.get_rank())
    failure = ""
    try:
        reader = ChunkReader(directory)
        momenta, adams = (_saved_state(reader, kind) for kind in (MOMENTUM, MOMENTS[0]))
        other = other_kind(optimizer.muon.matrices.keys(), momenta, adams)
        if other := other or other_trained(optimizer.parameters.keys(), momenta | adams):
            raise UncoveredChunkError(other)
        if key in reader:
            state[key] = torch.get_rng_state()
        for name, tensor in state.items():
            reader.fill(_own_boxes(name, tensor))
        reader.read()
    except (OSError, *MALFORMED) as error:
        failure = f"{directory.name!r} cannot be read: {error}"
    failures: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(failures, failure, group=group)
    if any(failures):
        raise ForeignCheckpointError(next(filter(None, failures)))
    if "optimizer/step" in state:
        optimizer.set_step(state["optimizer/step"])
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
    for name, kind, moment in optimizer.moments():
        state[f"optimizer/{name}/{kind}"] = _as_part(moment, optimizer.parameters[name])
    if (number := optimizer.step_number) is not None:
        state["optimizer/step"] = number
    return state


def _saved_state(reader: ChunkReader, kind: str) -> set[str]:
    """Names of the parameters of which a checkpoint has a moment of that kind."""
    return {
        key.removeprefix("optimizer/").removesuffix(f"/{kind}")
        for key in reader.keys()  # noqa: SIM118  # not a mapping
        if key.startswith("optimizer/") and key.endswith(f"/{kind}")
    }


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
