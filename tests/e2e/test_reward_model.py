"""A run learns what a value head likes, asked over HTTP; the service dies on the way."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from examples.models.tiny_qwen3 import build_tiny_qwen3
from examples.models.value_head import build_value_head
from sluice.samples.arrow import decode_group
from sluice.samples.blob_store import BlobStore
from tests.e2e.conftest import Stack, start_stack, stop_stack

STEPS = 24


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Path]]:
    root = tmp_path_factory.mktemp("scored")
    head = build_value_head(build_tiny_qwen3(root / "body", 4), root / "head", 1)
    service = {"kind": "reward_model", "config": {"model": str(head), "threads": 1}}
    stack = start_stack(root / "stack", scores=service)
    yield stack, head
    stop_stack(stack)


def train(stack: Stack, name: str, **changes: Any) -> Any:
    settings = {
        "reward": "reward_model",
        "reward_settings": {
            "url": f"{stack.run_dir}/services.json#scores",
            "model": "head",
            "attempt_seconds": 5,
            "longest_backoff_seconds": 0.5,
        }
        | changes,
    }
    return stack.train(
        name,
        environment={"name": "prompts", "settings": settings},
        groups_per_step=8,
        samples_per_group=8,
        steps=STEPS,
    )


@pytest.mark.long
def test_the_mean_reward_moves_towards_what_the_head_likes(scored: tuple[Stack, Path]) -> None:
    stack, head = scored
    training = train(stack, "learn")
    training.wait_for_step(3)
    os.kill(stack.pid("scores"), signal.SIGKILL)
    training.finish()
    rows = training.rows()
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    means = [row["reward_mean"] for row in rows]
    tokenizer = transformers.AutoTokenizer.from_pretrained(head)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(head).eval()
    blobs, rewards = BlobStore(stack.run_dir / "store", sync=False), []
    for group in training.groups("consumed"):
        assert group.blob is not None
        for sample in decode_group(blobs.get(group.blob)):
            text = tokenizer.decode(sample.token_ids, skip_special_tokens=True).replace(" ", "")
            with torch.no_grad():
                alone = model(**tokenizer(text, return_tensors="pt")).logits[0, 0].item()
            assert sample.columns["reward"] == pytest.approx(alone, abs=1e-4)
            rewards.append(alone)
    assert len(rewards) == STEPS * 64, "a group is missing, or there twice"
    gain = sum(means[-4:]) / 4 - sum(means[:4]) / 4
    error = torch.tensor(rewards).std().item() * (2 / (4 * 64)) ** 0.5  # of that difference
    assert gain > 4 * error, means


def test_another_model_ends_the_run_by_name(scored: tuple[Stack, Path]) -> None:
    """And not with rewards of whatever is served there."""
    stack, _ = scored
    training = train(stack, "other", model=f"head@{'0' * 32}")
    output, _ = training.process.communicate(timeout=600)
    assert training.process.returncode != 0
    assert "HTTP 404" in output and "model_not_found" in output
