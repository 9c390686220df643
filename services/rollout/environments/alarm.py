"""Ends the judging of an answer that takes too long, in libraries that know no limit.

By a signal, so only in the main thread of a process of its own.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, TypeVar

from pydantic import Field

from sluice.config import Config

T = TypeVar("T")

SHORTEST_SECONDS = 0.5  # for an answer, once its group had all its time


class JudgingTime(Config):
    """`seconds`: for judging one answer; then it is wrong.

    Where a group takes longer than `group_seconds`, each answer that is left has half a second, so
    that it costs those their reward and not the group's.
    """

    seconds: int = Field(5, ge=1, le=3600)
    group_seconds: float = Field(20.0, gt=0, le=3600)


class _Rung(BaseException):
    """The time of an answer is over. No Exception, for libraries catch those."""


class Alarm:
    """Judges the answers of a group, one after another."""

    def __init__(self, limits: JudgingTime) -> None:
        self._seconds = limits.seconds
        self._end = time.monotonic() + limits.group_seconds

    def within(self, work: Callable[[], T], otherwise: T) -> T:
        """Returns what `work` does, or `otherwise` where that takes too long."""
        left = max(self._end - time.monotonic(), SHORTEST_SECONDS)
        former = signal.signal(signal.SIGALRM, _ring)
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, min(self._seconds, left))
                return work()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except _Rung:
            return otherwise
        finally:
            signal.signal(signal.SIGALRM, former)


def _ring(number: int, frame: FrameType | None) -> NoReturn:
    raise _Rung
