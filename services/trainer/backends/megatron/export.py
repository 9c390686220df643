"""Weights out of a running policy as HF tensors, each by exactly one rank, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from services.trainer.backends.megatron import parallel
from services.trainer.backends.megatron.loading import LocalTensor
from sluice.weights.rules import Cut, unpack
from sluice.weights.store import ShardFile
from sluice.weights.writer import ShardWrite

Reader = Callable[[LocalTensor], torch.Tensor]


def read_parameter(tensor: LocalTensor) -> torch.Tensor:
    return tensor.parameter.detach()


@torch.no_grad()
def export_tensors(
    tensors: Sequence[LocalTensor], read: Reader = read_parameter
) -> Iterator[dict[str, torch.Tensor]]:
    """The HF tensors that this rank owns, those of one Megatron tensor at a time.

    `read` gives what is exported of each, in the parameter's shape. Of the copies of a tensor
    over data and context ranks the first is taken; its shares are gathered on one of the tensor
    ranks, each in turn. Collective over the tensor-parallel groups: run it to the end.
    """
    for index, tensor in enumerate(tensors):
        expert = tensor.binding.expert is not None
        if tensor.binding.alias or _copy_index(expert=expert) != 0:
            continue
        group = parallel.tensor_group(expert=expert)
        owner = index % group.size()
        shares = _collect(read(tensor), tensor.binding.cut, owner, group)
        if shares is not None:
            yield unpack(tensor.binding, shares)


def write_shards(
    tensors: Sequence[LocalTensor],
    directory: Path,
    *,
    rank: int,
    max_bytes: int,
    write: ShardWrite,
) -> list[ShardFile]:
    """Write what this rank owns as safetensors files of about `max_bytes` below `directory`."""
    files: list[ShardFile] = []
    waiting: dict[str, torch.Tensor] = {}

    def flush() -> None:
        name = f"model-{rank:05d}-{len(files):05d}.safetensors"
        files.append(write(directory, name, waiting))
        waiting.clear()

    for made in export_tensors(tensors):
        waiting.update({name: tensor.contiguous() for name, tensor in made.items()})
        if sum(tensor.nbytes for tensor in waiting.values()) >= max_bytes:
            flush()
    if waiting:
        flush()
    return files


def _copy_index(*, expert: bool) -> int:
    if expert:
        return int(parallel_state.get_expert_data_parallel_rank())
    return int(parallel_state.get_data_parallel_rank(with_context_parallel=True))


def _collect(
    share: torch.Tensor, cut: Cut, owner: int, group: dist.ProcessGroup
) -> list[torch.Tensor] | None:
    """All shares on the owner, None elsewhere. What is not cut needs no exchange."""
    mine = group.rank() == owner
    if cut is Cut.NONE or group.size() == 1:
        return [share] if mine else None
    share = share.contiguous()
    shares = [torch.empty_like(share) for _ in range(group.size())] if mine else None
    dist.gather(share, shares, dst=dist.get_global_rank(group, owner), group=group)
    return shares
