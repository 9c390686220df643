"""Tensor parallelism by the plan that a family ships: which layers are cut, and how.

transformers cuts the layers and exchanges what they make. Ours are the vocabulary, of which ranks
have equal parts, and the weights that are whole on all ranks and see a part of the heads.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.functional import linear
from transformers.distributed.tensor_parallel import (
    apply_tensor_parallelism,
    replace_layer_number_by_wildcard,
)

from services.trainer.backend import LayoutError, Mesh
from services.trainer.backends.fsdp.layout import check_heads
from services.trainer.backends.lora import Adapter
from sluice.algo.collectives import Collectives
from sluice.weights.errors import InvalidAdapterError

REPLICA, DATA, TENSOR = "replica", "data", "tensor"  # the dimensions of the mesh
SUMMED = "replicated_with_grad_allreduce"  # transformers' word for weights of a part of the heads
LATENT = "mla_kv_a_proj"  # and for one of whose outputs a part is compressed, a part of no head

# Weights that are whole on every rank and act on what a layer beside them, which is cut, has made.
BEHIND = {
    **dict.fromkeys(("q_norm", "k_norm", "q_layernorm", "k_layernorm"), "q_proj"),
    "act_fn": "up_proj",  # activations that are learned
}


def create_mesh(ranks: Mesh, device_type: str, timeout: timedelta, replicas: int) -> DeviceMesh:
    """Make the groups of replica, data and tensor ranks; collective over all ranks.

    `timeout` is that of their collectives, where torch's own differs between libraries. Of one
    replica the mesh has no dimension.
    """
    names: tuple[str, ...] = (DATA, TENSOR)
    shape: tuple[int, ...] = (ranks.world_size // ranks.tensor_size, ranks.tensor_size)
    if replicas == 1 and 1 in shape:  # then all ranks are a group, which there is
        return init_device_mesh(device_type, shape, mesh_dim_names=names)
    if replicas > 1:
        names, shape = (REPLICA, *names), (replicas, shape[0] // replicas, shape[1])
    return mesh_of_groups(names, shape, device_type, timeout)


def mesh_of_groups(
    names: tuple[str, ...], shape: tuple[int, ...], device_type: str, timeout: timedelta
) -> DeviceMesh:
    """Make a mesh of all ranks, with groups of its own; collective over all of them."""
    places = torch.arange(math.prod(shape)).view(shape)
    groups = []
    for dim, size in enumerate(shape):
        lines = places.movedim(dim, -1).reshape(-1, size).tolist()
        group, _ = dist.new_subgroups_by_enumeration(lines, timeout=timeout)
        groups.append(group)
    return DeviceMesh.from_group(groups, device_type, places, mesh_dim_names=names)


def replica_of(mesh: DeviceMesh) -> int:
    """Return which copy of the model this rank has a part of."""
    return mesh.get_local_rank(REPLICA) if REPLICA in (mesh.mesh_dim_names or ()) else 0


def cut_layers(model: Any, mesh: DeviceMesh) -> None:
    """Cut a model that has no memory yet over the ranks of a mesh of one dimension.

    A vocabulary that does not divide is whole on every rank. What is tied is to be tied again.
    Raises LayoutError.
    """
    plan: dict[str, str] = dict(model.tp_plan)
    names = {module: name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for ends in (embedding, head):
        plan.pop(names.get(ends, ""), None)
    if not plan:
        raise LayoutError(
            f"model_type {model.config.model_type} ships no plan for fsdp.tensor above 1"
        )
    check_heads(model.config, plan, mesh.size())
    if len(embedding.weight) % mesh.size() == 0:
        plan[names[embedding]] = "embedding_rowwise"
        if head is not None:
            plan[names[head]] = "colwise"
        embedding.register_forward_hook(_copied)
    plan |= _behind_cuts(model, plan)
    summed = {pattern for pattern, style in plan.items() if style == SUMMED}
    apply_tensor_parallelism(model, mesh, {p: s for p, s in plan.items() if p not in summed})
    for name, module in model.named_modules():
        if replace_layer_number_by_wildcard(name) in summed:
            _sum_gradients(module, mesh)
    _check_even(model, mesh.size())


def _behind_cuts(model: Any, plan: Mapping[str, str]) -> dict[str, str]:
    """What plans leave out: norms over cut heads, which some models have, learned activations."""
    found = {}
    for name, module in model.named_modules():
        pattern = replace_layer_number_by_wildcard(name)
        owner, _, last = pattern.rpartition(".")
        if last not in BEHIND or plan.get(f"{owner}.{BEHIND[last]}") != "colwise":
            continue
        weights = list(module.parameters())
        if any(weight.ndim > 1 for weight in weights):
            raise LayoutError(f"fsdp.tensor above 1 with {name}, which has weights for every head")
        if weights:
            found[pattern] = SUMMED
    return found


def _copied(_: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    """A tensor of its own: fully_shard warns of what is a view of another."""
    return output.clone()


def check_targets(model: Any, targets: Collection[str]) -> None:
    """Raise InvalidAdapterError for layers that can have no adapters where others are cut."""
    for pattern, style in model.tp_plan.items():
        name = pattern.rpartition(".")[2]
        if style == LATENT and name in targets:
            raise InvalidAdapterError(
                f"lora.targets name {name!r}: with fsdp.tensor above 1 a part of its output has a "
                "gradient of its own on every rank; name others"
            )


def _check_even(model: Any, size: int) -> None:
    for name, tensor in model.named_parameters():
        if (cut := tensor_cut(tensor)) is None:
            continue
        length = tensor.shape[cut.dim] // cut.matrices
        if length % size:
            raise LayoutError(f"fsdp.tensor {size} does not divide {length} of {name}")


def check_rows(model: Any, data_size: int) -> None:
    """Raise LayoutError where a data rank would have nothing of a weight that is cut once more.

    transformers' loader has no answer for that.
    """
    for name, tensor in model.named_parameters():
        cut = tensor_cut(tensor)
        if cut is None or cut.dim:
            continue
        rows = tensor.shape[0] // tensor.device_mesh.size(-1)
        if -(-rows // data_size) * (data_size - 1) >= rows > 0 and data_size > 1:
            raise LayoutError(
                f"fsdp.tensor leaves a rank {rows} rows of {name}: too few for {data_size} data "
                "ranks"
            )


def _sum_gradients(module: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Weights that are whole on every rank, each of which has a part of what they act on.

    Not by transformers' hook, which sums what is there: of earlier passes too.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        whole = distribute_tensor(parameter, mesh, [Replicate()], src_data_rank=None)
        module._parameters[name] = torch.nn.Parameter(whole, parameter.requires_grad)
    swap = _LocalWeights()
    module.register_forward_pre_hook(swap.take)
    module.register_forward_hook(swap.put_back, always_call=True)


class _LocalWeights:
    """While a layer runs, its weights are plain tensors whose gradients are partial sums."""

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}

    def take(self, module: torch.nn.Module, _: Any) -> None:
        self._kept = dict(module._parameters)
        for name, weight in self._kept.items():
            assert isinstance(weight, DTensor)
            module._parameters[name] = weight.to_local(grad_placements=[Partial()])  # type: ignore[assignment]

    def put_back(self, module: torch.nn.Module, *_: Any) -> None:
        module._parameters.update(self._kept)
        self._kept = {}


@dataclass(frozen=True)
class TensorRanks:
    """The ranks that hold the parts of layers of one another."""

    mesh: DeviceMesh
    collectives: Collectives

    def spread(self, whole: torch.Tensor) -> torch.Tensor:
        """What is alike on all ranks, for products with a part; gradients are summed over ranks."""
        spread = DTensor.from_local(whole, self.mesh, [Replicate()], run_check=False)
        local: torch.Tensor = spread.to_local(grad_placements=[Partial()])
        return local

    def summed(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, which is alike on all of them, as its gradient is."""
        found = DTensor.from_local(partial, self.mesh, [Partial()], run_check=False)
        local: torch.Tensor = found.redistribute(placements=[Replicate()]).to_local()
        return local

    def adapted(
        self, adapter: Adapter, inputs: torch.Tensor, output: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """The output of a layer with what its adapter, whole on every rank, adds to it.

        The layer may have a part of the inputs, or of the outputs, on each rank. Gradients of the
        adapter are partial, to be summed over ranks: where all have the same, the first counts.
        """
        rank, size = self.collectives.rank, self.collectives.size
        a: torch.Tensor = adapter.a
        b: torch.Tensor = adapter.b
        if inputs.shape[-1] < a.shape[1]:
            low = self.summed(linear(inputs, a.chunk(size, 1)[rank].to(inputs.dtype)))
            b = self._once(b)
        elif output.shape[-1] < b.shape[0]:
            low = linear(self.spread(inputs), a.to(inputs.dtype))
            b = b.chunk(size)[rank]
        else:
            low, b = linear(inputs, self._once(a).to(inputs.dtype)), self._once(b)
        return output + linear(low, b.to(low.dtype)) * scale

    def _once(self, factor: torch.Tensor) -> torch.Tensor:
        """A factor whose gradient is zero but on the first rank: all run the same backward pass."""
        if self.collectives.rank == 0:
            return factor
        seen = factor.view_as(factor)
        if seen.requires_grad:
            seen.register_hook(torch.zeros_like)
        return seen


def unsharded(tensor: Any) -> Any:
    """This rank's part of a weight, as a tensor whose gradient is that of the part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class TensorCut:
    """What tensor ranks have a part of each: the dimension, and of how many matrices in one."""

    dim: int
    matrices: int


def tensor_cut(tensor: torch.Tensor) -> TensorCut | None:
    """How tensor ranks have cut a tensor; None where they have the same of it."""
    names = (tensor.device_mesh.mesh_dim_names or ()) if isinstance(tensor, DTensor) else ()
    if TENSOR not in names:
        return None
    placement: Any = tensor.placements[names.index(TENSOR)]  # type: ignore[attr-defined]
    if placement.is_replicate():
        return None
    matrices: Any = placement.split_factor if isinstance(placement, _StridedShard) else 1
    return TensorCut(int(placement.dim % tensor.ndim), matrices)
