"""Memory that another process opens by a handle: of a live owner alone, and what it was told of."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from sluice import platform
from sluice.platform import CPU
from sluice.shared_memory import MemoryHandle, ProcessIdentity, SharedMemoryError
from sluice.weights.errors import TransferBrokenError
from sluice.weights.transfer.deadline import Deadline
from sluice.weights.transfer.group import Meeting
from sluice.weights.transfer.handles import HandleGroup
from sluice.weights.transfer.plan import HANDLES, Membership
from tests.fresh import FRESH
from tests.patience import PATIENCE

SIZE = 10_000


def numbers(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def share(pipe: Connection) -> None:
    """Another process: shares memory, and changes or drops it as it is told."""
    memory: torch.Tensor | None = CPU.shareable_memory(SIZE)
    assert memory is not None
    memory.copy_(torch.from_numpy(numbers(SIZE)))
    pipe.send(CPU.share(memory).encode())
    while (told := pipe.recv()) != "end":
        if told == "change":
            memory[7] ^= 1
        elif told == "drop":
            memory = None
            others = [CPU.shareable_memory(SIZE) for _ in range(3)]  # under the same numbers
            pipe.send(len(others))
            continue
        pipe.send(os.getpid())


class Owner:
    def __init__(self) -> None:
        self.pipe, other = FRESH.Pipe()
        self.process = FRESH.Process(target=share, args=(other,), daemon=True)
        self.process.start()
        other.close()
        assert self.pipe.poll(PATIENCE)
        self.handle = MemoryHandle.decode(self.pipe.recv())

    def tell(self, what: str) -> Any:
        self.pipe.send(what)
        assert self.pipe.poll(PATIENCE)
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE)


@pytest.fixture
def owner():
    running = Owner()
    yield running
    running.kill()


@pytest.fixture(scope="module")
def idle_owner():
    """For tests that leave it as it is."""
    running = Owner()
    yield running
    running.kill()


def test_memory_of_another_process_is_one_and_the_same(owner: Owner) -> None:
    shared = CPU.open_shared(owner.handle)
    assert np.array_equal(shared.numpy(), numbers(SIZE))
    owner.tell("change")
    changed = numbers(SIZE)
    changed[7] ^= 1
    assert np.array_equal(shared.numpy(), changed)
    owner.kill()
    assert np.array_equal(shared.numpy(), changed)  # what is open stays


def test_memory_of_a_dead_process_is_refused_by_its_name(owner: Owner) -> None:
    CPU.open_shared(owner.handle)
    owner.kill()
    with pytest.raises(SharedMemoryError, match=f"process {owner.process.pid} has ended"):
        CPU.open_shared(owner.handle)


def test_a_process_that_was_started_in_its_place_is_not_its_owner(idle_owner: Owner) -> None:
    before = replace(idle_owner.handle.owner, started=idle_owner.handle.owner.started - 60)
    with pytest.raises(SharedMemoryError, match="is another one by now"):
        CPU.open_shared(replace(idle_owner.handle, owner=before))


def test_memory_that_was_given_up_is_not_what_lies_in_its_place(owner: Owner) -> None:
    owner.tell("drop")
    with pytest.raises(SharedMemoryError, match="given it up"):
        CPU.open_shared(owner.handle)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"size": SIZE * 10}, "given it up"),
        ({"device_type": "cuda"}, "memory of cuda"),
        ({"device_id": "GPU-1"}, "GPU-1"),
        ({"parts": ()}, "unpack"),
        ({"parts": (b"1", 0, 0)}, "process"),
        ({"parts": (-1, 0, 0)}, "process"),
        ({"parts": (1 << 70, 0, 0)}, "process"),
    ],
)
def test_a_handle_of_something_else_is_refused(
    idle_owner: Owner, changes: dict, cause: str
) -> None:
    with pytest.raises(SharedMemoryError, match=cause):
        CPU.open_shared(replace(idle_owner.handle, **changes))


def test_a_process_of_another_host_is_refused(idle_owner: Owner) -> None:
    elsewhere = replace(idle_owner.handle.owner, host="another")
    with pytest.raises(SharedMemoryError, match="of another host"):
        CPU.open_shared(replace(idle_owner.handle, owner=elsewhere))


def encoded(**changes: Any) -> bytes:
    own = ProcessIdentity.own()
    document = {
        "owner": [own.host, own.process, own.started],
        "device": ["cpu", ""],
        "size": 8,
        "parts": [3, 4, 5],
        **changes,
    }
    return json.dumps(document).encode()


def test_a_handle_reads_as_it_was_written() -> None:
    handle = MemoryHandle.decode(encoded())
    assert (handle.size, handle.parts, handle.owner) == (8, (3, 4, 5), ProcessIdentity.own())
    of_a_device = replace(handle, parts=(b"\x00\xff" * 32, 1 << 40, 0, b"", True))
    assert MemoryHandle.decode(of_a_device.encode()) == of_a_device


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 5000,
        b"[]",
        b"{}",
        b"null",
        encoded()[:-9],
        encoded(size=0),
        encoded(size=-8),
        encoded(size=float("nan")),
        encoded(size=float("inf")),
        encoded(size="many"),
        encoded(owner=["host", -1, 0.0]),
        encoded(owner=["host", 1]),
        encoded(parts=[None]),
        encoded(parts=["not base64"]),
        encoded(parts=[0.5]),
        encoded(device=[]),
    ],
)
def test_what_is_no_handle_is_refused(data: bytes) -> None:
    with pytest.raises(SharedMemoryError, match="no handle of memory"):
        MemoryHandle.decode(data)


class FakeStorage:
    """Of a device whose library gives eight things to open memory by, as CUDA's does."""

    given = (0, b"handle\x00", SIZE, 512, b"counter", 3, b"event", True)

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def _share_cuda_(self) -> tuple[Any, ...]:
        return self.given

    def nbytes(self) -> int:
        return SIZE


class FakeMemory:
    def untyped_storage(self) -> FakeStorage:
        return FakeStorage()


def test_an_accelerator_opens_by_what_its_own_library_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is found by its id: it may have another number in the other process."""
    opened: list[tuple[Any, ...]] = []

    def open_storage(*given: Any) -> torch.UntypedStorage:
        opened.append(given)
        return torch.zeros(SIZE, dtype=torch.uint8).untyped_storage()

    class Properties:
        uuid, name = "GPU-7", "a GPU"

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_storage)
    monkeypatch.setattr(platform.CUDA.module, "current_device", lambda: 5)
    monkeypatch.setattr(platform.CUDA.module, "get_device_properties", lambda _: Properties)
    handle = platform.CUDA.share(FakeMemory())  # type: ignore[arg-type]
    again = MemoryHandle.decode(handle.encode())
    assert platform.CUDA.open_shared(again).numel() == SIZE
    assert opened == [(5, *FakeStorage.given[1:])]
    assert isinstance(opened[0][-1], bool)
    Properties.uuid = "GPU-8"
    with pytest.raises(SharedMemoryError, match="GPU-7"):
        platform.CUDA.open_shared(again)
    assert len(opened) == 1


def receive(address: str, sizes: list[int], pipe: Connection) -> None:
    """Another process: takes buckets, and tells their bytes."""
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), 2, is_master=False, wait_for_workers=False)
    member = Membership(address=address, group="g", rank=1, world_size=2, backend=HANDLES)
    group = HandleGroup(store, member, Deadline(PATIENCE))
    for size in sizes:
        flat = torch.empty(size, dtype=torch.uint8)
        group.broadcast(flat, Deadline(PATIENCE))
        pipe.send(flat.numpy().tobytes())
    pipe.recv()


def test_buckets_of_all_sizes_arrive_and_memory_is_used_again() -> None:
    sizes = [1, 1, SIZE, 7, *([SIZE] * 100), SIZE * 100, 1]
    pipe, other = FRESH.Pipe()
    meeting = Meeting("127.0.0.1", 2, PATIENCE)
    process = FRESH.Process(target=receive, args=(meeting.address, sizes, other), daemon=True)
    process.start()
    other.close()
    group = meeting.join("g", HANDLES, Deadline(PATIENCE))
    files: list[int] = []
    for seed, size in enumerate(sizes):
        group.broadcast(torch.from_numpy(numbers(size, seed)), Deadline(PATIENCE))
        assert pipe.poll(PATIENCE)
        assert pipe.recv() == numbers(size, seed).tobytes()
        files.append(psutil.Process(process.pid).num_fds())
    assert max(files[-3:]) <= files[5] + 1  # of buffers that have grown the old ones are closed
    process.kill()
    process.join(PATIENCE)
    late = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(TransferBrokenError, match=f"process {process.pid} has ended"):
        for _ in range(3):  # buffers are filled before anybody has to have taken them
            group.broadcast(late, Deadline(PATIENCE))
    group.close()
    meeting.close()


def test_who_does_not_take_is_waited_for_until_the_deadline_or_until_it_leaves() -> None:
    meeting = Meeting("127.0.0.1", 2, PATIENCE)
    host, _, port = meeting.address.rpartition(":")
    store = dist.TCPStore(host, int(port), 2, is_master=False, wait_for_workers=False)
    dist.PrefixStore("g", store).set("member/1", _identity())
    sender = meeting.join("g", HANDLES, Deadline(PATIENCE))
    member = Membership(address=meeting.address, group="g", rank=1, world_size=2, backend=HANDLES)
    receiver = HandleGroup(store, member, Deadline(PATIENCE))
    flat = torch.zeros(8, dtype=torch.uint8)
    sender.broadcast(flat, Deadline(PATIENCE))
    sender.broadcast(flat, Deadline(PATIENCE))
    with pytest.raises(TransferBrokenError, match="deadline"):
        sender.broadcast(flat, Deadline(0.3))
    receiver.close()
    with pytest.raises(TransferBrokenError, match="has left"):
        sender.broadcast(flat, Deadline(PATIENCE))
    sender.close()
    meeting.close()


def test_memory_of_a_process_that_is_not_the_sender_is_refused(idle_owner: Owner) -> None:
    meeting = Meeting("127.0.0.1", 2, PATIENCE)
    host, _, port = meeting.address.rpartition(":")
    store = dist.TCPStore(host, int(port), 2, is_master=False, wait_for_workers=False)
    keys = dist.PrefixStore("g", store)
    keys.set("member/0", _identity())
    member = Membership(address=meeting.address, group="g", rank=1, world_size=2, backend=HANDLES)
    receiver = HandleGroup(store, member, Deadline(PATIENCE))
    keys.set("bucket/0/1", idle_owner.handle.encode())
    with pytest.raises(TransferBrokenError, match="not of the sender's"):
        receiver.broadcast(torch.zeros(8, dtype=torch.uint8), Deadline(PATIENCE))
    meeting.close()


def _identity() -> str:
    own = ProcessIdentity.own()
    return f"{own.process} {own.started!r} {own.host}"
