"""The platform of a host without accelerators, and what of the others needs no device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from sluice import platform
from sluice.platform import CPU, CUDA, NPU, PlatformError
from tests.apart import apart


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
    assert (chosen.collective, chosen.visible_env) == ("gloo", "")
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
    assert [p.collective for p in (CPU, CUDA, NPU)] == ["gloo", "nccl", "hccl"]
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


def test_memory_of_the_process_and_the_host():
    apart(allocate)


def allocate() -> None:
    before = CPU.memory()
    block = torch.ones(64 << 20, dtype=torch.uint8)
    after = CPU.memory()
    assert after.allocated - before.allocated > len(block) // 2
    assert after.peak >= after.allocated
    assert after.total > after.free > 0


def test_memory_in_pieces_is_joined_where_it_is_much_and_is_not_joined_already(
    monkeypatch: pytest.MonkeyPatch,
):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)

    def full(in_pieces: int) -> platform.MemoryStatistics:
        return platform.MemoryStatistics(100 << 30, (100 << 30) + in_pieces, 0, 1 << 30, 140 << 30)

    much, little = full(20 << 30), full(2 << 30)
    setting = "expandable_segments:True"
    assert platform.CUDA.joining(much) == f"PYTORCH_ALLOC_CONF={setting}"
    assert platform.NPU.joining(much) == f"PYTORCH_NPU_ALLOC_CONF={setting}"
    assert platform.CUDA.joining(little) == platform.CPU.joining(much) == ""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"max_split_size_mb:512,{setting}")
    assert platform.CUDA.joining(much) == ""


def test_want_of_memory_is_told_from_other_errors():
    """By what torch and numpy raise here, and by the words of other devices' allocators."""
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(1 << 60)
    with pytest.raises(MemoryError) as of_numpy:
        np.empty(1 << 50)
    words = (
        "NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 61.28 GiB total capacity)",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: out of memory",
    )
    lacking = [of_torch.value, of_numpy.value, torch.OutOfMemoryError("CUDA out of memory.")]
    assert all(platform.is_out_of_memory(e) for e in (*lacking, *map(RuntimeError, words)))
    others = [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError(words[0])]
    assert not any(platform.is_out_of_memory(error) for error in (*others, OSError("memory")))
