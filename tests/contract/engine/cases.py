"""Tiny models with a transformers oracle, and short ways to ask an engine."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from services.rollout.engine.interface import Delta, Engine, Generation, Sampling

StartEngine = Callable[..., Awaitable[Engine]]

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.2,  # sharp enough for draws to differ from uniform ones
}


@dataclass(frozen=True)
class Model:
    """A tiny random model, in memory and on disk."""

    module: PreTrainedModel
    directory: Path

    @torch.no_grad()
    def logprobs(
        self, prompt: list[int], response: tuple[int, ...], temperature: float = 1.0
    ) -> list[float]:
        """Teacher-forced by transformers."""
        logits = self.module(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        table = (logits.double() / temperature).log_softmax(-1)
        return table.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()


def build_model(directory: Path, family: str, seed: int) -> Model:
    torch.manual_seed(seed)
    if family == "qwen3":
        module: Any = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False))
    else:
        module = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    module.eval().save_pretrained(directory)
    return Model(module, directory)


def family_of(directory: Path) -> str:
    """Of a model that `build_model` made."""
    kind: str = json.loads((directory / "config.json").read_bytes())["model_type"]
    return kind


def write_letters(directory: Path) -> Path:
    """A tokenizer of letters, pairs of them and bytes, so that no text is cut in one way alone."""
    pairs = [a + b for a in ascii_lowercase[:6] for b in ascii_lowercase[:11]]
    pieces = [*"ÃĥÂ©", "<end>", *ascii_lowercase, *pairs][: SIZES["vocab_size"]]
    made = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, []))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    directory.mkdir(exist_ok=True)
    made.save(str(directory / "tokenizer.json"))
    return directory


def text_of(directory: Path, token_ids: Sequence[int]) -> str:
    """By the tokenizer of a directory; special tokens are text, too."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=False)
    return text


def request_of(name: str, prompt: list[int], count: int = 1, **settings: Any) -> Generation:
    """A request for `count` samples; `stream` and `sampling` settings by keyword."""
    stream = settings.pop("stream", False)
    return Generation(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=Sampling(**{"max_new_tokens": 8, **settings}),
        sample_count=count,
        stream=stream,
    )


async def gather(engine: Engine, generation: Generation) -> list[list[Delta]]:
    """All deltas by sample."""
    deltas: list[list[Delta]] = [[] for _ in range(generation.sample_count)]
    async for delta in engine.generate(generation):
        deltas[delta.index].append(delta)
    return deltas


async def complete(engine: Engine, generation: Generation) -> list[Delta]:
    """One delta per sample of a request that does not stream."""
    found = await gather(engine, generation)
    assert all(len(deltas) == 1 for deltas in found)
    return [deltas[0] for deltas in found]
