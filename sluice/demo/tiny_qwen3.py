"""A tiny random Qwen3 with a tokenizer of ten digits, built on the spot.

`python -m sluice.demo.tiny_qwen3 DIRECTORY [SEED]`
"""

from __future__ import annotations

import sys
from pathlib import Path

from sluice.imports import run_process, uncompiled

DIGITS, EQUALS, END, PAD = "0123456789", "=", "<end>", "<pad>"


def build_tiny_qwen3(
    directory: Path, seed: int = 0, *, hidden_size: int = 64, layers: int = 2, heads: int = 4
) -> Path:
    """Write a random Qwen3 (108k parameters by default) and its tokenizer; the same for a seed."""
    with uncompiled():
        import torch
        from safetensors.torch import save_file
        from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=13,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=max(16, hidden_size // heads),
        max_position_embeddings=64,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=11,
        pad_token_id=None,  # transformers would start its embedding at zero
    )
    directory.mkdir(parents=True, exist_ok=True)
    model = Qwen3ForCausalLM(config)
    # as by save_pretrained of the model, which would import what shards it
    config.architectures, config.dtype = [type(model).__name__], "float32"
    config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    save_file(model.state_dict(), directory / "model.safetensors", {"format": "pt"})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_digit_tokenizer(), eos_token=END, pad_token=PAD
    )
    tokenizer.save_pretrained(directory)
    return directory


def _digit_tokenizer():  # type: ignore[no-untyped-def]  # tokenizers ships no usable types
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    words = [*DIGITS, EQUALS, END, PAD]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, PAD))
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
