"""What a run of steps on a trainer is, whatever it trains on: its start, its run checkpoints."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from sluice import faults
from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.client import Client, RemoteError, TrainerClient
from sluice.loop import trace
from sluice.loop.config import CommonRunConfig
from sluice.loop.ledger import Ledger, lost_reason
from sluice.loop.metrics import LOST_GROUPS, STEP
from sluice.loop.report import RunReport
from sluice.loop.retention import Retention
from sluice.loop.run_directory import (
    LEDGER,
    RUN_CHECKPOINTS,
    RunCheckpoint,
    check_layouts,
    check_ledger,
    check_trainers,
    damaged_run_checkpoints,
    latest_run_checkpoint,
    list_run_checkpoints,
    none_intact,
    notice_copy,
    set_aside,
)
from sluice.loop.store_inspection import inspect_store
from sluice.loop.training import (
    CheckpointLostError,
    SavingCheckpoint,
    TrainerBrokenError,
    TrainerLostError,
    TrainerRecovery,
    check_step,
    describe_trainer,
    is_checkpoint_lost,
    layout_of,
    wait_for_trainer,
)
from sluice.place import place_of, within
from sluice.runtime.recovery import NotReadyError, wait_until_ready

if TYPE_CHECKING:
    from sluice.loop.run_archive import RunArchive  # nobody else needs obstore

logger = logging.getLogger(__name__)


C = TypeVar("C", bound=CommonRunConfig)


@dataclass(frozen=True)
class Reference:
    """The weights that a KL is to: a version, published after `step`; 0 is the settings' own."""

    version: int = 0
    step: int = 0


class TrainerRun(ABC, Generic[C]):
    """A run of steps on a trainer: where it stands, and the run checkpoints it can go back to."""

    def __init__(
        self,
        config: C,
        report: RunReport,
        weights: str = "",
        archive: RunArchive | None = None,
    ) -> None:
        """`weights` is where versions are, if not in the store; `archive` has run checkpoints of a
        run whose store is a bucket."""
        self.config, self.report, self._weights_location = config, report, weights
        self.trainer = TrainerClient(config.trainer, config.security)
        self.ledger = Ledger(config.run_dir / LEDGER)
        self.step = 0  # of the loop
        self.optimizer_step = 0  # of the trainer
        self._weights = sample_pb2.WeightVersion()  # published last
        self._reference = Reference()
        self._settings: dict[str, str] = {}  # digests of those that shape the run
        self._run_checkpoints = config.run_dir / RUN_CHECKPOINTS
        if (newest := latest_run_checkpoint(self._run_checkpoints)) is not None:
            STEP.set(newest.step)  # while it waits for services, and goes back to that
        self._recovery = TrainerRecovery(self.trainer, self._begin, config.service_timeout_seconds)
        self._archive = archive
        self._retained: Retention | None = None
        self._saving: asyncio.Task[None] | None = None  # of the run checkpoint asked for last
        self._write_behind = False  # whether the trainer may promise versions
        self._promised: int | None = None  # a version that was not durable when it was published

    @property
    def _retention(self) -> Retention:
        assert self._retained is not None, "the run has not started"
        return self._retained

    async def start(self) -> None:
        """Brings all services to the first state, or to that of the last run checkpoint.

        Raises ConfigError for services that cannot do what the run is to do.
        """
        config = self.config
        check_ledger(self.ledger, latest_run_checkpoint(self._run_checkpoints))
        # of one whose store is a bucket one loop alone goes on
        former = None if self._archive else notice_copy(config.run_dir, self.ledger)
        self.report.start_trackers()
        trainer = await wait_for_trainer(self.trainer, config.service_timeout_seconds)
        await self._check_services(trainer)
        self._retained = Retention(
            config.retention,
            config.store_place,
            config.run_dir,
            self.ledger,
            self._weights_location,
            config.store_cache,
            self._archive,
        )
        if former is not None:
            self.report.note(
                f"{config.run_dir} is a copy of {former}, and another run from here on: the "
                f"checkpoints that it has so far are those of {former}, and go with them"
            )
        await self._retained.adopt()
        await self._inspect_store()
        await self._recovery.run(self._begin)

    async def close(self) -> None:
        """Ends what runs in the background and closes every connection."""
        await self._drop_saving()
        if self._retained is not None:
            await self._retained.close()
        await self.trainer.close()
        self.ledger.close()

    @property
    def _deterministic(self) -> bool:
        return False

    async def _inspect_store(self) -> None:
        """Raises ConfigError for a service that sees another store than this process."""
        store, clients = self.config.store_place, await self._store_clients()
        weights = place_of(self._weights_location) if self._weights_location else None
        places = {"store": store, "weights": weights or within(store, "weights")}
        try:
            await inspect_store(places, {"trainer": self.trainer, **clients})
        finally:
            await asyncio.gather(*(client.close() for client in clients.values()))

    async def _store_clients(self) -> dict[str, Client]:
        """Other services by name that use the store; the caller closes the clients."""
        return {}

    async def _check_services(self, trainer: trainer_pb.Trainer) -> None:
        """Waits for other services. Raises ConfigError for those that cannot do their part."""

    @abstractmethod
    async def _begin_anew(self) -> None:
        """Brings services to the first state; the trainer is there."""

    @abstractmethod
    async def _restore(self, run_checkpoint: RunCheckpoint) -> None:
        """Goes back to a run checkpoint."""

    async def _begin_critic_checkpoint(self, checkpoint_id: str) -> SavingCheckpoint | None:
        """Has the critic save beside what follows, if there is one."""
        return None

    async def _trainers(self) -> dict[str, trainer_pb.Trainer]:
        """Returns each trainer that learns, by what it is to the run."""
        seconds = self.config.service_timeout_seconds
        return {"trainer": await wait_for_trainer(self.trainer, seconds)}

    async def _facts(self) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, str]]]:
        """How the ranks of trainers are laid out, and settings of those that say them, by name."""
        found = await self._trainers()
        layouts = {name: layout_of(trainer) for name, trainer in found.items()}
        return layouts, {name: dict(each.settings) for name, each in found.items() if each.settings}

    async def _begin(self) -> None:
        """Goes back to the newest run checkpoint that is intact, or begins.

        Raises RunDirectoryError where none is, and leaves all as they are.
        """
        await self._drop_saving()
        if self._archive is not None:
            await asyncio.to_thread(self._archive.verify)
        self._promised = None
        await self._take_devices()
        lost = damaged_run_checkpoints(self._run_checkpoints)
        trained = self.ledger.last_consumed_step()
        for run_checkpoint in reversed(list_run_checkpoints(self._run_checkpoints)):
            layouts, settings = await self._facts()
            note, deterministic = self.report.note, self._deterministic
            check_layouts(run_checkpoint, layouts, note, deterministic=deterministic)
            check_trainers(run_checkpoint, settings, note, deterministic=deterministic)
            try:
                await self._restore(run_checkpoint)
            except (RemoteError, CheckpointLostError) as error:
                if not is_checkpoint_lost(error):
                    raise
                lost[run_checkpoint.step] = str(error)
                logger.warning("run checkpoint of step %d: %s", run_checkpoint.step, error)
                continue
            self._pass_over(lost, trained)
            await self._judge_promises()
            return
        if lost:
            raise none_intact(self._run_checkpoints, lost)
        if self.config.initial_checkpoint:
            loaded = await self.trainer.load_checkpoint(self.config.initial_checkpoint)
            self.optimizer_step = loaded.step
        else:
            self.optimizer_step = (await self._described(self.trainer)).step
        await self._begin_anew()
        await self._judge_promises()

    async def _judge_promises(self) -> None:
        """Drops groups that versions sampled which were lost before the trainer had written them.

        It has published anew, and does that once what it promised before is written or lost.
        """
        for version in self.ledger.promised_versions():
            if await self._retention.has_weights(version) and self.ledger.knows_version(version):
                self.ledger.version_durable(version)
                continue
            count = self.ledger.lose_version(version)
            LOST_GROUPS.inc(count)
            if count or self.ledger.knows_version(version):
                self.report.note(
                    f"{lost_reason(version)}: {count} groups that it had sampled are dropped and "
                    "replaced"
                )

    async def _wait_durable(self, version: int) -> None:
        """Waits until a promised version is in the store. Raises TrainerLostError if it is lost."""

        async def look() -> None:
            if await self._retention.has_weights(version):
                return
            trainer = await self.trainer.get()
            if trainer.promised_version == version:
                raise NotReadyError("the trainer still writes it")
            if not await self._retention.has_weights(version):
                raise TrainerLostError(lost_reason(version))

        seconds = self.config.service_timeout_seconds
        what = f"weight version {version} in the store"
        await wait_until_ready(what, look, seconds, TrainerBrokenError)

    def _pass_over(self, lost: Mapping[int, str], trained: int) -> None:
        """Says what was damaged, and what is repeated for it."""
        for step, why in sorted(lost.items()):
            if step > self.step:
                self.report.note(f"run checkpoint of step {step} is damaged: {why}")
            set_aside(self._run_checkpoints, step)
        if any(step > self.step for step in lost):
            again = (
                f"steps {self.step + 1} to {trained} are" if trained > self.step else "nothing is"
            )
            self.report.note(
                f"went back to the run checkpoint of step {self.step}: {again} repeated"
            )

    async def _take_devices(self) -> None:
        """Has the trainer awake, in whatever state another run has left it."""
        if (await self._described(self.trainer)).asleep:
            await self.trainer.wake()

    async def _described(self, trainer: TrainerClient) -> trainer_pb.Trainer:
        """A call that comes too late ends no run: the trainer is asked again."""
        return await describe_trainer(trainer, self.config.service_timeout_seconds)

    async def _load(self, run_checkpoint: RunCheckpoint) -> int:
        """Loads trainer and ledger; returns how many groups wait to be trained on again."""
        loaded = await self.trainer.load_checkpoint(run_checkpoint.checkpoint)
        if loaded.step != run_checkpoint.optimizer_step:
            raise CheckpointLostError(
                f"{run_checkpoint.checkpoint} is of optimizer step {loaded.step}, not "
                f"{run_checkpoint.optimizer_step}"
            )
        reference = Reference(run_checkpoint.reference_version, run_checkpoint.reference_step)
        if reference.version and not await self._retention.has_weights(reference.version):
            raise CheckpointLostError(
                f"weight version {reference.version}, the reference of run checkpoint "
                f"{run_checkpoint.step}, is gone"
            )
        self._refer_to(reference)
        group_count = self.ledger.roll_back(run_checkpoint.step)
        await self._retention.resume()
        self.step, self.optimizer_step = run_checkpoint.step, loaded.step
        return group_count

    def _refer_to(self, reference: Reference) -> None:
        self._reference = reference
        self._retention.hold_reference(reference.version)

    async def _save(self) -> None:
        """Has a checkpoint of now saved beside the steps that follow, one at a time.

        The manifest that makes it the place to resume from is of now too, and is written once all
        that it names is durable.
        """
        await self._settle_saving()
        await self._retention.settle()
        layouts, settings = await self._facts()
        run_checkpoint = RunCheckpoint(
            step=self.step,
            optimizer_step=self.optimizer_step,
            checkpoint="",  # they say so when they are done
            weight_version=self._weights.version,
            weight_digest=self._weights.digest,
            position=self.ledger.next_position(),
            seed=self.config.seed,
            settings=self._settings,
            layouts=layouts,
            trainers=settings,
            reference_version=self._reference.version,
            reference_step=self._reference.step,
        )
        name = self._retention.new_checkpoint_id(self.step)
        self._retention.expect(run_checkpoint)
        writing = SavingCheckpoint(self.optimizer_step, await self.trainer.begin_checkpoint(name))
        critic = await self._begin_critic_checkpoint(name)
        recording = self._record(run_checkpoint, writing, critic)
        self._saving = asyncio.create_task(recording, name=f"run checkpoint {self.step}")
        faults.point("checkpoint_begun")

    async def _record(
        self,
        run_checkpoint: RunCheckpoint,
        writing: SavingCheckpoint,
        critic: SavingCheckpoint | None,
    ) -> None:
        with trace.span(trace.STORE, "write checkpoint", f"step {run_checkpoint.step}"):
            run_checkpoint = replace(
                run_checkpoint,
                checkpoint=await writing.name(),
                critic_checkpoint="" if critic is None else await critic.name(),
                critic_optimizer_step=None if critic is None else critic.step,
            )
        faults.point("checkpoint")
        if run_checkpoint.weight_version in self.ledger.promised_versions():
            await self._wait_durable(run_checkpoint.weight_version)
            self.ledger.version_durable(run_checkpoint.weight_version)
        await self._retention.record(run_checkpoint)
        self.report.keep(run_checkpoint.step)

    async def _settle_saving(self) -> None:
        """Waits until the run checkpoint that was asked for is one; raises why it is none."""
        saving, self._saving = self._saving, None
        if saving is not None:
            with trace.span(trace.TRAINER, "checkpoint"):
                await saving

    async def _note_saved(self) -> None:
        """Raises why the run checkpoint that was asked for will be none, if that is known, and
        RunTakenError where another loop has taken the run over."""
        if self._archive is not None:
            await self._archive.attend()
        if self._saving is not None and self._saving.done():
            await self._settle_saving()

    async def _drop_saving(self) -> None:
        """The run goes back, or ends: what was not a run checkpoint yet will be none."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.cancel()
            await asyncio.gather(saving, return_exceptions=True)

    async def _publish_weights(
        self,
        targets: Sequence[trainer_pb.TransferTarget] = (),
        mode: engine_pb.PauseMode = engine_pb.PAUSE_MODE_UNSPECIFIED,
        restored: RunCheckpoint | None = None,
        on_allocated: Callable[[int], None] | None = None,
    ) -> trainer_pb.PublishWeightsResponse:
        """Publishes the trainer's weights; they are pinned, and in the ledger.

        `on_allocated` hears their number meanwhile. Those that are sent to `targets` may be a
        promise. Raises CheckpointLostError where they are not those that `restored` names, and
        TrainerLostError where those published before were promised and are lost.
        """
        if targets and self._write_behind:  # engines may serve them before this run knows them
            on_allocated = self.ledger.promise_version
        with trace.span(trace.TRAINER, "publish"):
            published = await self.trainer.publish_weights(targets, mode, on_allocated)
        weights = published.weights
        faults.point("published")
        check_step(published.step, self.optimizer_step, "published weights")
        await self._keep_promise()
        if not await self._retention.hold_weights(weights.version, promised=published.promised):
            raise TrainerLostError(lost_reason(weights.version))
        if restored is not None:
            await self._check_restored(weights, restored)
        with self.ledger.transaction():
            self.ledger.record_version(weights.version, weights.digest, self.step)
            if published.promised:
                self.ledger.promise_version(weights.version)
                self._promised = weights.version
            else:
                self.ledger.version_durable(weights.version)
        return published

    async def _keep_promise(self) -> None:
        """The trainer has published again, so that what it promised before is durable or lost."""
        version, self._promised = self._promised, None
        if version is not None:
            if not await self._retention.has_weights(version):
                raise TrainerLostError(lost_reason(version))
            self.ledger.version_durable(version)

    async def _settle_promise(self) -> None:
        """Waits until the version published last is durable."""
        if self._promised is not None:
            await self._wait_durable(self._promised)
            await self._keep_promise()

    async def _check_restored(
        self, weights: sample_pb2.WeightVersion, restored: RunCheckpoint
    ) -> None:
        if weights.digest == restored.weight_digest:
            return
        before = restored.weight_version
        different = await self._retention.compare_weights(weights.version, before)
        if different is None:
            self.report.note(
                f"restored weights are published as version {weights.version}, which cannot be "
                f"compared with version {before} of the run checkpoint: it is gone, or was "
                "published in another type"
            )
            return
        raise CheckpointLostError(
            f"{restored.checkpoint} restores other weights than version {before}, which was "
            f"published from them: {', '.join(different[:4])}"
        )
