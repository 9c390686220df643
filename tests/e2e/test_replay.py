"""A run trained again on the groups of an earlier one, by a trainer alone."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice.config import ConfigError
from sluice.loop.config import ReplayConfig
from sluice.loop.journal import RunJournal, read_journal
from sluice.loop.ledger import Ledger
from sluice.loop.replay import ReplayedRun
from sluice.place import StoreCacheConfig
from tests.e2e.conftest import Stack, Training, start_stack, stop_stack
from tests.patience import PATIENCE

STEPS = 5
MINI_BATCHES = {"mini_batches": 2, "epochs": 2}
SOURCE: dict[str, Any] = {
    "steps": STEPS,
    "deterministic": True,
    "algorithm": MINI_BATCHES,
    "retention": {"keep_blobs": True, "blob_grace_seconds": 0.001, "cuts": 1},
    "checkpoint_every": 1,
}


def files(folder: Path) -> dict[str, str]:
    """Digest by name of all that a run left, and of what is in its store."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def digests(run: Training) -> dict[int, str]:
    """By step, of the weights that a run published."""
    ledger = Ledger(run.run_dir / "ledger.sqlite")
    try:
        found = {step: ledger.digest_of_step(step) for step in range(STEPS + 1)}
    finally:
        ledger.close()
    return {step: digest for step, digest in found.items() if digest}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Training, Path]:
    """A run of 5 steps, and the directory of its stack, which has ended."""
    folder = tmp_path_factory.mktemp("source")
    stack = start_stack(folder)
    try:
        training = stack.train("source", **SOURCE)
        training.finish()
    finally:
        stop_stack(stack)
    return training, folder


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Stack]:
    """A trainer with the weights that the run began with, and nothing else."""
    stack = start_stack(tmp_path / "alone", router=None, rollout=None)
    yield stack
    stop_stack(stack)


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A trainer alone that replays of several tests may have taken on."""
    stack = start_stack(tmp_path_factory.mktemp("used"), router=None, rollout=None)
    yield stack
    stop_stack(stack)


def replayed(source: Training, **more: Any) -> dict[str, Any]:
    """The settings of a replay of it, without what it has no use for."""
    return {
        "replay": {"run_dir": str(source.run_dir), **more},
        "algorithm": MINI_BATCHES,
        "steps": ...,
    }


def test_a_replay_has_the_weights_of_the_run_to_the_bit(
    source: tuple[Training, Path], trainer: Stack
) -> None:
    run, folder = source
    before = files(folder)
    changes = replayed(run) | {"deterministic": True}
    trainer.train("again", **changes, dies_at=("published", 1)).died()
    trainer.train("again", **changes, resume=True, dies_at=("consumed", 4)).died()
    again = trainer.train("again", **changes, resume=True)
    again.finish()
    assert digests(again)[STEPS] == digests(run)[STEPS] != digests(run)[0]
    assert digests(again)[0] == digests(run)[0]
    assert files(folder) == before, "the earlier run is only read"
    consumed = {(group.group_id, group.consumed_step) for group in again.groups("consumed")}
    assert consumed == {(group.group_id, group.consumed_step) for group in run.groups("consumed")}
    for mine, theirs in zip(again.rows(), run.rows(), strict=True):
        for name in ("loss", "grad_norm", "reward_mean", "response_length_mean", "tokens"):
            assert mine[name] == theirs[name]
        assert mine["staleness_max"] == theirs["staleness_max"] == 0
    notes = " ".join(event["text"] for event in read_journal(again.run_dir) if "text" in event)
    assert "without effect: environment, groups_per_step, prompts" in notes
    assert "other weights" not in notes
    for command in ("status", "report", "trace", "samples"):
        told = command_of(command, str(again.run_dir))
        assert "Traceback" not in told
    assert json.loads(command_of("status", "--json", str(again.run_dir)))["run"]["state"] == "done"
    assert len(list((again.run_dir / "samples").iterdir())) == 1


def command_of(name: str, *words: str) -> str:
    """What a command of `sluice` prints; it ends well."""
    done = subprocess.run(
        [sys.executable, "-m", "sluice.cli", name, *reversed(words)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_some_steps_are_replayed_by_another_loss_and_the_run_is_replayed_again(
    source: tuple[Training, Path], used: Stack
) -> None:
    run, folder = source
    before = files(folder)
    changes = replayed(run, first_step=3, last_step=4) | {
        "algorithm": {"loss": {"name": "cispo", "clip_high": 0.3}},
        "retention": SOURCE["retention"],
        "checkpoint_every": 1,
    }
    some = used.train("some", **changes)
    output = some.finish()
    theirs = [group.group_id for group in run.groups("consumed") if group.consumed_step in (3, 4)]
    assert [group.group_id for group in some.groups("consumed")] == theirs
    assert [row["step"] for row in some.rows()] == [1, 2]
    assert "begins with other weights" in " ".join(output.split())
    twice = used.train("twice", **(changes | {"replay": {"run_dir": str(some.run_dir)}}))
    twice.finish()
    assert [group.group_id for group in twice.groups("consumed")] == theirs
    assert files(folder) == before


def refused(stack: Stack, source: Training, name: str, **changes: Any) -> str:
    """How a replay ends that is refused; it has changed nothing."""
    before = files(source.run_dir)
    run = stack.train(name, **(replayed(source) | changes))
    output, _ = run.process.communicate(timeout=PATIENCE)
    assert run.process.returncode == 2, output
    assert files(source.run_dir) == before
    assert not run.rows() and not run.groups("generated")
    return " ".join(output.split())


def test_what_cannot_be_replayed_as_a_whole_is_refused_before_the_first_step(
    source: tuple[Training, Path], used: Stack, tmp_path: Path
) -> None:
    run, _ = source
    where = str(run.run_dir)
    loop, pairs = tmp_path / "loop", tmp_path / "pairs"
    loop.symlink_to(loop)
    pairs.mkdir()
    RunJournal(pairs).start("dpo", 3, {})
    bad: list[tuple[dict[str, Any], str]] = [
        ({"replay": {"run_dir": where, "last_step": 6}}, "no groups of step 6; it has trained 5"),
        ({"replay": {"run_dir": where, "first_step": 9}}, "no groups of step 9"),
        ({"replay": {"run_dir": str(tmp_path / "none")}}, "is no run directory"),
        ({"sampling": {"max_new_tokens": 5, "temperature": 0.5}}, "sampled at 1"),
        ({"algorithm": {"mini_batches": 5}}, "5 cannot be made of the 4 groups of step 1"),
        ({"replay": {"run_dir": str(loop)}}, "is no run directory"),
        ({"replay": {"run_dir": str(pairs)}}, "is of sluice dpo"),
    ]
    for number, (changes, why) in enumerate(bad):
        assert why in refused(used, run, f"bad{number}", **changes)
    own = str(used.run_dir / "runs" / "own")
    assert "is that of this run" in refused(used, run, "own", replay={"run_dir": own})


def test_a_replay_that_goes_on_is_held_to_its_groups_too(
    source: tuple[Training, Path], used: Stack
) -> None:
    changes = replayed(source[0])
    used.train("more", **changes, dies_at=("consumed", 2)).died()
    more = used.train("more", **(changes | {"algorithm": {"mini_batches": 5}}), resume=True)
    output, _ = more.process.communicate(timeout=PATIENCE)
    assert more.process.returncode == 2, output
    told = " ".join(output.split())
    assert "algorithm.mini_batches: 5 cannot be made of the 4 groups of step" in told
    assert "Traceback" not in told
    used.train("more", **changes, resume=True).finish()


def test_blobs_that_are_gone_are_named_by_their_first_step(
    source: tuple[Training, Path], used: Stack, tmp_path: Path
) -> None:
    run, folder = source
    blobs = folder / "store" / "blobs"
    group = [group for group in run.groups("consumed") if group.consumed_step == 2][-1]
    assert group.blob is not None
    path = blobs / group.blob.digest
    hidden = tmp_path / "hidden"
    path.rename(hidden)
    try:
        told = refused(used, run, "gone")
        assert f"{group.blob.digest} of step 2 is gone" in told
        assert "retention.keep_blobs: true" in told
        path.write_bytes(hidden.read_bytes()[:-1])
        assert "step 2" in refused(used, run, "cut")
        cache = StoreCacheConfig()
        found = ReplayedRun.read(ReplayConfig(run_dir=run.run_dir), tmp_path, 1.0, cache)
        with pytest.raises(ConfigError, match=f"step 2: blob {group.blob.digest} has digest"):
            found.copy(1, found.run.store, cache)  # of a replay in the store of the run
    finally:
        hidden.rename(path)


def test_a_run_keeps_no_blobs_that_it_is_not_told_to_keep(used: Stack, source: Any) -> None:
    """The control of the settings of `source`, whose grace is as short."""
    run, _ = source
    changes = replayed(run) | {
        "retention": {"blob_grace_seconds": 0.001, "cuts": 1},
        "checkpoint_every": 1,
    }
    plain = used.train("plain", **changes)
    plain.finish()
    told = refused(used, plain, "late")
    assert "of step 1 is gone" in told


def test_a_trainer_of_another_vocabulary_is_refused(
    source: tuple[Training, Path], tmp_path: Path
) -> None:
    run, _ = source
    other = build_tiny_qwen3(tmp_path / "other", 0)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    trainer = {"kind": "trainer", "config": {"model": str(other)}}
    stack = start_stack(tmp_path / "alone", router=None, rollout=None, trainer=trainer)
    try:
        assert "another vocabulary than the trainer's model" in refused(stack, run, "other")
    finally:
        stop_stack(stack)


def test_a_run_that_goes_on_is_replayed_as_far_as_it_got(trainer: Stack, tmp_path: Path) -> None:
    stack = start_stack(tmp_path / "source")
    try:
        run = stack.train("source", **SOURCE, stops_at=("consumed", 3))
        with run.held():
            before = files(tmp_path / "source")
            again = trainer.train("again", **replayed(run), deterministic=True)
            again.finish()
            left = files(tmp_path / "source")
            assert {name for name in left if left[name] != before.get(name)} <= {
                str(run.run_dir / "ledger.sqlite-shm")  # sqlite's list of who reads
            }
            assert len(again.rows()) == 3
        run.finish()
    finally:
        stop_stack(stack)
    assert digests(again)[3] == digests(run)[3]
