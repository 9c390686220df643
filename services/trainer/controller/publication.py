"""Publishes the policy as a new version of the weight store."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from services.trainer import metrics
from services.trainer.config import TrainerConfig
from services.trainer.controller.rank_group import RankGroup
from services.trainer.controller.state import PolicyState, PublishedWeights, TrainerState, Turns
from services.trainer.controller.transfer import Shipment, Target, WeightSender
from services.trainer.errors import (
    MixedPublicationError,
    ReferenceFixedError,
    TransferDisabledError,
    disk_errors,
)
from sluice import faults
from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.client import RemoteError
from sluice.durable import naming
from sluice.place import is_bucket
from sluice.runtime.errors import NotFoundError
from sluice.runtime.idempotency import to_its_end
from sluice.runtime.waits import Waits
from sluice.weights.adapter import AdapterSpec
from sluice.weights.checkpoint import companion_files, digest_base
from sluice.weights.classifier import reward_model_config
from sluice.weights.convert.quantized_layout import modules_kept
from sluice.weights.errors import MixedKindsError, VersionNotFoundError, WeightStoreError
from sluice.weights.manifest import DeltaFile, ShardFile, TensorEntry
from sluice.weights.staging import Staging
from sluice.weights.store import StoredVersion, WeightStore

logger = logging.getLogger(__name__)

CONFIG = "config.json"


@dataclass(frozen=True, kw_only=True)
class Publication:
    """A new version, what it took in the store, and by engine why it did not arrive, or None."""

    record: StoredVersion
    stored_bytes: int
    full_bytes: int
    rank_files: Sequence[Sequence[str]]
    staging: Staging
    transfer_seconds: float = 0.0
    outcomes: Mapping[str, RemoteError | None] = field(default_factory=dict)


class Publisher:
    """Allocates a version, lets every rank write its shards, commits.

    Or it promises the version, sends it to engines, and has it written while others work; the next
    one waits for that. Meanwhile versions go but the newest `keep` of each adapter and those that
    anybody has pinned.
    """

    def __init__(
        self,
        config: TrainerConfig,
        store: WeightStore,
        state: TrainerState,
        ranks: RankGroup,
        turns: Turns,
        waits: Waits,
    ) -> None:
        self.turns = turns
        self._model, self._keep = Path(config.model), config.keep_versions
        self._config, self._lora = config.publish, config.lora
        self._fixed_reference = config.fixed_reference
        self._is_reward_model = config.head == "reward"
        self._base_digest = ""  # once it is known
        self._write_behind = config.transfer.write_behind
        self._is_shared = not is_bucket(config.weights_location)
        self._store, self._state, self._ranks = store, state, ranks
        self.seconds = math.inf  # that the last version took, besides its transfer
        self._removing: asyncio.Task[None] | None = None
        self._in_use = 0  # the newest version, which a removal leaves
        self._waits = waits
        self._writing: asyncio.Task[StoredVersion] | None = None  # of the version promised last
        self._promised = 0  # its number
        self._sender: WeightSender | None = None
        if config.transfer.enabled:
            self._sender = WeightSender(config.transfer, config.server.security, ranks, waits)

    @property
    def promised(self) -> int:
        """Return the number of the version that is being written behind, 0 while none is."""
        is_writing = self._writing is not None and not self._writing.done()
        return self._promised if is_writing else 0

    def reference_directory(self, version: int) -> str:
        """Find where ranks read a version from that is to be the reference; blocks.

        Raises ReferenceFixedError and NotFoundError.
        """
        if self._fixed_reference:
            raise ReferenceFixedError(self._fixed_reference)
        try:
            stored = self._store.get(version)
        except VersionNotFoundError:
            raise NotFoundError("weights", f"weights/{version}") from None
        if stored.directory is None or stored.base is not None:  # of other settings than today's
            raise ReferenceFixedError(f"weights/{version} is not whole in a directory")
        return str(stored.directory.resolve())

    def durability(self) -> Callable[[], Awaitable[None]]:
        """Return what waits until the version that was promised last, by now, is durable.

        Ranks have the command timeout to write it. It raises why the version is lost, if it is.
        """
        return partial(self._settle, self._writing, self._promised)

    async def _settle(self, writing: asyncio.Task[StoredVersion] | None, version: int) -> None:
        if writing is None:
            return
        with self._waits.waiting(
            f"weight version {version} to be written", on=lambda: ["the ranks and the store"]
        ):
            await asyncio.wait([writing])
        writing.result()

    async def forget_loss(self) -> None:
        """Wait for the end of what is written: the trainer goes back, so its loss is none."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
            self._writing = None

    def sweep(self) -> None:
        """Take back what an earlier process has promised."""
        self._store.sweep()

    async def close(self) -> None:
        """Give up what is being written, and wait for what is being removed."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        if self._sender is not None:
            await self._sender.close()
        if self._removing is not None:
            await asyncio.gather(self._removing, return_exceptions=True)

    def check_targets(self, targets: Sequence[Target]) -> None:
        """Raises TransferDisabledError."""
        if targets and self._sender is None:
            raise TransferDisabledError("this trainer sends no weights: set transfer.enabled")

    async def publish(
        self,
        on_allocated: Callable[[int], None],
        targets: Sequence[Target] = (),
        pause_mode: engine_pb.PauseMode = engine_pb.PAUSE_MODE_UNSPECIFIED,
        adapter: str = "",
    ) -> Publication:
        """Publish a new version of an adapter or of the policy, and send it to `targets`.

        With `transfer.write_behind` it is then a promise, unless no target has it. Cancelled
        while it waits, for its turn or the version before, it takes no number. Raises
        TransferDisabledError or MixedPublicationError, and why the version before is lost.
        """
        self.check_targets(targets)
        publish = partial(self._publish, on_allocated, targets, pause_mode, adapter)
        return await self.turns.run("publish", publish, self._ready)

    async def _ready(self) -> None:
        self._state.check_awake()
        await self._settled()

    async def _settled(self) -> None:
        """Wait for what is being written; once it is told why that is lost, it is forgotten."""
        try:
            await self.durability()()
        finally:
            self._forget_written()

    async def _publish(
        self,
        on_allocated: Callable[[int], None],
        targets: Sequence[Target],
        pause_mode: engine_pb.PauseMode,
        adapter: str,
    ) -> Publication:
        policy = self._state.policy(adapter)
        behind = bool(targets) and self._write_behind
        began = time.monotonic()
        try:
            publication = await self._store_version(policy, on_allocated, behind)
        finally:
            self.seconds = time.monotonic() - began
            metrics.PUBLISH_SECONDS.observe(self.seconds)
        if targets and self._sender is not None:
            try:
                publication = await self._send(self._sender, publication, targets, pause_mode)
                faults.point("weights.sent")
            except BaseException:
                if behind:
                    await self._lose(publication.staging)
                raise
        if behind:
            writing = self._begin_writing(publication.staging)
            if all(publication.outcomes.values()):  # nobody has it: engines are to read it
                await self._settled()
                publication = replace(publication, record=writing.result())
        return publication

    def _forget_written(self) -> None:
        """Forget what was written or lost, and told; not what a caller stopped waiting for."""
        if self._writing is not None and self._writing.done():
            self._writing = None

    async def _send(
        self,
        sender: WeightSender,
        publication: Publication,
        targets: Sequence[Target],
        pause_mode: engine_pb.PauseMode,
    ) -> Publication:
        began = time.monotonic()
        record = publication.record
        weights = sample_pb2.WeightVersion(
            version=record.version, digest=record.digest, adapter=record.line
        )
        shipment = Shipment(
            weights=weights,
            rank_files=publication.rank_files,
            pause_mode=pause_mode,
        )
        outcomes = await sender.send(shipment, targets)
        seconds = time.monotonic() - began
        metrics.TRANSFER_SECONDS.observe(seconds)
        return replace(publication, outcomes=outcomes, transfer_seconds=seconds)

    def _begin_writing(self, staging: Staging) -> asyncio.Task[StoredVersion]:
        """Have the ranks write what they kept, and the version committed, beside later calls."""
        name, self._promised = f"write weights {staging.version}", staging.version
        self._writing = task = asyncio.create_task(self._write(staging), name=name)
        return task

    async def _write(self, staging: Staging) -> StoredVersion:
        began = time.monotonic()
        directory = str(staging.directory.resolve()) if self._is_shared else ""
        command = pb.WriteWeightsCommand(directory=directory, version=staging.version)
        try:
            with disk_errors():
                ranks = self._ranks.incarnation
                await (await ranks.run_behind(pb.FollowResponse(write_weights=command)))
                faults.point("weights.written")
                # A thread that is cancelled goes on, and an abort beside it would do damage.
                record = await to_its_end(asyncio.to_thread(self._store.fulfil, staging))
        except BaseException as error:
            logger.error("weight version %d is lost: %s", staging.version, error)
            await self._lose(staging)
            raise
        metrics.WRITE_BEHIND_SECONDS.observe(time.monotonic() - began)
        self._remove_in_background(record.version)
        return record

    async def _lose(self, staging: Staging) -> None:
        """Take a promise back, if it is not kept already."""
        metrics.LOST_VERSIONS.inc()
        await asyncio.shield(asyncio.to_thread(self._store.abort, staging))

    async def _store_version(
        self, policy: PolicyState, on_allocated: Callable[[int], None], behind: bool
    ) -> Publication:
        """Make a version durable, or with `behind` promise it."""
        ranks = self._ranks.incarnation
        parent = None if policy.weights is None else policy.weights.version
        staging = await asyncio.to_thread(self._store.allocate, parent)
        on_allocated(staging.version)
        try:
            base = await asyncio.to_thread(self._find_base, staging.version)
            directory = str(staging.directory.resolve()) if self._is_shared else ""
            command = pb.PublishCommand(
                directory=directory, version=staging.version, base=base, write_behind=behind
            )
            message = pb.FollowResponse(publish=command, adapter=policy.adapter)
            results = await ranks.run(message)
            shards = [shard_from_proto(s) for result in results for s in result.shards]
        except BaseException:
            await asyncio.shield(asyncio.to_thread(self._store.abort, staging))
            raise
        # Outside of the `try`: a thread that is cancelled goes on, and an abort beside it would
        # make a damaged version.
        if behind:
            end = partial(self._promise, staging, shards, policy.step)
        else:
            end = partial(self._commit, staging, shards, policy, base)
        record = await asyncio.shield(asyncio.to_thread(end))
        policy.weights = PublishedWeights(record.version, record.digest)
        if not policy.adapter:
            metrics.WEIGHT_VERSION.set(record.version)
        _count_bytes(shards, max(result.encode_seconds for result in results))
        if not behind:
            self._remove_in_background(record.version)
        return Publication(
            record=record,
            stored_bytes=sum(s.delta.size if s.delta else s.size for s in shards),
            full_bytes=sum(shard.size for shard in shards),
            rank_files=[[s.file_name for s in result.shards] for result in results],
            staging=staging,
        )

    def _promise(self, staging: Staging, shards: Sequence[ShardFile], step: int) -> StoredVersion:
        try:
            return self._store.promise(staging, shards, self._companions(staging, shards), step)
        except BaseException:
            self._store.abort(staging)
            raise

    def _commit(
        self, staging: Staging, shards: Sequence[ShardFile], policy: PolicyState, base: int | None
    ) -> StoredVersion:
        step = policy.step
        try:
            if self._lora is not None:
                adapter, line = self.describe_adapter(policy), policy.adapter
                return self._store.commit(staging, shards, [], step, adapter=adapter, line=line)
            companions = self._companions(staging, shards)
            return self._store.commit(staging, shards, companions, step, base=base)
        except BaseException:
            self._store.abort(staging)
            raise

    def _companions(self, staging: Staging, shards: Sequence[ShardFile]) -> list[Path]:
        """Return the model's, `config.json` saying what the weights are if they are other ones:
        quantised, or a reward model's."""
        found, layout = companion_files(self._model), self._config.layout
        if layout is None and not self._is_reward_model:
            return found
        own = staging.directory / CONFIG
        document = json.loads((self._model / CONFIG).read_bytes())
        if self._is_reward_model:
            document = reward_model_config(document)
        if layout is not None:
            tensors = {n: (t.dtype, t.shape) for shard in shards for n, t in shard.tensors.items()}
            document["quantization_config"] = layout.config(modules_kept(tensors))
        with naming(own):
            own.write_text(json.dumps(document, indent=2) + "\n")
        return [own, *(path for path in found if path.name != CONFIG)]

    def _check_kind(self, version: int) -> None:
        try:
            self._store.check_kind(version, is_adapter=self._lora is not None)
        except MixedKindsError as error:
            raise MixedPublicationError(str(error), version=version) from error

    def describe_adapter(self, policy: PolicyState) -> AdapterSpec:
        """Say what is published of a policy of adapters; the base is hashed once."""
        settings = policy.settings or self._lora
        assert settings is not None
        self._base_digest = self._base_digest or digest_base(self._model)
        return settings.spec(self._base_digest)

    def _find_base(self, version: int) -> int | None:
        """Find the version that the next one may be a delta of, while the chain is not too long.

        Raises MixedPublicationError where the newest is of another kind than it.
        """
        self._check_kind(version)
        published = self._state.weights
        if not self._config.delta or published is None:
            return None
        try:
            self._store.manifest(published.version)  # of which the commit takes tensors
            chain = self._store.chain(published.version)
        except WeightStoreError as error:
            logger.warning("version %d is no base: %s", published.version, error)
            return None
        return published.version if len(chain) <= self._config.chain else None

    def _remove_in_background(self, newest: int) -> None:
        """Also where a removal goes on, which does not know of the newest version: after it."""
        self._in_use = newest
        if self._keep and (self._removing is None or self._removing.done()):
            self._removing = asyncio.create_task(self._remove(), name="remove old weights")

    async def _remove(self) -> None:
        kept = 0
        while kept != self._in_use:
            kept = self._in_use
            await asyncio.to_thread(self._remove_old, kept)

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
    delta = None
    if message.HasField("delta"):
        written = message.delta
        delta = DeltaFile(
            written.size_bytes, written.digest, written.changed_count, written.element_count
        )
    return ShardFile(message.file_name, message.size_bytes, message.digest, tensors, delta)


def _count_bytes(shards: Sequence[ShardFile], encode_seconds: float) -> None:
    """Count what a version took in the store, and how much of it changed."""
    deltas = [shard.delta for shard in shards if shard.delta]
    metrics.FULL_BYTES.inc(sum(shard.size for shard in shards))
    metrics.PUBLISHED_BYTES.inc(
        sum(shard.delta.size if shard.delta else shard.size for shard in shards)
    )
    if deltas:
        metrics.ENCODE_SECONDS.observe(encode_seconds)
        elements = sum(delta.elements for delta in deltas)
        metrics.DELTA_DENSITY.set(sum(delta.changed for delta in deltas) / max(1, elements))
