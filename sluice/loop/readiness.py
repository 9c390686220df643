"""Waits for a trainer, and tells one that lost its state from one that refuses."""

from __future__ import annotations

import asyncio
import logging
import time

import grpc

from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.client import RemoteError, TrainerClient

logger = logging.getLogger(__name__)

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


class TrainerFailedError(Exception):
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
    """The trainer, once it takes work. Raises TrainerFailedError with its own reason."""
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
                        raise TrainerFailedError(f"trainer failed: {trainer.failure}")
                patience.waited(state)
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise TrainerFailedError(
            f"trainer {client.address} was not ready in {seconds:g} s: {state}"
        ) from None
