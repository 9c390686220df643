"""Work that a lost trainer may interrupt."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from sluice.client import RemoteError, TrainerClient
from sluice.loop.readiness import TrainerLostError, is_lost, wait_for_trainer

logger = logging.getLogger(__name__)

TRAINER_LOSSES = 5  # in a row, without a step in between

Work = Callable[[], Awaitable[None]]


class Survival:
    """Does work; where the trainer is lost on the way, goes back to the last cut instead."""

    def __init__(self, trainer: TrainerClient, begin: Work, wait_seconds: float) -> None:
        self._trainer, self._begin, self._wait_seconds = trainer, begin, wait_seconds
        self._losses = 0  # since the last step

    def progressed(self) -> None:
        """A step was made."""
        self._losses = 0

    async def run(self, work: Work) -> None:
        """Raises what is no loss of the trainer, and the last of too many losses in a row."""
        while True:
            try:
                await work()
                return
            except (RemoteError, TrainerLostError) as error:
                if isinstance(error, RemoteError) and not is_lost(error):
                    raise
                self._losses += 1
                if self._losses > TRAINER_LOSSES:
                    raise
                logger.warning("trainer: %s; going back to the last cut", error)
                await wait_for_trainer(self._trainer, self._wait_seconds)
            work = self._begin
