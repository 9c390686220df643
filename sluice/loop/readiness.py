"""Waits for a trainer, and tells one that lost its state from one that refuses."""

from __future__ import annotations

import asyncio

import grpc

from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.client import RemoteError, TrainerClient

POLL_SECONDS = 0.2

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


def is_lost(error: RemoteError) -> bool:
    """Whether going back to a cut helps."""
    return error.reason in _LOST or error.code is grpc.StatusCode.UNAVAILABLE


def lost_blob(error: RemoteError) -> str | None:
    """The digest of the blob that the trainer could not read, if that is the error."""
    if error.reason not in _BLOB_LOST:
        return None
    return error.metadata.get("blob") or error.metadata.get("name")


async def wait_for_trainer(client: TrainerClient, seconds: float) -> pb.Trainer:
    """The trainer, once it takes work. Raises TrainerFailedError with its own reason."""
    state = "no answer"
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
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise TrainerFailedError(
            f"trainer {client.address} was not ready in {seconds:g} s: {state}"
        ) from None
