"""Tensors out of a sharded model one at a time, under the names of the HF checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from services.trainer.backends.fsdp.exchange import gather_rows, join_parts
from services.trainer.backends.fsdp.expert_parallel import EXPERT, SHARD, is_spread
from services.trainer.backends.fsdp.model import ShardedModel
from services.trainer.backends.fsdp.optimizer import local_part
from services.trainer.backends.fsdp.tensor_parallel import (
    DATA,
    TENSOR,
    TensorCut,
    replica_of,
    tensor_cut,
)
from services.trainer.backends.untrained import untrained_names, untrained_tensors
from sluice.weights.manifest import ShardFile
from sluice.weights.shards import ShardWrite

Read = Callable[[str, torch.Tensor], torch.Tensor]


def read_weight(name: str, tensor: torch.Tensor) -> torch.Tensor:
    del name
    return tensor.detach()


@dataclass(frozen=True)
class Export:
    """Which rank makes what of each tensor, the same on all of them; of the first replica alone.

    Raises ValueError where tensors of the checkpoint are made of several of the model's.
    """

    sharded: ShardedModel
    dtype: torch.dtype  # of parameters; buffers, which steer routing, are left as they are
    source: Path | None = None  # whose layers that are not trained are written too, as they are

    @cached_property
    def owners(self) -> dict[str, int]:
        """The rank that makes each of the model's tensors: the largest first, evenly."""
        sizes = {n: t.numel() for n, t in self._tensors().items()}
        self._check(sizes)
        loads = [0] * (self.sharded.mesh[DATA].size() * self.sharded.mesh[TENSOR].size())
        owners = {}
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            owners[name] = rank = loads.index(min(loads))
            loads[rank] += sizes[name]
        return owners

    def tensors(self, read: Read = read_weight) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the HF tensors of this rank, those of one tensor at a time; collective.

        Run it to the end. `read` gives what is exported of each parameter, in its shape.
        """
        for name, tensor in self._tensors().items():
            if (made := self._make(name, tensor, read)) is not None:
                yield made

    def write(self, directory: Path, write: ShardWrite) -> list[ShardFile]:
        """Write this rank's tensors as files no larger than the largest of them; collective."""
        cap = max(t.numel() for t in self._tensors().values()) * self.dtype.itemsize
        files: list[ShardFile] = []
        waiting: dict[str, torch.Tensor] = {}
        size = 0

        def flush() -> None:
            nonlocal size
            name = f"model-{dist.get_rank():05d}-{len(files):05d}.safetensors"
            files.append(write(directory, name, waiting, {})())
            waiting.clear()
            size = 0

        tensors = list(self._tensors().items())
        for index, (name, tensor) in enumerate(tensors):
            mine = self.owners[name] == dist.get_rank()
            more = tensor.numel() * self._dtype_of(tensor).itemsize if mine else 0
            if waiting and size + more > cap:
                try:  # ahead of the gather: what waits and what comes are never both here
                    flush()
                except BaseException:  # a full disk: other ranks wait for this one in each gather
                    for each in tensors[index:]:
                        self._make(*each, read_weight)
                    raise
            waiting.update(self._make(name, tensor, read_weight) or {})
            size += more
        for made in self._untrained_tensors():
            more = sum(tensor.nbytes for tensor in made.values())
            if waiting and size + more > cap:
                flush()
            waiting.update(made)
            size += more
        if waiting:
            flush()
        return files

    @cached_property
    def untrained(self) -> tuple[str, ...]:
        """Names of the tensors of the source that are published as they are."""
        if self.source is None:
            return ()
        empty = {n: torch.empty(t.shape, device="meta") for n, t in self._tensors().items()}
        return untrained_names(self.source, revert_weight_conversion(self.sharded.model, empty))

    def _untrained_tensors(self) -> Iterator[dict[str, torch.Tensor]]:
        if self.source is None:
            return iter(())
        rank, world_size = dist.get_rank(), dist.get_world_size()
        return untrained_tensors(self.source, self.untrained, rank=rank, world_size=world_size)

    def _make(self, name: str, tensor: torch.Tensor, read: Read) -> dict[str, torch.Tensor] | None:
        """The HF tensors made of one tensor, on its owner; collective over the first replica."""
        if replica_of(self.sharded.mesh):
            return None
        part = read(name, tensor).to(self._dtype_of(tensor))
        whole = _gather(part, self.owners[name], self.sharded)
        if whole is None:
            return None
        made: dict[str, torch.Tensor] = revert_weight_conversion(self.sharded.model, {name: whole})
        return made

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        return self.dtype if isinstance(tensor, torch.nn.Parameter) else tensor.dtype

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**self.sharded.parameters(), **self.sharded.buffers()}

    def _check(self, sizes: Mapping[str, int]) -> None:
        """One at a time must give what all at once do."""
        model: Any = self.sharded.model
        meta = {name: torch.empty(t.shape, device="meta") for name, t in self._tensors().items()}
        assert meta.keys() == sizes.keys()
        alone: dict[str, torch.Tensor] = {}
        for name, tensor in meta.items():
            alone |= revert_weight_conversion(model, {name: tensor})
        together = revert_weight_conversion(model, meta)
        if {n: t.shape for n, t in alone.items()} != {n: t.shape for n, t in together.items()}:
            raise ValueError(
                f"model_type {model.config.model_type} cannot be exported one tensor at a time"
            )


def _gather(tensor: torch.Tensor, owner: int, sharded: ShardedModel) -> torch.Tensor | None:
    """The whole tensor on its owner, None elsewhere. What every rank holds needs no exchange.

    First over data ranks, each on the one that stands where the owner does, then over its tensor
    ranks, which takes the tensor once more. Of experts: over those that share some, then over all.
    """
    mine = dist.get_rank() == owner
    if not isinstance(tensor, DTensor):
        return tensor if mine else None
    mesh, experts = sharded.mesh, sharded.experts
    over, within, cut = mesh.get_group(DATA), mesh.get_group(TENSOR), tensor_cut(tensor)
    if is_spread(tensor):
        assert experts is not None
        over, within = experts.mesh.get_group(SHARD), experts.mesh.get_group(EXPERT)
        cut = TensorCut(dim=0, matrices=1)
    data, place = divmod(owner, within.size())
    if cut is None and within.rank() != place:
        return None
    rows = tensor.shape[0] // (within.size() if cut is not None and cut.dim == 0 else 1)
    local = local_part(tensor).to(mesh.device_type)  # with cpu_offload it is on the host
    part = gather_rows(local, rows, data, over)
    if part is None or cut is None:
        return part
    parts = _gather_parts(part, place, within)
    return None if parts is None else join_parts(parts, cut)


def _gather_parts(
    part: torch.Tensor, to: int, group: dist.ProcessGroup
) -> list[torch.Tensor] | None:
    """The parts of all ranks, which are of one shape, on one of them, None elsewhere."""
    parts = [torch.empty_like(part) for _ in range(group.size())] if group.rank() == to else None
    dist.gather(part.contiguous(), parts, dst=dist.get_global_rank(group, to), group=group)
    return parts
