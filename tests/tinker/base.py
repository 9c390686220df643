"""A tiny model that often writes two digits in the other order, trained by plain torch."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from examples.models.tiny_qwen3 import DIGITS, END, build_tiny_qwen3

EQUALS_ID, END_ID = len(DIGITS), len(DIGITS) + 1
ROWS, ENOUGH = 64, 0.7  # nats a token: what is left of chance is room to explore
assert END == "<end>"


def reversed_pair(rng: random.Random) -> list[int]:
    """Two digits, `=`, and the same in the other order."""
    first, second = rng.randrange(10), rng.randrange(10)
    return [first, second, EQUALS_ID, second, first, END_ID]


def train_base(directory: Path) -> Path:
    build_tiny_qwen3(directory, 0)
    rng = random.Random(0)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    loss = torch.tensor(float("inf"))
    while loss.item() > ENOUGH:
        tokens = torch.tensor([reversed_pair(rng) for _ in range(ROWS)])
        logits = model(input_ids=tokens[:, :-1]).logits[:, 2:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 3:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    return directory
