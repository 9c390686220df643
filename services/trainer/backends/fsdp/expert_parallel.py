"""Expert parallelism: ranks of a group hold whole experts of every layer; tokens travel to them.

Of each layer of experts a rank gathers its own alone, over the ranks that hold parts of the same
ones. Which experts a token goes to decides how much is sent, and nothing else: every rank takes
part in every exchange, with no row where it has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from services.trainer.backend import LayoutError, Mesh
from services.trainer.backends.fsdp.config import FsdpConfig
from services.trainer.backends.fsdp.tensor_parallel import REPLICA, mesh_of_groups, unsharded
from sluice.algo.collectives import Collectives, create_collectives, exchange_rows

SHARD, EXPERT = "shard", "expert"  # the dimensions of the mesh of experts, in place of data


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that hold the experts of one another, and those that share them."""

    mesh: DeviceMesh  # of shard and expert ranks, and of replicas where there are several
    collectives: Collectives  # over the expert ranks

    @property
    def cut_over(self) -> DeviceMesh:
        """The ranks over which experts are cut once more, and replicas of them."""
        if REPLICA in (self.mesh.mesh_dim_names or ()):
            return self.mesh[REPLICA, SHARD]
        return self.mesh[SHARD]


def create_experts(
    ranks: Mesh, device_type: str, timeout: timedelta, settings: FsdpConfig, check: timedelta | None
) -> ExpertRanks | None:
    """Make the groups of expert ranks, which are neighbours; collective over all ranks.

    None where every rank gathers all experts. `check`: as of `create_collectives`.
    """
    if settings.expert == 1:
        return None
    names: tuple[str, ...] = (SHARD, EXPERT)
    data_size = ranks.world_size // settings.replicas
    shape: tuple[int, ...] = (data_size // settings.expert, settings.expert)
    if settings.replicas > 1:
        names, shape = (REPLICA, *names), (settings.replicas, *shape)
    mesh = mesh_of_groups(names, shape, device_type, timeout)
    return ExpertRanks(mesh, create_collectives(mesh.get_group(EXPERT), check))


def cut_experts(model: Any, ranks: ExpertRanks) -> list[torch.nn.Module]:
    """Cut a model that has no memory yet; the layers of experts, which are to be cut once more.

    Raises LayoutError.
    """
    found = []
    for name, module in model.named_modules():
        if not name.endswith(".experts") or not any(True for _ in module.parameters()):
            continue
        _check(name, module, ranks.collectives.size)
        for own, parameter in list(module.named_parameters(recurse=False)):
            cut = distribute_tensor(parameter, ranks.mesh[EXPERT], [Shard(0)], src_data_rank=None)
            module._parameters[own] = torch.nn.Parameter(cut, parameter.requires_grad)
        module.forward = _Travel(module, ranks.collectives)
        found.append(module)
    return found


def check_spread(model: Any) -> None:
    """Raise LayoutError for a model that has no experts, whose ranks would be for nothing."""
    if not any(is_spread(parameter) for parameter in model.parameters()):
        raise LayoutError(
            f"fsdp.expert has no effect on model_type {model.config.model_type}, which has no "
            "experts; leave it out"
        )


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether expert ranks have a part each of a tensor."""
    return isinstance(tensor, DTensor) and EXPERT in (tensor.device_mesh.mesh_dim_names or ())


def _check(name: str, module: Any, size: int) -> None:
    """Raises LayoutError for layers that are not a row of experts in transformers' own way."""
    count = getattr(module, "num_experts", 0)
    shapes = {own: parameter.shape for own, parameter in module.named_parameters()}
    stacked = all("." not in own and shape[0] == count for own, shape in shapes.items())
    if not stacked or not hasattr(type(module), "_apply_gate"):
        raise LayoutError(
            f"fsdp.expert above 1 with {name}, which is not given tokens with the experts of each, "
            "or has tensors that are not stacks of all experts: leave it out"
        )
    if count % size:
        raise LayoutError(f"fsdp.expert {size} does not divide the {count} experts of {name}")


class _Travel:
    """Stands for the forward of a layer of experts of which this rank holds some."""

    def __init__(self, experts: Any, ranks: Collectives) -> None:
        self._experts, self._ranks, self._count = experts, ranks, experts.num_experts
        experts.num_experts //= ranks.size  # what its own forward counts by

    def __call__(
        self, hidden_TH: torch.Tensor, chosen_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Of A = T x K pairs of a token and an expert, in order of experts, each goes to its own.

        Weights of the router are applied where a token came from.
        """
        ids_A, order_A = chosen_TK.reshape(-1).sort(stable=True)
        firsts = torch.arange(self._count + 1, device=ids_A.device)
        sent_NE = torch.searchsorted(ids_A, firsts).diff().view(self._ranks.size, -1)
        equal = [1] * self._ranks.size
        came_NE = self._ranks.all_to_all(sent_NE, sent=equal, taken=equal)
        sent, taken = torch.stack([sent_NE.sum(1), came_NE.sum(1)]).tolist()
        rows_AH = hidden_TH[order_A // chosen_TK.shape[1]]
        came_BH = exchange_rows(rows_AH, self._ranks, sent=sent, taken=taken)
        made_BH = self._run(came_BH, came_NE)
        back_AH = exchange_rows(made_BH, self._ranks, sent=taken, taken=sent)
        outputs_AH = back_AH[order_A.argsort()]
        outputs_TKH = outputs_AH.view(*chosen_TK.shape, outputs_AH.shape[1]) * weights_TK[..., None]
        return outputs_TKH.sum(1).to(hidden_TH.dtype)

    def _run(self, came_BH: torch.Tensor, came_NE: torch.Tensor) -> torch.Tensor:
        """Each row by its one expert; without any, weights have gradients of zero all the same."""
        size, local = came_NE.shape
        ids = torch.arange(local, device=came_BH.device).repeat(size)
        ids_B = ids.repeat_interleave(came_NE.reshape(-1), output_size=len(came_BH))
        rows = came_BH
        if not len(came_BH):
            rows, ids_B = came_BH.sum(0, keepdim=True), ids[:1]
        with self._parts():
            plain = type(self._experts).forward
            made: torch.Tensor = plain(
                self._experts, rows, ids_B[:, None], rows.new_ones(len(rows), 1)
            )
        return made[: len(came_BH)]

    @contextmanager
    def _parts(self) -> Iterator[None]:
        """The layer finds plain tensors of its own experts, or what stands for them already."""
        places = vars(self._experts)
        own = {n: p for n, p in self._experts._parameters.items() if n not in places}
        places.update({name: unsharded(parameter) for name, parameter in own.items()})
        try:
            yield
        finally:
            for name in own:
                del places[name]
