"""Who has what in a bucket, which has no locks: a loop that claims it, and shows that it lives.

A claim is an entry of a log whose numbers have no gaps, written on the condition that its number
is new. Beside it lies an object that changes while its loop lives. A loop that has been silent for
long enough is taken for dead: another one claims what it had, which it meets if it lives yet.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Protocol

from sluice.loop.run_directory import RunDirectoryError
from sluice.runtime import waits

logger = logging.getLogger(__name__)

TAKEOVER_SECONDS = 30.0  # of silence
BEATS = 6  # in the time after which a silent loop is taken for dead
OVER = b"over"  # the last beat of a loop that ended


class RunTakenError(RunDirectoryError):
    """Another loop trains this run, or drives its trainer, or has taken over; the message names
    it."""


class Beating(Protocol):
    """What shows in a bucket that its owner lives. Calls block, and raise RunDirectoryError."""

    url: str

    @property
    def beat_seconds(self) -> float:
        """Seconds between two signs of life."""
        ...

    def beat(self, count: int) -> None:
        """Show that the owner lives. Raises RunTakenError once there is a newer claim."""
        ...

    def end(self) -> None:
        """Let go: another loop need not wait."""
        ...


class Watched(Protocol):
    """A log of claims. Calls block, and raise RunDirectoryError."""

    url: str

    @property
    def beat_seconds(self) -> float:
        """Seconds between two signs of life of this loop."""
        ...

    def sign_of_life(self, claim: int) -> bytes | None:
        """What the owner of a claim has written last to show that it lives."""
        ...


@asynccontextmanager
async def shown_alive(claim: Beating) -> AsyncIterator[None]:
    """Show that this loop lives while the block lasts.

    Raises RunTakenError out of the block, wherever it waits, once another loop has taken over.
    """
    whole, taken = asyncio.current_task(), list[RunTakenError]()
    assert whole is not None

    async def beat() -> None:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "beat") as thread:  # no long work of others is before it
            for count in itertools.count():
                try:
                    await loop.run_in_executor(thread, claim.beat, count)
                except RunTakenError as error:
                    taken.append(error)
                    whole.cancel()
                    return
                except RunDirectoryError as error:
                    logger.warning("no sign of life: %s", error)
                await asyncio.sleep(claim.beat_seconds)

    beating = asyncio.create_task(beat(), name="show that this loop lives")
    try:
        yield
    except asyncio.CancelledError:
        if taken and whole.uncancel() == 0:
            raise taken[0] from None
        raise
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await asyncio.to_thread(claim.end)


async def wait_for_silence(
    log: Watched, number: int, takeover_seconds: float, whom: str, refusal: str
) -> None:
    """Wait until the loop of the claim `number` is seen to be dead, which says itself after how
    many seconds of silence it is.

    Raises RunTakenError, with `refusal`, for one that lives. No clock of another host is asked: it
    is looked at for so long.
    """
    before = await asyncio.to_thread(log.sign_of_life, number)
    seconds = max(log.beat_seconds * BEATS, takeover_seconds)
    looks = math.ceil(2 * seconds / log.beat_seconds)  # counted: a host may stop, with both
    with waits.waiting(f"a sign of life of {whom}", timeout=seconds, on=lambda: [log.url]):
        while before != OVER and looks:
            looks -= 1
            await asyncio.sleep(log.beat_seconds / 2)
            now = await asyncio.to_thread(log.sign_of_life, number)
            if now not in (before, OVER):
                raise RunTakenError(refusal)
            before = now
