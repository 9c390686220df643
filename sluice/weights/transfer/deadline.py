"""How long the members of a transfer wait for each other."""

from __future__ import annotations

import datetime
import time


class Deadline:
    """Seconds that are left of a budget."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> datetime.timedelta:
        """At least a millisecond: torch takes 0 for no limit."""
        return datetime.timedelta(seconds=max(0.001, self._end - time.monotonic()))

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end
