"""Mixtures in real runs whose loops are killed."""

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import Stack, Training

STEPS, GROUPS = 6, 4
PROMPTS = {"name": "prompts", "settings": {"reward": "position_match"}}
# what a curriculum might do: `late` comes in from the third step on
SCHEDULE = "tests.e2e.test_mixtures:late_from_the_third_step"
CALM = "tests.e2e.test_mixtures:always_alike"


def late_from_the_third_step(step: int, scalars: dict[str, float]) -> dict[str, float]:
    assert step == 0 or scalars["step"] == step
    return {"early": 3.0, "late": float(step >= 2)}


def always_alike(step: int, scalars: dict[str, float]) -> dict[str, float]:
    return {"early": 3.0, "late": 1.0}


def shares_of(stack: Stack, **late: str) -> dict[str, dict]:
    share = {"prompts": {"file": str(stack.run_dir / "prompts.jsonl")}, "environment": PROMPTS}
    return {"early": {**share, "weight": 3}, "late": {**share, **late}}


def train_mixture(stack: Stack, name: str, **changes) -> Training:
    settings = {"prompts": None, "environment": None, "environments": shares_of(stack), **changes}
    return stack.train(name, **{"steps": STEPS, "groups_per_step": GROUPS, **settings})


def assert_whole(training: Training) -> dict[str, list[int]]:
    """Every group trained on once, each environment's tasks in order; the steps of each."""
    groups = training.groups("consumed")
    assert [group.position for group in groups] == list(range(STEPS * GROUPS))
    assert [group.consumed_step for group in groups] == [
        1 + i // GROUPS for i in range(len(groups))
    ]
    steps: dict[str, list[int]] = {}
    for name in {group.environment for group in groups}:
        own = [group for group in groups if group.environment == name]
        assert [group.task for group in own] == list(range(len(own)))
        steps[name] = [group.consumed_step for group in own]
    return steps


@pytest.mark.parametrize("point", ["issued", "generated", "consumed", "checkpoint"])
def test_a_mixture_that_is_killed_goes_on_as_one_that_was_not(stack: Stack, point: str) -> None:
    dies_at = (point, 2 if point == "checkpoint" else 3)
    train_mixture(stack, f"mixed-{point}", environment_schedule=SCHEDULE, dies_at=dies_at).died()
    again = train_mixture(stack, f"mixed-{point}", environment_schedule=SCHEDULE, resume=True)
    again.finish()
    steps = assert_whole(again)
    assert steps["late"] == [3, 4, 5, 6] and len(steps["early"]) == 20
    rows = again.rows()
    assert [row["groups/late"] for row in rows] == [0, 0, 1, 1, 1, 1]
    for row in rows:
        parts = [(row["groups/early"], row["reward_mean/early"])]
        if row["groups/late"]:
            parts.append((row["groups/late"], row["reward_mean/late"]))
        mean = sum(count * reward for count, reward in parts) / GROUPS
        assert row["reward_mean"] == pytest.approx(mean)


def test_other_tasks_are_refused_when_a_mixture_is_resumed(stack: Stack, tmp_path: Path) -> None:
    train_mixture(stack, "changed").finish()
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "1=", "answer": "1"}))
    changed = shares_of(stack)
    changed["late"]["prompts"] = {"file": str(other)}
    refused = train_mixture(stack, "changed", environments=changed, resume=True)
    output, _ = refused.process.communicate()
    assert refused.process.returncode == 2 and "prompts: are not those of the run" in output


def test_a_schedule_is_not_asked_with_another_row_without_a_word(stack: Stack) -> None:
    training = train_mixture(stack, "cut", environment_schedule=CALM)
    training.finish()
    path = training.run_dir / "metrics.jsonl"
    *rows, last = path.read_text().splitlines()
    path.write_text("".join(f"{row}\n" for row in [*rows, last[: len(last) // 2]]))
    damaged = path.read_bytes()
    lost = f"environment_schedule: {path} has no row of step {STEPS}"
    changes = {"environment_schedule": CALM, "resume": True, "steps": STEPS + 1}
    refused = train_mixture(stack, "cut", **changes, deterministic=True)
    output, _ = refused.process.communicate()
    assert refused.process.returncode == 2 and f"deterministic: {lost}" in output
    assert path.read_bytes() == damaged  # it may still be mended
    again = train_mixture(stack, "cut", **changes)
    assert f"{lost}: it is asked with the one before" in again.finish()
