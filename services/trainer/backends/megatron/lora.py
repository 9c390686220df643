"""LoRA adapters on Megatron's parallel layers, under the names that checkpoints give them.

A fused layer has an adapter for each layer of the checkpoint in it, whose outputs go to the rows
that the rules of its weight give them. Of a layer cut by rows A is whole and B cut like the weight;
of one cut by columns A is cut and B whole, and the product with A, of `rank` numbers a token, is
summed over ranks, not the output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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
from services.trainer.backends.lora import Adapters, AdapterTraining, begin
from services.trainer.backends.megatron import parallel
from services.trainer.backends.megatron.config import MegatronConfig
from services.trainer.backends.megatron.model import PolicyModel
from services.trainer.backends.megatron.model_config import uses_transformer_engine
from services.trainer.backends.megatron.parallel import RankGroups
from services.trainer.backends.megatron.weights import LocalTensor
from services.trainer.config import LoraConfig, OptimConfig
from sluice.weights.adapter import leaf_of, matched_layers, tensor_names
from sluice.weights.errors import InvalidAdapterError
from sluice.weights.rules.packing import row_runs, source_slices
from sluice.weights.rules.rule import ShardAxis

LAYER = re.compile(r"(?P<layer>.*\.layers\.\d+\..*proj(_with_mqa)?)\.weight")
Span = tuple[int, int]  # first and last (exclusive) along the axis of a cut


@dataclass(frozen=True)
class HeldFactor:
    """Which part of a whole factor this rank has. `summed`: each tensor rank has its own tokens'
    or its own rows' gradient, and the sum of all is that of the factor.
    """

    shape: tuple[int, int]  # of the whole
    axis: int | None = None  # of the cut; None where every tensor rank has all of it
    spans: tuple[Span, ...] = ()
    summed: bool = False

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        if self.axis is None:
            return whole
        parts = [whole.narrow(self.axis, first, last - first) for first, last in self.spans]
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


class AdaptedLayers:
    """The adapters of this rank's layers, hooked to them."""

    def __init__(
        self, policy: PolicyModel, config: MegatronConfig, settings: LoraConfig, adapters: Adapters
    ) -> None:
        self.adapters, self.held = adapters, dict[str, HeldFactor]()
        self._scattered = config.sequence_parallel
        self._targets = set(settings.targets)
        self._check(policy, settings)
        owners = {
            id(module.weight): module
            for model in policy.models
            for module in model.modules()
            if isinstance(getattr(module, "weight", None), torch.nn.Parameter)
        }
        for tensor in policy.tensors:
            layers = [_layer_of(source.name) for source in tensor.binding.sources]
            if any(layer and leaf_of(layer) in self._targets for layer in layers):
                self._attach(tensor, owners[id(tensor.parameter)], layers)
        if not adapters.layers:
            stage = parallel_state.get_pipeline_model_parallel_rank()
            raise InvalidAdapterError(f"pipeline stage {stage} has no layer of lora.targets")

    def _check(self, policy: PolicyModel, settings: LoraConfig) -> None:
        every = policy.source.weights.hf_tensors()
        layers = [layer for name in every if (layer := _layer_of(name))]
        matched = matched_layers(layers, settings.targets)
        if experts := sorted({leaf_of(name) for name in matched if ".experts." in name}):
            raise InvalidAdapterError(
                f"lora.targets name {', '.join(map(repr, experts))}: layers of the model's experts "
                "too, which take no adapters here; name others"
            )
        self.adapters.check_layers(matched)

    def _attach(self, tensor: LocalTensor, module: torch.nn.Module, layers: Sequence[str]) -> None:
        binding = tensor.binding
        partition = parallel.partition(expert=False, padded_vocab=0)
        device = tensor.parameter.device
        adds: list[Callable[[torch.Tensor], torch.Tensor]] = []
        places: list[torch.Tensor | None] = []
        runs, columns = row_runs(binding, partition), source_slices(binding, partition)
        for index, (source, layer) in enumerate(zip(binding.sources, layers, strict=True)):
            if leaf_of(layer) not in self._targets:
                continue
            outside, inside = source.part
            rank = self.adapters.spec.rank
            a, b = HeldFactor((rank, inside)), HeldFactor((outside, rank))
            place = None
            if binding.cut is ShardAxis.ROWS:
                own = [run for run in runs if run.source == index]
                spans = tuple((run.start, run.start + run.rows) for run in own)
                a = HeldFactor(a.shape, summed=True)
                b = HeldFactor(b.shape, 0, spans)
                rows = [torch.arange(run.row, run.row + run.rows) for run in own]
                place = None if len(layers) == 1 else torch.cat(rows).to(device)
            elif binding.cut is ShardAxis.COLUMNS:
                span = (columns[index].start, columns[index].stop)
                a = HeldFactor(a.shape, 1, (span,))
                b = HeldFactor(b.shape, summed=self._scattered)
            else:  # whole on every rank, over its own tokens
                a, b = (HeldFactor(f.shape, summed=self._scattered) for f in (a, b))
            adds.append(self._create(layer, a, b, binding.cut, device))
            places.append(place)
        enter = self._gather if binding.cut is ShardAxis.ROWS else _as_it_is

        def add(
            _: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, Any]
        ) -> tuple[torch.Tensor, Any] | None:
            if not self.adapters.are_on:
                return None
            hidden, given = output[0], enter(inputs[0])
            for update, place in zip(adds, places, strict=True):
                more = update(given).to(hidden.dtype)
                hidden = hidden + more if place is None else hidden.index_add(-1, place, more)
            return hidden, *output[1:]

        module.register_forward_hook(add)

    def _create(
        self, layer: str, a: HeldFactor, b: HeldFactor, cut: ShardAxis, device: torch.device
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Make an adapter; what it adds to the output of its layer, given the whole input."""
        whole = self.adapters.draw(layer, (a.shape[1], b.shape[0]))
        held = (a, b)
        mine = [factor.cut(drawn).to(device) for factor, drawn in zip(held, whole, strict=True)]
        adapter = self.adapters.add(layer, *mine)
        self.held |= zip(tensor_names(layer), held, strict=True)
        scale = self.adapters.spec.scale
        if cut is not ShardAxis.COLUMNS:
            return lambda given: adapter(given, scale)

        def add_partial(given: torch.Tensor) -> torch.Tensor:
            low = linear(given, adapter.a.to(given.dtype))
            if self._scattered:
                low = reduce_scatter_to_sequence_parallel_region(low)
            else:
                low = reduce_from_tensor_model_parallel_region(low)
            return linear(low, adapter.b.to(low.dtype)) * scale

        return add_partial

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
    return found["layer"] if found else ""


def adapt(
    policy: PolicyModel,
    config: MegatronConfig,
    settings: LoraConfig,
    directory: Path,
    *,
    seed: int,
) -> AdaptedLayers:
    """Freeze a model and give its target layers adapters; collective.

    Raises InvalidAdapterError, or ValueError for a layout that has none.
    """
    if uses_transformer_engine(config, policy.source):
        raise ValueError("lora needs megatron.layer_spec local: others fuse norms into layers")
    for model in policy.models:
        model.requires_grad_(False)
        embedding = getattr(model, "embedding", None)
        if config.recompute == "full" and isinstance(embedding, torch.nn.Module):
            # a layer that is run again is left out of backward if nothing before it has gradients
            embedding.register_forward_hook(_require_gradient)
    adapters = begin(settings, directory, seed=seed)
    return AdaptedLayers(policy, config, settings, adapters)


def _require_gradient(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


class ParallelTraining(AdapterTraining):
    """Adapters cut over tensor ranks and stages, gathered on the first rank to be written."""

    def __init__(
        self, layers: AdaptedLayers, optim: OptimConfig, mesh: Mesh, groups: RankGroups
    ) -> None:
        self._layers, self._groups = layers, groups
        super().__init__(layers.adapters, optim, mesh, groups.data, is_writer=mesh.rank == 0)

    def reduce(self, gradients: torch.Tensor) -> None:
        """Sum over data and context ranks, and over tensor ranks what these have in parts."""
        views = dict(self.optimizer.views())
        partial = [views[name] for name, held in self._layers.held.items() if held.summed]
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
            if is_first or self._layers.held[name].axis is not None
        ]
        total = torch.zeros((), dtype=torch.float64, device=gradients.device)
        total += sum(squares)
        self._groups.model.all_reduce(total, "sum")
        return float(total.sqrt())

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return self._layers.held[_factor_of(name)].cut(tensor)

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        mine = {}
        if parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
            for name, tensor in tensors.items():
                held = self._layers.held[_factor_of(name)]
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
