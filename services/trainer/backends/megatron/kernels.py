"""Which implementations the operations of a model have, and what of Megatron's settings follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from services.trainer.backend import LayoutError
from services.trainer.backends.megatron import upstream
from services.trainer.backends.megatron.config import FP8_TOKENS, MegatronConfig
from services.trainer.backends.megatron.model_config import ModelSource, uses_transformer_engine
from sluice.operations import AUTO, OperationError, OperationsConfig, Usage, capability_of, choose
from sluice.platform import CUDA

ENGINE = "transformer_engine"
LEAST_ENGINE = {  # releases of Transformer Engine whose exchange takes packs
    "a2a": "2.10.0",
    "all_gather": "2.18.0",
}
LEAST_FP8 = {  # compute capability
    "delayed": (8, 9),
    "tensorwise": (8, 9),
    "blockwise": (9, 0),
    "mxfp8": (10, 0),
}


def choose_operations(
    source: ModelSource,
    config: MegatronConfig,
    asked: OperationsConfig,
    device: torch.device,
    *,
    adapters: bool = False,
) -> dict[str, str]:
    """Returns what runs in a model and its optimizer; `adapters` have an optimizer of torch's.

    Raises OperationError, or LayoutError for a setting that what runs does not have.
    """
    has_engine = uses_transformer_engine(config, source)
    usage = Usage(
        device_type=device.type,
        models="megatron",
        dtype=config.dtype,
        heads=_heads(source),
        capability=capability_of(device.type),
        engine_obstacle="" if has_engine else "the layers are not Transformer Engine's",
    )
    used = {"rms_norm"} if source.clamped else {"rms_norm", "swiglu"}
    used |= {"experts"} if source.shape.experts else set()
    used |= set() if source.latent else {"rotary"}  # which has its own
    used |= set() if source.value_head else {"logprobs"}
    layers = asked.model_copy(update={"adamw": AUTO})  # which is Megatron's to choose
    chosen = choose(layers, usage, used | {"attention"})
    if (obstacle := _attention_obstacle(source, config)) and chosen["attention"] == ENGINE:
        usage = Usage(**{**vars(usage), "engine_obstacle": obstacle})
        chosen |= choose(OperationsConfig(attention=asked.attention), usage, {"attention"})
    offloads = config.optimizer_offload > 0
    chosen["adamw"] = _adamw(asked, usage, adapters=adapters, offloads=offloads)
    if config.cp_comm_type is not None and chosen["attention"] != ENGINE:
        raise LayoutError(
            f"cp_comm_type {config.cp_comm_type} is of Transformer Engine's attention, and "
            f"{chosen['attention']} runs"
        )
    _check_exchange(source, config)
    if config.fp8 is not None:
        _check_fp8(source, config, usage)
    return chosen


def core_options(chosen: Mapping[str, str], config: MegatronConfig) -> dict[str, Any]:
    """Returns what Megatron's configuration says of what was chosen, and of fp8."""
    options: dict[str, Any] = {
        "bias_activation_fusion": chosen.get("swiglu") == "megatron_swiglu",
        "apply_rope_fusion": chosen.get("rotary") == ENGINE,
        "moe_grouped_gemm": chosen.get("experts") == ENGINE,
        "cp_comm_type": config.cp_comm_type,
    }
    if config.fp8 is not None:
        options |= {"fp8": config.fp8, "fp8_recipe": config.fp8_recipe}
        options |= {"moe_router_padding_for_quantization": "experts" in chosen}
    return options


def _heads(source: ModelSource) -> tuple[int, int]:
    if not source.latent:
        return source.shape.head_dim, source.shape.head_dim
    text = source.hf_config
    return text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim


def _attention_obstacle(source: ModelSource, config: MegatronConfig) -> str:
    """Why Transformer Engine's attention cannot run in a model of its layers."""
    if source.latent:
        return "latent attention has values of another width than keys"
    if config.context > 1 and config.cp_layout != "zigzag":
        return f"cp_layout {config.cp_layout} is not how it cuts sequences"
    return ""


def _check_exchange(source: ModelSource, config: MegatronConfig) -> None:
    """Raises LayoutError where Transformer Engine would refuse `cp_comm_type` in the first pass."""
    kind = config.cp_comm_type
    if kind in LEAST_ENGINE and not upstream.is_engine_of(least := LEAST_ENGINE[kind]):
        raise LayoutError(f"cp_comm_type {kind} over packs needs Transformer Engine {least}")
    heads = max(1, source.shape.kv_heads // config.tensor)
    if kind == "a2a" and heads % config.context:
        raise LayoutError(
            f"cp_comm_type a2a: {heads} key heads of a tensor rank do not divide over "
            f"{config.context} context ranks"
        )


def _adamw(asked: OperationsConfig, usage: Usage, *, adapters: bool, offloads: bool) -> str:
    """Megatron takes what is installed, whatever is asked for; what offloads is torch's."""
    if adapters:
        host = Usage(device_type=usage.device_type, capability=usage.capability)
        return choose(OperationsConfig(adamw=asked.adamw), host, {"adamw"})["adamw"]
    found, why = upstream.optimizer_name(), "Megatron takes {} as it is installed"
    if offloads:
        found, why = "torch_foreach", "megatron.optimizer_offload steps by {}"
    if asked.adamw not in (AUTO, found) or found in asked.without:
        raise OperationError(f"operations.adamw: {why.format(found)}")
    return found


def _check_fp8(source: ModelSource, config: MegatronConfig, usage: Usage) -> None:
    """Raises LayoutError where Transformer Engine has no products of 8 bits for it."""
    what = f"fp8 {config.fp8}"
    if usage.device_type != CUDA.device_type:
        raise LayoutError(f"{what} needs a {CUDA.device_type} device, not {usage.device_type}")
    if usage.engine_obstacle:
        raise LayoutError(f"{what}: {usage.engine_obstacle}")
    least = LEAST_FP8[config.fp8_recipe]
    if usage.capability < least:
        raise LayoutError(
            f"{what}: fp8_recipe {config.fp8_recipe} needs compute capability "
            f"{least[0]}.{least[1]}, not {usage.capability[0]}.{usage.capability[1]}"
        )
    shape = source.shape
    sizes = {"hidden_size": shape.hidden, "intermediate_size": shape.ffn // config.tensor}
    sizes |= {"heads": shape.heads * shape.head_dim // config.tensor}
    for name, size in sizes.items():
        if size % FP8_TOKENS:
            raise LayoutError(f"{what}: {name} of a tensor rank, {size}, is no multiple of 16")
