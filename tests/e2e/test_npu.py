"""The demo's stack where the accelerator is an NPU (a fake one): two ranks over hccl, no CUDA."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from examples.models.tiny_qwen3 import build_tiny_qwen3
from tests.e2e.conftest import ENVIRONMENT, Stack, start_stack, stop_stack
from tests.patience import PATIENCE

FAKE_NPU = Path(__file__).parents[1] / "fake_npu"
OURS = ("sluice", "services", "examples")


FAKE_MINDSPEED = FAKE_NPU.parent / "fake_mindspeed"
BACKENDS = {
    "reference": {},
    "megatron": {"backend": "megatron", "megatron": {"tensor": 2, "dtype": "float32"}},
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name == "reference" else pytest.mark.long)
        for name in BACKENDS
    ],
)
def npu_stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    run_dir = tmp_path_factory.mktemp("npu")
    calls = run_dir / "calls"
    calls.mkdir()
    paths = [FAKE_NPU] if request.param == "reference" else [FAKE_MINDSPEED, FAKE_NPU]
    added = {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
        "SLUICE_DEVICE": "npu",
        "FAKE_NPU_CALLS": str(calls),
    }
    trainer = {
        "model": str(run_dir / "model"),
        "optim": {"learning_rate": 2e-3},
        "ranks": {"count": 2},
        **BACKENDS[request.param],
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in added.items():
            patch.setitem(ENVIRONMENT, name, value)
        stack = start_stack(run_dir, trainer={"kind": "trainer", "config": trainer})
        yield stack
        stop_stack(stack)


def uses_megatron(stack: Stack) -> bool:
    return "megatron" in (stack.run_dir / "services.yaml").read_text()


def recorded(stack: Stack) -> dict[int, Counter]:
    """What each process asked of the fake, by process id."""
    return {
        int(path.stem): Counter(json.loads(path.read_text()))
        for path in (stack.run_dir / "calls").glob("*.json")
    }


def environment(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def test_the_stack_trains_on_npus_and_asks_nothing_of_cuda(npu_stack: Stack) -> None:
    ranks, engine = npu_stack.rank_pids(), npu_stack.pid("rollout")
    training = npu_stack.train("npu", steps=3)
    training.finish()
    rows = training.rows()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["rollout_mismatch"] < 1e-4 for row in training.learning_rows())

    calls = recorded(npu_stack)
    assert len(ranks) == 2
    for rank in ranks:
        assert calls[rank]["hccl"] > 0  # their collectives are the NPU's
        assert calls[rank]["npu.set_device"] > 0
        assert calls[rank]["allocate"] > 0
        assert calls[rank]["mindspeed"] == uses_megatron(npu_stack)
        assert calls[rank]["npu_rms_norm"] > 0
        # what a pass computes with goes over pinned memory, in the backends that are ours
        assert (calls[rank]["pin_memory"] > 0) or uses_megatron(npu_stack)
        for name in ("npu_rotary_mul", "npu_swiglu"):  # MindSpeed's matter in a model of Megatron
            assert (calls[rank][name] == 0) == uses_megatron(npu_stack)
    for name in ("allocate", "npu_rms_norm", "npu_rotary_mul", "npu_swiglu"):
        assert calls[engine][name] > 0
    of_cuda = {
        f"{pid}: {name}": count
        for pid, counts in calls.items()
        for name, count in counts.items()
        if name.startswith("cuda.") and name.rpartition(":")[2] in OURS
    }
    assert not of_cuda


def test_the_trainer_says_which_operations_run(npu_stack: Stack) -> None:
    targets = json.loads((npu_stack.run_dir / "prometheus.json").read_text())
    (address,) = next(t["targets"] for t in targets if t["labels"]["service"] == "trainer")
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE) as answer:
        lines = answer.read().decode().splitlines()
    name = "sluice_trainer_operation_info"
    found = {
        sample.labels["operation"]: (sample.labels["implementation"], sample.value)
        for family in text_string_to_metric_families("\n".join(lines) + "\n")
        for sample in family.samples
        if sample.name == name
    }
    expected = {
        "attention": ("torch_sdpa", 2.0),  # in float32
        "rms_norm": ("npu_rms_norm", 2.0),
        "rotary": ("npu_rotary_mul", 2.0),
        "swiglu": ("npu_swiglu", 2.0),
        "logprobs": ("by_size", 2.0),
        "adamw": ("torch_foreach", 2.0),
    }
    if uses_megatron(npu_stack):
        expected |= {"rotary": ("plain", 2.0), "swiglu": ("plain", 2.0)}
    assert found == expected


def test_each_rank_sees_a_device_and_ports_of_its_own(npu_stack: Stack) -> None:
    found = sorted(npu_stack.rank_pids(), key=lambda pid: environment(pid)["RANK"])
    seen = [environment(pid) for pid in found]
    assert [values["ASCEND_RT_VISIBLE_DEVICES"] for values in seen] == ["0", "1"]
    assert [values["LOCAL_RANK"] for values in seen] == ["0", "0"]
    ranges = [values["HCCL_HOST_SOCKET_PORT_RANGE"].split("-") for values in seen]
    assert int(ranges[0][1]) < int(ranges[1][0])


@pytest.fixture
def without_cann(tmp_path: Path) -> dict[str, str]:
    """The environment where `import torch_npu` fails, as it does without CANN."""
    (tmp_path / "torch_npu.py").write_text("raise OSError('libhccl.so: cannot open')\n")
    return {**ENVIRONMENT, "PYTHONPATH": str(tmp_path), "SLUICE_DEVICE": "npu"}


def run(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_an_engine_without_a_working_torch_npu_says_what_to_do(
    without_cann: dict[str, str], tmp_path: Path
) -> None:
    model = str(build_tiny_qwen3(tmp_path / "model"))
    config = {"engine_id": "e", "router": "127.0.0.1:1", "store": str(tmp_path), "tokenizer": model}
    config["engine"] = {"max_running": 4, "max_model_length": 16}
    (tmp_path / "rollout.yaml").write_text(yaml.safe_dump(config))
    done = run(without_cann, "services.rollout", "--config", str(tmp_path / "rollout.yaml"))
    assert done.returncode == 2, done.stderr
    assert "Install CANN" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_trainer_without_a_working_torch_npu_ends_sluice_up(
    without_cann: dict[str, str], tmp_path: Path
) -> None:
    model = str(build_tiny_qwen3(tmp_path / "model"))
    trainer = {"model": model, "ranks": {"max_restarts": 0}}
    up = {"run_dir": str(tmp_path), "services": {"t": {"kind": "trainer", "config": trainer}}}
    (tmp_path / "up.yaml").write_text(yaml.safe_dump(up))
    done = run(without_cann, "sluice.cli", "up", str(tmp_path / "up.yaml"))
    assert done.returncode == 2, done.stderr
    assert re.search(r"trainer t at \S+ failed", done.stderr), done.stderr
    assert "Install CANN" in done.stderr
