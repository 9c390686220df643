"""Runs whose trainer and engine share devices: one of both sleeps, always."""

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.client import EngineClient, TrainerClient
from sluice.durable import scratch
from tests.e2e.conftest import Stack, start_stack, stop_stack
from tests.patience import PATIENCE

DENSE = {"name": "prompts", "settings": {"reward": "position_match"}}
PPO = {
    "algorithm": {"advantage": {"name": "gae"}, "loss": {"name": "ppo_clip", "clip_low": 0.2}},
    "critic": {},
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A critic beside the trainer; weights go through memory."""
    run_dir = tmp_path_factory.mktemp("placement")
    model = str(run_dir / "model")
    memory = Path("/dev/shm")
    with scratch("sluice-weights-", memory if memory.is_dir() else None) as weights:
        stack = start_stack(
            run_dir,
            trainer={
                "kind": "trainer",
                "config": {
                    "model": model,
                    "optim": {"learning_rate": 2e-3},
                    "weights": str(weights / "weights"),
                },
            },
            critic={"kind": "trainer", "config": {"model": model, "head": "value"}},
        )
        yield stack
        stop_stack(stack)
        assert list((weights / "weights" / "versions").iterdir())
        assert not (run_dir / "store" / "weights" / "versions").exists()


async def both_awake(stack: Stack, names: tuple[str, ...], training: Any) -> tuple[int, int]:
    """How often an engine and a trainer were awake at once, and how often only one was.

    However seldom this looks, once it does where the run stops itself.
    """
    services = {name: entry["address"] for name, entry in stack.services.items()}
    both = one = 0
    async with EngineClient(services["rollout"]) as engine:
        trainers = [TrainerClient(services[name]) for name in names]
        while training.process.poll() is None:
            is_held = training.is_stopped
            if (
                not is_held and not (training.run_dir / "metrics.jsonl").exists()
            ):  # before, they are as they were
                await asyncio.sleep(0.02)
                continue
            before = await engine.get()
            awake = [not (await trainer.get()).asleep for trainer in trainers]
            after = await engine.get()
            # between, the engine has not slept: waking it takes weights
            stays = before.weights == after.weights and before.HasField("weights")
            if stays and not before.asleep and not after.asleep:
                both += any(awake)
                one += not any(awake)
            if is_held:
                training.go_on()
            await asyncio.sleep(0.002)
        for trainer in trainers:
            await trainer.close()
    return both, one


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_one_of_both_sleeps(stack: Stack, placement: str) -> None:
    training = stack.train(placement, placement=placement, steps=6, stops_at=("generated", 6))
    both, one = asyncio.run(both_awake(stack, ("trainer",), training))
    output = training.finish()
    assert (both == 0, one > 0) == (placement == "colocated", placement == "colocated"), output
    rows = training.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["rollout_mismatch"] < 1e-4 for row in training.learning_rows())
    for row in rows:
        found = {"to_engines_seconds", "to_trainers_seconds"} & row.keys()
        assert len(found) == (2 if placement == "colocated" else 0)
        assert all(math.isfinite(row[name]) and row[name] > 0 for name in found)
    consumed = {group.group_id: group.consumed_step for group in training.groups("consumed")}
    assert consumed == {f"g{i:07}": i // 4 + 1 for i in range(24)}


def test_a_critic_sleeps_and_wakes_with_the_trainer_and_evaluations_wait(stack: Stack) -> None:
    prompts = {"file": str(stack.run_dir / "prompts.jsonl"), "shuffle": False}
    evaluation = {"datasets": {"greedy": {"prompts": prompts, "groups": 3}}, "every_steps": 2}
    changes = {**PPO, "evaluation": evaluation, "placement": "colocated", "steps": 5}
    training = stack.train("ppo", **changes, dies_at=("trainers_asleep", 4))
    training.died()
    training = stack.train("ppo", **changes, resume=True, stops_at=("generated", 2))
    both, one = asyncio.run(both_awake(stack, ("trainer", "critic"), training))
    output = training.finish()
    assert (both, one > 0) == (0, True), output
    assert [row["step"] for row in training.rows()] == [1, 2, 3, 4, 5]
    lines = (training.run_dir / "metrics.jsonl").read_text().splitlines()
    scored = [row for row in map(json.loads, lines) if "dataset" in row]
    assert {(row["evaluation"], row["step"]) for row in scored} == {
        ("before", 0),
        ("during", 2),
        ("during", 4),
        ("after", 5),
    }
    for row in scored:  # nothing else was sampled meanwhile, by other weights
        assert row["version_min"] == row["version_max"] == row["weight_version"]


def test_a_run_with_devices_of_its_own_wakes_what_another_left_asleep(stack: Stack) -> None:
    async def put_to_sleep() -> None:
        services = {name: entry["address"] for name, entry in stack.services.items()}
        async with (
            TrainerClient(services["trainer"]) as trainer,
            EngineClient(services["rollout"]) as engine,
        ):
            await trainer.sleep()
            await engine.pause()
            await engine.sleep()

    asyncio.run(put_to_sleep())
    training = stack.train("woken", steps=2)
    training.finish(PATIENCE)
    assert [row["step"] for row in training.rows()] == [1, 2]
