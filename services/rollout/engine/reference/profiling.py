"""Records passes of the reference engine, on the thread that runs them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from services.rollout.engine.interface import EngineProfile, ProfileOrder
from services.rollout.engine.reference.core import EngineCore
from sluice.profiler import ProfileError, Recording

logger = logging.getLogger(__name__)


class PassProfiler:
    """Records passes of a core. All but `profile` belongs to the thread that runs them.

    What goes wrong, also in the profiler of torch, is logged and told in `profile`, not raised.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._order: ProfileOrder | None = None
        self._recording: Recording | None = None
        self._left = 0
        self.profile: EngineProfile | None = None  # that was asked for last

    def begin(self, order: ProfileOrder) -> EngineProfile:
        """Records from now on, in place of what is recorded."""
        self.drop("another profile was asked for")
        self._order, self._left = order, order.pass_count
        profile = self.profile = EngineProfile(
            name=order.name, directory=order.directory, left_count=order.pass_count
        )
        try:
            self._recording = Recording(order.options)
        except ProfileError as error:
            logger.exception("profile %s cannot be recorded", order.name)
            return self._fail(profile, error)
        self._core.passing = self._passing
        return profile

    @property
    def is_complete(self) -> bool:
        """Whether all passes are recorded and none is written."""
        return self._recording is not None and not self._left

    def write(self) -> None:
        """Writes what is recorded; takes as long as that does."""
        recording, profile, order = self._end(), self.profile, self._order
        assert recording is not None
        assert profile is not None
        assert order is not None
        try:
            files = recording.write(order.directory, order.prefix)
        except ProfileError as error:
            logger.exception("profile %s cannot be written", order.name)
            self._fail(profile, error)
            return
        self.profile = replace(profile, left_count=0, files=tuple(sorted(files)))
        logger.info("profile %s is in %s", order.name, order.directory)

    def drop(self, why: str) -> None:
        """Forgets what is recorded, if anything is."""
        recording, profile = self._end(), self.profile
        if recording is None:
            return
        assert profile is not None
        self.profile = replace(profile, left_count=0, failure=why)
        try:
            recording.drop()
        except ProfileError:
            logger.exception("profile %s cannot be dropped", profile.name)

    def _end(self) -> Recording | None:
        """Records no more passes."""
        recording, self._recording = self._recording, None
        self._core.passing = nullcontext
        return recording

    def _fail(self, profile: EngineProfile, error: ProfileError) -> EngineProfile:
        self.profile = replace(profile, left_count=0, failure=str(error))
        return self.profile

    @contextmanager
    def _passing(self, what: str) -> Iterator[None]:
        """Shows a pass in the trace, and counts it; the last one is to come until it is written."""
        recording, profile = self._recording, self.profile
        assert recording is not None
        assert profile is not None
        with recording.named(what):
            yield
        self._left -= 1
        self.profile = replace(profile, left_count=max(1, self._left))
