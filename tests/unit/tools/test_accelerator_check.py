"""How the check of an accelerator runs its steps, whatever becomes of one of them."""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.patience import PATIENCE
from tools.accelerator_check.backends import alone
from tools.accelerator_check.packages import WheelError, missing, third_party, unpack
from tools.accelerator_check.report import CheckReport
from tools.accelerator_check.runner import CheckResult, StepRunner
from tools.accelerator_check.steps import STEPS, CheckStep
from tools.accelerator_check.work import StepWork

SCRIPTS = {
    "fine": "print('all well')",
    "wrong": "raise ValueError('the loss is negative')",
    "endless": "import time; time.sleep(3600)",
    "killed": "import os; os.kill(os.getpid(), 9)",
}


def step(name: str, seconds: float = PATIENCE) -> CheckStep:
    return CheckStep(name, "steps", seconds)  # a module that imports nothing from outside


class Checks:
    """Runners over one folder, whose steps are scripts; `started` lists those that ran."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.started: list[str] = []

    def command(self, chosen: CheckStep) -> Sequence[str]:
        self.started.append(chosen.name)
        return [sys.executable, "-c", SCRIPTS[chosen.name]]

    def run(
        self, *steps: CheckStep, device: str = "some device", seconds: float = PATIENCE
    ) -> list[CheckResult]:
        runner = StepRunner(
            self.out, "full", device, seconds=seconds, environment={}, command=self.command
        )
        return runner.run(steps)


@pytest.fixture
def checks(tmp_path: Path) -> Checks:
    return Checks(tmp_path)


def test_steps_that_fail_hang_or_die_are_reported_and_the_others_run(
    checks: Checks, capsys: pytest.CaptureFixture[str]
) -> None:
    results = checks.run(step("wrong"), step("endless", 0.5), step("killed"), step("fine"))
    assert [(result.name, result.status) for result in results] == [
        ("wrong", "failed"),
        ("endless", "timeout"),
        ("killed", "failed"),
        ("fine", "ok"),
    ]
    assert results[0].reason == "ended with 1: ValueError: the loss is negative"
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["step:", result.name, result.status] for result in results
    ]
    assert "the loss is negative" in lines[0]


def test_a_second_run_does_what_is_not_done(checks: Checks) -> None:
    steps = [step("fine"), step("wrong"), replace(step("killed"), always=True)]
    checks.run(*steps)
    checks.started.clear()
    assert [result.status for result in checks.run(*steps)] == ["ok", "failed", "failed"]
    assert checks.started == ["wrong", "killed"]


def test_what_another_device_did_is_done_again(checks: Checks) -> None:
    checks.run(step("fine"))
    checks.run(step("fine"), device="another")
    assert checks.started == ["fine", "fine"]


def test_no_step_starts_once_the_time_is_over(checks: Checks) -> None:
    (result,) = checks.run(step("fine"), seconds=0.0)
    assert (result.status, checks.started) == ("timeout", [])


def test_a_missing_package_is_named(checks: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    (result,) = checks.run(CheckStep("fine", "steps", PATIENCE, entries=("sluice.runtime.server",)))
    assert (result.status, result.reason, checks.started) == ("failed", "missing: grpc", [])


def test_what_a_step_found_before_it_died_is_kept(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tools.accelerator_check.work import StepWork;"
        "from tools.accelerator_check.steps import CheckStep;"
        "StepWork(CheckStep('half', 'steps', 1), Path(sys.argv[1]), 'full').record(gbs=2.5);"
        "raise MemoryError('no more')"
    )
    runner = StepRunner(
        tmp_path,
        "full",
        "some device",
        seconds=PATIENCE,
        environment={},
        command=lambda _: [sys.executable, "-c", script, str(tmp_path)],
    )
    (result,) = runner.run([step("half")])
    assert (result.status, result.figures) == ("failed", {"gbs": 2.5})
    assert "MemoryError" in result.reason


def test_every_step_says_what_it_imports() -> None:
    named = {name for step in STEPS for name in step.roots}
    assert all(importlib.util.find_spec(name) for name in named)  # no module was moved away
    found = {step.name: set(third_party(step.roots)) for step in STEPS}
    assert {"grpc", "pydantic", "uvloop", "torch"} <= found["demo-reference"]
    assert "megatron.core" in found["demo-megatron"] - found["demo-reference"]
    everything = set().union(*found.values())
    assert not everything & {"matplotlib", "reasoning_gym", "obstore", "pytest"}
    assert missing(["json", "google.protobuf", "no_such_package", "google.no_such"]) == [
        "google.no_such",
        "no_such_package",
    ]


def test_wheels_are_unpacked_and_those_of_another_python_refused(tmp_path: Path) -> None:
    wheels, target = tmp_path / "wheels", tmp_path / "packages"
    wheels.mkdir()
    with pytest.raises(WheelError, match="no wheels"):
        unpack(wheels, target)
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    ours = ["gift-1.0-py3-none-any.whl", f"ours-1.0-{own}-{own}-manylinux_2_17_x86_64.whl"]
    for name in ours:
        with zipfile.ZipFile(wheels / name, "w") as wheel:
            wheel.writestr(f"{name.split('-')[0]}/__init__.py", "VALUE = 3")
    assert unpack(wheels, target) == ours
    assert (target / "ours" / "__init__.py").read_text() == "VALUE = 3"
    other = "cp312" if own == "cp311" else "cp311"
    name = f"gift-1.0-{other}-{other}-manylinux_2_17_x86_64.whl"
    (wheels / name).write_bytes(b"")
    with pytest.raises(WheelError, match=f"{name} is for another Python"):
        unpack(wheels, target)


def result(name: str, status: str = "ok", **figures: float) -> CheckResult:
    return CheckResult(name, status, 1.0, "full", "NVIDIA H200", figures, [], "")  # type: ignore[arg-type]


def test_the_last_line_takes_the_worst_and_knows_what_is_not_there(tmp_path: Path) -> None:
    results = [
        result("parity-reference", fp32=2e-6, bf16=0.02),
        result("parity-megatron", fp32=3e-5, bf16=0.01),
        result("training-0.5b", mfu=0.3, vs_bare=1.2),
        result("training-1.5b", mfu=0.45, vs_bare=math.nan),
        result("sync", "failed", gbs=4.0, vs_copy=0.5, pause_ms=0.25),
    ]
    report = CheckReport("NVIDIA H200", "full", "python -m tools.accelerator_check", results)
    assert report.line == (
        "accelerator: device=NVIDIA_H200 steps=4 of=5 parity_fp32=3e-05 parity_bf16=0.02 "
        "mfu_0_5b=0.3 mfu_1_5b=0.45 vs_bare=1.2 engine/generate=nan sync_gbs=4 sync/copy=0.5 "
        "pause_ms=0.25"
    )
    report.write(tmp_path)
    written = json.loads((tmp_path / "accelerator.json").read_text())
    assert (written["steps"], written["of"]) == (4, 5)
    assert written["figures"]["engine/generate"] is None
    page = (tmp_path / "accelerator.md").read_text()
    assert "| mfu_1_5b | 0.45 | >= 0.4 |" in page
    assert "## training-1.5b" in page


def test_work_keeps_figures_notes_and_failures(tmp_path: Path) -> None:
    work = StepWork(step("fine"), tmp_path, "small")
    work.record(speed=3.0)
    work.note("read from the page cache")
    work.fail("too slow")
    found = json.loads((tmp_path / "work" / "fine.found.json").read_text())
    assert found == {
        "figures": {"speed": 3.0},
        "notes": ["read from the page cache"],
        "failures": ["too slow"],
    }


def test_groups_of_one_folder_leave_each_other_alone(tmp_path: Path) -> None:
    """The store of one that has ended goes whenever nothing holds it any more."""
    with alone(tmp_path):
        former = [dist.distributed_c10d._get_default_store()]
    with alone(tmp_path):
        store = dist.distributed_c10d._get_default_store()
        store.set_timeout(timedelta(seconds=5))
        store.set("known", "1")
        former.clear()
        gc.collect()
        assert store.get("known") == b"1"
