"""Buckets that engines of the same host take out of the sender's memory, by its handles.

In place of a collective's broadcast. Two buffers of the sender's device (on a CPU: shared memory
without a name) take turns; who has taken a bucket says so, and a buffer is filled again when all
have. Handles and acknowledgements go through the store at which the members have met:

- `member/<rank>`: the process that is this member;
- `bucket/<number>/<rank>`: the handle of the buffer that the bucket lies in, for this member;
- `taken/<number>/<rank>`: it has a copy of its own;
- `left/<rank>`: it waits for nobody any more, so that nobody has to wait for it.

Nothing outlives its owner: a handle of a process that has ended, or of one that was started in its
place, is refused by name. A device that trainer and engine share has no collectives between them.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from sluice import platform
from sluice.shared_memory import MemoryHandle, ProcessIdentity, SharedMemoryError
from sluice.weights.errors import TransferBrokenError
from sluice.weights.transfer.deadline import Deadline
from sluice.weights.transfer.plan import Membership

BUFFERS = 2
LEAVE_TIME = datetime.timedelta(seconds=1.0)
TICK_SECONDS = 0.2  # between two looks whether those that are waited for live


class HandleGroup:
    """A sender, rank 0, and those that take its buckets. Used by one thread at a time."""

    def __init__(self, store: dist.Store, member: Membership, deadline: Deadline) -> None:
        self.member = member
        self._store = dist.PrefixStore(member.group, store)
        self._number = 0  # of the bucket that comes next
        self._buffers: list[torch.Tensor] = []
        self._handles: dict[tuple[int, int], str] = {}  # by buffer and member
        self._opened: dict[bytes, torch.Tensor] = {}
        self._peers: list[ProcessIdentity] = []
        others = self._receivers if member.rank == 0 else [0]
        self._leaving = [f"left/{rank}" for rank in others]
        with self._breaking():
            self._store.set(f"member/{member.rank}", _encode(ProcessIdentity.own()))
            for rank in others:
                self._await([f"member/{rank}"], deadline)
                peer = _decode(self._store.get(f"member/{rank}"))
                peer.check()
                self._peers.append(peer)

    def broadcast(self, flat: torch.Tensor, deadline: Deadline) -> None:
        """Fill `flat` (uint8) from rank 0's. Raises TransferBrokenError."""
        number, self._number = self._number, self._number + 1
        with self._breaking():
            if self.member.rank == 0:
                self._post(number, flat, deadline)
            else:
                self._take(number, flat, deadline)

    def close(self) -> None:
        """Give up the memory; who has opened it keeps what it has."""
        self._buffers.clear()
        self._handles.clear()
        self._opened.clear()
        with contextlib.suppress(RuntimeError):  # the sender, who keeps the store, is gone
            self._store.set_timeout(LEAVE_TIME)
            self._store.set(f"left/{self.member.rank}", "1")

    def _post(self, number: int, flat: torch.Tensor, deadline: Deadline) -> None:
        if number >= BUFFERS:
            self._settle(number - BUFFERS, deadline)
        buffer = self._buffer(number % BUFFERS, flat.numel())
        buffer[: flat.numel()].copy_(flat)
        platform.current().synchronize()
        for rank in self._receivers:
            handle = self._handle(number % BUFFERS, rank)
            self._store.set(f"bucket/{number}/{rank}", handle)

    def _settle(self, number: int, deadline: Deadline) -> None:
        """Wait until all have taken a bucket, and forget it."""
        taken = [f"taken/{number}/{rank}" for rank in self._receivers]
        self._await(taken, deadline)
        for key in taken:
            self._store.delete_key(key)

    def _take(self, number: int, flat: torch.Tensor, deadline: Deadline) -> None:
        key = f"bucket/{number}/{self.member.rank}"
        self._await([key], deadline)
        data = self._store.get(key)
        self._store.delete_key(key)
        shared = self._opened.get(data)
        if shared is None:
            handle = MemoryHandle.decode(data)
            if handle.owner != self._peers[0]:
                raise SharedMemoryError(
                    f"it is memory of process {handle.owner.process}, not of the sender's"
                )
            shared = platform.current().open_shared(handle)
            while len(self._opened) >= BUFFERS:  # a buffer that was too small has gone
                del self._opened[next(iter(self._opened))]
            self._opened[data] = shared
        if shared.numel() < flat.numel():
            raise SharedMemoryError(f"a bucket of {flat.numel()} bytes in {shared.numel()}")
        flat.copy_(shared[: flat.numel()])
        platform.current().synchronize()
        self._store.set(f"taken/{number}/{self.member.rank}", "1")

    @property
    def _receivers(self) -> range:
        return range(1, self.member.world_size)

    def _buffer(self, index: int, size: int) -> torch.Tensor:
        while len(self._buffers) <= index:
            self._buffers.append(platform.current().shareable_memory(size))
        if self._buffers[index].numel() < size:
            self._buffers[index] = platform.current().shareable_memory(size)
            for rank in self._receivers:
                self._handles.pop((index, rank), None)
        return self._buffers[index]

    def _handle(self, index: int, rank: int) -> str:
        """One for each member: devices count who has opened each."""
        if (index, rank) not in self._handles:
            handle = platform.current().share(self._buffers[index])
            self._handles[index, rank] = handle.encode().decode()
        return self._handles[index, rank]

    def _await(self, keys: Sequence[str], deadline: Deadline) -> None:
        while not deadline.passed:
            left = min(deadline.left(), datetime.timedelta(seconds=TICK_SECONDS))
            try:
                self._store.wait(list(keys), left)
            except dist.DistStoreError:  # not yet
                for peer, leaving in zip(self._peers, self._leaving, strict=False):
                    peer.check()
                    if self._store.check([leaving]):
                        raise SharedMemoryError(f"process {peer.process} has left") from None
            else:
                return
        raise TransferBrokenError(self.member.group, "the deadline has passed")

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """Tell what goes wrong as the end of this group."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            cause = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TransferBrokenError(self.member.group, cause) from error


def _encode(identity: ProcessIdentity) -> str:
    return f"{identity.process} {identity.started!r} {identity.host}"


def _decode(data: bytes) -> ProcessIdentity:
    process, started, host = data.decode().split(" ", 2)
    return ProcessIdentity(host, int(process), float(started))
