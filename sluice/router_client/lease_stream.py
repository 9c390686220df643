"""All requests for leases that are under way to a router, on one stream."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.api.router.v1 import router_service_pb2_grpc as pb_grpc
from sluice.runtime import waits
from sluice.runtime.errors import RemoteError, error_from_status, typed_errors
from sluice.runtime.idempotency import cancel_all
from sluice.runtime.recovery import is_passing

_STREAM_SECONDS = 3600.0  # then another one
_BYTES = 1 << 18  # of requests, after which a message is full
_OVER = RemoteError(grpc.StatusCode.UNAVAILABLE, "", "the router ended the stream", {})
_CLOSED = RemoteError(grpc.StatusCode.CANCELLED, "", "the stream is closed", {})


@dataclass(frozen=True, eq=False, slots=True)
class _Asked:
    request: pb.AcquireLeasesRequest
    future: asyncio.Future[pb.StreamedLeaseAnswer]


class StreamRefusedError(Exception):
    """The stream ended with `error`, which says nothing of this one request."""

    def __init__(self, error: RemoteError) -> None:
        super().__init__(str(error))
        self.error = error


class LeaseStream:
    """Opens when something is asked; what is asked while a message leaves goes with the next one.

    A stream that breaks is opened anew, and all that has no answer is sent again: requests have
    ids by which they count once. Should nothing be answered there either, all of them fail.
    """

    def __init__(self, stub: pb_grpc.RouterServiceStub) -> None:
        self._stub = stub
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Asked] = {}  # without an answer
        self._unsent: list[int] = []
        self._has_unsent = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._current = object()  # of each stream another one; that of an earlier takes nothing

    async def acquire(
        self, request: pb.AcquireLeasesRequest, seconds: float
    ) -> pb.AcquireLeasesResponse:
        """Returns the answer to a request. Raises RemoteError and StreamRefusedError."""
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[pb.StreamedLeaseAnswer] = loop.create_future()
        self._asked[number] = _Asked(request, future)
        self._unsent.append(number)
        self._has_unsent.set()
        if self._task is None:
            self._start()
        limit = loop.call_later(seconds, self._leave, number, seconds)
        try:
            with waits.waiting("RouterService.AcquireLeases", on=("router",), timeout=seconds):
                answer = await future
        finally:
            limit.cancel()
            self._asked.pop(number, None)
        if answer.HasField("error"):
            raise error_from_status(answer.error)
        return answer.leases

    async def close(self) -> None:
        """End the stream; what has no answer fails."""
        if self._task is not None:
            await cancel_all([self._task])

    def _start(self) -> None:
        # In no one's context: it is no wait of the caller who happens to be first.
        self._task = asyncio.create_task(
            self._stream(), name="stream leases", context=contextvars.Context()
        )

    def _leave(self, number: int, seconds: float) -> None:
        """Leave a stream on which an answer does not come; what else is asked goes on another."""
        late = self._asked.pop(number, None)
        if late is None or late.future.done():
            return
        message = f"no answer in {seconds:g} s"
        late.future.set_exception(RemoteError(grpc.StatusCode.DEADLINE_EXCEEDED, "", message, {}))
        if self._task is not None:
            self._task.cancel()
        self._task, self._current = None, object()
        if self._asked:
            self._send_again()
            self._start()

    def _send_again(self) -> None:
        self._unsent = list(self._asked)
        if self._unsent:
            self._has_unsent.set()

    async def _stream(self) -> None:
        """Keep a stream open as long as it carries answers."""
        error = None
        try:
            while True:
                error, has_answered = await self._carry()
                self._send_again()
                if not (self._asked and has_answered and is_passing(error)):
                    break
        finally:
            if self._task is asyncio.current_task():
                self._task, self._current = None, object()
                self._fail(error or _CLOSED)

    async def _carry(self) -> tuple[RemoteError, bool]:
        """Run one stream to its end; how it ended, and whether there were answers."""
        has_answered, call = False, None
        self._current = object()
        try:
            with typed_errors():
                messages = self._messages(self._current)
                call = self._stub.StreamLeases(messages, timeout=_STREAM_SECONDS)
                async for response in call:
                    has_answered = True
                    for answer in response.answers:
                        self._take(answer)
        except RemoteError as error:
            return error, has_answered
        finally:
            self._current = object()
            self._has_unsent.set()  # so that `messages` ends
            if call is not None:
                call.cancel()
        return _OVER, has_answered

    async def _messages(self, mine: object) -> AsyncIterator[pb.StreamLeasesRequest]:
        while True:
            await self._has_unsent.wait()  # for as long as the stream is open
            if self._current is not mine:
                return
            self._has_unsent.clear()
            while requests := self._next():
                yield pb.StreamLeasesRequest(requests=requests)
                if self._current is not mine:
                    return

    def _next(self) -> list[pb.StreamedLeaseRequest]:
        """Takes out what the next message carries."""
        requests, size, count = [], 0, 0
        for number in self._unsent:
            if size > _BYTES:
                break
            count += 1
            if (asked := self._asked.get(number)) is not None:
                requests.append(pb.StreamedLeaseRequest(number=number, acquire=asked.request))
                size += requests[-1].ByteSize()
        del self._unsent[:count]
        return requests

    def _take(self, answer: pb.StreamedLeaseAnswer) -> None:
        asked = self._asked.get(answer.number)
        if asked is not None and not asked.future.done():
            asked.future.set_result(answer)

    def _fail(self, error: RemoteError) -> None:
        for asked in self._asked.values():
            if not asked.future.done():
                parts = error.code, error.reason, error.message, error.metadata
                same = RemoteError(*parts, error.retry_seconds)
                asked.future.set_exception(same if is_passing(error) else StreamRefusedError(same))
        self._unsent.clear()
        self._has_unsent.clear()
