"""All services die and are started again elsewhere, under a run that is told so by a file."""

from __future__ import annotations

import os
import signal
import socket
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Stack, start_stack, stop_stack
from tests.patience import PATIENCE

STEPS = 8


def addresses(stack: Stack) -> dict[str, str]:
    return {name: entry["address"] for name, entry in stack.services.items()}


def kill(stack: Stack) -> None:
    """The supervisor, and with it all that it has started; the file stays, as after a power cut."""
    family = psutil.Process(stack.process.pid).children(recursive=True)
    os.kill(stack.process.pid, signal.SIGKILL)
    stack.process.wait(PATIENCE)
    _, alive = psutil.wait_procs(family, timeout=PATIENCE)
    assert not alive


@pytest.mark.long
def test_a_run_goes_on_with_services_that_all_have_moved(tmp_path: Path) -> None:
    stack = start_stack(tmp_path / "stack")
    training = stack.train("moved", steps=STEPS)
    training.wait_for_step(3)
    before = addresses(stack)
    kill(stack)
    (stack.run_dir / "services.json").rename(stack.run_dir / "before.json")
    with ExitStack() as others:  # who have their ports by now, and answer nobody
        for address in before.values():
            host, _, port = address.rpartition(":")
            others.enter_context(socket.create_server((host, int(port))))
        again = start_stack(stack.run_dir)
        after = addresses(again)
        assert before.keys() == after.keys()
        assert set(before.values()).isdisjoint(after.values())
        training.finish()
    stop_stack(again)
    steps = Counter(group.consumed_step for group in training.groups("consumed"))
    assert steps == {step: 4 for step in range(1, STEPS + 1)}
