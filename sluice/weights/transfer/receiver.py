"""A receiver's groups on a thread of their own, so that a broken one holds up nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from sluice.weights.errors import TransferBrokenError
from sluice.weights.transfer.exchange import receive
from sluice.weights.transfer.group import Deadline, TransferGroup, join_group
from sluice.weights.transfer.plan import Bucket, Membership

T = TypeVar("T")


class Receiver:
    """One membership. After an error it is of no use: close it and make another.

    `close` ends what is waited for at once; the thread ends with the deadline that it has.
    """

    def __init__(self, initializer: Callable[[], None] = lambda: None) -> None:
        """`initializer` runs first on the thread."""
        self._thread = ThreadPoolExecutor(1, "weight-receiver", initializer=initializer)
        self._groups: list[TransferGroup] = []
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
        """What `use`, on the thread, makes of the tensors; see `exchange.receive`."""
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
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            running.add_done_callback(_ignore)
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
