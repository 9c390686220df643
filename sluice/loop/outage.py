"""How long a run puts up with services that are down."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from sluice.client import RemoteError
from sluice.loop.filters import FilterError

_LONGEST_PAUSE = 2.0  # seconds between two tries while something is down
_FEWEST_FAILURES = 5  # of long calls two may fail for two reasons


class RolloutFailedError(Exception):
    """Rollouts cannot go on; the message says why."""


@dataclass
class Outage:
    """Failures in a row that are nobody's fault but of what is down."""

    patience_seconds: float
    count: int = 0
    since: float = 0.0

    def end(self) -> None:
        self.count = 0

    async def endure(self, error: str, retry_seconds: float = 0.0) -> None:
        """Wait a moment. Raises RolloutFailedError when it has lasted too long."""
        now = time.monotonic()
        if not self.count:
            self.since = now
        if self.count >= _FEWEST_FAILURES and now - self.since > self.patience_seconds:
            raise RolloutFailedError(f"nothing went on for {now - self.since:.0f} s: {error}")
        self.count += 1
        longest = min(_LONGEST_PAUSE, self.patience_seconds / _FEWEST_FAILURES)
        await asyncio.sleep(max(retry_seconds, min(longest, 0.1 * 2 ** min(self.count, 5))))


def told(error: BaseException) -> str:
    """Of an exception that nobody foresaw the type says more than the text."""
    foreseen = isinstance(error, RolloutFailedError | RemoteError | FilterError)
    return str(error) if foreseen else f"{type(error).__name__}: {error}"
