"""Loads Megatron: the pinned version, the mends of its known faults, and this rank's device."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch

from services.trainer.backends.megatron import cpu
from sluice import platform


def on_cpu() -> bool:
    return platform.current().device_type == platform.CPU.device_type


def current_device() -> torch.device:
    """Returns the device that the rank's process made current."""
    chosen = platform.current()
    if on_cpu():
        return chosen.device()
    return torch.device(chosen.device_type, chosen.module.current_device())


VERSION = "0.16.1"  # the one whose faults are known; others are refused


class MegatronVersionError(ImportError):
    """The installed megatron-core is not the one this backend was measured with."""


@cache
def load() -> ModuleType:
    """Imports `megatron.core`, adapted to the device where that is not the one it is written for.

    Raises MegatronVersionError.
    """
    # It warns at every start that TransformerEngine and Apex are missing.
    warnings.filterwarnings("ignore", module=r"megatron\.core|.*megatron\.cpu")
    if platform.current().device_type == platform.CPU.device_type:
        cpu.install()
    elif platform.current().device_type == platform.NPU.device_type:
        importlib.import_module("torch_npu.contrib.transfer_to_npu")  # the vendor's own adapter
    core = importlib.import_module("megatron.core")
    if core.__version__ != VERSION:
        raise MegatronVersionError(f"megatron-core {VERSION} is needed, found {core.__version__}")
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        vars(moe_utils)["te_general_gemm"] = None
    if not has_transformer_engine():  # this module alone takes it for installed then
        latent = importlib.import_module("megatron.core.transformer.multi_latent_attention")
        vars(latent)["HAVE_TE"] = False
    return core


def has_transformer_engine() -> bool:
    """Says whether Megatron found TransformerEngine."""
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    return bool(specs.HAVE_TE)


def distributed_parts(optimizer: Any) -> Iterator[Any]:
    """Yields the DistributedOptimizers with state inside `optimizer`, itself or chained."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if hasattr(part, "_set_main_param_and_optimizer_states") and not part.is_stub_optimizer:
            yield part


def own_steps(optimizer: Any) -> None:
    """Gives every parameter of torch's Adam its own `step`; 0 where there is none."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.is_stub_optimizer or not isinstance(part.optimizer, torch.optim.Adam):
            continue
        for state in part.optimizer.state.values():
            step = state.get("step", torch.tensor(0.0))
            state["step"] = torch.as_tensor(step, dtype=torch.float32).clone()


def name_missing_steps(state: dict[Any, Any]) -> None:
    """Writes step 0 into a loaded optimizer state; Megatron leaves it out when it saves."""
    parts = [state] if "state" in state or "optimizer" in state else list(state.values())
    for part in parts:
        inner = part.get("optimizer", part)
        if "state" in inner:  # not so with a DistributedOptimizer
            inner["state"].setdefault("common_step", torch.tensor(0.0))


def start_state(optimizer: Any) -> None:
    """Makes the state now that torch's Adam makes at its first step.

    Without it Megatron can neither save nor load an optimizer that has not stepped yet.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.is_stub_optimizer or not isinstance(part.optimizer, torch.optim.Adam):
            continue
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                part.optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


@contextmanager
def keep_steps(optimizer: Any) -> Iterator[None]:
    """Leaves, while loading, the `step` that was just restored where the checkpoint has none."""
    parts = list(distributed_parts(optimizer))
    for part in parts:
        part._set_main_param_and_optimizer_states = _StepKeeper(part)
    try:
        yield
    finally:
        for part in parts:
            del part._set_main_param_and_optimizer_states


class _StepKeeper:
    def __init__(self, part: Any) -> None:
        self._part = part
        self._set = part._set_main_param_and_optimizer_states

    def __call__(self, model_param: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        group, order = self._part.model_param_group_index_map[model_param]
        main = self._part.optimizer.param_groups[group]["params"][order]
        step = self._part.optimizer.state[main].get("step")
        self._set(model_param, tensors if step is None else {**tensors, "step": step})
