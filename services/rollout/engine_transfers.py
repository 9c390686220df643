"""The transfer groups an engine is in, and the versions that come over them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from services.rollout import metrics
from services.rollout.engine import Engine, IncomingWeights, PauseMode
from services.rollout.errors import (
    NoTransferError,
    TransferFailedError,
    TransferGroupNotJoinedError,
    UnfitWeightsError,
)
from services.rollout.version_files import damage
from sluice.runtime.errors import ServiceError
from sluice.weights.errors import (
    TransferBrokenError,
    WeightStoreError,
)
from sluice.weights.open import AnyWeightStore
from sluice.weights.transfer.plan import Membership, plan_buckets

GRACE_SECONDS = 3.0  # beyond the deadline of a transfer, for the engine to notice it itself


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """How a version comes: over which group, and which files of its manifest each sender owns."""

    group: str
    files: Sequence[Sequence[str]]
    bucket_bytes: int
    seconds: float
    mode: PauseMode = PauseMode.IN_PLACE


class EngineTransfers:
    """One membership at a time; after a failure there is none."""

    def __init__(self, engine: Engine, store: AnyWeightStore) -> None:
        self._engine, self._store = engine, store
        self._joining = asyncio.Lock()
        self._senders = 0
        self.group = ""

    async def join(self, group: str, members: Sequence[Membership], seconds: float) -> None:
        """Join `group`, and leave the one before; free for the group it is in.

        Raises NoTransferError or TransferFailedError.
        """
        if not self._engine.status().transfer_ranks:
            raise NoTransferError("this engine reads weights from the store only")
        async with self._joining:
            if group == self.group:
                return
            self.group = ""
            try:
                async with asyncio.timeout(seconds + GRACE_SECONDS):
                    await self._engine.join_transfer(members, seconds)
            except (TransferBrokenError, TimeoutError) as error:
                raise _broken(group, error) from error
            self.group, self._senders = group, len(members)

    async def receive(self, version: int, transfer: Transfer) -> None:
        """Have the engine take a version. Raises typed errors; the group is then left."""
        group = transfer.group
        began = time.monotonic()
        try:
            async with asyncio.timeout(transfer.seconds + GRACE_SECONDS):
                manifest = await asyncio.to_thread(self._store.manifest, version)
                self._check(transfer)  # nothing else runs from here until the engine receives
                buckets = [
                    plan_buckets(manifest, files, transfer.bucket_bytes) for files in transfer.files
                ]
                await self._engine.receive(
                    IncomingWeights(
                        manifest=manifest,
                        buckets=buckets,
                        seconds=transfer.seconds,
                        mode=transfer.mode,
                    )
                )
        except (WeightStoreError, TimeoutError) as error:
            self._leave(group)
            raise typed_error(version, error) from error
        except ServiceError:
            self._leave(group)
            raise
        metrics.TRANSFER_SECONDS.observe(time.monotonic() - began)
        metrics.TRANSFERRED_BYTES.inc(sum(bucket.size for sent in buckets for bucket in sent))

    def _check(self, transfer: Transfer) -> None:
        group = transfer.group
        if not group or group != self.group:
            raise TransferGroupNotJoinedError(
                f"in transfer group {self.group or 'none'!r}, not {group!r}", joined=self.group
            )
        if len(transfer.files) != self._senders:
            raise TransferFailedError(
                f"{len(transfer.files)} senders for the {self._senders} that were joined"
            )

    def _leave(self, group: str) -> None:
        if self.group == group:
            self.group = ""


def typed_error(version: int, error: WeightStoreError | OSError) -> ServiceError:
    """What a caller is told of weights that cannot be had."""
    match error:
        case WeightStoreError() if (found := damage(error)) is not None:
            return found
        case TransferBrokenError():
            return _broken(error.group, error)
        case TimeoutError():
            return TransferFailedError(f"version {version} did not come in time")
        case _:
            return UnfitWeightsError(f"version {version} cannot be had: {error}", version=version)


def _broken(group: str, error: Exception) -> TransferFailedError:
    return TransferFailedError(str(error) or f"the members of {group!r} did not meet in time")
