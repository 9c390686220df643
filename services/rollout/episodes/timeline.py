"""Where the time of a group's episodes goes, gathered while they run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from services.rollout.engine import Delta
from sluice.api.rollout.v1 import trace_pb2 as pb

ALL = -1  # in place of an episode
SHORTEST_SECONDS = 1e-6  # what is shorter counts for the next span


class Timeline:
    """Spans that follow each other: each one begins where the episode's last one ended.

    So the spans of an episode add up to its time from the begin of the group to its last mark.
    """

    def __init__(self, episode_count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start_time, self._zero = time.time(), clock()
        self._ends = [0.0] * episode_count
        self._places: dict[str, int] = {}
        self._kinds: list[pb.SpanKind] = []
        self._episodes: list[int] = []
        self._spots: list[int] = []
        self._starts: list[float] = []
        self._durations: list[float] = []

    def now(self) -> float:
        """Seconds since the group began."""
        return self._clock() - self._zero

    def mark(self, kind: pb.SpanKind, place: str, episodes: Iterable[int] | None = None) -> None:
        """What these episodes (default: all) did until now."""
        now = self.now()
        if episodes is None and len(set(self._ends)) == 1:  # one span for all
            self._add(kind, place, 0, now, shared=True)
            self._ends = [now] * len(self._ends)
            return
        for episode in range(len(self._ends)) if episodes is None else episodes:
            self._add(kind, place, episode, now)

    def sampled(self, place: str, episode: int, delta: Delta) -> None:
        """An answer came from the engine `place`, where it was since its last mark.

        What the engine does not account for is left to the next mark.
        """
        now, timing = self.now(), delta.timing
        if timing is None:
            self._add(pb.SPAN_KIND_GENERATE, place, episode, now)
            return
        for kind, seconds in (
            (pb.SPAN_KIND_QUEUE, timing.queue),
            (pb.SPAN_KIND_PREFILL, timing.prefill),
            (pb.SPAN_KIND_DECODE, timing.decode),
        ):
            self._add(kind, place, episode, min(now, self._ends[episode] + seconds))

    def to_proto(self) -> pb.GroupTrace:
        trace = pb.GroupTrace(
            place_names=self._places,
            kinds=self._kinds,
            episodes=self._episodes,
            places=self._spots,
            starts=self._starts,
            durations=self._durations,
        )
        trace.start_time.FromNanoseconds(int(self._start_time * 1e9))
        return trace

    def _add(
        self, kind: pb.SpanKind, place: str, episode: int, end: float, *, shared: bool = False
    ) -> None:
        start = self._ends[episode]
        if end - start < SHORTEST_SECONDS:
            return
        self._kinds.append(kind)
        self._episodes.append(ALL if shared else episode)
        self._spots.append(self._places.setdefault(place, len(self._places)))
        self._starts.append(start)
        self._durations.append(end - start)
        self._ends[episode] = end
