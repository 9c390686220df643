"""Ids that were given back although this router did not know them.

A renewal that was on its way while its lease was given back must not charge it again. Ids
granted here are covered by the lease table; these are the others, remembered for a while.
"""

from __future__ import annotations

from collections.abc import Iterable

_LIMIT = 200_000


class ReturnedIds:
    """Remembers an id for one to two `keep_seconds`."""

    def __init__(self, keep_seconds: float) -> None:
        self._keep = keep_seconds
        self._turned = 0.0
        self._newer: set[int] = set()
        self._older: set[int] = set()

    def __contains__(self, lease: int) -> bool:
        return lease in self._newer or lease in self._older

    def add(self, ids: Iterable[int]) -> None:
        if len(self._newer) < _LIMIT:
            self._newer.update(ids)

    def turn(self, now: float) -> None:
        """Forget the older half when its time is over."""
        if now - self._turned >= self._keep:
            self._older, self._newer, self._turned = self._newer, set(), now
