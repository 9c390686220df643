"""Records passes of the reference engine, on the thread that runs them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from services.rollout.engine.interface import EngineProfile, ProfileOrder
from services.rollout.engine.reference.core import EngineCore
from sluice.profiler import ProfileError, Recording

logger = logging.getLogger(__name__)


class PassProfiler:
    """Records passes of a core. All but `profile` belongs to the thread that runs them.

    What goes wrong, also in the profiler of torch, is logged and told in `profile`, not raised. So
    is why it ends early where the host's memory would not do for more of it.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._order: ProfileOrder | None = None
        self._recording: Recording | None = None
        self._left = 0
        self._early = ""  # why it ends before all passes are recorded
        self.profile: EngineProfile | None = None  # that was asked for last

    def begin(self, order: ProfileOrder) -> EngineProfile:
        """Records from the next pass on, in place of what is recorded."""
        self.drop("another profile was asked for")
        self._order, self._left, self._early = order, order.pass_count, ""
        self.profile = EngineProfile(
            name=order.name, directory=order.directory, left_count=order.pass_count
        )
        self._core.passing = self._passing
        return self.profile

    @property
    def is_complete(self) -> bool:
        """Whether all passes that are to come are recorded and none is written."""
        return self._recording is not None and not self._left

    def write(self) -> None:
        """Writes what is recorded; takes as long as that does."""
        order, recording = self._end()
        assert order is not None
        assert recording is not None
        try:
            files = recording.write(order.directory, order.prefix)
        except ProfileError as error:
            self._fail(order, error)
            return
        self._tell(left_count=0, files=tuple(sorted(files)), failure=self._early)
        logger.info("profile %s is in %s", order.name, order.directory)

    def drop(self, why: str) -> None:
        """Forgets what is recorded, or was to be, if anything was."""
        order, recording = self._end()
        if order is None:
            return
        self._tell(left_count=0, failure=why)
        if recording is None:
            return
        try:
            recording.drop()
        except ProfileError:
            logger.exception("profile %s cannot be dropped", order.name)

    def _end(self) -> tuple[ProfileOrder | None, Recording | None]:
        """Records no more passes; returns what was under way."""
        ended = self._order, self._recording
        self._order = self._recording = None
        self._core.passing = nullcontext
        return ended

    def _fail(self, order: ProfileOrder, error: ProfileError) -> None:
        logger.error("profile %s", order.name, exc_info=error)
        self._tell(left_count=0, failure=str(error))

    def _tell(self, **news: Any) -> None:
        assert self.profile is not None, "it has begun"
        self.profile = replace(self.profile, **news)

    @contextmanager
    def _passing(self, what: str) -> Iterator[None]:
        """Shows a pass in the trace, and counts it; the last one is to come until it is written."""
        order = self._order
        assert order is not None
        if self._recording is None:
            # Not before there is a pass: torch records the calls of other threads, too.
            try:
                self._recording = Recording(order.options)
            except ProfileError as error:
                self._end()
                self._fail(order, error)
                yield
                return
        with self._recording.named(what):
            yield
        self._left -= 1
        if self._left and (why := self._recording.too_large()):
            done = order.pass_count - self._left
            self._early = f"ended early, after {done} of {order.pass_count} passes: {why}"
            logger.error("profile %s %s", order.name, self._early)
            self._left = 0
        self._tell(left_count=max(1, self._left))
