"""What a fresh process finds: no torch, no device, a broken torch-npu, the fake one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]
FAKE_NPU = ROOT / "tests" / "fake_npu"


def run(script: str, *paths: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("SLUICE_DEVICE", "FAKE_NPU_CALLS", "ASCEND_RT_VISIBLE_DEVICES")
    }
    return subprocess.run(
        [sys.executable, "-c", script],
        env={
            **inherited,
            "PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT))),
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def answer(script: str, *paths: Path, **environment: str) -> Any:
    """What the script prints last, as JSON."""
    done = run(script, *paths, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_names_need_no_torch():
    script = """
import json, sys
sys.modules["torch"] = None
from sluice import platform
declared = platform.declared()
print(json.dumps([declared.device_type, declared.collective, declared.visible_devices([3])]))
"""
    assert answer(script, SLUICE_DEVICE="npu") == [
        "npu",
        "hccl",
        {"ASCEND_RT_VISIBLE_DEVICES": "3"},
    ]
    assert answer(script, SLUICE_DEVICE="cpu") == ["cpu", "gloo", {}]


def test_a_device_without_torch_says_what_to_install():
    script = """
import sys
sys.modules["torch"] = None
from sluice import platform
platform.current()
"""
    assert "torch does not load" in run(script).stderr
    assert "pip install 'sluice[reference]'" in run(script).stderr


REFUSED = """
import json, os
from sluice import platform

def refusal(device):
    os.environ["SLUICE_DEVICE"] = device
    platform.current.cache_clear()
    try:
        return platform.current().device_type
    except platform.PlatformError as error:
        return str(error)
"""


def test_absent_devices_are_refused_with_a_reason():
    script = REFUSED + "print(json.dumps([refusal('cuda'), refusal('npu'), refusal('auto')]))"
    cuda, npu, auto = answer(script, CUDA_VISIBLE_DEVICES="")
    assert "SLUICE_DEVICE=cuda, but no such device is visible" in cuda
    assert "CUDA_VISIBLE_DEVICES is ''" in cuda
    assert "SLUICE_DEVICE=npu needs torch-npu" in npu
    assert auto == "cpu"


@pytest.fixture(scope="module")
def broken_npu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """torch-npu as it is on a host without CANN."""
    root = tmp_path_factory.mktemp("broken")
    (root / "torch_npu").mkdir()
    (root / "torch_npu" / "__init__.py").write_text(
        "raise ImportError('libhccl.so: cannot open shared object file')\n"
    )
    registered = root / "torch_npu-2.8.dist-info"
    registered.mkdir()
    (registered / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.8\n")
    (registered / "entry_points.txt").write_text(
        "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"
    )
    return root


def test_a_torch_npu_without_cann_breaks_a_plain_import_of_torch(broken_npu: Path):
    """The control: this is what the platform has to get round."""
    assert (
        "Failed to load the backend extension: torch_npu" in run("import torch", broken_npu).stderr
    )


def test_a_torch_npu_without_cann_is_named_with_the_way_out(broken_npu: Path):
    script = (
        REFUSED
        + """
found = [refusal('cpu'), refusal('auto'), refusal('npu')]
import torch
print(json.dumps([*found, torch.ones(3).sum().item(), os.environ.get(platform.AUTOLOAD_VARIABLE)]))
"""
    )
    cpu, auto, npu, total, variable = answer(script, broken_npu)
    assert cpu == "cpu"
    for message in (auto, npu):
        assert "libhccl.so: cannot open shared object file" in message
        assert "set_env.sh" in message
        assert "SLUICE_DEVICE=cpu" in message
    assert total == 3, "torch is not usable after the refusal"
    assert variable is None, "children would not find their vendor's plug-in"


EVERYTHING = """
import json, os
from sluice import platform
npu = platform.current()
import torch
import torch_npu

npu.set_device(1)
npu.seed_all(7)
torch.randn(4, 16, device=npu.device(1))
npu.synchronize()
npu.release_memory()
print(json.dumps({
    "devices": [str(npu.device()), str(npu.device(0))], "current": npu.module.current_device(),
    "memory": vars(npu.memory()), "calls": dict(torch_npu.calls),
}))
"""


def test_the_npu_is_used_through_its_own_interface():
    on_npu = answer(EVERYTHING, FAKE_NPU, SLUICE_DEVICE="npu")
    calls = on_npu["calls"]
    assert (on_npu["devices"], on_npu["current"]) == (["npu:1", "npu:0"], 1)
    assert on_npu["memory"]["allocated"] == 1 << 30
    assert on_npu["memory"]["total"] == 64 << 30
    for name in (
        *("allocate", "npu.set_device", "npu.synchronize"),
        *("npu.manual_seed_all", "npu.empty_cache", "npu.reset_peak_memory_stats"),
    ):
        assert calls[name] >= 1, name
    assert not [name for name in calls if name.startswith("cuda.") and name.endswith(":sluice")]


def test_hidden_npus_are_not_there():
    script = REFUSED + "print(json.dumps([refusal('npu'), refusal('auto')]))"
    npu, auto = answer(script, FAKE_NPU, ASCEND_RT_VISIBLE_DEVICES="", CUDA_VISIBLE_DEVICES="")
    assert "no such device is visible (ASCEND_RT_VISIBLE_DEVICES is ''; see `npu-smi info`)" in npu
    assert auto == "cpu"


RANK = """
import sys
from datetime import timedelta
from sluice import platform
npu = platform.current()
import torch, torch.distributed as dist
rank = int(sys.argv[1])
for backend in (npu.collective, f"cpu:gloo,npu:{npu.collective}"):
    dist.init_process_group(
        backend, init_method=f"file://{sys.argv[2]}-{backend[:3]}", rank=rank, world_size=2,
        timeout=timedelta(seconds=240),
    )
    total = torch.full((3,), rank + 1.0, device=npu.device(rank))
    dist.all_reduce(total)
    assert total.tolist() == [3.0] * 3
    dist.destroy_process_group()
"""


def test_hccl_groups_of_two_ranks_reduce(tmp_path: Path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(map(str, (FAKE_NPU, ROOT))),
                "SLUICE_DEVICE": "npu",
                "FAKE_NPU_CALLS": str(tmp_path),
            },
        )
        for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=PATIENCE) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    written = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert [calls["hccl"] for calls in written] == [2, 2]


TRAINING = """
import json, os
from sluice import platform
import torch, torch_npu
from sluice.imports import uncompiled
with uncompiled():
    from transformers import Qwen2Config, Qwen2ForCausalLM

def losses(device):
    os.environ["SLUICE_DEVICE"] = device
    platform.current.cache_clear()
    chosen = platform.current()
    chosen.seed_all(0)
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )
    model = Qwen2ForCausalLM(config).to(chosen.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator(device=chosen.device()).manual_seed(1)
    tokens = torch.randint(0, 64, (3, 12), generator=generator, device=chosen.device())
    mask = torch.arange(12, device=chosen.device()) >= torch.tensor([[0], [3], [5]])
    found = []
    for _ in range(3):
        loss = model(input_ids=tokens, attention_mask=mask, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found

on_cpu = losses("cpu")
allocated = torch_npu.calls["allocate"]
on_npu = losses("npu")
before = dict(torch_npu.calls)
torch.cuda.is_available()
print(json.dumps([on_cpu, allocated, on_npu, before, dict(torch_npu.calls)]))
"""


def test_a_transformers_model_trains_on_the_npu_as_on_the_cpu():
    on_cpu, allocated_by_cpu, on_npu, calls, after = answer(TRAINING, FAKE_NPU)
    assert on_npu == on_cpu
    assert on_cpu[-1] < on_cpu[0]
    assert allocated_by_cpu == 0 < calls["allocate"]
    ours = ("sluice", "services", "__main__")
    assert not [name for name in calls if name.startswith("cuda.") and name.endswith(ours)]
    assert after["cuda.is_available:__main__"] == 1, "the watch sees nothing"


MEGATRON = """
import json, sys
from sluice import platform
try:
    platform.current().answer_cuda("megatron")
    import torch
    from torch_npu import calls
    print(json.dumps([calls["mindspeed"], torch.get_device_module("cuda").device_count()]))
except platform.PlatformError as error:
    print(json.dumps(str(error)))
"""
FAKE_MINDSPEED = FAKE_NPU.parent / "fake_mindspeed"


def test_megatron_on_npus_needs_mindspeed_before_it():
    environment = {"SLUICE_DEVICE": "npu", "ASCEND_RT_VISIBLE_DEVICES": "1"}
    assert "MindSpeed, which is not installed" in answer(MEGATRON, FAKE_NPU, **environment)
    paths = (FAKE_MINDSPEED, FAKE_NPU)
    assert answer(MEGATRON, *paths, **environment) == [1, 1]
    late = "import sys, types; sys.modules['megatron'] = types.ModuleType('megatron')\n" + MEGATRON
    assert "imported before MindSpeed" in answer(late, *paths, **environment)


STEPS = """
import json, resource, sys
import numpy as np
from sluice.platform import CPU
if {keep}:
    CPU.keep_memory()
def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [np.ones(3 << 17) for _ in range(20)]  # 3 MiB each
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(json.dumps([step() for _ in range(4)][-1]))
"""


def test_what_a_step_frees_serves_the_next():
    """Of the 15,360 pages of a step; neither without it nor where glibc was told otherwise."""
    assert answer(STEPS.format(keep=True)) < 100
    assert answer(STEPS.format(keep=False)) > 10_000
    assert answer(STEPS.format(keep=True), MALLOC_TRIM_THRESHOLD_="131072") > 10_000
