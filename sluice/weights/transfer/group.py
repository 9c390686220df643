"""Process groups of a transfer: a sender and the engines, apart from all others of a process.

Every process group is used by one thread at a time. Calls block until the deadline at most.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from sluice.weights.errors import TransferBrokenError
from sluice.weights.transfer.plan import Membership


class Deadline:
    """Seconds that are left of a budget."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> datetime.timedelta:
        """At least a millisecond: torch takes 0 for no limit."""
        return datetime.timedelta(seconds=max(0.001, self._end - time.monotonic()))

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end


class Meeting:
    """The sender's end: a store at a free port, until closed.

    It listens on `host` only and asks nobody who they are; torch's own would listen everywhere.
    """

    def __init__(self, host: str, world_size: int, seconds: float) -> None:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]  # IPv4 or IPv6
        listener = socket.create_server((host, 0), family=family)
        port = listener.getsockname()[1]
        self.address = f"{host}:{port}"
        self._world_size = world_size
        self._store: dist.TCPStore | None = dist.TCPStore(
            host,
            port,
            world_size,
            is_master=True,
            timeout=datetime.timedelta(seconds=seconds),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def join(self, group: str, backend: str, deadline: Deadline) -> TransferGroup:
        """Be rank 0 of `group`; returns when all have come. Raises TransferBrokenError."""
        assert self._store is not None
        member = Membership(
            address=self.address, group=group, rank=0, world_size=self._world_size, backend=backend
        )
        return TransferGroup(self._store, member, deadline)

    def close(self) -> None:
        """Stop listening."""
        self._store = None


def join_group(member: Membership, deadline: Deadline) -> TransferGroup:
    """Be a receiver; returns when all have come, or, of backends that connect with the first
    broadcast, when the sender's store answers. Raises TransferBrokenError."""
    host, _, port = member.address.rpartition(":")
    with _breaking(member.group):
        store = dist.TCPStore(
            host,
            int(port),
            member.world_size,
            is_master=False,
            timeout=deadline.left(),
            wait_for_workers=False,
        )
    return TransferGroup(store, member, deadline)


class TransferGroup:
    """One process group. Names are unique in a process, also after `close`."""

    def __init__(self, store: dist.Store, member: Membership, deadline: Deadline) -> None:
        self.member = member
        store.set_timeout(deadline.left())
        with _breaking(member.group):
            self._group, _ = distributed_c10d._new_process_group_helper(
                member.world_size,
                member.rank,
                [],
                dist.Backend(member.backend),
                dist.PrefixStore(member.group, store),
                group_name=member.group,  # type: ignore[arg-type]
                timeout=deadline.left(),
            )
            ranks = {rank: rank for rank in range(member.world_size)}
            distributed_c10d._world.pg_group_ranks[self._group] = ranks

    def broadcast(self, flat: torch.Tensor, deadline: Deadline) -> None:
        """Fill `flat` (uint8) from rank 0's. Raises TransferBrokenError."""
        if deadline.passed:
            raise TransferBrokenError(self.member.group, "the deadline has passed")
        with _breaking(self.member.group):
            work = dist.broadcast(flat, group=self._group, group_src=0, async_op=True)
            work.wait(deadline.left())

    def close(self) -> None:
        """Leave; what other threads wait for in it still ends with their deadline."""
        with contextlib.suppress(ValueError, RuntimeError, AssertionError):  # left before
            dist.destroy_process_group(self._group)


@contextlib.contextmanager
def _breaking(group: str) -> Iterator[None]:
    """What torch raises for a peer that is gone, or late, by its name here."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # DistBackendError and its kin are RuntimeErrors
        raise TransferBrokenError(group, str(error).splitlines()[0]) from error
