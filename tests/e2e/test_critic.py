"""PPO with a critic: two trainers, one run."""

from __future__ import annotations

import os
import shutil
import signal

import pytest

from sluice.loop.run_directory import latest_run_checkpoint, list_run_checkpoints
from tests import warm
from tests.e2e.conftest import start_stack, stop_stack
from tests.patience import PATIENCE

PPO = {
    "algorithm": {"advantage": {"name": "gae", "gae_lambda": 0.95}},
    "critic": {"warmup_steps": 2},
    "retention": {"cuts": 1},
    "steps": 6,
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory):
    run_dir = tmp_path_factory.mktemp("critic")
    config = {"model": str(run_dir / "model"), "head": "value"}
    stack = start_stack(run_dir, critic={"kind": "trainer", "config": config})
    yield stack
    stop_stack(stack)


@pytest.fixture(scope="module")
def training(stack):
    """A run that ended well, though a rank of its critic and then the loop were killed."""
    training = stack.train("ppo", **PPO)
    training.wait_for_step(3)
    (rank,) = warm.children(stack.pid("critic"))
    os.kill(rank.pid, signal.SIGKILL)
    training.wait_for_step(5)
    training.die_at("consumed")  # never while a run checkpoint replaces the one before
    training.process.wait(timeout=PATIENCE)
    stack.train("ppo", resume=True, **PPO).finish()
    return training


def test_a_run_with_a_critic_survives_the_death_of_each(training):
    rows = training.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    # the actor waits for the critic, which learns from the first step on
    assert [row["optimizer_step"] for row in rows] == [0, 0, 1, 2, 3, 4]
    assert all(row["critic_grad_norm"] > 0 for row in rows)
    assert rows[0]["critic_value"] == 0  # a new head
    assert rows[-1]["critic_value"] != 0
    consumed = {group.group_id: group.consumed_step for group in training.groups("consumed")}
    assert consumed == {f"g{i:07}": i // 4 + 1 for i in range(24)}


def test_checkpoints_of_both_are_those_of_the_run_checkpoint(training, stack):
    run_checkpoint = latest_run_checkpoint(training.run_dir / "cuts")
    assert run_checkpoint.step == 6
    store = stack.run_dir / "store"
    kept = [
        store / run_checkpoint.checkpoint,
        store / "critics" / "critic" / run_checkpoint.critic_checkpoint,
    ]
    assert all(path.is_dir() for path in kept)
    assert [len(list(path.parent.iterdir())) for path in kept] == [1, 1]


def test_a_critic_that_is_missing_or_idle_is_refused(training, stack):
    for changes, message in (
        ({"algorithm": PPO["algorithm"]}, "the advantage gae needs one"),
        ({"critic": {}}, "has no effect for the advantage grpo"),
        ({**PPO, "critic": {"service": "judge"}}, "no service is called judge"),
        ({**PPO, "critic": {"service": "trainer"}}, "has no head: value"),
    ):
        refused = stack.train(f"refused-{abs(hash(message))}", **changes)
        output, _ = refused.process.communicate(timeout=PATIENCE)
        assert refused.process.returncode == 2, output
        assert message in output
    output, _ = stack.train("ppo", resume=True).process.communicate(timeout=PATIENCE)
    assert "critic: the run to resume had one" in output


def test_a_critic_that_comes_back_as_of_another_step_is_no_place_to_go_on_from(stack):
    """Every file is as it was written: only the run checkpoint knows which step it is of."""
    settings = {**PPO, "critic": {}, "retention": {"cuts": 2}, "checkpoint_every": 1}
    training = stack.train("mixed", **{**settings, "steps": 2})
    training.finish()
    before, newest = list_run_checkpoints(training.run_dir / "cuts")[-2:]
    (critics,) = (stack.run_dir / "store" / "critics").iterdir()
    shutil.rmtree(critics / newest.critic_checkpoint)
    shutil.copytree(critics / before.critic_checkpoint, critics / newest.critic_checkpoint)
    output = " ".join(
        stack.train("mixed", resume=True, **{**settings, "steps": 3}).finish().split()
    )
    assert "run checkpoint of step 2 is damaged" in output
    assert f"{newest.critic_checkpoint} of the critic is of optimizer step" in output
    assert "went back to the run checkpoint of step 1" in output
    assert [row["step"] for row in training.rows()] == [1, 2, 3]
