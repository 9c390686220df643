"""Work that a lost trainer may interrupt."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.client import RemoteError, TrainerClient
from sluice.loop.filters import FilterError

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


POLL_SECONDS = 0.2
PATIENCE_SECONDS = 3.0

# What a trainer answers whose ranks or front went away and came back at an earlier state.
_LOST = {
    "RANK_LOST",
    "LOADING",
    "STEP_MISMATCH",
    "BATCH_NOT_FOUND",
    "OPERATION_NOT_FOUND",
    "COLUMN_MISSING",
    "GRADIENTS_INCOMPLETE",
    "PARTS_MISMATCH",
    "NO_GRADIENTS",
}
_BLOB_LOST = {"BLOB_NOT_FOUND", "DIGEST_MISMATCH"}


class TrainerBrokenError(Exception):
    """The trainer cannot go on; the message carries its reason."""


class TrainerLostError(Exception):
    """The trainer is not where this run left it."""


def check_step(step: int, expected: int, what: str) -> None:
    """A front that came back has forgotten the steps since its start, and answers.

    Raises TrainerLostError.
    """
    if step != expected:
        raise TrainerLostError(f"{what} of step {step}, this run is at {expected}")


def is_lost(error: RemoteError) -> bool:
    """Whether going back to a cut helps."""
    return error.reason in _LOST or error.code is grpc.StatusCode.UNAVAILABLE


def lost_blob(error: RemoteError) -> str | None:
    """The digest of the blob that the trainer could not read, if that is the error."""
    if error.reason not in _BLOB_LOST:
        return None
    return error.metadata.get("blob") or error.metadata.get("name")


class Patience:
    """Says once what is waited for and why, when that takes longer than people expect."""

    def __init__(self, what: str) -> None:
        self._what, self._begin, self._said = what, time.monotonic(), False

    def waited(self, cause: str) -> None:
        """To be called between tries."""
        if not self._said and time.monotonic() - self._begin > PATIENCE_SECONDS:
            self._said = True
            logger.warning("waiting for %s: %s", self._what, cause)


async def wait_for_trainer(client: TrainerClient, seconds: float) -> pb.Trainer:
    """The trainer, once it takes work. Raises TrainerBrokenError with its own reason."""
    state = "no answer"
    patience = Patience(f"trainer {client.address}")
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    trainer = await client.get()
                except RemoteError as error:
                    if error.code not in (
                        grpc.StatusCode.UNAVAILABLE,
                        grpc.StatusCode.DEADLINE_EXCEEDED,
                    ):
                        raise
                    state = str(error)
                else:
                    state = pb.Trainer.State.Name(trainer.state)
                    if trainer.state == pb.Trainer.STATE_ACTIVE:
                        return trainer
                    if trainer.state == pb.Trainer.STATE_FAILED:
                        raise TrainerBrokenError(f"trainer failed: {trainer.failure}")
                patience.waited(state)
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise TrainerBrokenError(
            f"trainer {client.address} was not ready in {seconds:g} s: {state}"
        ) from None
