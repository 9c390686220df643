"""Run directories that two loops want, that cannot be written, that a signal leaves behind."""

import contextlib
import os
import pty
import signal
import subprocess

import psutil
import pytest

from sluice.loop.journal import read_journal
from sluice.loop.timeline.page import load
from tests.e2e.conftest import Stack, Training
from tests.patience import PATIENCE


def refusal(training: Training) -> str:
    """The one line it ends with."""
    output, _ = training.process.communicate(timeout=PATIENCE)
    assert training.process.returncode == 2, output
    assert "Traceback" not in output
    (line,) = [line for line in output.splitlines() if line.startswith("sluice: ")]
    return line


def goes_on(stack: Stack, name: str, steps: int) -> None:
    """The run comes to its end, with every group consumed once and in order."""
    training = stack.train(name, steps=steps, resume=True)
    training.finish()
    consumed = {group.group_id: group.consumed_step for group in training.groups("consumed")}
    assert consumed == {f"g{i:07}": i // 4 + 1 for i in range(4 * steps)}


def ended_by(training, number: int) -> str:
    """The output of a run that was asked to end, again where it did not at once."""
    try:
        for _ in range(3):
            training.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return training.process.communicate(timeout=PATIENCE)[0]
    finally:
        training.process.kill()  # services are shared: no second run may go on beside others
    raise AssertionError(f"three times signal {number} ended nothing")


def test_a_second_loop_is_refused_and_the_first_goes_on(stack):
    first = stack.train("contested", steps=500)  # more than it makes while the second starts
    try:
        first.wait_for_step(1)
        line = refusal(stack.train("contested", steps=5, resume=True))
        assert f"process {first.process.pid} (sluice loop) works in" in line
        line = refusal(stack.train("beside", steps=5))  # a directory of its own, the same trainer
        assert f"is driven by process {first.process.pid} on" in line
        assert "contested" in line
        first.wait_for_step(first.rows()[-1]["step"] + 2)
    finally:
        output = ended_by(first, signal.SIGTERM)
    assert "going back to the last run checkpoint" not in output
    steps = [row["step"] for row in first.rows()]
    assert steps == list(range(1, len(steps) + 1))


def test_a_full_disk_ends_the_run_in_one_line_and_costs_nothing(stack):
    training = stack.train("full", steps=200)
    training.wait_for_step(2)
    psutil.Process(training.process.pid).rlimit(psutil.RLIMIT_FSIZE, (4096, 4096))
    line = refusal(training)
    assert any(word in line for word in ("File too large", "disk I/O error", "disk is full")), line
    assert str(stack.run_dir) in line and "or the store" not in line, "it names the file"
    done = training.rows()[-1]["step"]
    goes_on(stack, "full", done + 3)


def test_an_address_file_that_cannot_be_removed_hides_nothing(stack):
    training = stack.train("unremovable", steps=500)
    training.wait_for_step(1)
    address = training.run_dir / "loop.address.json"
    address.unlink()
    address.mkdir()
    output = ended_by(training, signal.SIGTERM)
    assert training.process.returncode == 128 + signal.SIGTERM, output
    assert "Traceback" not in output
    assert "address.json" not in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_signal_ends_a_run_in_order(stack, number):
    training = stack.train(f"ended-{number}", steps=500)
    training.wait_for_step(1)
    output = ended_by(training, number)
    assert training.process.returncode == 128 + number, output
    assert "Traceback" not in output
    assert not (training.run_dir / "ledger.sqlite-wal").exists()  # it was closed
    done = training.rows()[-1]["step"]
    assert load(training.run_dir).steps[1] <= done
    assert f"stopped at step {done} of 500; `--resume` goes on " in output
    goes_on(stack, f"ended-{number}", training.rows()[-1]["step"] + 2)


def test_a_run_whose_terminal_is_closed_ends_in_order(stack):
    """Nobody takes what it writes any more, not even that it ends."""
    reader, writer = pty.openpty()
    training = stack.train("closed", steps=500, output=writer)
    os.close(writer)
    with open(reader, "rb", buffering=0) as terminal:
        shown = b""
        while b"step" not in shown:
            shown += terminal.read(1 << 16)
        training.wait_for_step(1)
    ended_by(training, signal.SIGHUP)
    assert training.process.returncode == 128 + signal.SIGHUP
    assert read_journal(training.run_dir)[-1]["outcome"] == "stopped"
    goes_on(stack, "closed", training.rows()[-1]["step"] + 2)


def test_a_run_under_nohup_goes_on_without_its_terminal(stack):
    training = stack.train("nohup", steps=500, before=("nohup",))
    training.wait_for_step(1)
    ranks = stack.rank_pids()
    for pid in (training.process.pid, *ranks):  # a terminal tells all that run in it
        os.kill(pid, signal.SIGHUP)
    training.wait_for_step(training.rows()[-1]["step"] + 3)
    assert stack.rank_pids() == ranks, "their controller ends them"
    output = ended_by(training, signal.SIGTERM)
    assert training.process.returncode == 128 + signal.SIGTERM, output
