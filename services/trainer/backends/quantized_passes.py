"""Passes by the numbers that experts are published as, in 4 bits, in place of their weights.

While a layer of experts runs, its code finds under the name of a weight the numbers that the weight
would be stored as. Gradients with respect to those go to the weight as they are (straight-through,
arXiv 1308.3432). To all else, such as checkpoints, optimizers and publication, the model is plain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from sluice.imports import uncompiled
from sluice.weights.convert.quantization import simulate
from sluice.weights.convert.quantized_layout import Int4Groups, Shape

with uncompiled():
    from transformers.core_model_loading import revert_weight_conversion

SETTING = "publish.quantization_aware"
Read = Callable[[Any], torch.Tensor]


class QuantizationAwareError(ValueError):
    """A model, or the part of it that a rank has, cannot be trained by numbers of 4 bits."""


class SimulatedWeights:
    """Weights of one module, in whose place its forward finds what they would be stored as.

    A module looks for an attribute in its own `__dict__` first, and for a parameter after that.
    """

    def __init__(self, names: Collection[str], layout: Int4Groups, read: Read) -> None:
        """`read` makes a parameter the tensor, of this rank, that a forward would compute with."""
        self._names, self._layout, self._read = names, layout, read

    def put(self, module: torch.nn.Module, _: Any) -> None:
        for name in self._names:
            weight = self._read(module._parameters[name])
            vars(module)[name] = _simulated(weight, self._layout)

    def take(self, module: torch.nn.Module, *_: Any) -> None:
        for name in self._names:
            vars(module).pop(name, None)


def attach(
    module: torch.nn.Module, names: Collection[str], layout: Int4Groups, read: Read
) -> SimulatedWeights:
    """Have a module compute with simulated weights whenever it is called."""
    weights = SimulatedWeights(names, layout, read)
    module.register_forward_pre_hook(weights.put)
    # also where a layer that is run again in backward is left as soon as it has made what is asked
    module.register_forward_hook(weights.take, always_call=True)
    return weights


def check_experts(tensors: Mapping[str, Shape], layout: Int4Groups) -> None:
    """Raise QuantizationAwareError where none of a checkpoint's tensors is published so."""
    if not any(layout.quantizes(name, shape) for name, shape in tensors.items()):
        raise QuantizationAwareError(
            f"{SETTING}: the model has no routed experts that are stored one by one, which alone "
            "are published in 4 bits; leave it out"
        )


def check_inputs(name: str, inputs: int, layout: Int4Groups, setting: str) -> None:
    """Raise QuantizationAwareError where groups of a weight go over ranks."""
    if inputs % layout.size:
        raise QuantizationAwareError(
            f"{SETTING}: a rank has {inputs} inputs of {name}, which are no whole groups of "
            f"{layout.size}: lower {setting}, or set publish.quantization to smaller groups"
        )


def simulate_experts(model: Any, layout: Int4Groups, read: Read = lambda weight: weight) -> None:
    """Have a transformers model compute with what its experts are published as.

    Raises QuantizationAwareError.
    """
    made = {
        name: _published(model, name, parameter.shape)
        for name, parameter in model.named_parameters()
    }
    check_experts({name: shape for each in made.values() for name, shape in each.items()}, layout)
    found: dict[str, list[str]] = {}
    for path, tensors in made.items():
        if not any(layout.quantizes(name, shape) for name, shape in tensors.items()):
            continue
        owner, _, name = path.rpartition(".")
        parameter, module = model.get_parameter(path), model.get_submodule(owner)
        _check_rows(module, path, tuple(parameter.shape), tensors)
        check_inputs(path, read(parameter).shape[-1], layout, "fsdp.tensor")
        found.setdefault(owner, []).append(name)
    for owner, names in found.items():
        attach(model.get_submodule(owner), names, layout, read)


def _published(model: Any, name: str, shape: Shape) -> dict[str, Shape]:
    """The tensors of a checkpoint that one of the model's becomes."""
    made = revert_weight_conversion(model, {name: torch.empty(shape, device="meta")})
    return {each: tuple(tensor.shape) for each, tensor in made.items()}


def _check_rows(module: Any, path: str, shape: Shape, tensors: Mapping[str, Shape]) -> None:
    """Groups run along the inputs, which a model of transformers has last, as checkpoints do."""
    rows = sum(math.prod(each[:-1]) for each in tensors.values())
    straight = {each[-1] for each in tensors.values()} == {shape[-1]}
    if getattr(module, "is_transposed", False) or not straight or rows != math.prod(shape[:-1]):
        raise QuantizationAwareError(
            f"{SETTING}: {path}, of shape {shape}, is not what checkpoints store of experts"
        )


def _simulated(weight: torch.Tensor, layout: Int4Groups) -> torch.Tensor:
    """One matrix at a time: what is computed on the way takes several times their memory."""
    if weight.ndim == 2:
        return simulate(weight, layout)
    return torch.stack([simulate(each, layout) for each in weight])
