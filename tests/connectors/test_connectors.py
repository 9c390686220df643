"""Environments of the verifiers package train as they are, over the OpenAI port."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from sluice.samples.arrow import decode_group
from sluice.samples.blob_store import BlobStore
from sluice.samples.sample import Sample
from tests.connectors.learned import LEARNED
from tests.e2e.conftest import Stack, Training

END = 11


def _run(stack: Stack, name: str, module: str, **changes: Any) -> Training:
    settings = {
        "environment": f"tests.connectors.{module}",
        "openai_url": stack.services["rollout"]["openai_url"],
        **changes.pop("settings", {}),
    }
    return stack.train(
        name,
        prompts={"index_count": 5000},
        environment={"name": "verifiers", "settings": settings},
        samples_per_group=16,
        checkpoint_every=0,
        **changes,
    )


def _rewards(training: Training) -> tuple[float, float]:
    means = [row["reward_mean"] for row in training.rows()]
    return sum(means[:3]) / 3, sum(means[-3:]) / 3


def _last_group(stack: Stack, training: Training) -> Sequence[Sample]:
    blobs = BlobStore(stack.run_dir / "store", sync=False)
    group = next(one for one in reversed(training.groups("consumed")) if blobs.exists(one.blob))
    return decode_group(blobs.get(group.blob))


@pytest.mark.timeout(1800)
def test_an_environment_of_one_turn_is_learned(stack: Stack) -> None:
    training = _run(
        stack,
        "copy",
        "copy_digits",
        settings={"arguments": {"digits": 1}},
        sampling={"max_new_tokens": 3},
        groups_per_step=8,
        steps=64,
    )
    training.finish(1500)
    first, last = LEARNED["copy"] = _rewards(training)
    assert first < 0.2 and last > first + 0.4
    for sample in _last_group(stack, training):
        prompt, answer = np.split(sample.token_ids, [sample.prompt_length])
        assert len(prompt) == 2, "a digit and ="
        said = [int(token) for token in answer if token != END]
        reads = "".join("0123456789="[token] if token < 11 else "" for token in said)
        right = float(sum(a == b for a, b in zip(reads, str(prompt[0]), strict=False)))
        assert sample.columns["reward"] == pytest.approx(right / max(1, len(reads)))
        assert sample.columns["score/is_whole"] == float(reads == str(prompt[0]))
        assert len(sample.columns["rollout_logprobs"]) == len(answer)
    measured = [row for row in training.rows() if row["silent_groups"] < 8]  # others train nothing
    assert len(measured) > 32 and all(row["rollout_mismatch"] < 1e-3 for row in measured)
    assert _open_groups(stack) == {"open": [], "closed": []}


@pytest.mark.timeout(1800)
def test_an_agent_of_three_turns_with_a_tool_learns_to_read_it(stack: Stack) -> None:
    """It goes on from what has learned to repeat a digit; that the tool is to be called is new."""
    training = _run(
        stack, "agent", "three_turns", sampling={"max_new_tokens": 2}, groups_per_step=4, steps=24
    )
    training.finish(1500)
    first, last = LEARNED["agent"] = _rewards(training)
    assert last > first + 0.2
    samples = _last_group(stack, training)
    assert {sample.columns["episode"] for sample in samples} == set(range(16))
    whole = [sample for sample in samples if sample.columns.get("loss_mask") is not None]
    assert whole, "episodes whose three answers are one sample"
    for sample in whole:
        mask = sample.columns["loss_mask"]
        shown = [
            int(t) for t, own in zip(sample.token_ids[-len(mask) :], mask, strict=True) if not own
        ]
        digits = [token for token in shown if token < 10]
        assert 1 <= len(digits) <= 2 and shown.count(10) == len(digits), "digits of the tool, and ="
        assert shown.count(END) <= len(digits), "after an answer that was cut off"
    assert all(sample.columns["score/num_turns"] == 3 for sample in samples)


def _open_groups(stack: Stack) -> dict[str, Any]:
    url = stack.services["rollout"]["openai_url"].removesuffix("/v1")
    with urllib.request.urlopen(f"{url}/sluice/v1/groups", timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found
