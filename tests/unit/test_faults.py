"""Faults fire once, where and when they are told to, and nowhere else."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sluice import faults
from tests.patience import PATIENCE

CODE = """
from sluice import faults
for number in range(5):
    print(number, flush=True)
    faults.point("written")
"""


def run(directory: Path | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != faults.VARIABLE}
    if directory is not None:
        environment[faults.VARIABLE] = str(directory)
    command = [sys.executable, "-c", CODE]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )


def test_a_process_dies_at_the_passing_named_and_its_next_life_does_not(tmp_path):
    faults.arm(tmp_path, "written", 3)
    first = run(tmp_path)
    assert first.returncode == -signal.SIGKILL
    assert first.stdout.split() == ["0", "1", "2"]
    again = run(tmp_path)
    assert (again.returncode, again.stdout.split()) == (0, ["0", "1", "2", "3", "4"])


def test_passings_of_many_threads_are_all_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "_directory", str(tmp_path))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(20):
                faults.arm(tmp_path, "written", 8)
                fired = list(pool.map(lambda _: faults.due("written"), range(12)))
                assert sum(fired) == 1
    finally:
        sys.setswitchinterval(interval)


def test_a_process_that_looks_for_no_faults_looks_at_no_file(tmp_path, monkeypatch):
    faults.arm(tmp_path, "written")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(faults, "_directory", "")
    assert not faults.due("written")
    assert (tmp_path / "written").exists()


def test_nothing_fires_that_is_not_armed_or_not_asked_for(tmp_path):
    faults.arm(tmp_path, "other")
    assert run(tmp_path).returncode == 0
    faults.arm(tmp_path, "written")
    assert run(None).returncode == 0
    assert sorted(faults.disarm(tmp_path)) == ["other", "written"]
    assert run(tmp_path).returncode == 0


def test_faults_cost_nothing_unless_asked_for():
    assert not faults.enabled()  # in this very process
    faults.point("written")
