"""The tool that runs tests over and over: it counts what failed, and its orders can be repeated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE

FLAKY = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range(6))
def test_order(number):
    with open({log!r}, "a") as log:
        log.write(str(number))

def test_it_fails_the_third_time():
    runs = Path({count!r})
    runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
    assert len(runs.read_text()) != {fails}
"""


@pytest.fixture
def stress(tmp_path: Path):
    def run(fails: int, *arguments: str) -> tuple[int, list[str], str]:
        """Exit status, output, and the order of `test_order` over all runs."""
        log, count = tmp_path / "order.log", tmp_path / "count"
        log.unlink(missing_ok=True)
        count.unlink(missing_ok=True)
        test = tmp_path / "test_flaky.py"
        test.write_text(FLAKY.format(log=str(log), count=str(count), fails=fails))
        command = [sys.executable, "-m", "tools.stress_tests", *arguments]
        command += ["--directory", str(tmp_path / "stress"), str(test)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        return done.returncode, done.stdout.splitlines(), log.read_text() if log.exists() else ""

    return run


def test_every_round_is_counted_and_a_seed_repeats_its_order(stress):
    status, output, order = stress(0, "--rounds", "3", "--seed", "5")
    assert (status, output[-1]) == (0, "stress: tests=7 runs=21 failed=0")
    orders = {order[:6], order[6:12], order[12:]}
    assert len(orders) == 3 and all(sorted(one) == list("012345") for one in orders)
    assert stress(0, "--rounds", "1", "--seed", "5")[2] == order[:6]
    assert stress(0, "--rounds", "1", "--seed", "4")[2] != order[:6]


def test_a_test_that_fails_once_has_failed_and_is_named_with_its_order(stress):
    status, output, _ = stress(3, "--rounds", "2", "--load", "2")
    assert (status, output[-1]) == (1, "stress: tests=7 runs=28 failed=1")
    named = [line for line in output if line.startswith("FAILED")]
    assert len(named) == 1
    assert "test_it_fails_the_third_time" in named[0] and "order seed" in named[0]


def test_time_that_is_over_is_no_failure_but_a_file_that_cannot_be_read_is(stress, tmp_path):
    status, output, order = stress(0, "--seconds", "0.000001")
    assert (status, output[-1], order) == (0, "stress: tests=1 runs=1 failed=0", order[:1])
    (tmp_path / "test_broken.py").write_text("import nothing_of_that_name")
    status, output, _ = stress(0, str(tmp_path / "test_broken.py"))
    assert status == 1 and output[-1].endswith("failed=1")


def test_nothing_has_changed_since_now(stress):
    status, output, order = stress(0, "--changed", "no-such-commit")
    assert (status, output[-1], order) == (0, "stress: tests=0 runs=0 failed=0", "")
