"""A run whose weights are sent to the engines, as deltas to the store besides."""

import asyncio
import os
import signal

import pytest

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice.client import EngineClient
from sluice.weights.store import WeightStore
from tests.e2e.conftest import start_stack, stop_stack
from tests.patience import PATIENCE


@pytest.fixture(scope="module")
def sending(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("sending")
    config = {
        "model": str(build_tiny_qwen3(run_dir / "model", 0)),
        "optim": {"learning_rate": 1e-5},
        "ranks": {"count": 2},
        "publish": {"delta": True, "chain": 3},
        "transfer": {"enabled": True},
    }
    stack = start_stack(run_dir, trainer={"kind": "trainer", "config": config})
    yield stack
    stop_stack(stack)


async def group_of(stack) -> str:
    async with EngineClient(stack.services["rollout"]["address"]) as engine:
        return (await engine.get()).transfer_group


def test_engines_sample_from_what_they_were_sent(sending):
    training = sending.train("sent", weight_transport="collective")
    training.finish()
    assert [row["step"] for row in training.rows()] == [1, 2, 3, 4]
    assert all(row["rollout_mismatch"] <= 1e-4 for row in training.learning_rows())
    assert asyncio.run(group_of(sending))
    store = WeightStore(sending.run_dir / "store" / "weights")
    assert [record.base for record in store.list()] == [None, 1, 2, 3, None]


def test_an_engine_that_dies_catches_up_from_the_store(sending):
    training = sending.train("killed", weight_transport="collective", steps=6)
    training.wait_for_step(2)
    os.kill(sending.pid("rollout"), signal.SIGKILL)
    training.finish()
    assert [row["step"] for row in training.rows()] == [1, 2, 3, 4, 5, 6]
    assert all(row["rollout_mismatch"] <= 1e-4 for row in training.learning_rows())


def test_a_trainer_that_sends_no_weights_is_told_of_ahead(stack):
    training = stack.train("unsent", weight_transport="collective")
    output, _ = training.process.communicate(timeout=PATIENCE)
    assert training.process.returncode == 2
    assert "weight_transport: collective, but the trainer sends no weights: set its" in output
    assert "Traceback" not in output
    assert not training.rows() and not training.groups("consumed")


@pytest.fixture(scope="module")
def behind(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("behind")
    config = {
        "model": str(build_tiny_qwen3(run_dir / "model", 0)),
        "optim": {"learning_rate": 1e-5},
        "transfer": {"enabled": True, "write_behind": True},
        "keep_versions": 0,
    }
    stack = start_stack(run_dir, trainer={"kind": "trainer", "config": config})
    yield stack
    stop_stack(stack)


def test_a_run_ends_when_all_that_engines_served_is_written(behind):
    """Without run checkpoints on the way, which would wait for it too."""
    training = behind.train("behind", weight_transport="collective", checkpoint_every=0)
    output = training.finish()
    assert [row["step"] for row in training.rows()] == [1, 2, 3, 4]
    assert all(row["rollout_mismatch"] <= 1e-4 for row in training.learning_rows())
    store = WeightStore(behind.run_dir / "store" / "weights")
    assert {row["weight_version"] for row in training.rows()} < set(store.versions())
    assert "lost" not in output
    assert asyncio.run(group_of(behind))


def test_a_deterministic_run_does_not_take_what_is_written_behind(behind):
    training = behind.train("bitwise", weight_transport="collective", deterministic=True)
    output, _ = training.process.communicate(timeout=PATIENCE)
    assert training.process.returncode == 2
    (line,) = [line for line in output.splitlines() if line.startswith("sluice: ")]
    assert "transfer.write_behind" in line
