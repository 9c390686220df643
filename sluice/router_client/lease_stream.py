"""All requests for leases that are under way to a router, on one stream."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import grpc

from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.api.router.v1 import router_service_pb2_grpc as pb_grpc
from sluice.runtime import waits
from sluice.runtime.deadlines import Deadlines
from sluice.runtime.errors import RemoteError, error_from_status, typed_errors
from sluice.runtime.idempotency import cancel_all
from sluice.runtime.recovery import is_passing

_STREAM_SECONDS = 3600.0  # then another one
_BYTES = 1 << 18  # of requests, after which a message is full
_OVER = RemoteError(grpc.StatusCode.UNAVAILABLE, "", "the router ended the stream", {})
_CLOSED = RemoteError(grpc.StatusCode.CANCELLED, "", "the stream is closed", {})


Asked = asyncio.Future[pb.AcquireLeasesResponse]  # an answer to come


class _Asked(NamedTuple):
    request: pb.AcquireLeasesRequest
    seconds: float
    future: Asked
    hear: Callable[[Asked], None] | None

    def fail(self, error: Exception) -> None:
        self.future.set_exception(error)
        if self.hear is not None:
            self.hear(self.future)


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
        self._deadlines = Deadlines[int](self._leave)
        self._unsent: list[int] = []
        self._idle: asyncio.Future[None] | None = None  # of a stream with nothing to send
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop
        self._current = object()  # of each stream another one; that of an earlier takes nothing

    def ask(
        self,
        request: pb.AcquireLeasesRequest,
        seconds: float,
        hear: Callable[[Asked], None] | None = None,
    ) -> Asked:
        """Returns the answer to come. It raises RemoteError and StreamRefusedError.

        hear: called with the answer, or the error, as it comes and not a turn of the loop later.
        """
        number = next(self._numbers)
        if self._task is None:
            self._start()
        future: Asked = self._loop.create_future()
        self._asked[number] = _Asked(request, seconds, future, hear)
        self._deadlines.add(number, seconds)
        self._unsent.append(number)
        self.wake()
        if (listed := waits.of_context()) is not None:
            wait = listed.begin("RouterService.AcquireLeases", on=("router",), timeout=seconds)
            future.add_done_callback(lambda _: listed.end(wait))
        return future

    async def close(self) -> None:
        """End the stream; what has no answer fails."""
        if self._task is not None:
            await cancel_all([self._task])
        self._deadlines.close()

    def _start(self) -> None:
        self._loop = asyncio.get_running_loop()  # which is a system call
        # In no one's context: it is no wait of the caller who happens to be first.
        self._task = asyncio.create_task(
            self._stream(), name="stream leases", context=contextvars.Context()
        )

    def _leave(self, number: int) -> None:
        """Leave a stream on which an answer does not come; what else is asked goes on another."""
        late = self._asked.pop(number, None)
        if late is None or late.future.done():
            return
        message = f"no answer in {late.seconds:g} s"
        late.fail(RemoteError(grpc.StatusCode.DEADLINE_EXCEEDED, "", message, {}))
        if self._task is not None:
            self._task.cancel()
        self._task, self._current = None, object()
        if self._asked:
            self._send_again()
            self._start()

    def _send_again(self) -> None:
        self._asked = {n: asked for n, asked in self._asked.items() if not asked.future.done()}
        self._unsent = list(self._asked)
        self.wake()

    def wake(self) -> None:
        """Have the stream look in the next turn of the loop whether there is something to send,
        and whether it is over."""
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

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
        mine = self._current = object()
        try:
            with typed_errors():
                messages = self._messages(mine)
                call = self._stub.StreamLeases(messages, timeout=_STREAM_SECONDS)
                async for response in call:
                    has_answered = True
                    for answer in response.answers[:]:  # half the cost of an iterator
                        self._take(answer)
        except RemoteError as error:
            return error, has_answered
        finally:
            if self._current is mine:  # and not of the next one, which has begun by now
                self._current = object()
            self.wake()  # so that `messages` ends
            if call is not None:
                call.cancel()
        return _OVER, has_answered

    async def _messages(self, mine: object) -> AsyncIterator[pb.StreamLeasesRequest]:
        while self._current is mine:
            if not self._unsent:
                self._idle = self._loop.create_future()
                await self._idle  # for as long as the stream is open
            elif (message := self._next()).requests:
                yield message

    def _next(self) -> pb.StreamLeasesRequest:
        """Takes out what the next message carries."""
        message, size, count = pb.StreamLeasesRequest(), 0, 0
        for count, number in enumerate(self._unsent, 1):
            asked = self._asked.get(number)
            if asked is not None and not asked.future.done():
                entry = message.requests.add()
                entry.number = number
                entry.acquire.CopyFrom(asked.request)
                size += asked.request.ByteSize() if count < len(self._unsent) else 0
            if size > _BYTES:
                break
        del self._unsent[:count]
        return message

    def _take(self, answer: pb.StreamedLeaseAnswer) -> None:
        asked = self._asked.pop(answer.number, None)
        if asked is None or asked.future.done():
            return
        self._deadlines.remove(answer.number)
        if answer.HasField("error"):
            asked.fail(error_from_status(answer.error))
        else:
            asked.future.set_result(answer.leases)
            if asked.hear is not None:
                asked.hear(asked.future)

    def _fail(self, error: RemoteError) -> None:
        asked_before, self._asked = self._asked, {}
        for asked in asked_before.values():
            if not asked.future.done():
                parts = error.code, error.reason, error.message, error.metadata
                same = RemoteError(*parts, error.retry_seconds)
                asked.fail(same if is_passing(error) else StreamRefusedError(same))
        self._deadlines.close()
        self._unsent.clear()
