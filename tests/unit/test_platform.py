"""The platform of a host without accelerators, and what of the others needs no device."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sluice import platform, torch_ops
from sluice.platform import CPU, CUDA, NPU, PlatformError


@pytest.fixture(autouse=True)
def choose(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SLUICE_DEVICE", "cpu")
    platform.current.cache_clear()
    yield
    platform.current.cache_clear()


def test_the_cpu_is_one_device_without_an_index():
    chosen = platform.current()
    assert chosen is CPU
    assert chosen.device(3) == torch.ones(1).device
    assert (chosen.collective, chosen.collectives, chosen.visible_env) == ("gloo", "gloo", "")
    assert chosen.visible_devices([0, 1]) == {}
    chosen.set_device(3)
    chosen.synchronize()
    chosen.release_memory()


def test_a_wrong_name_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLUICE_DEVICE", "gpu")
    for choose in (platform.current, platform.declared):
        with pytest.raises(PlatformError, match="must be auto, cpu, cuda, npu; it is 'gpu'"):
            choose()


def test_an_empty_variable_is_auto(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLUICE_DEVICE", "")
    assert platform.current() in (CPU, CUDA, NPU)


def test_names_of_every_platform():
    assert [p.device_type for p in (CPU, CUDA, NPU)] == ["cpu", "cuda", "npu"]
    assert [p.collectives for p in (CUDA, NPU)] == ["cpu:gloo,cuda:nccl", "cpu:gloo,npu:hccl"]
    assert NPU.visible_env == "ASCEND_RT_VISIBLE_DEVICES"


@pytest.mark.parametrize("device", [CUDA, NPU])
def test_children_see_a_part_of_what_is_visible_here(
    device: platform.Platform, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(device.visible_env, raising=False)
    assert device.visible_devices([1, 0]) == {device.visible_env: "1,0"}
    monkeypatch.setenv(device.visible_env, "4,GPU-8a,6")
    assert device.visible_devices([1, 2]) == {device.visible_env: "GPU-8a,6"}
    with pytest.raises(PlatformError, match="shows 3 devices, but local ranks"):
        device.visible_devices([3])


def test_hccl_listens_on_the_given_ports_only():
    assert NPU.collective_ports(60000, 32) == {
        "HCCL_HOST_SOCKET_PORT_RANGE": "60000-60031",
        "HCCL_NPU_SOCKET_PORT_RANGE": "60000-60031",
    }
    assert CUDA.collective_ports(60000, 32) == CPU.collective_ports(60000, 32) == {}
    for first, count in ((80, 4), (65530, 10), (60000, 0)):
        with pytest.raises(PlatformError, match="ports"):
            NPU.collective_ports(first, count)


def test_random_state_goes_on_where_it_was_saved():
    CPU.seed_all(3)
    state = CPU.rng_state()
    first = torch.rand(4)
    assert not torch.equal(torch.rand(4), first)
    CPU.set_rng_state(state)
    assert torch.equal(torch.rand(4), first)
    CPU.set_rng_state({**state, "npu": torch.zeros(8, dtype=torch.uint8)})
    assert torch.equal(torch.rand(4), first)


def test_a_generator_is_its_own_and_repeatable():
    state = CPU.rng_state()
    draws = [torch.rand(4, generator=CPU.generator(seed)) for seed in (5, 5, 6)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert torch.equal(CPU.rng_state()["cpu"], state["cpu"])


def test_work_on_a_stream_of_the_cpu_is_done():
    stream = CPU.create_stream()
    with CPU.on_stream(stream):
        total = torch.ones(8).sum()
    CPU.synchronize()
    assert total == 8


def test_memory_of_the_process_and_the_host():
    gc.collect()  # what earlier tests left must not end in between
    before = CPU.memory()
    block = torch.ones(64 << 20, dtype=torch.uint8)
    after = CPU.memory()
    assert after.allocated - before.allocated > len(block) // 2
    assert after.peak >= after.allocated
    assert after.total > after.free > 0


def test_dtypes_of_the_cpu():
    assert all(CPU.supports(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64))
    assert not CPU.supports(torch.float8_e4m3fn)
    assert not CPU.supports(torch.int64)


def test_a_profile_is_written(tmp_path: Path):
    with CPU.profile(tmp_path):
        torch.ones(8, 8) @ torch.ones(8, 8)
    (trace,) = tmp_path.iterdir()
    assert "aten::mm" in trace.read_text()


class TestOperations:
    def test_choices(self):
        assert CPU.op("rms_norm") is CPU.op("rms_norm", "off") is torch_ops.rms_norm
        assert CPU.op("adamw") is CPU.op("adamw", "on") is not CPU.op("adamw", "off")
        with pytest.raises(PlatformError, match="cpu has no fused swiglu"):
            CPU.op("swiglu", "on")

    @pytest.mark.parametrize("norm", [torch_ops.rms_norm, torch_ops.native_rms_norm])
    def test_rms_norm(self, norm):
        x, weight = torch.randn(5, 16), torch.randn(16)
        wide = x.double()
        expected = weight.double() * wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        torch.testing.assert_close(norm(x, weight, 1e-5).double(), expected, rtol=1e-5, atol=1e-6)

    def test_rms_norm_of_half_precision_keeps_its_statistic_in_fp32(self):
        x = torch.full((4,), 300.0, dtype=torch.float16)  # its square overflows
        assert torch_ops.rms_norm(x, torch.ones(4, dtype=x.dtype), 1e-6).tolist() == [1.0] * 4

    def test_swiglu(self):
        gate, up = torch.randn(3, 8).double(), torch.randn(3, 8).double()
        expected = gate / (1 + torch.exp(-gate)) * up
        torch.testing.assert_close(torch_ops.swiglu(torch.cat((gate, up), -1)), expected)

    def test_rotary_turns_pairs_of_the_two_halves(self):
        x, angles = torch.randn(2, 6, 8).double(), torch.randn(6, 4).double()
        turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(
            torch.ones_like(angles), angles
        )
        expected = torch.cat((turned.real, turned.imag), -1)
        cos, sin = (f(torch.cat((angles, angles), -1)) for f in (torch.cos, torch.sin))
        torch.testing.assert_close(torch_ops.rotary(x, cos, sin), expected)

    @pytest.mark.parametrize("choice", ["on", "off"])
    def test_adamw_takes_the_step_of_its_definition(self, choice):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = CPU.op("adamw", choice)([weight], lr=0.1, weight_decay=0.5)
        (weight * torch.tensor([1.0, -2.0, 4.0])).sum().backward()
        optimizer.step()
        torch.testing.assert_close(weight.data, torch.tensor([0.85, 1.05, 0.85]))


def test_compiling_is_a_choice():
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    assert CPU.compile(double) is CPU.compile(double, "off") is double
    with pytest.raises(PlatformError, match="no compiler for npu"):
        NPU.compile(double, "on")
