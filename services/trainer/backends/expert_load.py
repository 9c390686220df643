"""How evenly tokens go to the experts of each layer, counted over the passes of a step.

What losses of routers come to is kept beside it (`expert_losses`).

Counted is what layers of experts are given: a token for every row that it is read in, as rows that
share a prompt each have it, and the last of a row, which predicts nothing, for none. So counts are
the same however rows are packed, cut or spread over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from sluice.algo.collectives import Collectives
from sluice.routers import BIASES

Bias = tuple[Any, str]  # the module that has it, and its name there
# Tokens of the busiest expert of a layer by the mean of the layer: of the worst one, and the mean
# of all. How many experts no token went to, of all layers.
WORST, MEAN, UNUSED = "expert_load_max", "expert_load_mean", "experts_unused"


class NoBiasError(ValueError):
    """A model is to have its experts evened out by biases that it has not."""

    def __init__(self, model_type: str) -> None:
        super().__init__(
            f"experts.bias_update_rate is not for model_type {model_type}: its routers have no "
            "bias beside their scores, by which experts are chosen; leave it out"
        )


class ExpertLoad:
    """What the passes of a step sent to the experts of each layer, on this rank.

    Of a model without experts it is empty. Adapters take turns, and each has passes and steps of
    its own; losses of routers are of none.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        """`sizes`: how many experts each layer has, of all ranks and stages."""
        self.sizes, self.device = tuple(sizes), device
        self.biases: dict[int, Bias] = {}  # of this rank's layers
        self._counts: dict[str, torch.Tensor] = {}  # by adapter
        self._adapter = ""
        self._rows_T: torch.Tensor | None = None
        self._names: tuple[str, ...] = ()  # of losses
        self._losses, self._weight = torch.empty(0), 0.0

    def use(self, adapter: str) -> None:
        """From here on passes and steps are of this one; empty is the policy of the settings."""
        self._adapter = adapter

    @contextmanager
    def counting(self, rows_T: torch.Tensor | None) -> Iterator[None]:
        """Layers that run meanwhile are counted; those run again in backward, behind it, are not.

        rows_T: in how many rows each token of the pass is to count; None counts none.
        """
        self._rows_T = rows_T
        try:
            yield
        finally:
            self._rows_T = None

    @property
    def is_counting(self) -> bool:
        """Whether a layer that runs now is one of those counted."""
        return self._rows_T is not None

    def tell_losses(self, names: Sequence[str]) -> None:
        """Have steps tell what these come to."""
        self._names = tuple(names)
        self._clear_losses()

    def begin_call(self, weight: float) -> None:
        """What is added from here on is as much of a step as it weighs, of what all calls do."""
        self._weight += weight

    def add_losses(self, layer: int, values: Sequence[torch.Tensor]) -> None:
        """Add what tokens of a call bring to the losses of a layer, times what the call weighs."""
        self._losses[:, layer] += torch.stack(tuple(values)).detach()

    def take_losses(
        self, ranks: Collectives | None, *, is_counted: bool = True
    ) -> dict[str, float]:
        """Return what losses came to, mean of all layers, and begin anew; collective."""
        sums, weight = self._losses, self._weight
        self._clear_losses()
        if not self._names:
            return {}
        if not is_counted:
            sums = torch.zeros_like(sums)
        if ranks is not None:
            ranks.all_reduce(sums, "sum")
        if not weight:
            return {}
        means = sums.cpu().double().mean(1) / weight
        return dict(zip(self._names, means.tolist(), strict=True))

    def add(self, layer: int, chosen_TK: torch.Tensor) -> None:
        """Take which experts of a layer the tokens of the pass go to."""
        if (rows_T := self._rows_T) is None:
            return
        chosen_TK = chosen_TK.detach().reshape(len(rows_T), -1)
        rows_TK = rows_T[:, None].expand(chosen_TK.shape)
        self._of(layer).scatter_add_(0, chosen_TK.reshape(-1).long(), rows_TK.reshape(-1))

    def add_mask(self, layer: int, chosen_TE: torch.Tensor) -> None:
        """Take it as a mask, where no token is counted more than once."""
        if (rows_T := self._rows_T) is not None:
            self._of(layer).add_((chosen_TE.detach() & (rows_T > 0)[:, None]).sum(0))

    def clear(self) -> None:
        """Forget the passes since the last step."""
        self._counts.pop(self._adapter, None)
        self._clear_losses()

    def take(self, ranks: Collectives | None, *, is_counted: bool = True) -> list[list[int]]:
        """Return the counts of each layer over all ranks, and begin anew; collective.

        is_counted: whether this rank stands for the tokens that it has; others may have the same.
        """
        if not self.sizes:
            return []
        counts = self._flat()
        self._counts.pop(self._adapter)
        if not is_counted:
            counts = torch.zeros_like(counts)
        if ranks is not None:
            ranks.all_reduce(counts, "sum")
        return [part.tolist() for part in counts.cpu().split(self.sizes)]

    def add_bias(self, layer: int, bias: Bias) -> None:
        """Take what the router of a layer chooses experts by, beside its scores."""
        self.biases[layer] = bias

    @torch.no_grad()
    def even_out(self, counts: Sequence[Sequence[int]], rate: float) -> None:
        """Add `rate` to the biases of experts that had fewer tokens than the mean, or take it off.

        The same on all ranks, which have the same counts.
        """
        for layer, (owner, name) in self.biases.items():
            tokens = torch.tensor(counts[layer], dtype=torch.int64)
            direction = (tokens.sum() - len(tokens) * tokens).sign()
            bias = getattr(owner, name)
            bias.add_(direction.to(bias), alpha=rate)

    def _clear_losses(self) -> None:
        size = (len(self._names), len(self.sizes))
        self._losses, self._weight = torch.zeros(size, device=self.device), 0.0

    def _of(self, layer: int) -> torch.Tensor:
        return self._flat().split(self.sizes)[layer]

    def _flat(self) -> torch.Tensor:
        if self._adapter not in self._counts:
            zeros = torch.zeros(sum(self.sizes), dtype=torch.int64, device=self.device)
            self._counts[self._adapter] = zeros
        return self._counts[self._adapter]


def watch_experts(model: Any, device: torch.device) -> ExpertLoad:
    """Count what the layers of experts of a transformers model are given.

    Those of transformers' own way alone, as all proven families have: given the experts of each
    token.
    """
    layers = [layer for _, layer in layers_of(model)]
    load = ExpertLoad([len(next(layer.parameters())) for layer in layers], device)

    def note(index: int, _: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        load.add(index, given[1])

    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(partial(note, index))
    return load


def watch_biases(load: ExpertLoad, model: Any) -> None:
    """Have `load` even out the experts of a transformers model. Raises NoBiasError.

    Biases are buffers (`hold_biases`), whole on every rank and float32 wherever they go.
    """
    layers = list(layers_of(model))
    for index, (owner, _) in enumerate(layers):
        found = [(m, name) for m in owner.modules() for name in m._buffers if name in BIASES]
        if found:
            load.add_bias(index, found[0])
    if not layers or len(load.biases) < len(layers):
        raise NoBiasError(model.config.model_type)


def layers_of(model: Any) -> Iterator[tuple[torch.nn.Module, torch.nn.Module]]:
    """The layers of experts, each behind the module that has it and its router."""
    for name, module in model.named_modules():
        if name.endswith(".experts") and hasattr(type(module), "_apply_gate"):
            yield model.get_submodule(name.rpartition(".")[0]), module


def followed(length: int) -> torch.Tensor:
    """int64[length] of a row: 1 of each token that another follows, 0 of the last."""
    return (torch.arange(1, length + 1) < length).long()


def load_metrics(counts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return what a step tells of its counts; nothing where no token was counted."""
    seen = [layer for layer in counts if sum(layer)]
    if not seen:
        return {}
    loads = [max(layer) * len(layer) / sum(layer) for layer in seen]
    unused = sum(not count for layer in seen for count in layer)
    return {WORST: max(loads), MEAN: sum(loads) / len(loads), UNUSED: float(unused)}
