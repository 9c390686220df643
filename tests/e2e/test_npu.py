"""The demo's stack where the accelerator is an NPU (a fake one): two ranks over hccl, no CUDA."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.conftest import ENVIRONMENT, Stack, start_stack, stop_stack

FAKE_NPU = Path(__file__).parents[1] / "fake_npu"
OURS = ("sluice", "services", "examples")


@pytest.fixture(scope="module")
def npu_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    run_dir = tmp_path_factory.mktemp("npu")
    calls = run_dir / "calls"
    calls.mkdir()
    added = {
        "PYTHONPATH": os.pathsep.join([str(FAKE_NPU), os.environ.get("PYTHONPATH", "")]),
        "SLUICE_DEVICE": "npu",
        "FAKE_NPU_CALLS": str(calls),
    }
    trainer = {
        "model": str(run_dir / "model"),
        "optim": {"learning_rate": 2e-3},
        "ranks": {"count": 2},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in added.items():
            patch.setitem(ENVIRONMENT, name, value)
        stack = start_stack(run_dir, trainer={"kind": "trainer", "config": trainer})
        yield stack
        stop_stack(stack)


def recorded(stack: Stack) -> dict[int, Counter]:
    """What each process asked of the fake, by process id."""
    return {
        int(path.stem): Counter(json.loads(path.read_text()))
        for path in (stack.run_dir / "calls").glob("*.json")
    }


def run_service(kind: str, config: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", f"services.{kind}", "--config", str(config)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def environment(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def test_the_stack_trains_on_npus_and_asks_nothing_of_cuda(npu_stack: Stack) -> None:
    ranks, engine = npu_stack.rank_pids(), npu_stack.pid("rollout")
    training = npu_stack.train("npu", steps=3)
    training.finish()
    rows = training.rows()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["rollout_mismatch"] < 1e-4 for row in rows)

    calls = recorded(npu_stack)
    assert len(ranks) == 2
    for rank in ranks:
        assert calls[rank]["hccl"] > 0  # their collectives are the NPU's
        assert calls[rank]["npu.set_device"] > 0
        assert calls[rank]["allocate"] > 0
    assert calls[engine]["allocate"] > 0
    of_cuda = {
        f"{pid}: {name}": count
        for pid, counts in calls.items()
        for name, count in counts.items()
        if name.startswith("cuda.") and name.rpartition(":")[2] in OURS
    }
    assert not of_cuda


def test_each_rank_sees_a_device_and_ports_of_its_own(npu_stack: Stack) -> None:
    found = sorted(npu_stack.rank_pids(), key=lambda pid: environment(pid)["RANK"])
    seen = [environment(pid) for pid in found]
    assert [values["ASCEND_RT_VISIBLE_DEVICES"] for values in seen] == ["0", "1"]
    assert [values["LOCAL_RANK"] for values in seen] == ["0", "0"]
    ranges = [values["HCCL_HOST_SOCKET_PORT_RANGE"].split("-") for values in seen]
    assert int(ranges[0][1]) < int(ranges[1][0])


def test_a_torch_npu_that_does_not_load_is_explained(
    npu_stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without CANN `import torch_npu` fails; the service says so and ends with 2."""
    (tmp_path / "torch_npu.py").write_text("raise OSError('libhccl.so: cannot open')\n")
    (run_dir := tmp_path / "run").mkdir()
    for name, value in {"PYTHONPATH": str(tmp_path), "SLUICE_DEVICE": "npu"}.items():
        monkeypatch.setitem(ENVIRONMENT, name, value)
    services = npu_stack.run_dir / "services"
    config = yaml.safe_load((services / "rollout.yaml").read_text())
    config["server"]["address_file"] = str(run_dir / "address.json")
    config["server"].pop("port", None)
    (run_dir / "rollout.yaml").write_text(yaml.safe_dump(config))
    done = run_service("rollout", run_dir / "rollout.yaml")
    assert done.returncode == 2
    assert "Install CANN" in done.stderr
    assert "Traceback" not in done.stderr
