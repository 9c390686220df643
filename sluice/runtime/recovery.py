"""Waiting and trying again: after which failures, with which pauses, and until when."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import grpc

from sluice.runtime import waits
from sluice.runtime.errors import RemoteError

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Codes of a server that is down, starting, stopping or too slow: the same call may succeed later.
PASSING = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,  # a server that stops ends its calls so
        grpc.StatusCode.UNKNOWN,  # one that dies while it answers
    }
)
FEWEST_FAILURES = 5  # before giving up: of long calls two may fail for two reasons
LONGEST_PAUSE = 2.0  # seconds between two tries while something is down
USUAL_SECONDS = 3.0  # a longer wait is explained in the log


def is_passing(error: RemoteError | grpc.aio.AioRpcError) -> bool:
    """Whether the same call may succeed later, for all its code says."""
    code = error.code if isinstance(error, RemoteError) else error.code()
    return code in PASSING


@dataclass(frozen=True)
class Backoff:
    """Pauses that double with each failure in a row: from `first` to `longest` seconds.

    scatter: share by which a pause may be longer, drawn at random, so that callers which failed
    together do not come back together.
    """

    first: float
    longest: float
    scatter: float = 0.0

    def seconds(self, failures: int, rng: random.Random | None = None) -> float:
        """The pause after `failures` in a row, at least one."""
        doublings = min(max(failures, 1) - 1, 60)
        pause = min(self.longest, self.first * 2.0**doublings)
        if not self.scatter:
            return pause
        return pause * (1.0 + (rng or random).uniform(0.0, self.scatter))


class Retries:
    """Paces the tries of work that fails because something else is down.

    Gives up by raising `failure` once failures in a row have lasted for `seconds`.
    """

    def __init__(self, seconds: float, failure: Callable[[str], Exception]) -> None:
        self._seconds, self._failure = seconds, failure
        self._backoff = Backoff(first=0.2, longest=min(LONGEST_PAUSE, seconds / FEWEST_FAILURES))
        self._count = 0
        self._since = 0.0

    def succeeded(self) -> None:
        """Notes that the row of failures has ended."""
        self._count = 0

    async def pause(self, reason: str, at_least: float = 0.0) -> None:
        """Waits before the next try, for `at_least` so many seconds; `reason` is of the last."""
        now = time.monotonic()
        if not self._count:
            self._since = now
        if self._count >= FEWEST_FAILURES and now - self._since > self._seconds:
            raise self._failure(f"nothing went on for {now - self._since:.0f} s: {reason}")
        self._count += 1
        with waits.waiting("another try", timeout=self._seconds, explain=lambda: reason):
            await asyncio.sleep(max(at_least, self._backoff.seconds(self._count)))


class NotReadyError(Exception):
    """Raised by a probe of `wait_until_ready`; the message says what is missing."""


async def wait_until_ready(
    what: str,
    probe: Callable[[], Awaitable[T]],
    seconds: float,
    failure: Callable[[str], Exception],
    *,
    every: float = 0.2,
    usual_seconds: float = USUAL_SECONDS,
) -> T:
    """Calls `probe` every so many seconds until it returns, and returns what it does.

    It raises NotReadyError, or a RemoteError that may pass, to be called again; the reason is
    logged once after `usual_seconds`. Raises `failure` after `seconds`, and what else it raises.
    """
    reason, explained_at = "no answer", time.monotonic() + usual_seconds
    listed = waits.waiting(what, timeout=seconds, explain=lambda: reason)
    try:
        with listed:
            async with asyncio.timeout(seconds) as limit:
                while True:
                    try:
                        return await probe()
                    except (NotReadyError, RemoteError) as error:
                        if isinstance(error, RemoteError) and not is_passing(error):
                            raise
                        reason = str(error)
                    if time.monotonic() > explained_at:
                        explained_at = float("inf")
                        logger.warning("waiting for %s: %s", what, reason)
                    await asyncio.sleep(every)
    except TimeoutError:
        if not limit.expired():  # the probe's own
            raise
        raise failure(f"{what} was not ready in {seconds:g} s: {reason}") from None
