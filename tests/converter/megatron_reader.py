"""Loads converted checkpoints with Megatron-Core's own loader and computes logits with its layers.

Run as a process: arguments are a directory with a torch_dist checkpoint `<name>` for every name
that follows; logits of TOKENS go to `<name>.pt` there, and what the loader missed to
`<name>.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

TOKENS = torch.arange(3, 15)[None]


def main() -> None:
    from services.trainer.backends.megatron import cpu

    cpu.install()
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    _start(root)
    for name in sys.argv[2:]:
        config = json.loads((root / name / "config.json").read_bytes())
        torch.manual_seed(0)
        model, prefix = build(config)
        missing, unexpected = load(model, prefix, root / name)
        (root / f"{name}.json").write_text(
            json.dumps({"missing": sorted(missing), "unexpected": sorted(unexpected)})
        )
        with torch.no_grad():
            torch.save(logits(model), root / f"{name}.pt")


def load(model: Any, prefix: str, directory: Path) -> tuple[set[str], set[str]]:
    """Fill `model` and name what is in one of the two only."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    state = {"model": model.sharded_state_dict(prefix=prefix)}
    loaded, missing, unexpected = dist_checkpointing.load(
        state, str(directory), strict=StrictHandling.RETURN_ALL
    )
    model.load_state_dict({k.removeprefix(prefix): v for k, v in loaded["model"].items()})
    return missing, unexpected


def logits(model: Any) -> torch.Tensor:
    length = TOKENS.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    found: torch.Tensor = model(TOKENS, torch.arange(length)[None], mask)
    return found


def build(config: dict[str, Any]) -> tuple[Any, str]:
    """A GPTModel of Megatron's plain layers for an HF configuration, and the prefix of its keys."""
    from megatron.core.models.gpt import GPTModel

    text = config.get("text_config", config)
    kind = text["model_type"]
    megatron, spec = transformer_config(text, kind), None
    spec = layers(megatron, text, kind)
    model = GPTModel(
        config=megatron,
        transformer_layer_spec=spec,
        vocab_size=-(-text["vocab_size"] // 8) * 8,
        max_sequence_length=64,
        share_embeddings_and_output_weights=config.get("tie_word_embeddings", False),
        position_embedding_type="none" if kind in LATENT else "rope",
        rotary_percent=text["rope_parameters"].get("partial_rotary_factor", 1.0),
        rotary_base=int(text["rope_parameters"]["rope_theta"]),
    )
    return model.eval(), "language_model." if "text_config" in config else ""


def transformer_config(text: dict[str, Any], kind: str) -> Any:
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    common = {**PLAIN, **sizes(text, kind), **experts(text, kind)}
    if kind == "gpt_oss":
        common |= sinks(text)
    if kind in LATENT:
        indexer = ("n_heads", "head_dim", "topk")
        return MLATransformerConfig(
            **{f"dsa_indexer_{name}": text.get(f"index_{name}") for name in indexer},
            multi_latent_attention=True,
            q_lora_rank=text["q_lora_rank"],
            kv_lora_rank=text["kv_lora_rank"],
            qk_head_dim=text["qk_nope_head_dim"],
            qk_pos_emb_head_dim=text["qk_rope_head_dim"],
            v_head_dim=text["v_head_dim"],
            rope_type="rope",
            rotary_base=text["rope_parameters"]["rope_theta"],
            rotary_percent=1.0,
            **common,
        )
    return TransformerConfig(
        num_query_groups=text["num_key_value_heads"],
        kv_channels=text.get("head_dim"),
        **common,
        **(linear_attention(text) if kind.startswith(RECURRENT) else {}),
    )


RECURRENT = ("qwen3_next", "qwen3_5")
LATENT = ("deepseek_v3", "glm_moe_dsa")
PLAIN: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_cpu_initialization": True,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "params_dtype": torch.float32,
}


def sizes(text: dict[str, Any], kind: str) -> dict[str, Any]:
    return {
        "num_layers": text["num_hidden_layers"],
        "hidden_size": text["hidden_size"],
        "ffn_hidden_size": text.get("intermediate_size", 4),
        "num_attention_heads": text["num_attention_heads"],
        "layernorm_epsilon": text["rms_norm_eps"],
        "add_qkv_bias": text.get("attention_bias", False) or kind == "qwen2",
        "qk_layernorm": kind.startswith(("qwen3", *LATENT)) or text.get("use_qk_norm", False),
    }


def linear_attention(text: dict[str, Any]) -> dict[str, Any]:
    same = ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")
    return {
        "attention_output_gate": True,
        "deterministic_mode": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(kind[0] == "l") for kind in text["layer_types"]],
        **{f"linear_{name}": text[f"linear_{name}"] for name in same},
    }


def sinks(text: dict[str, Any]) -> dict[str, Any]:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    return {
        "softmax_type": "learnable",
        "window_size": (text["sliding_window"] - 1, 0),
        "window_attn_skip_freq": [int(kind[0] == "s") for kind in text["layer_types"]],
        "activation_func": quick_gelu,
        "activation_func_clamp_value": text["swiglu_limit"],
        "glu_linear_offset": 1.0,
        "add_bias_linear": True,
    }


def experts(text: dict[str, Any], kind: str) -> dict[str, Any]:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((text[name] for name in names if text.get(name)), 0)
    if not count:
        return {}
    dense = {*range(text.get("first_k_dense_replace", 0)), *text.get("mlp_only_layers", ())}
    sparse = [int(i not in dense) for i in range(text["num_hidden_layers"])]
    shared = text.get("shared_expert_intermediate_size") or (
        text.get("n_shared_experts", 0) * text.get("moe_intermediate_size", 0)
    )
    biased = kind in (*LATENT, "glm4_moe", "minimax_m2")
    width = text.get("moe_intermediate_size") or text["intermediate_size"]
    return {
        "num_moe_experts": count,
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": sparse if dense else 1,  # of all layers: Megatron's default
        "moe_router_topk": text["num_experts_per_tok"],
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
        "moe_shared_expert_intermediate_size": shared or None,
        "moe_shared_expert_gate": kind.startswith(RECURRENT),
        "moe_router_pre_softmax": kind == "qwen3_moe" and not text["norm_topk_prob"],
        "moe_router_score_function": "sigmoid" if biased else "softmax",
        "moe_router_enable_expert_bias": biased,
        "moe_router_topk_scaling_factor": text.get("routed_scaling_factor"),
        "moe_router_num_groups": text.get("n_group") if biased else None,
        "moe_router_group_topk": text.get("topk_group") if biased else None,
    }


def layers(config: Any, text: dict[str, Any], kind: str) -> Any:
    """Megatron's plain layers; those of linear attention in the places that HF names."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    sparse = config.moe_layer_freq if config.num_moe_experts else 0
    sparse = [sparse] * config.num_layers if isinstance(sparse, int) else sparse
    specs = []
    for index in range(config.num_layers):
        spec = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts if sparse[index] else None,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
            normalization="RMSNorm",
        )
        if config.multi_latent_attention:
            is_indexed = text.get("indexer_types", ["shared"] * (index + 1))[index] == "full"
            core = _IndexedAttention if is_indexed else _Attention
            spec.submodules.self_attention.submodules.core_attention = core
        if any(sparse) or kind.startswith(RECURRENT):
            spec.submodules.sharded_state_dict_keys_map = {}  # plain names, as they were written
        if kind.startswith(RECURRENT):
            _center(spec.submodules)
        if kind == "minimax_m2":
            spec.submodules.self_attention.module = _wide_norms()
        if kind.startswith(RECURRENT) and text["layer_types"][index] == "linear_attention":
            spec.submodules.self_attention = _delta_net()
        specs.append(spec)
    norm = _ZeroCentered if kind.startswith(RECURRENT) else specs[0].submodules.input_layernorm
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


def _center(layer: Any) -> None:
    layer.input_layernorm = layer.pre_mlp_layernorm = _ZeroCentered
    attention = layer.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = _ZeroCentered


class _Attention(torch.nn.Module):
    """Causal attention of [tokens, rows, heads, width]; the plain one wants equal widths."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
        heads = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        mixed = torch.nn.functional.scaled_dot_product_attention(
            *heads, is_causal=True, scale=self.scale
        )
        return mixed.permute(2, 0, 1, 3).flatten(2)


class _IndexedAttention(_Attention):
    """With Megatron's own indexer, by its names; no row is longer than what it would choose."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        from megatron.core.tensor_parallel import ColumnParallelLinear
        from megatron.core.transformer.experimental_attention_variant import dsa

        class Linear(ColumnParallelLinear):
            def __init__(self, *sizes: int, config: Any, init_method: Any, **_: Any) -> None:
                super().__init__(*sizes, config=config, init_method=init_method, bias=False)

        super().__init__(config, softmax_scale)
        layers = dsa.DSAIndexerSubmodules(Linear, Linear, _LayerNorm, Linear)
        self.indexer = dsa.DSAIndexer(config, layers)


class _LayerNorm(torch.nn.LayerNorm):
    def __init__(self, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps)


class _ZeroCentered(torch.nn.Module):
    """RMSNorm whose weight is stored less one: TransformerEngine's with that option."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        shape = hidden.shape[-1:]
        return torch.nn.functional.rms_norm(hidden, shape, 1 + self.weight, self.eps)


def _wide_norms() -> Any:
    """Attention with a norm over all heads of queries, and one over those of keys."""
    from megatron.core.transformer.attention import SelfAttention

    class Attention(SelfAttention):
        def __init__(self, config: Any, *args: Any, **options: Any) -> None:
            super().__init__(config, *args, **options)
            heads = {"q_norm": config.num_attention_heads, "k_norm": config.num_query_groups}
            for name, count in heads.items():
                norm = torch.nn.RMSNorm(count * config.kv_channels, config.layernorm_epsilon)
                setattr(self, name, norm)

        def get_query_key_value_tensors(self, *args: Any, **options: Any) -> Any:
            query, key, value = super().get_query_key_value_tensors(*args, **options)
            query = self.q_norm(query.flatten(2)).view(query.shape)
            return query, self.k_norm(key.flatten(2)).view(key.shape), value

    return Attention


def _delta_net() -> Any:
    from megatron.core.ssm import gated_delta_net
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import ModuleSpec

    gated_delta_net.HAVE_FLA = True  # its kernels are not used in deterministic mode
    gated_delta_net.l2norm = lambda x: x * (x.square().sum(-1, True) + 1e-6).rsqrt()
    return ModuleSpec(
        module=gated_delta_net.GatedDeltaNet,
        submodules=gated_delta_net.GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=_ZeroCentered, out_proj=RowParallelLinear
        ),
    )


def _start(root: Path) -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    # what both look for where TransformerEngine is missing
    vars(moe_utils)["te_general_gemm"] = None
    for name in ("TELinear", "TEColumnParallelLinear"):
        vars(multi_latent_attention)[name] = type(name, (), {})
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(0, force_reset_rng=True)


if __name__ == "__main__":
    main()
