"""Publishes the policy as a new version of the weight store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from services.trainer import metrics
from services.trainer.config import TrainerConfig
from services.trainer.front import commands
from services.trainer.front.rank_group import RankGroup
from services.trainer.front.state import PublishedWeights, TrainerState
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.weights.store import ShardFile, TensorEntry, VersionRecord, WeightStore, companion_files

logger = logging.getLogger(__name__)


class Publisher:
    """Allocates a version, lets every rank write its shards, commits. Callers hold the lock.

    Then, while others work, versions go but the newest `keep` and those that anybody has pinned.
    """

    def __init__(
        self, config: TrainerConfig, store: WeightStore, state: TrainerState, ranks: RankGroup
    ) -> None:
        self._model, self._keep = Path(config.model), config.keep_versions
        self._store, self._state, self._ranks = store, state, ranks
        self._removing: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Wait for what is being removed."""
        if self._removing is not None:
            await asyncio.gather(self._removing, return_exceptions=True)

    async def publish(self, on_allocated: Callable[[int], None]) -> tuple[VersionRecord, int]:
        """The new version and the bytes written."""
        generation = self._ranks.generation
        parent = None if self._state.weights is None else self._state.weights.version
        staging = await asyncio.to_thread(self._store.allocate, parent)
        on_allocated(staging.version)
        try:
            with metrics.PUBLISH_SECONDS.time():
                command = pb.PublishCommand(directory=str(staging.directory.resolve()))
                results = await self._ranks.run_on(
                    generation,
                    commands.same_for_all(pb.FollowResponse(publish=command)),
                )
                shards = [shard_from_proto(s) for result in results for s in result.shards]
                record = await asyncio.to_thread(
                    self._store.commit,
                    staging,
                    shards,
                    companion_files(self._model),
                    self._state.step,
                )
        except BaseException:
            await asyncio.shield(asyncio.to_thread(self._store.abort, staging))
            raise
        self._state.weights = PublishedWeights(record.version, record.digest)
        size = sum(shard.size for shard in shards)
        metrics.WEIGHT_VERSION.set(record.version)
        metrics.PUBLISHED_BYTES.inc(size)
        if self._keep and (self._removing is None or self._removing.done()):
            work = asyncio.to_thread(self._remove_old, record.version)
            self._removing = asyncio.create_task(work, name="remove old weights")
        return record, size

    def _remove_old(self, newest: int) -> None:
        try:
            self._store.retain(self._keep, in_use=[newest])
        except OSError as error:
            logger.warning("old weights were not removed: %s", error)


def shard_from_proto(message: pb.WrittenShard) -> ShardFile:
    tensors = {
        name: TensorEntry(tensor.dtype, tuple(tensor.shape), tensor.digest)
        for name, tensor in message.tensors.items()
    }
    return ShardFile(message.file_name, message.size_bytes, message.digest, tensors)
