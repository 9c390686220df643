"""The main job: roll out, train, publish, and again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sluice import faults
from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.rollout.v1 import rollout_service_pb2 as rollout_pb
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.client import Client, RemoteError, RouterClient
from sluice.config import ConfigError
from sluice.loop import trace
from sluice.loop.config import STALENESS_IGNORED, TRUNCATED, RunConfig
from sluice.loop.dispatcher import DispatcherConfig, GroupCounts, RolloutDispatcher
from sluice.loop.evaluation import EvaluationLane
from sluice.loop.filters import GroupFilters
from sluice.loop.fit import SaidServices, check_workers, checks_of
from sluice.loop.fleet import (
    PAUSE_MODES,
    CommitReport,
    EngineFleet,
    FleetConfig,
    engine_settings,
)
from sluice.loop.ledger import LedgerGroup
from sluice.loop.mixture import Mixture, digest_of, load_schedule, open_sources
from sluice.loop.placement import SharedDevices
from sluice.loop.policy_run import PolicyRun
from sluice.loop.prompts import Task
from sluice.loop.report import RunReport
from sluice.loop.run_directory import (
    ENGINES,
    RunCheckpoint,
    check_resumed,
    last_step_of_samples,
    settings_digests,
)
from sluice.loop.teachers import Teachers
from sluice.loop.trainer_run import Reference
from sluice.loop.training import (
    Critic,
    StepReport,
    Work,
    check_step,
    lost_blob,
    wait_for_trainer,
)
from sluice.loop.workers import EpisodeWorkers, build_request, check_teachers, teacher_of

if TYPE_CHECKING:
    from sluice.loop.run_archive import RunArchive  # nobody else needs obstore

logger = logging.getLogger(__name__)


class TrainingRun(PolicyRun):
    """One training run over running services. `start`, `train`, then `close`."""

    def __init__(
        self,
        config: RunConfig,
        report: RunReport,
        critic: Critic | None = None,
        archive: RunArchive | None = None,
    ) -> None:
        self._sources, shares = open_sources(config), config.shares
        for name, source in self._sources.items():
            check_teachers(config, shares[name], source)
        self._filters = GroupFilters(config.filters)
        settings = settings_digests(config, digest_of(self._sources))
        check_resumed(config, settings, report.note)
        super().__init__(config, report, settings, critic, archive)
        self.router = RouterClient(config.router, config.security)
        self.fleet = EngineFleet(
            self.router,
            config.security,
            FleetConfig(
                pause_mode=config.pause_mode,
                deterministic=config.deterministic,
                shares_devices=config.placement == "colocated",
                straggler_seconds=config.straggler_seconds,
            ),
        )
        self._devices: SharedDevices | None = None
        if config.placement == "colocated":
            trainers = [self.trainer, *([] if critic is None else [critic.client])]
            self._devices = SharedDevices(self.fleet, trainers, config.service_timeout_seconds)
        self.workers = EpisodeWorkers(self.router, config.security, config.service_timeout_seconds)
        self._teachers = Teachers(config, self.router, self._teacher_of)
        self._evaluations = EvaluationLane(config, self.workers, report)
        self._dispatcher: RolloutDispatcher | None = None
        self._has_told_dropped = False
        self._keeping_up: asyncio.Task[None] | None = None
        self._bringing: asyncio.Task[None] | None = None  # of engines to the version published last
        self._committed: CommitReport | None = None  # of the version that engines were brought to
        self._engine_settings: dict[str, dict[str, str]] = {}
        self._schedule = load_schedule(config)
        if any(config.training_sampling(share).truncates for share in self._shares.values()):
            report.note(TRUNCATED)
        if config.ignores_staleness:
            report.note(STALENESS_IGNORED)

    async def start(self) -> None:
        await super().start()
        self._keeping_up = asyncio.create_task(self.fleet.keep_up(), name="keep engines up")

    async def train(self) -> None:
        """Trains until the end that the config names; where the trainer is lost, goes back."""
        if self._is_done():
            self.report.note(f"the run is at its end already (step {self.step})")
        while self.step == 0 and not self._engines_take_work:
            await self._recovery.run(self._hand_over)
        if self.step == 0:
            await self._settle_engines()
            if self._evaluations.is_before_training:
                await self._evaluations.measure("before", 0, self.fleet.version)
        await self._do_work()
        await self._settle_engines()
        await self._evaluations.measure("after", self.step, self.fleet.version)

    def _next_work(self) -> Work | None:
        """What is left to do.

        A step, the last run checkpoint, the last weights in the store, engines that serve them.
        """
        if not self._is_done():
            return self._one_step
        if not self._has_last_run_checkpoint():
            return self._save_last
        if self._promised is not None:
            return self._settle_promise
        return None if self._engines_take_work else self._hand_over

    def _tell_dropped(self, counts: GroupCounts) -> None:
        """Say once that tasks are lost: a reward that raises for some rows ends no run."""
        if not self._has_told_dropped:
            self._has_told_dropped = True
            self.report.note(
                f"step {self.step}: groups dropped: {counts.dropped}, the last one: "
                f"{counts.drop_reason}; `dropped_groups` of metrics.jsonl counts those to come"
            )

    @property
    def _engines_take_work(self) -> bool:
        return self._devices is None or self._devices.are_with_engines

    async def close(self) -> None:
        background = [task for task in (self._keeping_up, self._bringing) if task is not None]
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await self._evaluations.close()
        if self._dispatcher is not None:
            await self._dispatcher.close()
        await self._teachers.close()
        await asyncio.gather(self.fleet.close(), self.workers.close(), self.router.close())
        await super().close()

    async def _check_services(self, trainer: trainer_pb.Trainer) -> None:
        check_workers(await self.workers.vocabularies(), trainer)
        await self.workers.check(self.config.environments_by_key)
        seconds = self.config.service_timeout_seconds
        engines = await self.fleet.describe(seconds)
        critic = None
        if self.critic is not None:
            critic = await wait_for_trainer(self.critic.client, seconds)
        said = SaidServices(trainer=trainer, critic=critic, engines=engines)
        for check in checks_of(self.config, said, self.report.note):
            check()
        await self._teachers.check(self.trainer, self.report.note)
        if of_engines := engine_settings(engines):
            self._engine_settings = {ENGINES: of_engines}
        if self.config.weight_transport == "collective":
            self._write_behind = trainer.write_behind

    async def _store_clients(self) -> dict[str, Client]:
        security = self.config.security
        addresses = {f"episode worker {each}": each for each in await self.workers.refresh()}
        addresses |= await self.fleet.addresses(self.config.service_timeout_seconds)
        if self.critic is not None:
            addresses["critic"] = self.critic.client.address
        return {name: Client(address, security) for name, address in addresses.items()}

    def _is_done(self) -> bool:
        return super()._is_done() or self._evaluations.has_reached

    async def _begin_weights(self) -> None:
        self._refer_to(Reference())
        await self._publish()

    async def _one_step(self) -> None:
        start = time.monotonic()
        if self._keeping_up is not None and self._keeping_up.done():
            self._keeping_up.result()  # a bug in there is one of this run
        await self._note_saved()
        if self._bringing is not None and self._bringing.done():
            await self._settle_engines()  # or no group would ever come
        await self._hand_over()
        handed = start if self._devices is None else time.monotonic()
        dispatcher = self._open_dispatcher()
        with trace.span(trace.LOOP, "wait for groups"):
            await dispatcher.fill(self.step)
            groups = await dispatcher.take(self.step)
        rolled_out = time.monotonic()
        await self._hand_to_trainers(dispatcher, groups)
        began = time.monotonic()
        trained = await self._train(dispatcher, groups)
        if trained is None:
            return
        self._note_trained(groups, trained)
        stepped = time.monotonic()
        await self._publish()
        seconds = {
            "rollout_seconds": rolled_out - handed,
            "train_seconds": stepped - began,
            "publish_seconds": time.monotonic() - stepped,
            "step_seconds": time.monotonic() - start,
        }
        if self._devices is not None:
            seconds["to_engines_seconds"] = handed - start
            seconds["to_trainers_seconds"] = began - rolled_out
        counts = dispatcher.take_counts()
        if self._filters or self.config.over_sampling > 1:
            trained.metrics.update(counts.row())
        if counts.dropped:
            trained.metrics["dropped_groups"] = float(counts.dropped)
            self._tell_dropped(counts)
        committed = self._committed
        assert committed is not None, "no engine serves"
        fleet = {
            "engines": committed.engine_count,
            "prepare_seconds": committed.prepare_seconds,
            "pause_seconds": committed.pause_seconds,
        }
        self._report_step(groups, trained, {**fleet, **self._reference_row(), **seconds})
        await self._move_reference()
        every = self.config.checkpoint_every
        if every and self.step % every == 0:
            await self._save()
        await self._evaluate_in_between()

    def _reference_row(self) -> dict[str, int]:
        moves = self.config.algorithm.reference_every or self._reference.version
        return {"reference_step": self._reference.step} if moves else {}

    async def _move_reference(self) -> None:
        """Has the KL be to the weights published last, where it is time for that.

        They are pinned, and durable, before a run checkpoint names them.
        """
        every = self.config.algorithm.reference_every
        if every and self.step % every == 0:
            await self._settle_promise()
            self._refer_to(Reference(self._weights.version, self.step))

    async def _hand_to_trainers(
        self, dispatcher: RolloutDispatcher, groups: Sequence[LedgerGroup]
    ) -> None:
        """Has shared devices with the trainers, for a step over these groups."""
        if self._devices is None:
            return
        try:
            await self._devices.to_trainers()
            trainer = await self._described(self.trainer)
            check_step(trainer.step, self.optimizer_step, "trainer that woke is")
        except BaseException:
            dispatcher.put_back(groups)
            raise

    async def _hand_over(self) -> None:
        """Has shared devices with the engines, at the weights published last.

        A run checkpoint that was asked for is one before the trainer sleeps.
        """
        if self._devices is None or self._devices.are_with_engines:
            return
        await self._settle_saving()
        await self._devices.to_engines(partial(self._bring_engines, self._weights))

    async def _take_devices(self) -> None:
        if self._devices is None:
            await super()._take_devices()
            return
        if self.critic is not None:
            await wait_for_trainer(self.critic.client, self.config.service_timeout_seconds)
        self._devices.forget()
        await self._devices.to_trainers()

    async def _train(
        self, dispatcher: RolloutDispatcher, groups: Sequence[LedgerGroup]
    ) -> StepReport | None:
        """One step over these groups; None if a blob is lost, whose group is generated again."""
        teach = self._teachers.teach if self.config.teachers else None
        try:
            return await self._train_on(groups, self._mismatch_limit(groups), teach)
        except RemoteError as error:
            dispatcher.put_back(groups)
            digest = lost_blob(error, groups)
            if digest is None or not dispatcher.lose_blob(digest):
                raise
            return None
        except BaseException:
            dispatcher.put_back(groups)
            raise

    def _open_dispatcher(self) -> RolloutDispatcher:
        if self._dispatcher is None:
            dispatcher_config = DispatcherConfig(
                groups_per_step=self.config.groups_per_step,
                max_staleness=self.config.max_staleness,
                attempts=self.config.group_attempts,
                outage_seconds=self.config.service_timeout_seconds,
                dropped_in_a_row=self.config.max_dropped_in_a_row
                or max(8, min(64, 4 * self.config.groups_per_step)),
                filtered_in_a_row=self.config.max_filtered_in_a_row,
                over_sampling=self.config.over_sampling,
                drops_surplus=self.config.surplus == "drop",
                steps=self.config.steps,
            )
            self._dispatcher = RolloutDispatcher(
                dispatcher_config,
                self.ledger,
                self.workers,
                self._rollout_request,
                self._retention.hold,
                self._filters,
                self._open_mixture(),
                self._place,
            )
        return self._dispatcher

    def _open_mixture(self) -> Mixture | None:
        weights = {name: share.weight for name, share in self.config.environments.items()}
        if not weights:
            return None
        return Mixture(weights, self.ledger, self._schedule, self.report.last_scalars)

    def _rollout_request(
        self, groups: Sequence[LedgerGroup], trial: int
    ) -> rollout_pb.RolloutRequest:
        version = self._weights.version
        synchronous = self.config.max_staleness == 0
        versions = engine_pb.VersionBounds(
            exact_version=version if synchronous else None,
            min_version=None if synchronous else version,
        )
        name = groups[0].environment  # of all, since a call has but one
        tasks = [(group.group_id, self._task(group)) for group in groups]
        return build_request(self.config, self._shares[name], tasks, versions, trial)

    def _task(self, group: LedgerGroup) -> Task:
        return self._sources[group.environment].task(group.task_number)

    def _place(self, group: LedgerGroup) -> str:
        return self._sources[group.environment].place(group.task_number)

    def _teacher_of(self, group: LedgerGroup) -> str:
        return teacher_of(self.config, self._shares[group.environment], self._task(group))

    async def _publish(self, restored: RunCheckpoint | None = None) -> None:
        """Publishes the trainer's weights and has the engines brought to them.

        An asynchronous run goes on meanwhile: what it asks for from now on waits for engines that
        serve them, so that no group is older than the step it is issued at. Those of a run
        checkpoint are compared with it before an engine hears of them.
        """
        await self._settle_engines()
        sleeps = self._devices is not None
        targets = []
        if self.config.weight_transport == "collective" and restored is None:
            targets = await self.fleet.targets()
        mode = PAUSE_MODES[self.config.pause_mode]
        if targets or restored is not None or sleeps:
            published = await self._publish_weights(targets, mode, restored)
        else:
            async with self.fleet.streaming() as note:
                published = await self._publish_weights(mode=mode, on_allocated=note)
        for outcome in published.engines:
            if outcome.HasField("error"):  # it is brought up to date from the store below
                cause = outcome.error.message
                logger.warning("engine %s received no weights: %s", outcome.engine_id, cause)
        self._weights = published.weights
        if self._dispatcher is not None:
            self._dispatcher.version_recorded()
        faults.point("version")
        if sleeps:
            return  # the trainer has the devices yet
        bringing = self._bring_engines(published.weights)
        self._bringing = asyncio.create_task(bringing, name="bring engines to new weights")
        if self.config.max_staleness == 0:
            await self._settle_engines()

    async def _bring_engines(self, weights: sample_pb2.WeightVersion) -> None:
        seconds = self.config.service_timeout_seconds
        committing = asyncio.create_task(self.fleet.commit(weights, seconds))
        tasks: list[asyncio.Task[Any]] = [committing]
        if weights.version == self._promised:  # once it is lost no engine comes to it
            tasks.append(asyncio.create_task(self._wait_durable(weights.version)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not committing.done():
                tasks[-1].result()
            self._committed = await committing
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for name, why in self._committed.late.items():
            self.report.note(
                f"engine {name} is left behind at version {weights.version}: {why}; nothing is "
                "asked of it until it has the weights of then"
            )
        faults.point("committed")
        await self._retention.release_weights(weights.version)

    async def _settle_engines(self) -> None:
        """Waits until an engine serves what was published last. Raises NoEngineError."""
        bringing, self._bringing = self._bringing, None
        if bringing is not None:
            with trace.span(trace.LOOP, "wait for engines"):
                await bringing

    async def _restore(self, run_checkpoint: RunCheckpoint) -> None:
        """Goes back: groups consumed since are trained on again, none is lost."""
        self._check_scalars(run_checkpoint.step)
        await self._evaluations.close()
        if self._dispatcher is not None:
            await self._dispatcher.close()
            self._dispatcher = None
        await self._go_back(run_checkpoint)
        await self._sample_again(run_checkpoint)
        await self._publish(run_checkpoint)
        await self._evaluate_in_between()  # if it was not finished

    async def _facts(self) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, str]]]:
        layouts, settings = await super()._facts()
        return layouts, settings | self._teachers.settings | self._engine_settings

    async def _sample_again(self, run_checkpoint: RunCheckpoint) -> None:
        """Has groups generated anew that are not of this run's settings, nor of weights to come.

        From then on the run checkpoint is of these settings: what is sampled next is.
        """
        layouts, trainers = await self._facts()
        last = last_step_of_samples(run_checkpoint, self._settings, trainers)
        if last is None:
            return
        count = self.ledger.sample_again(last)
        now = replace(run_checkpoint, settings=self._settings, layouts=layouts, trainers=trainers)
        await self._retention.record(now)
        if count:
            which = "" if last == -1 else f" by weights after step {last}"
            self.report.note(
                f"{count} groups are sampled again, which had been{which} with the settings before"
            )

    def _check_scalars(self, step: int) -> None:
        """A schedule is asked with the row of the step that a run goes back to.

        Raises ConfigError where that is gone and the run is to be deterministic.
        """
        if self._schedule is None or not step or self.report.has_row(step):
            return
        lost = f"environment_schedule: {self.report.path} has no row of step {step}"
        if self.config.deterministic:
            raise ConfigError(
                f"deterministic: {lost}, so that other weights might be answered: put it back, or "
                "resume without deterministic"
            )
        self.report.note(f"{lost}: it is asked with the one before")

    async def _evaluate_in_between(self) -> None:
        if not self._evaluations.is_due(self.step) or self._is_done():
            return
        await self._hand_over()
        await self._settle_engines()
        if self._evaluations.is_beside:
            self._evaluations.begin(self.step, self.fleet.version)
        else:
            await self._evaluations.measure("during", self.step, self.fleet.version)
