"""Layers of transformers models that run chosen operations in place of transformers' own lines.

A table says of which classes that is known; tests compare every one of them with its own forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch

from sluice.fused_operations import rms_norm, rotate, swiglu
from sluice.model_types import layer_configs
from sluice.operations import OperationsConfig, Usage, choose

# Their names begin so. Norms multiply by a weight that is stored as it is.
_NORMS = (
    "Arcee DeepseekV2 DeepseekV3 Ernie4_5 Exaone4 Glm Glm4 Glm4Moe Glm4MoeLite GlmMoeDsa Granite "
    "GraniteMoe HunYuanDenseV1 Llama Ministral Mistral Mixtral Phi3 Qwen2 Qwen2Moe Qwen2_5_VL "
    "Qwen3 Qwen3Moe Qwen3VLMoeText Qwen3VLText SeedOss SmolLM3"
)
_GATED = (  # gate_proj, up_proj and down_proj
    "Cohere Cohere2 DeepseekV2 DeepseekV3 Ernie4_5 Exaone4 Glm4Moe Glm4MoeLite GlmMoeDsa Granite "
    "HunYuanDenseV1 Llama Ministral Mistral Olmo Olmo2 Olmo3 Qwen2 Qwen2Moe Qwen3 Qwen3Moe "
    "Qwen3Next Qwen3VLMoeText Qwen3VLText Qwen3_5 Qwen3_5Moe SmolLM3"
)
_JOINED = "Glm Glm4 Phi3"  # gate_up_proj and down_proj
_TURNED = (  # whole heads, by halves
    "Arcee Exaone4 Granite GraniteMoe HunYuanDenseV1 Llama Ministral Mistral Mixtral Qwen2 "
    "Qwen2Moe Qwen2_5_VL Qwen3 Qwen3Moe Qwen3VLMoeText Qwen3VLText SeedOss SmolLM3"
)
NORMS = frozenset(f"{name}RMSNorm" for name in _NORMS.split())
GATED_MLPS = frozenset(f"{name}MLP" for name in _GATED.split())
JOINED_MLPS = frozenset(f"{name}MLP" for name in _JOINED.split())
TURNED = frozenset(f"{name}Attention" for name in _TURNED.split())
ROTARY = "apply_rotary_pos_emb"  # the global of a module that its attention calls
LOOP = "eager"  # transformers' word


def choose_for(
    model: Any, asked: OperationsConfig, usage: Usage, *, own: frozenset[str]
) -> dict[str, str]:
    """Returns which implementations a model has, and `own`, of what runs it.

    Raises OperationError.
    """
    return choose(asked, usage, own | used_by(_text_of(model)))


def adapt(model: Any, chosen: Mapping[str, str]) -> None:
    """Has the layers of a model run what was chosen; what is plain stays transformers' own."""
    text = _text_of(model)
    if _is_fused(chosen, "rms_norm"):
        for norm in _named(text, NORMS):
            norm.forward = partial(_norm, chosen["rms_norm"], norm)
    if _is_fused(chosen, "swiglu"):
        for mlp in _named(text, GATED_MLPS):
            mlp.forward = partial(_gated_mlp, chosen["swiglu"], mlp)
        for mlp in _named(text, JOINED_MLPS):
            mlp.forward = partial(_joined_mlp, chosen["swiglu"], mlp)
        for experts in _experts(text):
            experts._apply_gate = partial(_gate, chosen["swiglu"])
    if _is_fused(chosen, "rotary"):
        turn = partial(_turn, chosen["rotary"])
        for attention in _named(text, TURNED):
            attention.forward = _with_rotary(attention, turn)
    if chosen.get("experts") == "loop":
        model.set_experts_implementation(LOOP)


def heads_of(config: Any) -> tuple[int, int]:
    """Returns the largest sizes of a key and of a value of a head, by a model's configuration."""
    text = config.get_text_config()
    if getattr(text, "kv_lora_rank", None):
        return text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim
    heads = text.num_attention_heads
    own = [getattr(layer, "head_dim", None) for layer in layer_configs(text)]
    size = max(each or text.hidden_size // heads for each in own)
    return size, getattr(text, "v_head_dim", None) or size


def used_by(text: torch.nn.Module) -> set[str]:
    """Returns the operations whose implementation can be chosen in a model's layers."""
    used = set()
    if any(_named(text, NORMS)):
        used.add("rms_norm")
    if any(_named(text, GATED_MLPS | JOINED_MLPS)) or any(_experts(text)):
        used.add("swiglu")
    if any(_named(text, TURNED)):
        used.add("rotary")
    if any(hasattr(module, "_apply_gate") for module in text.modules()):
        used.add("experts")
    return used


def _text_of(model: Any) -> Any:
    """Without the tower of a model that sees."""
    return getattr(model.base_model, "language_model", model)


def _is_fused(chosen: Mapping[str, str], operation: str) -> bool:
    return chosen.get(operation, "plain") != "plain"


def _named(model: torch.nn.Module, names: frozenset[str]) -> Iterator[Any]:
    """Layers of classes of transformers with these names; of MLPs, those that gate by silu."""
    for module in model.modules():
        kind = type(module)
        if kind.__name__ not in names or not kind.__module__.startswith("transformers."):
            continue
        if not kind.__name__.endswith("MLP") or _gates_by_silu(module):
            yield module


def _experts(model: torch.nn.Module) -> Iterator[Any]:
    """Those whose gate is transformers' own: a half of the products gates the other."""
    for module in model.modules():
        gate = getattr(type(module), "_apply_gate", None)
        if getattr(gate, "__name__", "") == "_default_apply_gate" and _gates_by_silu(module):
            yield module


def _gates_by_silu(module: Any) -> bool:
    found = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    return type(found).__name__ in ("SiLU", "SiLUActivation")


def _norm(implementation: str, norm: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return rms_norm(implementation, hidden_states, norm.weight, norm.variance_epsilon)


def _gated_mlp(implementation: str, mlp: Any, hidden: torch.Tensor) -> torch.Tensor:
    gated = swiglu(implementation, mlp.gate_proj(hidden), mlp.up_proj(hidden))
    made: torch.Tensor = mlp.down_proj(gated)
    return made


def _joined_mlp(implementation: str, mlp: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    gate, up = mlp.gate_up_proj(hidden_states).chunk(2, dim=-1)
    made: torch.Tensor = mlp.down_proj(swiglu(implementation, gate, up))
    return made


def _gate(implementation: str, both: torch.Tensor) -> torch.Tensor:
    return swiglu(implementation, *both.chunk(2, dim=-1))


def _turn(
    implementation: str,
    query: torch.Tensor,
    key: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    return rotate(implementation, query, key, cosine, sine)


def _with_rotary(attention: Any, turn: Any) -> Any:
    """The layer's forward with a rotary embedding of ours where it calls the one of its module.

    Of this layer alone: others of the class, in other models, keep theirs.
    """
    forward: Any = type(attention).forward
    assert ROTARY in forward.__code__.co_names, f"{type(attention).__name__} calls no {ROTARY}"
    own = FunctionType(
        forward.__code__,
        {**forward.__globals__, ROTARY: turn},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(own, attention)
