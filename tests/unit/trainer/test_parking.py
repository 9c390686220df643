"""Tensors that are parked: their memory is free meanwhile, and they come back as they were."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.parking import FileParking, HostParking, ParkedTensors, Parking, ParkingError
from tests.apart import apart

MIB = 1 << 20
Make = Callable[[Path], Parking]
PARKINGS = {"file": FileParking, "host": lambda directory: HostParking()}


@pytest.fixture(params=PARKINGS)
def make(request: pytest.FixtureRequest) -> Make:
    return PARKINGS[request.param]  # type: ignore[no-any-return]


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def test_the_memory_of_the_process_is_free_meanwhile(tmp_path: Path) -> None:
    apart(park_and_restore, tmp_path)


def park_and_restore(tmp_path: Path) -> None:
    kept, cleared = torch.randn(24 * MIB), torch.ones(8 * MIB)
    before, sums = resident(), kept.sum()
    parked = ParkedTensors.park([kept, kept[5:]], [cleared], FileParking(tmp_path))
    assert parked.nbytes == 4 * 32 * MIB
    assert before - resident() > 0.9 * parked.nbytes
    assert not any(tmp_path.iterdir())
    parked.restore()
    assert kept.sum() == sums and not cleared.any()
    assert resident() > before - 8 * MIB


def test_views_and_parameters_see_the_same_memory_afterwards(make: Make, tmp_path: Path) -> None:
    flat = torch.arange(10_000, dtype=torch.float32)
    parameter = torch.nn.Parameter(flat[100:7000].view(60, 115))
    parameter.grad = torch.ones_like(parameter)
    empty = torch.empty(0)
    expected = flat.clone()
    parked = ParkedTensors.park([parameter, empty, flat], [parameter.grad], make(tmp_path))
    parked.restore()
    assert torch.equal(flat, expected)
    assert torch.equal(parameter.detach().flatten(), expected[100:7000])
    assert not parameter.grad.any()
    flat[100] = -1
    assert parameter[0, 0] == -1


def test_tensors_of_another_device_stay_where_they_are(make: Make, tmp_path: Path) -> None:
    own, other = torch.randn(5000), torch.empty(5000, device="meta")
    expected = own.clone()
    parked = ParkedTensors.park([other, own], [torch.empty(7, device="meta")], make(tmp_path))
    assert parked.nbytes == 4 * 5000
    parked.restore()
    assert torch.equal(own, expected)


@given(sizes=st.lists(st.integers(0, 40_000), min_size=1, max_size=6), shift=st.integers(0, 9000))
def test_any_sizes_come_back(tmp_path_factory: pytest.TempPathFactory, sizes, shift) -> None:  # type: ignore[no-untyped-def]
    directory = tmp_path_factory.getbasetemp() / "parking"
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    around = [torch.randint(0, 256, (shift + 1,), dtype=torch.uint8) for _ in sizes]
    expected = [tensor.clone() for tensor in (*tensors, *around)]
    for make_one in PARKINGS.values():
        ParkedTensors.park(tensors, [], make_one(directory)).restore()
        for tensor, copy in zip((*tensors, *around), expected, strict=True):
            assert torch.equal(tensor, copy)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_damage_to_what_waits_is_found(tmp_path: Path, damage: str) -> None:
    parking = FileParking(tmp_path)
    parked = ParkedTensors.park([torch.randn(5000), torch.randn(3)], [], parking)
    file = parking._file.fileno()
    if damage == "flip":
        os.pwrite(file, bytes([os.pread(file, 1, 700)[0] ^ 1]), 700)
    else:
        os.ftruncate(file, 0 if damage == "empty" else 20_003)
    with pytest.raises(ParkingError):
        parked.restore()


def test_without_room_all_is_as_before(tmp_path: Path) -> None:
    first, second = torch.randn(10_000), torch.randn(20_000)
    copies = first.clone(), second.clone()

    class Full(FileParking):
        def put(self, storage: torch.UntypedStorage) -> None:
            if storage.nbytes() > 50_000:
                raise OSError(28, "No space left on device")
            super().put(storage)

    with pytest.raises(OSError, match="space"):
        ParkedTensors.park([first, second], [], Full(tmp_path))
    assert torch.equal(first, copies[0]) and torch.equal(second, copies[1])
