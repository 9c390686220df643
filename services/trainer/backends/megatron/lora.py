"""LoRA adapters on Megatron's parallel layers, under the names that checkpoints give them.

A fused layer has an adapter for each layer of the checkpoint in it, whose outputs go to the rows
that the rules of its weight give them. Of a layer cut by rows A is whole and B cut like the weight;
of one cut by columns A is cut and B whole, and the product with A, of `rank` numbers a token, is
summed over ranks, not the output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch.nn.functional import linear

from services.trainer.backend import Mesh
from services.trainer.backends.lora import Adapter, Adapters, AdapterTraining, TrainedAdapters
from services.trainer.backends.megatron import parallel
from services.trainer.backends.megatron.config import MegatronConfig
from services.trainer.backends.megatron.model import PolicyModel, keep_gradients
from services.trainer.backends.megatron.model_config import uses_transformer_engine
from services.trainer.backends.megatron.parallel import RankGroups
from services.trainer.backends.megatron.weights import LocalTensor
from services.trainer.backends.sparse import INDEXER
from services.trainer.config import OptimConfig, TrainerConfig
from sluice.weights.adapter import leaf_of, matched_layers, tensor_names
from sluice.weights.errors import InvalidAdapterError
from sluice.weights.rules.packing import row_runs, source_slices
from sluice.weights.rules.rule import ShardAxis

LAYER = re.compile(r"(?P<layer>.*\.layers\.\d+\..*proj(_with_mqa)?)\.weight")
Span = tuple[int, int]  # first and last (exclusive) along the axis of a cut


@dataclass(frozen=True)
class HeldFactor:
    """Which part of a whole factor this rank has, no `spans` where it is none of a cut one: where
    tensor ranks share a key head, some have no row of its keys. `summed`: each tensor rank has its
    own tokens' or its own rows' gradient, and the sum of all is that of the factor.
    """

    shape: tuple[int, int]  # of the whole
    axis: int | None = None  # of the cut; None where every tensor rank has all of it
    spans: tuple[Span, ...] = ()
    summed: bool = False

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        if self.axis is None:
            return whole
        spans = self.spans or ((0, 0),)
        parts = [whole.narrow(self.axis, first, last - first) for first, last in spans]
        return torch.cat(parts, dim=self.axis)

    def place(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Put this part where it belongs."""
        if self.axis is None:
            whole.copy_(part)
            return
        at = 0
        for first, last in self.spans:
            size = last - first
            whole.narrow(self.axis, first, size).copy_(part.narrow(self.axis, at, size))
            at += size


class ParallelLayers:
    """The layers of this rank of a frozen model, which add what the adapters in use give.

    A parallel layer has one hook, however many adapters there are.
    """

    def __init__(self, policy: PolicyModel, config: MegatronConfig) -> None:
        self._policy, self._scattered = policy, config.sequence_parallel
        self._owners = {
            id(module.weight): module
            for model in policy.models
            for module in model.modules()
            if isinstance(getattr(module, "weight", None), torch.nn.Parameter)
        }
        self._hooked: set[int] = set()  # ids of weights
        self.used: Adapters | None = None

    def attach(self, adapters: Adapters) -> dict[str, HeldFactor]:
        """Give adapters their layers, which take part while they are in use.

        Returns what this rank has of every factor. Raises InvalidAdapterError for targets that are
        not there.
        """
        targets, held = set(adapters.spec.targets), dict[str, HeldFactor]()
        self._check(adapters)
        for tensor in self._policy.tensors:
            layers = [_layer_of(source.name) for source in tensor.binding.sources]
            if not any(layer and leaf_of(layer) in targets for layer in layers):
                continue
            held |= self._create(tensor, layers, adapters)
            if id(tensor.parameter) not in self._hooked:
                self._hooked.add(id(tensor.parameter))
                self._hook(tensor, layers)
        if not adapters.layers:
            stage = parallel_state.get_pipeline_model_parallel_rank()
            raise InvalidAdapterError(f"pipeline stage {stage} has no layer of lora.targets")
        return held

    def _check(self, adapters: Adapters) -> None:
        every = self._policy.source.weights.hf_tensors()
        layers = [layer for name in every if (layer := _layer_of(name))]
        matched = matched_layers(layers, adapters.spec.targets)
        if experts := sorted({leaf_of(name) for name in matched if ".experts." in name}):
            raise InvalidAdapterError(
                f"lora.targets name {', '.join(map(repr, experts))}: layers of the model's experts "
                "too, which take no adapters here; name others"
            )
        adapters.check_layers(matched)

    def _create(
        self, tensor: LocalTensor, layers: Sequence[str], adapters: Adapters
    ) -> dict[str, HeldFactor]:
        """Make the adapters of those layers in a parallel one that are targets."""
        binding, rank, made = tensor.binding, adapters.spec.rank, dict[str, HeldFactor]()
        partition = parallel.partition(expert=False, padded_vocab=0)
        runs, columns = row_runs(binding, partition), source_slices(binding, partition)
        for index, (source, layer) in enumerate(zip(binding.sources, layers, strict=True)):
            if leaf_of(layer) not in adapters.spec.targets:
                continue
            outside, inside = source.part
            a, b = HeldFactor((rank, inside)), HeldFactor((outside, rank))
            if binding.cut is ShardAxis.ROWS:
                own = [run for run in runs if run.source == index]
                spans = tuple((run.start, run.start + run.rows) for run in own)
                a = HeldFactor(a.shape, summed=True)
                b = HeldFactor(b.shape, 0, spans)
            elif binding.cut is ShardAxis.COLUMNS:
                span = (columns[index].start, columns[index].stop)
                a = HeldFactor(a.shape, 1, (span,))
                b = HeldFactor(b.shape, summed=self._scattered)
            else:  # whole on every rank, over its own tokens
                a, b = (HeldFactor(f.shape, summed=self._scattered) for f in (a, b))
            whole = adapters.draw(layer, (inside, outside))
            device = tensor.parameter.device
            adapters.add(layer, a.cut(whole[0]).to(device), b.cut(whole[1]).to(device))
            made |= zip(tensor_names(layer), (a, b), strict=True)
        return made

    def _hook(self, tensor: LocalTensor, layers: Sequence[str]) -> None:
        """Have a parallel layer add what adapters give, each to the rows of its layer."""
        cut = tensor.binding.cut
        places: dict[str, torch.Tensor | None] = dict.fromkeys(filter(None, layers))
        if cut is ShardAxis.ROWS and len(layers) > 1:
            runs = row_runs(tensor.binding, parallel.partition(expert=False, padded_vocab=0))
            for index, layer in enumerate(layers):
                own = [run for run in runs if run.source == index]
                rows = [torch.empty(0, dtype=torch.int64)]
                rows += [torch.arange(run.row, run.row + run.rows) for run in own]
                places[layer] = torch.cat(rows).to(tensor.parameter.device)
        enter = self._gather if cut is ShardAxis.ROWS else _as_it_is
        update = self._add_partial if cut is ShardAxis.COLUMNS else Adapter.__call__

        def add(
            _: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, Any]
        ) -> tuple[torch.Tensor, Any] | None:
            used = self.used
            if used is None or not used.are_on:
                return None
            mine = [(used.layers[layer], places[layer]) for layer in places if layer in used.layers]
            if not mine:
                return None
            hidden, given = output[0], enter(inputs[0])
            for adapter, place in mine:
                more = update(adapter, given, used.spec.scale).to(hidden.dtype)
                hidden = hidden + more if place is None else hidden.index_add(-1, place, more)
            return hidden, *output[1:]

        self._owners[id(tensor.parameter)].register_forward_hook(add)

    def _add_partial(self, adapter: Adapter, given: torch.Tensor, scale: float) -> torch.Tensor:
        """What an adapter adds to the whole output, of this rank's columns of its input."""
        low = linear(given, adapter.a.to(given.dtype))
        if self._scattered:
            low = reduce_scatter_to_sequence_parallel_region(low)
        else:
            low = reduce_from_tensor_model_parallel_region(low)
        return linear(low, adapter.b.to(low.dtype)) * scale

    def _gather(self, given: torch.Tensor) -> torch.Tensor:
        """All tokens; what comes back is summed over ranks, each of which has other rows."""
        if self._scattered:
            whole: torch.Tensor = gather_from_sequence_parallel_region(
                given, tensor_parallel_output_grad=True
            )
            return whole
        copied: torch.Tensor = copy_to_tensor_model_parallel_region(given)
        return copied


def _as_it_is(given: torch.Tensor) -> torch.Tensor:
    return given


def _layer_of(name: str) -> str:
    """The layer that a tensor of a checkpoint is the weight of; empty for others."""
    found = LAYER.fullmatch(name)
    return found["layer"] if found and INDEXER not in name else ""


def training(
    policy: PolicyModel, config: TrainerConfig, mesh: Mesh, groups: RankGroups, adamw: str
) -> TrainedAdapters | None:
    """Freeze a model and begin adapters; collective. None where there is no `lora`.

    Raises InvalidAdapterError, or ValueError for a layout that has none.
    """
    if config.lora is None:
        return None
    layout = config.megatron
    if uses_transformer_engine(layout, policy.source):
        raise ValueError("lora needs megatron.layer_spec local: others fuse norms into layers")
    for model in policy.models:
        model.requires_grad_(False)
        keep_gradients(model, layout)
    layers = ParallelLayers(policy, layout)

    def start(adapters: Adapters) -> ParallelTraining:
        held = layers.attach(adapters)
        return ParallelTraining(adapters, held, config.optim, mesh, groups, adamw=adamw)

    return TrainedAdapters(layers, config.lora, config, start)


class ParallelTraining(AdapterTraining):
    """Adapters cut over tensor ranks and stages, gathered on the first rank to be written."""

    def __init__(
        self,
        adapters: Adapters,
        held: Mapping[str, HeldFactor],
        optim: OptimConfig,
        mesh: Mesh,
        groups: RankGroups,
        *,
        adamw: str,
    ) -> None:
        """held: what this rank has of every factor, by its name."""
        self._held, self._groups = held, groups
        super().__init__(adapters, optim, mesh, groups.data, is_writer=mesh.rank == 0, adamw=adamw)

    def reduce(self, gradients: torch.Tensor) -> None:
        """Sum over data and context ranks, and over tensor ranks what these have in parts."""
        views = dict(self.optimizer.views())
        partial = [views[name] for name, held in self._held.items() if held.summed]
        if partial and self._groups.tensor.size > 1:
            flat = torch.cat([view.flatten() for view in partial])
            self._groups.tensor.all_reduce(flat, "sum")
            for view, part in zip(partial, flat.split([v.numel() for v in partial]), strict=True):
                view.copy_(part.view_as(view))
        self._groups.data.all_reduce(gradients, "sum")

    def norm(self, gradients: torch.Tensor) -> float:
        """Every element once: what all tensor ranks have is counted on the first."""
        is_first = self._groups.tensor.rank == 0
        squares = [
            torch.linalg.vector_norm(view, dtype=torch.float64).square()
            for name, view in self.optimizer.views()
            if is_first or self._held[name].axis is not None
        ]
        total = torch.zeros((), dtype=torch.float64, device=gradients.device)
        total += sum(squares)
        self._groups.model.all_reduce(total, "sum")
        return float(total.sqrt())

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return self._held[_factor_of(name)].cut(tensor)

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        mine = {}
        if parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
            for name, tensor in tensors.items():
                held = self._held[_factor_of(name)]
                if tensor.ndim == 0:  # a count of steps
                    held = HeldFactor((1, 1))
                if held.axis is not None or self._groups.tensor.rank == 0:
                    mine[name] = held, tensor.detach().cpu()
        every: list[Any] = [None] * dist.get_world_size()
        group = self._groups.checkpoint
        dist.gather_object(mine, every if self.is_writer else None, dst=0, group=group)
        made: dict[str, torch.Tensor] = {}
        for held, name, part in (
            (held, name, part) for each in every if each for name, (held, part) in each.items()
        ):
            if part.ndim == 0:
                made[name] = part
                continue
            if name not in made:
                made[name] = part.new_zeros(held.shape)
            held.place(made[name], part)
        return made


def _factor_of(name: str) -> str:
    """The factor that a tensor of an optimizer's state, `<factor>/<moment>`, belongs to."""
    return name.partition("/")[0]
