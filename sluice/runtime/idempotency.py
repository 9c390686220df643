"""At-most-once execution of calls that carry a request_id."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import xxhash
from google.protobuf import message as pb

from sluice.runtime.errors import RequestIdReusedError

T = TypeVar("T")


@dataclass(frozen=True)
class _Call:
    body: str
    task: asyncio.Task[Any]


def _digest(request: pb.Message) -> str:
    return xxhash.xxh3_128_hexdigest(request.SerializeToString(deterministic=True))


class RequestLog:
    """Runs each request id once; repeats share its result, also while it still runs.

    Failures are not remembered, so that a retry runs again. The last `capacity` finished
    calls are kept.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._calls: OrderedDict[str, _Call] = OrderedDict()

    async def once(
        self, request_id: str, request: pb.Message, run: Callable[[], Awaitable[T]]
    ) -> T:
        """The result of `run()`, which runs once for this id.

        Raises RequestIdReusedError when the id came before with another body.
        """
        if not request_id:
            return await run()
        body = _digest(request)
        call = self._calls.get(request_id)
        if call is None:
            task = asyncio.ensure_future(run())
            call = self._calls[request_id] = _Call(body, task)
            task.add_done_callback(lambda done: self._forget_failure(request_id, done))
            self._trim()
        elif call.body != body:
            raise RequestIdReusedError(
                f"request_id {request_id} was used for another request", request_id=request_id
            )
        # A caller that goes away must not cancel the work others wait for.
        result: T = await asyncio.shield(call.task)
        return result

    async def close(self) -> None:
        """Cancel what still runs and wait for its end."""
        running = [call.task for call in self._calls.values() if not call.task.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _forget_failure(self, request_id: str, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._calls.pop(request_id, None)

    def _trim(self) -> None:
        """Drop the oldest finished calls beyond the capacity."""
        excess = len(self._calls) - self._capacity
        if excess <= 0:
            return
        done = (key for key, call in self._calls.items() if call.task.done())
        for request_id in list(itertools.islice(done, excess)):
            del self._calls[request_id]
