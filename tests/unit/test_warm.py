"""A process that begins warm is what a cold one is; without a nursery it begins afresh."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.patience import PATIENCE

COMMAND = [sys.executable, "-m", "tests.unit.process_facts"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OWN": "é \udcff"}


def facts(code: int, **options: Any) -> dict[str, Any]:
    """What a process with this end finds, read from its output."""
    done = subprocess.run(
        [*COMMAND, str(code), "a b", ""],
        **{
            "env": ENVIRONMENT,
            "capture_output": True,
            "input": b"in",
            "timeout": PATIENCE,
            **options,
        },
    )
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["parent"] == os.getpid()
    assert found["read"] == "in"
    return found


@pytest.fixture
def passed() -> Any:
    with open(os.devnull) as file:
        yield file.fileno()


@pytest.mark.parametrize("code", [0, 3, -signal.SIGKILL])
def test_it_finds_what_a_cold_one_finds(
    code: int, tmp_path: Path, passed: int, pytestconfig: pytest.Config
) -> None:
    (tmp_path / "tests").symlink_to(warm.ROOT / "tests")
    environment = {**ENVIRONMENT, "TMPDIR": str(tmp_path)}
    own = {"cwd": tmp_path, "env": environment, "pass_fds": [passed], "start_new_session": True}
    for options in ({}, own):
        with warm.cold():
            expected = facts(code, **options)
        found = facts(code, **options)
        assert loads_torch_first(**options) != pytestconfig.getoption("--cold")
        assert found == expected


def loads_torch_first(**options: Any) -> bool:
    """Whether it was warm indeed: libraries are there that nobody has asked for."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([*COMMAND, "0"], **{"env": ENVIRONMENT, **pipes, **options})
    found = "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()
    process.communicate(b"", timeout=PATIENCE)
    return found


def test_a_worker_of_pytest_does_what_it_is_told() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, *warm.WORKER], env=ENVIRONMENT, text=True, **pipes)
    told = "import os, sys; print(os.getpid(), 'torch' in sys.modules, __name__)"
    output, _ = process.communicate(f"{told!r}\n", timeout=PATIENCE)
    assert output.split() == [str(process.pid), "True", "__main__"]


def test_a_program_is_what_python_would_run_but_that_it_is_warm() -> None:
    code = "import sys; print(sys.argv, __name__, 'torch' in sys.modules)"
    warm_one, cold_one = (
        subprocess.run(
            [sys.executable, *begun, code, "a"],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        ).stdout
        for begun in (["-m", "tests.program"], ["-c"])
    )
    assert cold_one == "['-c', 'a'] __main__ False\n"
    assert warm_one == "['-c', 'a'] __main__ True\n"


@pytest.mark.parametrize("module", ["sluice.cli", "services.trainer"])
def test_a_command_is_loaded_but_for_itself(module: str) -> None:
    """One that was imported before it is run would be told of on stderr."""
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, b"") and done.stdout


@pytest.mark.parametrize(
    ("words", "starts"),
    [
        ("sluice.cli up services.yaml", True),
        ("sluice.cli sft run.yaml --up services.yaml", True),
        ("sluice.cli train run.yaml", False),
        ("services.trainer --config trainer.yaml", True),
        ("services.rollout --config rollout.yaml", False),
    ],
)
def test_what_starts_services_has_a_nursery_of_its_own(words: str, starts: bool) -> None:
    command = [sys.executable, "-m", *words.split()]
    assert warm.Order(os.getpid(), command, {}, "/", False, []).has_children == starts


def test_what_is_loaded_by_another_environment_begins_afresh() -> None:
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "3"}
    assert not loads_torch_first(env=environment)


MAPS = """\
55d0c0000000-55d0c0900000 rw-p 00000000 00:00 0                          [heap]
7f0000100000-7f0000700000 rw-p 00000000 00:00 0
7f0001000000-7f0001800000 r--p 00000000 00:00 0
7f0002000000-7f0002800000 rw-p 00200000 08:01 1234                       /usr/lib/libtorch_cpu.so
7f0003100000-7f00034ff000 rw-p 00000000 00:00 0
"""


def test_huge_pages_are_cut_of_writable_memory_that_is_of_no_file() -> None:
    mib = 1 << 20
    assert list(warm.huge_pages(MAPS)) == [
        (0x55D0C0000000, 8 * mib),
        (0x7F0000200000, 4 * mib),
        (0x7F0003200000, 2 * mib),
    ]


def test_a_nursery_that_was_killed_is_done_without() -> None:
    nursery = warm.Nursery()
    order = warm.Order(os.getpid(), [*COMMAND, "5"], dict(os.environ), os.getcwd(), False, [0])
    with open(os.devnull) as nothing:
        child = nursery.bear(order, [nothing.fileno()])
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        assert nursery.process is not None
        nursery.process.kill()
        nursery.process.wait(PATIENCE)
        with pytest.raises(OSError):
            nursery.bear(order, [nothing.fileno()])
