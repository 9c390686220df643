"""An asynchronous run trains on while an engine prepares what the step before has published."""

import asyncio
import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from sluice import faults
from sluice.client import TrainerClient
from tests.e2e import conftest
from tests.e2e.conftest import Stack, start_stack, stop_stack, wait_until
from tests.e2e.test_waits import waits_of
from tests.patience import PATIENCE


@pytest.fixture(scope="module")
def two_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Services that look for faults; nobody replaces one that is stopped."""
    directory = tmp_path_factory.mktemp("overlap")
    engine = {"model": "", "max_running": 64, "max_model_length": 16, "threads": 1}
    before = dict(conftest.ENVIRONMENT)
    conftest.ENVIRONMENT[faults.VARIABLE] = str(directory / "faults")
    try:
        stack = start_stack(
            directory,
            {"liveness": {"interval_seconds": 3600.0, "timeout_seconds": 600.0, "failures": 100}},
            spare={"kind": "rollout", "config": {"roles": ["engine"], "engine": engine}},
        )
    finally:
        conftest.ENVIRONMENT.clear()
        conftest.ENVIRONMENT.update(before)
    yield stack
    stop_stack(stack)


def trainer_step(stack: Stack) -> int:
    async def ask() -> int:
        async with TrainerClient(stack.services["trainer"]["address"]) as trainer:
            return (await trainer.get()).step

    return asyncio.run(ask())


def is_stopped(process: int) -> bool:
    return psutil.Process(process).status() == psutil.STATUS_STOPPED


def test_a_step_is_made_while_an_engine_prepares(two_engines: Stack) -> None:
    armed = two_engines.run_dir / "faults" / "spare"
    faults.arm(armed, "engine.prepared", 2, signal.SIGSTOP)  # the version after the first step
    engine = two_engines.pid("spare")
    training = two_engines.train("overlapped", steps=5, max_staleness=3, checkpoint_every=0)
    wait_until(lambda: is_stopped(engine), what="the engine to have prepared")
    try:
        wait_until(lambda: trainer_step(two_engines) >= 2, what="the step after the publication")
        assert is_stopped(engine)
    finally:
        os.kill(engine, signal.SIGCONT)
    training.finish()
    rows = training.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(row["staleness_max"] <= 3 for row in rows)
    assert trainer_step(two_engines) == 5


def test_a_synchronous_run_waits_for_its_engines(two_engines: Stack) -> None:
    """The control: no step is made by weights that an engine lacks."""
    armed = two_engines.run_dir / "faults" / "spare"
    before = trainer_step(two_engines)
    faults.arm(armed, "engine.prepared", 2, signal.SIGSTOP)
    engine = two_engines.pid("spare")
    training = two_engines.train(
        "in-turn", steps=3, max_staleness=0, checkpoint_every=0, straggler_seconds=PATIENCE
    )
    wait_until(lambda: is_stopped(engine), what="the engine to have prepared")
    try:
        assert trainer_step(two_engines) == before + 1
        assert len(training.groups("consumed")) == 4
    finally:
        os.kill(engine, signal.SIGCONT)
    training.finish()
    assert trainer_step(two_engines) == before + 3


def test_a_synchronous_run_goes_on_without_an_engine_that_hangs(two_engines: Stack) -> None:
    """And with it, once it moves and has the weights of then."""
    faults.arm(two_engines.run_dir / "faults" / "spare", "engine.swapped", 2, signal.SIGSTOP)
    engine = two_engines.pid("spare")
    training = two_engines.train(
        "without", steps=500, max_staleness=0, checkpoint_every=0, straggler_seconds=0.5
    )

    def engines() -> list[int]:
        return [row["engines"] for row in training.rows()]

    wait_until(lambda: is_stopped(engine), what="the engine to be in a commit")
    try:
        wait_until(lambda: engines()[-3:] == [1, 1, 1], what="steps by the other engine")
        assert is_stopped(engine)
    finally:
        os.kill(engine, signal.SIGCONT)
    wait_until(lambda: engines()[-1] == 2, what="both engines at the current weights")
    training.process.send_signal(signal.SIGTERM)
    output, _ = training.process.communicate(timeout=PATIENCE)
    assert "engine spare is left behind at version" in output


def test_a_trainer_that_answers_each_look_at_it_too_late_ends_no_run(two_engines: Stack) -> None:
    """It was asked once here and there, and five seconds without an answer were an error."""
    armed = two_engines.run_dir / "faults" / "trainer"
    faults.arm(armed, "done.GetTrainer", 1, signal.SIGSTOP)
    trainer, stops = two_engines.pid("trainer"), 0
    training = two_engines.train("late", steps=1, checkpoint_every=0)

    def next_stop() -> bool:
        return is_stopped(trainer) or training.process.poll() is not None

    wait_until(next_stop, what="the first stop")
    while training.process.poll() is None:
        stops += 1
        wait_until(lambda: "DEADLINE_EXCEEDED" in waits_of(training.run_dir), what="the deadline")
        faults.arm(armed, "done.GetTrainer", 2, signal.SIGSTOP)  # what asks again is answered
        os.kill(trainer, signal.SIGCONT)
        wait_until(next_stop, what="the next stop, or the end")
    faults.disarm(armed)
    training.finish()
    assert stops > 2
