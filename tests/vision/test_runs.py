"""Runs with images on real processes: each group is trained on once, whatever was killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sluice.loop.ledger import Ledger
from sluice.samples.arrow import decode_group
from sluice.samples.blob_store import BlobStore
from sluice.samples.blobs import BlobReference
from tests.e2e.conftest import Stack, start_stack, stop_stack, wait_until
from tests.vision.bad_images import encoded, noise, url
from tests.vision.cases import build_model, speak

STEPS, GROUPS, IMAGES = 6, 4, 3
RUN: dict[str, Any] = {
    "sampling": {"max_new_tokens": 3},
    "steps": STEPS,
    "groups_per_step": GROUPS,
    "samples_per_group": 2,
    "checkpoint_every": 2,
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    root = tmp_path_factory.mktemp("seeing")
    model = str(speak(build_model(root / "seeing", "qwen3_vl")).directory)
    rollout = {
        "tokenizer": model,
        "engine": {"max_running": 64, "max_model_length": 100, "threads": 1},
        "episodes": {"user_modules": ["tests"]},
    }
    trainer = {"model": model, "optim": {"learning_rate": 1e-3}, "vision": {"frozen_tower": True}}
    stack = start_stack(
        root,
        rollout={"kind": "rollout", "config": rollout},
        trainer={"kind": "trainer", "config": trainer},
    )
    rows = []
    for number in range(STEPS * GROUPS):  # as many show no image as show one
        shown = [url(encoded(noise(number % IMAGES, 20, 40, 3)))] if number % 2 else []
        rows.append({"prompt": f"WHAT IS {number}?", "answer": "1", "images": shown})
    (root / "seen.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    yield stack
    stop_stack(stack)


def settings(stack: Stack) -> dict[str, Any]:
    reward = {"reward": "tests.vision.observing:length", "chat": True}
    prompts = {"file": str(stack.run_dir / "seen.jsonl"), "shuffle": False}
    return {**RUN, "environment": {"name": "prompts", "settings": reward}, "prompts": prompts}


def check(stack: Stack, run_dir: Path) -> None:
    """Every group once, at its step, with the picture of its row, whose blob is still there."""
    ledger = Ledger(run_dir / "ledger.sqlite")
    consumed = sorted(ledger.groups("consumed"), key=lambda group: group.position)
    left = [*ledger.groups("issued"), *ledger.groups("dropped")]
    ledger.close()
    assert not left
    assert [group.position for group in consumed] == list(range(STEPS * GROUPS))
    assert [group.consumed_step for group in consumed] == [
        position // GROUPS + 1 for position in range(STEPS * GROUPS)
    ]
    blobs, shown = BlobStore(stack.run_dir / "store", sync=False), dict[int, set[str]]()
    for group in consumed[-GROUPS:]:  # which the last run checkpoint still needs
        assert group.blob is not None
        for sample in decode_group(blobs.get(group.blob)):
            assert len(sample.media) == group.position % 2
            for span in sample.media:
                assert blobs.get(BlobReference(span.digest, span.size))
                shown.setdefault(group.position % IMAGES, set()).add(span.digest)
    assert all(len(digests) == 1 for digests in shown.values())


def stop_for_a_while(pids: Sequence[int]) -> None:
    """What runs goes on without them, or waits."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + 2
    try:
        wait_until(lambda: time.monotonic() > until, what="the end of the stop")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_a_killed_and_stopped_trainer_costs_no_group(stack: Stack) -> None:
    training = stack.train("trainer", **settings(stack))
    training.wait_for_step(1)
    killed = stack.pid("trainer")
    os.kill(killed, signal.SIGKILL)
    training.wait_for_step(3)
    assert stack.pid("trainer") != killed
    stop_for_a_while([stack.pid("trainer"), *stack.rank_pids()])
    training.finish()
    check(stack, training.run_dir)


def test_killed_and_stopped_services_cost_no_group(stack: Stack) -> None:
    training = stack.train("killed", **settings(stack))
    training.wait_for_step(1)
    os.kill(stack.pid("rollout"), signal.SIGKILL)
    training.wait_for_step(2)
    (rank, *_) = stack.rank_pids()
    os.kill(rank, signal.SIGKILL)
    training.wait_for_step(4)
    stop_for_a_while([stack.pid("rollout")])
    training.finish()
    check(stack, training.run_dir)


@pytest.mark.parametrize(("point", "passing"), [("uploaded", 2), ("consumed", 3)])
def test_a_killed_loop_goes_on_where_it_was(stack: Stack, point: str, passing: int) -> None:
    name = f"resumed-{point}"
    training = stack.train(name, dies_at=(point, passing), **settings(stack))
    training.died()
    stack.train(name, resume=True, **settings(stack)).finish()
    check(stack, training.run_dir)


def test_a_replay_shows_the_trainer_the_same_pictures(stack: Stack, tmp_path: Path) -> None:
    run = stack.train("kept", **settings(stack), retention={"keep_blobs": True})
    run.finish()
    model = str(stack.run_dir / "seeing")
    trainer = {"model": model, "optim": {"learning_rate": 1e-3}, "vision": {"frozen_tower": True}}
    alone = start_stack(
        tmp_path / "alone",
        router=None,
        rollout=None,
        trainer={"kind": "trainer", "config": trainer},
    )
    try:
        changes = {**settings(stack), "replay": {"run_dir": str(run.run_dir)}, "steps": ...}
        again = alone.train("again", **changes)
        again.finish()
        check(alone, again.run_dir)
        assert [row["tokens"] for row in again.rows()] == [row["tokens"] for row in run.rows()]
    finally:
        stop_stack(alone)
