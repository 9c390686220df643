"""Runs that go on: what they need, what they find damaged, what they refuse."""

from __future__ import annotations

from sluice.loop.run_directory import latest_run_checkpoint
from tests.patience import PATIENCE


def test_blobs_that_are_gone_or_damaged_are_generated_again(stack):
    training = stack.train("damaged", steps=5, dies_at=("consumed", 3))
    training.died()
    run_checkpoint = latest_run_checkpoint(training.run_dir / "cuts")
    groups = [g for g in training.groups("consumed") if g.consumed_step > run_checkpoint.step]
    groups += training.groups("generated")
    assert len(groups) >= 4  # they are to be trained on again
    blobs = stack.run_dir / "store" / "blobs"
    gone, damaged = (blobs / g.blob.digest[:2] / g.blob.digest for g in groups[:2])
    gone.unlink()
    damaged.write_bytes(b"\0" + damaged.read_bytes()[1:])
    output = stack.train("damaged", steps=5, resume=True).finish()
    assert "is gone" in output  # found when the run came back
    assert "is lost" in output  # found by the trainer
    consumed = {group.group_id: group.consumed_step for group in training.groups("consumed")}
    assert consumed == {f"g{i:07}": i // 4 + 1 for i in range(20)}


def test_a_run_resumed_with_another_seed_is_refused(stack):
    stack.train("seeded", steps=1).finish()
    training = stack.train("seeded", steps=2, resume=True, seed=7)
    output, _ = training.process.communicate(timeout=PATIENCE)
    assert training.process.returncode == 2
    assert "seed: is 7, the run to resume has 0" in output


def test_a_restart_policy_may_always_say_resume(stack):
    output = stack.train("always", steps=1, resume=True).finish()
    assert "holds no run yet" in output
    training = stack.train("always", steps=2, resume=True)
    assert "holds no run yet" not in training.finish()
    assert [row["step"] for row in training.rows()] == [1, 2]


def test_a_finished_run_can_go_on_from_its_last_step(stack):
    stack.train("longer", steps=3, checkpoint_every=2).finish()
    training = stack.train("longer", steps=4, checkpoint_every=2, resume=True)
    training.finish()
    assert latest_run_checkpoint(training.run_dir / "cuts").step == 4
    rewards = [row["reward_mean"] for row in training.rows()]
    assert len(rewards) == 4
    consumed = {group.group_id: group.consumed_step for group in training.groups("consumed")}
    assert consumed == {f"g{i:07}": i // 4 + 1 for i in range(16)}
