"""What this process is waiting for, so that a hang explains itself."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field

from prometheus_client import Gauge

from sluice.api.common.v1 import wait_service_pb2 as pb
from sluice.api.common.v1 import wait_service_pb2_grpc as pb_grpc
from sluice.runtime.wire import duration_of, seconds_of, timestamp_of

Names = Sequence[str] | Callable[[], Sequence[str]]

WAITS = Gauge("sluice_waits", "Things this process waits for.")
OLDEST_WAIT = Gauge("sluice_oldest_wait_seconds", "Age of the oldest thing it waits for.")
_listed: weakref.WeakSet[Waits] = weakref.WeakSet()


@dataclass(eq=False)
class Wait:
    """One thing waited for. `on` and `explain` may be callables: they are asked at listing."""

    what: str
    on: Names = ()
    timeout: float | None = None  # seconds
    explain: Callable[[], str] = lambda: ""
    began: float = field(default_factory=time.monotonic)  # clocks are set back now and then

    def to_proto(self) -> pb.Wait:
        names = self.on() if callable(self.on) else self.on
        age = time.monotonic() - self.began
        start = time.time() - age
        return pb.Wait(
            what=self.what,
            on=names,
            explanation=self.explain(),
            start_time=timestamp_of(start),
            deadline_time=None if self.timeout is None else timestamp_of(start + self.timeout),
            age=duration_of(age),
        )


def age_of(wait: pb.Wait) -> float:
    """Seconds since a wait that a process listed began."""
    return (
        seconds_of(wait.age) if wait.HasField("age") else time.time() - seconds_of(wait.start_time)
    )


class Waits(pb_grpc.WaitServiceServicer):
    """The waits of one process; also the servicer that lists them."""

    def __init__(self) -> None:
        self._waits: dict[Wait, None] = {}  # in the order in which they began
        _listed.add(self)

    @contextmanager
    def waiting(
        self,
        what: str,
        *,
        on: Names = (),
        timeout: float | None = None,
        explain: Callable[[], str] = lambda: "",
    ) -> Iterator[Wait]:
        """Listed while the block runs; `timeout` in seconds only informs, the block keeps it."""
        wait = self.begin(what, on=on, timeout=timeout, explain=explain)
        try:
            yield wait
        finally:
            self.end(wait)

    def begin(
        self,
        what: str,
        *,
        on: Names = (),
        timeout: float | None = None,
        explain: Callable[[], str] = lambda: "",
    ) -> Wait:
        """List a wait until `end`; for what is no block."""
        wait = Wait(what, on, timeout, explain)
        self._waits[wait] = None
        return wait

    def end(self, wait: Wait) -> None:
        """Idempotent: grpc.aio has called back twice for one call that failed."""
        self._waits.pop(wait, None)

    async def ListWaits(
        self, request: pb.ListWaitsRequest, context: object
    ) -> pb.ListWaitsResponse:
        waits = sorted(self._waits, key=lambda wait: wait.began)
        return pb.ListWaitsResponse(waits=[wait.to_proto() for wait in waits])


_of_context: ContextVar[Waits | None] = ContextVar("waits", default=None)


def of_context() -> Waits | None:
    """Where calls to other services are listed that are made here; None lists them nowhere."""
    return _of_context.get()


@contextmanager
def listed_in(waits: Waits) -> Iterator[None]:
    """List the calls that the block makes to other services, and the tasks that it starts."""
    token = _of_context.set(waits)
    try:
        yield
    finally:
        _of_context.reset(token)


def waiting(
    what: str,
    *,
    on: Names = (),
    timeout: float | None = None,
    explain: Callable[[], str] = lambda: "",
) -> AbstractContextManager[object]:
    """`Waits.waiting` among those of the context, if it has any."""
    if (waits := of_context()) is None:
        return nullcontext()
    return waits.waiting(what, on=on, timeout=timeout, explain=explain)


def oldest() -> Wait | None:
    """What this process waits for since longest, among what any of its tasks lists."""
    return min(_all(), key=lambda wait: wait.began, default=None)


def _all() -> list[Wait]:
    return [wait for waits in list(_listed) for wait in list(waits._waits)]


WAITS.set_function(lambda: len(_all()))
OLDEST_WAIT.set_function(
    lambda: max((time.monotonic() - wait.began for wait in _all()), default=0.0)
)
