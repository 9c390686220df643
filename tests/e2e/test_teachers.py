"""Teachers of both kinds in real runs: killed, and who has another vocabulary than the trainer."""

import json
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice.loop.run_directory import latest_run_checkpoint, write_run_checkpoint
from sluice.samples.arrow import decode_group
from sluice.samples.blob_store import BlobStore
from tests import warm
from tests.e2e.conftest import Stack, start_stack, stop_stack
from tests.e2e.test_mixtures import assert_whole, shares_of, train_mixture

ENGINE = {"max_running": 64, "max_model_length": 16, "threads": 1}


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack with a teacher of each kind."""
    root = tmp_path_factory.mktemp("taught")
    model = str(build_tiny_qwen3(root / "teacher", 7))
    engine = {**ENGINE, "model": model}
    asked = {"roles": ["engine"], "engine_id": "large-0", "pool": "large", "engine": engine}
    stack = start_stack(
        root / "stack",
        large={"kind": "rollout", "config": asked},
        maths={"kind": "trainer", "config": {"model": model}},
    )
    yield stack
    stop_stack(stack)


def test_teachers_that_are_killed_miss_no_row(taught: Stack) -> None:
    training = train_mixture(taught, "taught", **settings_of(taught))
    training.wait_for_step(2)
    ranks = warm.children(taught.pid("maths"))
    for pid in (taught.pid("large"), *(rank.pid for rank in ranks)):
        os.kill(pid, signal.SIGKILL)
    training.finish()
    assert_whole(training)
    assert all(math.isfinite(row["kl_teacher"]) for row in training.rows())
    blobs = BlobStore(taught.run_dir / "store", sync=False)
    for group in training.groups("consumed"):
        assert group.blob is not None
        samples = decode_group(blobs.get(group.blob))
        # a trainer's log-probs go to the rows of a step; an engine's are part of the group
        held = ["teacher_logprobs" in sample.columns for sample in samples]
        assert held == [group.environment == "early"] * len(samples)


def settings_of(taught: Stack) -> dict[str, Any]:
    return {
        "environments": shares_of(taught, teacher="maths"),
        "teachers": {"large": {"pool": "large"}, "maths": {"service": "maths"}},
        "teacher": "large",
        "algorithm": {"advantage": {"name": "distillation"}},
    }


def test_another_model_of_a_teacher_is_told_when_a_run_goes_on(taught: Stack) -> None:
    """Its settings are in no file of the run: divergences were from another, without a word."""
    training = train_mixture(taught, "other", **settings_of(taught), steps=1)
    training.finish()
    cuts = training.run_dir / "cuts"
    last = latest_run_checkpoint(cuts)
    assert last is not None
    had = last.trainers["teacher maths"]
    assert had["model"] and not any(name.startswith("optim") for name in had)
    other = {**last.trainers, "teacher maths": {**had, "model": '"/another"'}}
    write_run_checkpoint(cuts, replace(last, trainers=other))
    again = train_mixture(taught, "other", **settings_of(taught), steps=2, resume=True)
    output = " ".join(again.finish().split())
    assert 'resumed with other settings of the teacher maths (model: "/another", now' in output


def build_swapped(directory: Path) -> Path:
    """A model for which 0 and 1 are each other's tokens."""
    model = build_tiny_qwen3(directory, 3)
    document = json.loads((model / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary["0"], vocabulary["1"] = vocabulary["1"], vocabulary["0"]
    (model / "tokenizer.json").write_text(json.dumps(document))
    return model


def test_a_worker_whose_tokenizer_is_another_model_s_is_refused_before_anything_runs(
    tmp_path: Path,
) -> None:
    config = {"tokenizer": str(build_swapped(tmp_path / "other")), "engine": ENGINE}
    stack = start_stack(tmp_path / "stack", rollout={"kind": "rollout", "config": config})
    try:
        training = stack.train("odd")
        output, _ = training.process.communicate()
        assert training.process.returncode == 2, output
        told = " ".join(output.split())
        assert "tokenizer: the episode worker" in told
        assert "has another vocabulary than the trainer's model" in told
        assert not training.groups("issued")
    finally:
        stop_stack(stack)


def test_a_teacher_of_another_vocabulary_is_refused_before_anything_runs(
    tmp_path: Path, taught: Stack
) -> None:
    engine = {**ENGINE, "model": str(build_swapped(tmp_path / "model"))}
    asked = {"roles": ["engine"], "engine_id": "odd-0", "pool": "odd", "engine": engine}
    stack = start_stack(tmp_path / "stack", odd={"kind": "rollout", "config": asked})
    try:
        training = stack.train(
            "odd",
            teachers={"odd": {"pool": "odd"}},
            algorithm={"advantage": {"name": "distillation"}},
        )
        output, _ = training.process.communicate()
        assert training.process.returncode == 2
        assert "teachers.odd: has another vocabulary than the trainer" in " ".join(output.split())
        assert not training.groups("issued")
    finally:
        stop_stack(stack)
