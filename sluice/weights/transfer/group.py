"""Process groups of a transfer: a sender and the engines, apart from all others of a process.

Every process group is used by one thread at a time. Calls block until the deadline at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from sluice import faults, platform
from sluice.address import join_address, plain_host, split_address
from sluice.weights.dtypes import TORCH_DTYPES
from sluice.weights.errors import TensorDigestError, TransferBrokenError
from sluice.weights.manifest import digest_bytes
from sluice.weights.transfer.deadline import Deadline
from sluice.weights.transfer.handles import HandleGroup
from sluice.weights.transfer.plan import HANDLES, Bucket, Membership

OPEN_PORTS = (
    (
        "where the members of a collective weight transfer meet, and its collectives",
        "the host that `server.advertise` names, free ports",
        "nothing: libraries open them, for as long as the transfer lasts",
    ),
)


class Meeting:
    """The sender's end: a store at a free port, until closed.

    It listens on `host` only and asks nobody who they are; torch's own would listen everywhere.
    """

    def __init__(self, host: str, world_size: int, seconds: float) -> None:
        host = plain_host(host)
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]  # IPv4 or IPv6
        listener = socket.create_server((host, 0), family=family)
        port = listener.getsockname()[1]
        self.address = join_address(host, port)
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

    def join(self, group: str, backend: str, deadline: Deadline) -> MemberGroup:
        """Be rank 0 of `group`; returns when all have come. Raises TransferBrokenError."""
        assert self._store is not None
        member = Membership(
            address=self.address, group=group, rank=0, world_size=self._world_size, backend=backend
        )
        return _create_group(self._store, member, deadline)

    def close(self) -> None:
        """Stop listening."""
        self._store = None


def join_group(member: Membership, deadline: Deadline) -> MemberGroup:
    """Be a receiver; returns when all have come, or, of backends that connect with the first
    broadcast, when the sender's store answers. Raises TransferBrokenError."""
    host, port = split_address(member.address)
    with _breaking(member.group):
        store = dist.TCPStore(
            host,
            int(port),
            member.world_size,
            is_master=False,
            timeout=deadline.left(),
            wait_for_workers=False,
        )
    return _create_group(store, member, deadline)


class MemberGroup(Protocol):
    """Members of a transfer that have met: rank 0 sends, the others receive."""

    def broadcast(self, flat: torch.Tensor, deadline: Deadline) -> None:
        """Fill `flat` (uint8) from rank 0's. Raises TransferBrokenError."""

    def close(self) -> None:
        """Leave."""


def _create_group(store: dist.Store, member: Membership, deadline: Deadline) -> MemberGroup:
    kind = HandleGroup if member.backend == HANDLES else TransferGroup
    return kind(store, member, deadline)


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
    """Translate what torch raises for a peer that is gone, or late."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # DistBackendError and its kin are RuntimeErrors
        raise TransferBrokenError(group, str(error).splitlines()[0]) from error


def send(
    group: MemberGroup,
    buckets: Sequence[Bucket],
    read: Callable[[Bucket], torch.Tensor],
    deadline: Deadline,
) -> int:
    """Broadcast `buckets`, whose bytes `read` gives as uint8[size] on the host; bytes sent.

    Raises TransferBrokenError.
    """
    device = platform.current().device()
    for bucket in buckets:
        group.broadcast(read(bucket).to(device), deadline)
        faults.point("transfer.sent")
    return sum(bucket.size for bucket in buckets)


def receive(
    senders: Sequence[tuple[MemberGroup, Sequence[Bucket]]], deadline: Deadline
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of every sender, on the device, as views of memory that a bucket shares.

    Each is digested, but broadcasts go on after a wrong one, for the sake of the other members:
    serve the tensors only after the iterator has ended without TensorDigestError (which names
    the first wrong one) or TransferBrokenError.
    """
    device = platform.current().device()
    wrong: TensorDigestError | None = None
    for group, buckets in senders:
        for bucket in buckets:
            flat = torch.empty(bucket.size, dtype=torch.uint8, device=device)
            group.broadcast(flat, deadline)
            faults.point("transfer.received")
            host = flat.cpu().numpy().data
            for piece in bucket.pieces:
                actual = digest_bytes(host[piece.begin : piece.end])
                if actual != piece.digest:
                    wrong = wrong or TensorDigestError(piece.name, piece.digest, actual)
                tensor = flat[piece.begin : piece.end].view(TORCH_DTYPES[piece.dtype])
                yield piece.name, tensor.reshape(piece.shape)
    if wrong is not None:
        raise wrong


T = TypeVar("T")


class Receiver:
    """One membership. After an error it is of no use: close it and make another.

    `close` ends what is waited for at once; the thread ends with the deadline that it has.
    """

    def __init__(self, initializer: Callable[[], None] = lambda: None) -> None:
        """`initializer` runs first on the thread."""
        self._thread = ThreadPoolExecutor(1, "weight-receiver", initializer=initializer)
        self._groups: list[MemberGroup] = []
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def join(self, members: Sequence[Membership], seconds: float) -> None:
        """Meet the other members of each group. Raises TransferBrokenError."""
        await self._run(self._join, members, Deadline(seconds))

    async def receive(
        self,
        buckets: Sequence[Sequence[Bucket]],
        seconds: float,
        use: Callable[[Iterator[tuple[str, torch.Tensor]]], T],
    ) -> T:
        """Return what `use`, on the thread, makes of the tensors; see `receive` of this module."""
        return await self._run(self._receive, buckets, Deadline(seconds), use)

    def close(self) -> None:
        """Leave the groups; does not wait."""
        if not self._closed.done():
            self._closed.set_result(None)
            self._thread.submit(self._leave)
            self._thread.shutdown(wait=False)

    async def _run(self, call: Callable[..., T], *arguments: object) -> T:
        running = asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)
        either: list[asyncio.Future[Any]] = [running, self._closed]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:  # also where the caller went away
            if not running.done():
                running.add_done_callback(_ignore)
        if not running.done():
            raise TransferBrokenError("", "it was left")
        return running.result()

    def _join(self, members: Sequence[Membership], deadline: Deadline) -> None:
        for member in members:
            self._groups.append(join_group(member, deadline))

    def _receive(
        self,
        buckets: Sequence[Sequence[Bucket]],
        deadline: Deadline,
        use: Callable[[Iterator[tuple[str, torch.Tensor]]], T],
    ) -> T:
        return use(receive(list(zip(self._groups, buckets, strict=True)), deadline))

    def _leave(self) -> None:
        for group in self._groups:
            group.close()
        self._groups = []


def _ignore(running: asyncio.Future[Any]) -> None:
    """Nobody waits any more for what it comes to."""
    if not running.cancelled():
        running.exception()
