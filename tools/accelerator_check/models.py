"""Random Qwen3 models in the shapes that the check measures."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from sluice import platform
from tools.accelerator_check.work import StepWork


@dataclass(frozen=True)
class Qwen3Shape:
    """Sizes of a Qwen3 with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    feed_forward: int
    vocabulary: int

    @property
    def body(self) -> int:
        """Parameters that every token passes: all but the embedding."""
        attention = self.hidden * self.head * (2 * self.heads + 2 * self.kv_heads)
        norms = 2 * self.hidden + 2 * self.head
        return self.layers * (attention + 3 * self.hidden * self.feed_forward + norms)

    @property
    def parameters(self) -> int:
        return self.body + self.hidden + self.vocabulary * self.hidden

    def config(self, spread: float) -> Qwen3Config:
        """Without special tokens; `spread` is the standard deviation of random weights."""
        return Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.feed_forward,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            initializer_range=spread,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )

    def training_flops(self, tokens: int, scored: int, length: int) -> float:
        """Of forward and backward over rows of `length`, `scored` of whose tokens have logits.

        6 FLOP a weight and token, and 6 x heads x head size x length for causal attention,
        whose two products see half of the row on average (Chowdhery et al. 2022, appendix B).
        """
        attention = 6 * self.layers * self.heads * self.head * length
        head = 6 * self.vocabulary * self.hidden
        return float((6 * self.body + attention) * tokens + head * scored)


SHAPES = {
    "0.5b": Qwen3Shape(896, 24, 14, 2, 64, 4864, 151936),
    "1.5b": Qwen3Shape(1536, 28, 12, 2, 128, 8960, 151936),
    "parity": Qwen3Shape(256, 4, 4, 2, 64, 768, 4096),
}
SMALL_SHAPES = {
    "0.5b": Qwen3Shape(64, 2, 4, 2, 16, 192, 512),
    "1.5b": Qwen3Shape(96, 2, 6, 2, 16, 256, 512),
    "parity": Qwen3Shape(64, 2, 4, 2, 16, 192, 512),
}


def shape_of(work: StepWork, name: str) -> Qwen3Shape:
    return (SMALL_SHAPES if work.small else SHAPES)[name]


def random_model(
    work: StepWork, name: str, *, dtype: torch.dtype = torch.bfloat16, spread: float = 0.02
) -> Path:
    """The HF directory of a shape, made once for all steps; a spread of 0.02 gives nearly even
    next tokens."""
    path = work.out / "work" / "models" / name
    if path.exists():
        return path
    platform.current().seed_all(0)
    with platform.current().device():  # a billion draws take a while on a host
        model = Qwen3ForCausalLM(shape_of(work, name).config(spread))
    partial = path.with_name(f"{name}.{work.step.name}")
    model.to(dtype).save_pretrained(partial)
    try:
        partial.rename(path)
    except OSError:  # another step was first
        if not path.exists():
            raise
        shutil.rmtree(partial)
    return path
