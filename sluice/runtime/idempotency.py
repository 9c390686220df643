"""What was begun for each request id, so that a repeated call does nothing twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import xxhash
from google.protobuf import message as pb

from sluice.runtime.errors import RequestIdReusedError

T = TypeVar("T")
V = TypeVar("V")
_Answer = tuple[Any]  # of a call that has ended; it may be None


def request_digest(request: pb.Message) -> str:
    """The same for the same request; which message type it is does not count."""
    return xxhash.xxh3_128_hexdigest(request.SerializeToString(deterministic=True))


class RequestTable(Generic[V]):
    """Values by request id; an id that comes with another body is refused.

    A value that is `done` is kept until the weights of newer ones that are exceed `capacity`;
    without a `weigh` each counts as one.
    """

    def __init__(self, capacity: float, weigh: Callable[[V], float] = lambda value: 1) -> None:
        self._capacity, self._weigh = capacity, weigh
        self._running: dict[str, tuple[str, V, float]] = {}  # digest, value and weight
        self._done: OrderedDict[str, tuple[str, V, float]] = OrderedDict()
        self._weight = 0.0  # of the done ones

    def __iter__(self) -> Iterator[V]:
        """Those that are done, oldest first, then those that are not."""
        return iter([value for _, value, _ in (*self._done.values(), *self._running.values())])

    def get(self, request_id: str) -> V | None:
        """The value of the id, whatever its body."""
        entry = self._running.get(request_id) or self._done.get(request_id)
        return None if entry is None else entry[1]

    def find(self, request_id: str, digest: str) -> V | None:
        """The value of the id. Raises RequestIdReusedError if that was for another body."""
        entry = self._running.get(request_id) or self._done.get(request_id)
        if entry is None:
            return None
        check_same_body(request_id, digest, entry[0])
        return entry[1]

    def add(self, request_id: str, digest: str, value: V) -> V:
        """Remember a value that is not done, in the place of an earlier one."""
        self.discard(request_id)
        self._running[request_id] = digest, value, 0.0
        return value

    def keep(self, request_id: str, digest: str, value: V) -> None:
        """Remember a value that is done, in the place of an earlier one."""
        self._running.pop(request_id, None)
        if (former := self._done.pop(request_id, None)) is not None:
            self._weight -= former[2]
        self._done[request_id] = digest, value, (weight := self._weigh(value))
        self._weight += weight
        while self._weight > self._capacity:
            _, (_, _, weight) = self._done.popitem(last=False)
            self._weight -= weight

    def done(self, request_id: str, value: V) -> None:
        """Note that the value of the id is done, unless the id stands for another one by now."""
        entry = self._running.get(request_id)
        if entry is None or entry[1] is not value:
            return
        self.keep(request_id, entry[0], value)

    def discard(self, request_id: str, value: V | None = None) -> None:
        """Forget the id; with a value, only where it still stands for that one."""
        for entries in (self._running, self._done):
            entry = entries.get(request_id)
            if entry is None or (value is not None and entry[1] is not value):
                continue
            del entries[request_id]
            self._weight -= entry[2]


def share_of(
    max_bytes: int, capacity: int, answer_of: Callable[[V], object]
) -> Callable[[V], float]:
    """The weight that keeps at most `capacity` answers and their bytes; never fewer than one."""

    least = max_bytes // capacity

    def weigh(value: V) -> float:
        answer = answer_of(value)
        size = answer.ByteSize() if isinstance(answer, pb.Message) else 0
        return least if size <= least else min(max_bytes, size)

    return weigh


def check_same_body(request_id: str, digest: str, known: str) -> None:
    """Raises RequestIdReusedError where the digests of two requests of one id differ."""
    if digest != known:
        raise RequestIdReusedError(
            f"request_id {request_id} was used for another request", request_id=request_id
        )


def has_failed(task: asyncio.Future[Any]) -> bool:
    """Whether a task has ended without a result."""
    return task.done() and (task.cancelled() or task.exception() is not None)


async def cancel_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel those that still run and wait for their end."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Runs what must not be left half done: cancelled, it is waited for before that is raised."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await settle(task)
        raise


async def settle(task: asyncio.Future[Any]) -> None:
    """Waits for the end of a task, however often the caller is cancelled meanwhile."""
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([task])


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs all at once; the results in order. A failure or a cancellation ends the others too."""
    tasks = [asyncio.create_task(part) for part in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


def _answer_of(call: asyncio.Future[Any] | _Answer) -> object:
    return call[0] if isinstance(call, tuple) else None


class RequestLog:
    """Runs each request id once; repeats share its result, also while it still runs.

    Failures are not remembered, so that a retry runs again. Of finished calls the answers alone
    are kept: the last `capacity`, and those of no more than `max_bytes`.
    """

    def __init__(self, capacity: int = 1024, max_bytes: int = 1 << 24) -> None:
        # Of each id the task that runs, or its answer without that: a task holds all that its
        # caller held.
        self._calls: RequestTable[asyncio.Future[Any] | _Answer] = RequestTable(
            max_bytes, weigh=share_of(max_bytes, capacity, _answer_of)
        )

    async def once(
        self, request_id: str, request: pb.Message, run: Callable[[], Awaitable[T]]
    ) -> T:
        """The result of `run()`, which runs once for this id.

        Raises RequestIdReusedError when the id came before with another body.
        """
        if not request_id:
            return await run()
        digest = request_digest(request)
        call = self._calls.find(request_id, digest)
        if call is None:
            call = task = asyncio.ensure_future(run())
            self._calls.add(request_id, digest, task)
            task.add_done_callback(lambda done: self._settle(request_id, digest, done))
        # A caller that goes away must not cancel the work others wait for.
        result: T = call[0] if isinstance(call, tuple) else await asyncio.shield(call)
        return result

    def once_now(self, request_id: str, request: pb.Message, run: Callable[[], T]) -> T:
        """As `once`, for work without an await: no call can come while it runs."""
        if not request_id:
            return run()
        digest = request_digest(request)
        call = self._calls.find(request_id, digest)
        if call is None:
            answer = run()
            self._calls.keep(request_id, digest, (answer,))
            return answer
        assert isinstance(call, tuple), "work that waits has other requests"
        known: T = call[0]
        return known

    async def close(self) -> None:
        """Cancel what still runs and wait for its end."""
        await cancel_all([call for call in self._calls if not isinstance(call, tuple)])

    def _settle(self, request_id: str, digest: str, task: asyncio.Future[Any]) -> None:
        if has_failed(task):
            self._calls.discard(request_id, task)
        else:
            self._calls.keep(request_id, digest, (task.result(),))
