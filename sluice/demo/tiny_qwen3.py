"""A tiny random Qwen3 with a tokenizer of ten digits, built on the spot.

`python -m sluice.demo.tiny_qwen3 DIRECTORY [SEED]`

transformers reads it and has no part in making it: to import it costs more than all of this.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice.imports import run_process, uncollected

if TYPE_CHECKING:
    import torch

DIGITS, EQUALS, END, PAD = "0123456789", "=", "<end>", "<pad>"
WORDS = [*DIGITS, EQUALS, END, PAD]


def build_tiny_qwen3(
    directory: Path, seed: int = 0, *, hidden_size: int = 64, layers: int = 2, heads: int = 4
) -> Path:
    """Write a random Qwen3 (108k parameters by default) and its tokenizer; the same for a seed."""
    with uncollected():
        import torch
        from safetensors.torch import save_file

    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "vocab_size": len(WORDS),
        "hidden_size": hidden_size,
        "intermediate_size": hidden_size * 3,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": max(16, hidden_size // heads),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "attention_bias": False,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": WORDS.index(END),
        "pad_token_id": None,  # transformers would start its embedding at zero
    }
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    weights = {
        f"{name}.weight": module.get_parameter("weight").detach()
        for name, module in _modules(config)
    }
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    _write(directory / "config.json", config)
    _write(directory / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    _digit_tokenizer().save(str(directory / "tokenizer.json"))
    special = {"eos_token": END, "pad_token": PAD}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    _write(directory / "tokenizer_config.json", kind | special)
    return directory


def _modules(config: dict[str, Any]) -> Iterator[tuple[str, torch.nn.Module]]:
    """What has weights, by its name; drawn in the order of transformers, to the bit."""
    from torch.nn import Embedding, Linear, RMSNorm

    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    width = config["num_attention_heads"] * dim
    modules: dict[str, torch.nn.Module]
    modules = {"model.embed_tokens": Embedding(config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        place = f"model.layers.{layer}"
        for name in "qkv":
            modules[f"{place}.self_attn.{name}_proj"] = Linear(hidden, width, bias=False)
        modules[f"{place}.self_attn.o_proj"] = Linear(width, hidden, bias=False)
        for name in "qk":
            modules[f"{place}.self_attn.{name}_norm"] = RMSNorm(dim)
        for name in ("gate", "up"):
            modules[f"{place}.mlp.{name}_proj"] = Linear(hidden, inner, bias=False)
        modules[f"{place}.mlp.down_proj"] = Linear(inner, hidden, bias=False)
        for name in ("input", "post_attention"):
            modules[f"{place}.{name}_layernorm"] = RMSNorm(hidden)
    modules["model.norm"] = RMSNorm(hidden)
    yield from _drawn(modules, config)
    yield from _drawn({"lm_head": Linear(hidden, config["vocab_size"], bias=False)}, config)


def _drawn(
    modules: dict[str, torch.nn.Module], config: dict[str, Any]
) -> Iterator[tuple[str, torch.nn.Module]]:
    from torch.nn import RMSNorm, init

    for name, module in modules.items():
        if not isinstance(module, RMSNorm):
            init.normal_(module.weight, std=config["initializer_range"])  # type: ignore[arg-type]
        yield name, module


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def _digit_tokenizer():  # type: ignore[no-untyped-def]  # tokenizers ships no usable types
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+"), "removed"),
            pre_tokenizers.Split(Regex(r"<end>|<pad>|."), "isolated"),
        ]
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END, PAD])
    return tokenizer


def main() -> int:
    """Build it where the command says."""
    build_tiny_qwen3(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    return 0


if __name__ == "__main__":
    run_process(main)
