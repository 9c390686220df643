"""Publishes the policy as a new version of the weight store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from services.trainer import metrics
from services.trainer.front import commands
from services.trainer.front.rank_group import RankGroup
from services.trainer.front.state import PublishedWeights, TrainerState
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.weights.store import ShardFile, TensorEntry, VersionRecord, WeightStore, companion_files


class Publisher:
    """Allocates a version, lets every rank write its shards, commits. Callers hold the lock."""

    def __init__(
        self, model: Path, store: WeightStore, state: TrainerState, ranks: RankGroup
    ) -> None:
        self._model, self._store, self._state, self._ranks = model, store, state, ranks

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
        return record, size


def shard_from_proto(message: pb.WrittenShard) -> ShardFile:
    tensors = {
        name: TensorEntry(tensor.dtype, tuple(tensor.shape), tensor.digest)
        for name, tensor in message.tensors.items()
    }
    return ShardFile(message.file_name, message.size_bytes, message.digest, tensors)
