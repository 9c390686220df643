"""Reward models of several families, and what transformers alone says of texts."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from examples.models.tiny_qwen3 import build_tiny_qwen3
from examples.models.value_head import build_value_head
from services.rollout.reward_model.config import RewardModelConfig
from services.rollout.reward_model.process import RewardModelProcess
from sluice.config import parse_config

SIZES = {
    "vocab_size": 13,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "num_labels": 1,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, num_key_value_heads=2, pad_token_id=12),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, num_key_value_heads=2, pad_token_id=None),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=13, n_positions=64, n_embd=32, n_layer=2, n_head=4, num_labels=1,
        pad_token_id=12, bos_token_id=11, eos_token_id=11,
    ),
    "bert": lambda: transformers.BertConfig(**SIZES, pad_token_id=12),
}  # fmt: skip
FAMILIES = ("qwen3", *CONFIGS, "critic")


@dataclass(frozen=True)
class Oracle:
    """transformers as it comes, one text at a time."""

    tokenizer: Any
    model: Any
    every_token: bool

    def score(self, text: str) -> float:
        with torch.no_grad():
            logits = self.model(**self.tokenizer(text, return_tensors="pt")).logits
        return float(logits[0, -1, 0] if self.every_token else logits[0, 0])

    def scores(self, texts: Sequence[str]) -> list[float]:
        return [self.score(text) for text in texts]


def build(family: str, root: Path) -> Path:
    """A random model of the family, with the tokenizer of digits."""
    plain, directory = root / "plain", root / family
    build_tiny_qwen3(plain, 3)
    if family == "qwen3":
        return build_value_head(plain, directory, 1)
    torch.manual_seed(5)
    if family == "critic":  # as a trainer publishes it: beside the config of a language model
        model = transformers.AutoModelForTokenClassification.from_pretrained(plain, num_labels=1)
        for parameter in model.score.parameters():
            torch.nn.init.normal_(parameter)
        shutil.copytree(plain, directory)
        save_file(model.state_dict(), directory / "model.safetensors", {"format": "pt"})
        return directory
    model = transformers.AutoModelForSequenceClassification.from_config(CONFIGS[family]())
    for name, parameter in model.named_parameters():
        if name.startswith(("score", "classifier")):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(plain).save_pretrained(directory)
    return directory


class Models(dict[str, Path]):
    """By family, built when first asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def __missing__(self, family: str) -> Path:
        self[family] = build(family, self._root / family)
        return self[family]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def qwen3(models: Models) -> Path:
    return models["qwen3"]


def oracle_of(directory: Path) -> Oracle:
    is_critic = "score.bias" in load_file(directory / "model.safetensors")
    kind: Any = transformers.AutoModelForSequenceClassification
    options: dict[str, Any] = {}
    if is_critic:
        kind, options = transformers.AutoModelForTokenClassification, {"num_labels": 1}
    model = kind.from_pretrained(directory, dtype=torch.float32, **options).eval()
    return Oracle(transformers.AutoTokenizer.from_pretrained(directory), model, is_critic)


def random_texts(seed: int, count: int, longest: int = 60) -> list[str]:
    draws = random.Random(seed)
    return [
        "".join(draws.choice("0123456789=") for _ in range(draws.randint(1, longest)))
        for _ in range(count)
    ]


@contextlib.asynccontextmanager
async def running(model: Path, **values: Any) -> AsyncIterator[RewardModelProcess]:
    """A process on free ports, in the event loop of the test."""
    server = {"drain_seconds": 0.2, **values.pop("server", {})}
    config = {"model": str(model), "name": "rm", "threads": 1, "server": server, **values}
    process = RewardModelProcess(parse_config(RewardModelConfig, config))
    await process.start()
    try:
        yield process
    finally:
        await process.server.stop()
        await process.close()
