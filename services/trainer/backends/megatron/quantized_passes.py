"""Megatron's layers of experts, computed with the numbers that they are published as."""

from __future__ import annotations

from typing import Any

import torch

from services.trainer.backend import LayoutError
from services.trainer.backends.megatron.model import PolicyModel
from services.trainer.backends.quantized_passes import (
    SETTING,
    SimulatedWeights,
    attach,
    check_experts,
    check_inputs,
)
from sluice.weights.convert.quantized_layout import Int4Groups


def simulate_experts(policy: PolicyModel, layout: Int4Groups) -> None:
    """Have passes of a policy compute with what its experts are published as.

    Raises QuantizationAwareError, or LayoutError for layers that read their weights otherwise.
    """
    check_experts(policy.source.weights.hf_tensors(), layout)
    owners = {
        id(parameter): (module, name)
        for model in policy.models
        for module in model.modules()
        for name, parameter in module._parameters.items()
    }
    found: dict[torch.nn.Module, list[str]] = {}
    for tensor in policy.tensors:
        sources = tensor.binding.sources
        if not all(layout.quantizes(source.name, source.part) for source in sources):
            continue
        inputs = tensor.parameter.shape[-1]
        check_inputs(tensor.binding.megatron, inputs, layout, "megatron.expert_tensor")
        module, name = owners[id(tensor.parameter)]
        found.setdefault(module, []).append(name)
    for module, names in found.items():
        check_reads(module, attach(module, names, layout, lambda weight: weight))


def check_reads(module: Any, weights: SimulatedWeights) -> None:
    """Raise LayoutError for a layer that adds gradients to its parameters by itself, past autograd,
    or, of Transformer Engine, does not find what is put in their place.
    """
    kind = type(module).__name__
    for setting in ("fuse_wgrad_accumulation", "gradient_accumulation_fusion"):
        if getattr(module, setting, False):
            raise LayoutError(f"{SETTING}: {kind} has {setting}, by which weights get no gradients")
    if not hasattr(module, "_get_weight_tensors"):
        return
    weights.put(module, ())
    put = {id(value) for name, value in vars(module).items() if name in module._parameters}
    read = {id(tensor) for tensor in module._get_weight_tensors()}
    weights.take(module)
    if not put or put != read:
        raise LayoutError(
            f"{SETTING}: {kind} of the Transformer Engine that is installed does not read its "
            "weights by their names: set megatron.layer_spec to local"
        )
