"""Muon: which parameters of a model are matrices, and what a step adds to each (arXiv 2502.16982).

torch.optim.Muon takes whole matrices alone: no stacks of experts, and no parts that ranks have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.conv import _ConvNd

from services.trainer.config import MuonConfig, OptimConfig
from sluice.imports import uncompiled

with uncompiled():
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.pytorch_utils import Conv1D

COEFFICIENTS = (3.4445, -4.775, 2.0315)  # of every implementation since the first
SMALLEST_NORM = 1e-7
MOMENTUM = "momentum_buffer"
MAX_NUMBERS = 1 << 26  # of matrices that are made orthogonal at once


@dataclass(frozen=True)
class Matrices:
    """The matrices that a parameter is made of, of one shape each.

    transposed: they are [in, out].
    """

    rows: int
    columns: int
    transposed: bool = False

    def adjusted(self, settings: MuonConfig) -> float:
        """What their learning rate is multiplied by."""
        outside, inside = self.rows, self.columns
        if self.transposed:
            outside, inside = inside, outside
        if settings.adjustment == "original":
            return settings.rate_factor * math.sqrt(max(1.0, outside / inside))
        return settings.rate_factor * 0.2 * math.sqrt(max(outside, inside))

    def directions(self, tensor: torch.Tensor, settings: MuonConfig) -> torch.Tensor:
        """Make each of the matrices of a tensor orthogonal."""
        whole = tensor.reshape(-1, self.rows, self.columns)
        at_once = max(1, MAX_NUMBERS // (self.rows * self.columns))
        made = [orthogonal(part, settings) for part in whole.split(at_once)]
        return (made[0] if len(made) == 1 else torch.cat(made)).reshape(tensor.shape)


def orthogonal(matrices: torch.Tensor, settings: MuonConfig) -> torch.Tensor:
    """Return [n, rows, columns] whose singular values are near 1, where those given are not 0.

    Newton-Schulz iterations on the smaller side of each, which begin from a norm of 1.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    wide = matrices.to(getattr(torch, settings.newton_schulz_dtype))
    wide = wide.mT if is_tall else wide
    norms = torch.linalg.matrix_norm(wide, keepdim=True)
    wide = wide / norms.clamp(min=SMALLEST_NORM)
    for _ in range(settings.newton_schulz_steps):
        gram = wide @ wide.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        wide = torch.baddbmm(wide, gram, wide, beta=a)
    return wide.mT if is_tall else wide


Directions = Callable[[Mapping[str, torch.Tensor]], Iterable[tuple[str, torch.Tensor]]]


class Muon:
    """Steps parameters, or this rank's parts of them, by their gradients.

    `scales`: learning rates by name. `directions` makes what is to be added, of all by name, to
    whole matrices orthogonal; None has all of them here.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        matrices: Mapping[str, Matrices],
        optim: OptimConfig,
        *,
        scales: Mapping[str, float],
        directions: Directions | None = None,
    ) -> None:
        self.parameters, self.matrices = parameters, matrices
        self._settings, self._decay, self._scales = optim.muon, optim.weight_decay, scales
        self._directions = directions or self._own_directions
        self.momenta: dict[str, torch.Tensor] = {}  # none before the first step

    def start(self) -> None:
        """Have momenta of zero."""
        self.momenta = {name: torch.zeros_like(p.detach()) for name, p in self.parameters.items()}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Add to the parameters. What gradients are left is undefined."""
        if not self.momenta:
            self.start()
        settings, updates = self._settings, {}
        for name, parameter in self.parameters.items():
            gradient, momentum = parameter.grad, self.momenta[name]
            assert gradient is not None
            momentum.lerp_(gradient, 1 - settings.momentum)
            updates[name] = (
                gradient.lerp_(momentum, settings.momentum) if settings.nesterov else momentum
            )
        for name, direction in self._directions(updates):
            own = rate * self._scales[name]
            parameter = self.parameters[name]
            parameter.mul_(1 - own * self._decay)
            parameter.add_(direction, alpha=-own * self.matrices[name].adjusted(settings))

    def _own_directions(
        self, updates: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, update in updates.items():
            yield name, self.matrices[name].directions(update, self._settings)


def hidden_matrices(model: Any, optim: OptimConfig) -> dict[str, Matrices]:
    """The parameters that Muon steps, by name: trained ones of hidden layers that are matrices.

    A matrix is what the HF checkpoint has a tensor of or, in one that has all experts, what each
    expert has. None of them are embeddings, the output layer or head, convolutions, biases and
    what a recurrent layer's state decays by.
    Raises ValueError where no matrix is trained, or AdamW's own settings have no effect.
    """
    if optim.kind != "muon":
        return {}
    heads = (model.get_output_embeddings(), getattr(model, "score", None))
    others = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding) or module in heads
        for parameter in module.parameters()
    }
    found: dict[str, Matrices] = {}
    for module_name, module in model.named_modules():
        if isinstance(module, _ConvNd):
            continue
        for name, parameter in module.named_parameters(module_name, recurse=False):
            own = name.rpartition(".")[2]  # not so decays of a state, in Jamba's layers
            is_matrix = own == "weight" if parameter.ndim == 2 else not own.endswith("bias")
            is_matrix = is_matrix and parameter.ndim in {2, 3}
            if is_matrix and parameter.requires_grad and id(parameter) not in others:
                found[name] = _matrices_of(model, name, parameter, module)
    if not found:
        raise ValueError(
            "optim.kind muon has no effect: no matrix of a hidden layer is trained; set it to adamw"
        )
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for setting in ("betas", "epsilon"):
        default = OptimConfig.model_fields[setting].default
        if trained == found.keys() and getattr(optim, setting) != default:
            raise ValueError(f"optim.{setting} has no effect: Muon steps all that is trained")
    return found


def _matrices_of(
    model: Any, name: str, parameter: torch.Tensor, module: torch.nn.Module
) -> Matrices:
    rows, columns = parameter.shape[-2:]
    if parameter.ndim == 2:
        return Matrices(rows, columns, transposed=isinstance(module, Conv1D))
    empty = torch.empty(parameter.shape, device="meta")
    made = revert_weight_conversion(model, {name: empty})
    if len(made) > 1:
        shapes = {tuple(tensor.shape) for tensor in made.values()}
        rows, own_columns = next(iter(shapes))
        if len(shapes) > 1 or own_columns != columns or parameter.shape[1] % rows:
            raise ValueError(
                f"optim.kind muon: {name} is made of matrices of shapes {sorted(shapes)}, which "
                "cannot be told apart in it; set it to adamw"
            )
    return Matrices(rows, columns, transposed=bool(getattr(module, "is_transposed", False)))


def other_kind(matrices: Set[str], momenta: Set[str], moments: Set[str]) -> str:
    """Say how a checkpoint has state of another optimizer; or nothing.

    `matrices`: of this trainer. `momenta`, `moments`: what there is of Muon's and of AdamW's.
    """
    saved = "muon" if momenta and not matrices else "adamw" if moments & matrices else ""
    if not saved:
        return ""
    return (
        f"it was saved by a trainer with optim.kind {saved}: set it so, or publish the weights and "
        "start from them"
    )
