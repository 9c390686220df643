"""Loads Megatron: the pinned version, the mends of its known faults, and this rank's device."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch

from services.trainer.backends.megatron import cpu
from services.trainer.backends.megatron.offloaded_adamw import OffloadedAdamW
from sluice import platform


def on_cpu() -> bool:
    return platform.current().device_type == platform.CPU.device_type


def current_device() -> torch.device:
    """Returns the device that the rank's process made current."""
    return platform.current().device()


VERSION = "0.16.1"  # the one whose faults are known; others are refused


class MegatronVersionError(ImportError):
    """The installed megatron-core is not the one this backend was measured with."""


@cache
def load() -> ModuleType:
    """Imports `megatron.core`, adapted to the device where that is not the one it is written for.

    Raises MegatronVersionError or PlatformError.
    """
    # It warns at every start that TransformerEngine and Apex are missing.
    warnings.filterwarnings("ignore", module=r"megatron\.core|.*megatron\.cpu")
    if platform.current().device_type == platform.CPU.device_type:
        cpu.install()
    else:
        platform.current().answer_cuda("megatron")
    core = importlib.import_module("megatron.core")
    if core.__version__ != VERSION:
        raise MegatronVersionError(f"megatron-core {VERSION} is needed, found {core.__version__}")
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        vars(moe_utils)["te_general_gemm"] = None
    if not has_transformer_engine():  # this module alone takes it for installed then
        latent = importlib.import_module("megatron.core.transformer.multi_latent_attention")
        vars(latent)["HAVE_TE"] = False
    attention = importlib.import_module("megatron.core.transformer.attention")
    vars(attention)["_yarn_get_concentration_factor_from_config"] = rotary_scaling
    delta_net = importlib.import_module("megatron.core.ssm.gated_delta_net")
    vars(delta_net)["HAVE_FLA"] = True  # asked for to build one; delta_net.py computes it itself
    return core


def has_transformer_engine() -> bool:
    """Says whether Megatron found TransformerEngine."""
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    return bool(specs.HAVE_TE)


def is_engine_of(release: str) -> bool:
    """Says whether the TransformerEngine that is installed is of this release or a later one."""
    return bool(importlib.import_module("megatron.core.utils").is_te_min_version(release))


def optimizer_name() -> str:
    """Returns whose AdamW Megatron takes."""
    vendor: str = importlib.import_module("megatron.core.optimizer").Adam.__module__
    vendor = vendor.partition(".")[0]
    return "torch_foreach" if vendor == "torch" else vendor


def rotary_scaling(config: Any) -> float:
    """Return what multiplies cosine and sine: Megatron knows of one formula, of its settings."""
    return float(getattr(config, "rotary_scaling", 1.0))


@contextmanager
def own_offloading(options: Any) -> Iterator[None]:
    """Optimizers made meanwhile have OffloadedAdamW where Megatron has a class of its own.

    Where `options` are to offload, float32 copies are left to it: Megatron's own option for that,
    use_precision_aware_optimizer, compares a release of Transformer Engine that may be missing.
    """
    if options.optimizer_cpu_offload:
        options.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    names = ("megatron.core.optimizer", "megatron.core.optimizer.distrib_optimizer")
    modules = [vars(importlib.import_module(name)) for name in names]
    before = [module["HybridDeviceOptimizer"] for module in modules]
    for module in modules:
        module["HybridDeviceOptimizer"] = OffloadedAdamW
    try:
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            module["HybridDeviceOptimizer"] = own


@dataclass(frozen=True)
class OptimizerShare:
    """Elements of a parameter that this rank updates, from `begin` on: `main` in their order.

    `state` is what its optimizer keeps of them. `spread` says that other data ranks have the rest.
    """

    parameter: torch.Tensor
    main: torch.Tensor
    state: dict[str, Any]
    begin: int
    spread: bool


def optimizer_shares(optimizer: Any) -> Iterator[OptimizerShare]:
    """Yield what this rank's optimizers hold; copies in float32 of other parameters among it."""
    for part in _parts(optimizer):
        if isinstance(part.optimizer, OffloadedAdamW):
            yield from _offloaded_shares(part)
            continue
        states = part.optimizer.state
        if hasattr(part, "model_param_group_index_map"):  # a DistributedOptimizer
            for parameter, main in _spread_parameters(part):
                begin = part._get_model_param_range_map(parameter)["param"].start
                yield OptimizerShare(parameter, main.detach(), states[main], begin, spread=True)
            continue
        copied = dict(_copied_parameters(part))
        for group in part.optimizer.param_groups:
            for main in group["params"]:
                parameter = copied.get(main, main)
                flat = main.detach().view(-1)
                yield OptimizerShare(parameter, flat, states[main], 0, spread=False)


def main_parameters(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of a parameter and what its optimizer updates for it on this rank."""
    for part in _parts(optimizer):
        if hasattr(part, "model_param_group_index_map"):  # a DistributedOptimizer
            yield from _spread_parameters(part)
            continue
        copied = dict(_copied_parameters(part))
        for group in part.optimizer.param_groups:
            for main in group["params"]:
                yield copied.get(main, main), main


@contextmanager
def only(optimizer: Any, keeps: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Norms and clipping meanwhile are of the main parameters that `keeps` says."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    for part in parts:
        every = part.get_parameters
        part.get_parameters = lambda every=every: [p for p in every() if keeps(p)]
    try:
        yield
    finally:
        for part in parts:
            del part.get_parameters


def _spread_parameters(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of a parameter and what a DistributedOptimizer updates of it.

    Where some parameters are narrow and others float32, its own table has them in another order
    than the groups that it says they are in.
    """
    offloaded = isinstance(part.optimizer, OffloadedAdamW)  # which has the float32 copies
    pairs = (
        (
            part.model_float16_groups,
            part.shard_float16_groups if offloaded else part.shard_fp32_from_float16_groups,
        ),
        (part.model_fp32_groups, part.shard_fp32_groups),
    )
    for models, mains in pairs:
        for parameters, updated in zip(models, mains, strict=True):
            yield from zip(parameters, updated, strict=True)


def _offloaded_shares(part: Any) -> Iterator[OptimizerShare]:
    """What an OffloadedAdamW holds: several shares of a parameter that lies in several blocks."""
    owned = {id(updated): parameter for parameter, updated in _spread_parameters(part)}
    for kept in part.optimizer.kept():
        parameter = owned[id(kept.owner)]
        begin = part._get_model_param_range_map(parameter)["param"].start + kept.begin
        yield OptimizerShare(parameter, kept.main, kept.moments, begin, spread=True)


def _copied_parameters(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of a float32 copy and the parameter; none of an optimizer of float32 parameters."""
    copies = getattr(part, "fp32_from_float16_groups", [])
    for mains, parameters in zip(copies, getattr(part, "float16_groups", []), strict=True):
        yield from zip(mains, parameters, strict=True)


def _parts(optimizer: Any) -> list[Any]:
    """List the optimizers with parameters inside `optimizer`, itself or chained."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not part.is_stub_optimizer]


def held_state(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield what optimizers hold on the device: copies of parameters, and moments."""
    for part in _parts(optimizer):
        if isinstance(part.optimizer, OffloadedAdamW):
            yield from part.optimizer.on_device()
            continue
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for kept in part.optimizer.state.values():
            yield from (value for value in kept.values() if isinstance(value, torch.Tensor))


def set_step(optimizer: Any, step: int) -> None:
    """Give every parameter of torch's Adam its own `step`, and groups of others theirs."""
    for part in _parts(optimizer):
        if isinstance(part.optimizer, OffloadedAdamW):
            part.optimizer.steps = step
        elif isinstance(part.optimizer, torch.optim.Adam):
            for state in part.optimizer.state.values():
                state["step"] = torch.tensor(float(step))
        else:
            for group in part.optimizer.param_groups:
                group["step"] = step


def scalers_of(optimizer: Any) -> list[Any]:
    """List what scales the losses of float16, the same for each part; none for others."""
    found = [getattr(part, "grad_scaler", None) for part in _parts(optimizer)]
    return [scaler for scaler in found if scaler]


def start_state(optimizer: Any) -> None:
    """Makes the state now that torch's Adam makes at its first step.

    What a checkpoint is read into is there from the start, then, and no step adds memory.
    """
    for part in _parts(optimizer):
        if isinstance(part.optimizer, OffloadedAdamW):
            part.optimizer.start()
        if not isinstance(part.optimizer, torch.optim.Adam):
            continue
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                part.optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
