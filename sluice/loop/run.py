"""The main job: roll out, train, publish, and again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from sluice import faults
from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.rollout.v1 import rollout_service_pb2 as rollout_pb
from sluice.client import RemoteError, RouterClient, TrainerClient
from sluice.config import ConfigError
from sluice.loop.config import RunConfig
from sluice.loop.cut import Cut, latest_cut, write_cut
from sluice.loop.evaluation import evaluate
from sluice.loop.feed import FeedConfig, GroupFeed
from sluice.loop.fleet import CommitReport, EngineFleet, FleetConfig
from sluice.loop.ledger import Ledger, LedgerGroup
from sluice.loop.prompts import load_prompts
from sluice.loop.readiness import TrainerLostError, lost_blob, wait_for_trainer
from sluice.loop.report import Report
from sluice.loop.requests import build_request
from sluice.loop.retention import Retention
from sluice.loop.survival import Survival
from sluice.loop.training import StepReport, train_step
from sluice.loop.workers import EpisodeWorkers

logger = logging.getLogger(__name__)


class Run:
    """One training run over running services. `start`, `train`, then `close`."""

    def __init__(self, config: RunConfig, trainer: str, router: str, report: Report) -> None:
        self.config, self.report = config, report
        self._prompts = load_prompts(config.prompts, config.seed)
        self._check_directory()
        self.trainer = TrainerClient(trainer, config.security)
        self.router = RouterClient(router, config.security)
        self.fleet = EngineFleet(
            self.router,
            config.security,
            FleetConfig(pause_mode=config.pause_mode, deterministic=config.deterministic),
        )
        self.workers = EpisodeWorkers(self.router, config.security, config.service_timeout_seconds)
        self.ledger = Ledger(config.run_dir / "ledger.sqlite")
        self._cuts = config.run_dir / "cuts"
        self._retention: Retention | None = None
        self._feed: GroupFeed | None = None
        self._keeping_up: asyncio.Task[None] | None = None
        self.step = 0  # of the loop
        self.optimizer_step = 0  # of the trainer
        self._rewards: list[float] = []
        self._survival = Survival(self.trainer, self._begin, config.service_timeout_seconds)
        self._weights: sample_pb2.WeightVersion | None = None  # published last

    def _check_directory(self) -> None:
        ledger = self.config.run_dir / "ledger.sqlite"
        if ledger.exists() and not self.config.resume:
            raise ConfigError(
                f"run_dir: {self.config.run_dir} holds a run; give resume: true or another run_dir"
            )
        if self.config.resume and not ledger.exists():
            self.report.note(f"{self.config.run_dir} holds no run yet: this one begins")
        cut = latest_cut(self.config.run_dir / "cuts")
        if cut is not None and cut.seed != self.config.seed:
            raise ConfigError(f"seed: is {self.config.seed}, the run to resume has {cut.seed}")

    async def start(self) -> None:
        """Bring trainer and engines to the first weights, or to those of the last cut.

        Raises ConfigError for services that cannot do what the run is to do.
        """
        seconds = self.config.service_timeout_seconds
        await wait_for_trainer(self.trainer, seconds)
        await self.workers.refresh()
        if self.config.deterministic:
            await self.fleet.check_deterministic(seconds)
        self._retention = Retention(
            self.config.retention, self.config.store_dir, self.config.run_dir, self.ledger
        )
        await self._survival.run(self._begin)
        self._keeping_up = asyncio.create_task(self.fleet.keep_up(), name="keep engines up")

    async def train(self) -> None:
        """Steps until the end the config names; a lost trainer is restored from the last cut."""
        if self.step == 0:
            await self._evaluate("before")
        while not (self._is_done() and self._has_last_cut()):
            await self._survival.run(self._cut if self._is_done() else self._one_step)
        await self._evaluate("after")

    async def close(self) -> None:
        """End what runs in the background and close every connection."""
        if self._keeping_up is not None:
            self._keeping_up.cancel()
            await asyncio.gather(self._keeping_up, return_exceptions=True)
        if self._feed is not None:
            await self._feed.close()
        if self._retention is not None:
            await self._retention.close()
        await asyncio.gather(
            self.fleet.close(), self.workers.close(), self.trainer.close(), self.router.close()
        )
        self.ledger.close()

    def _is_done(self) -> bool:
        config = self.config
        recent = self._rewards[-config.stop_window :]
        reached = (
            config.stop_at_reward is not None
            and len(recent) == config.stop_window
            and sum(recent) / len(recent) >= config.stop_at_reward
        )
        return reached or self.step >= config.steps

    async def _begin(self) -> None:
        """The first weights and the first cut, or what the last cut names."""
        cut = latest_cut(self._cuts)
        if cut is not None:
            await self._restore(cut)
            return
        if self.config.initial_checkpoint:
            loaded = await self.trainer.load_checkpoint(self.config.initial_checkpoint)
            self.optimizer_step = loaded.step
        else:
            self.optimizer_step = (await self.trainer.get()).step
            if self.optimizer_step:
                self._begin_late(self.optimizer_step)
        await self._publish()
        await self._cut()

    def _begin_late(self, step: int) -> None:
        """The trainer is another run's, or was: say so."""
        where = f"the trainer is at step {step}"
        if self.config.deterministic:
            raise ConfigError(
                f"deterministic: {where}, which no other run can begin with; "
                "give initial_checkpoint, or restart the trainer"
            )
        self.report.note(f"{where}; the run goes on from there")

    async def _one_step(self) -> None:
        start = time.monotonic()
        if self._keeping_up is not None and self._keeping_up.done():
            self._keeping_up.result()  # a bug in there is one of this run
        feed = self._open_feed()
        await feed.fill(self.step)
        groups = await feed.take(self.step)
        rolled_out = time.monotonic()
        trained = await self._train(feed, groups)
        if trained is None:
            return
        self.ledger.consume((group.group_id for group in groups), self.step + 1)
        faults.point("consumed")
        self.step, self.optimizer_step = self.step + 1, trained.optimizer_step
        self._survival.progressed()
        stepped = time.monotonic()
        committed = await self._publish()
        seconds = {
            "rollout_seconds": rolled_out - start,
            "train_seconds": stepped - rolled_out,
            "publish_seconds": time.monotonic() - stepped,
            "step_seconds": time.monotonic() - start,
        }
        self._report_step(groups, trained, committed, seconds)
        every = self.config.checkpoint_every
        if every and self.step % every == 0:
            await self._cut()
        await self._evaluate_in_between()

    async def _train(self, feed: GroupFeed, groups: Sequence[LedgerGroup]) -> StepReport | None:
        """One step over these groups; None if a blob is lost, whose group is generated again."""
        try:
            return await train_step(
                self.trainer,
                self.config.algorithm,
                groups,
                optimizer_step=self.optimizer_step,
                name=f"step-{self.step}",
            )
        except RemoteError as error:
            feed.put_back(groups)
            digest = lost_blob(error)
            if digest is None or not feed.lose_blob(digest):
                raise
            return None
        except BaseException:
            feed.put_back(groups)
            raise

    def _open_feed(self) -> GroupFeed:
        if self._feed is None:
            feed_config = FeedConfig(
                groups_per_step=self.config.groups_per_step,
                max_staleness=self.config.max_staleness,
                attempts=self.config.group_attempts,
                patience_seconds=self.config.service_timeout_seconds,
                dropped_in_a_row=max(8, min(64, 4 * self.config.groups_per_step)),
            )
            assert self._retention is not None
            self._feed = GroupFeed(
                feed_config,
                self.ledger,
                self.workers,
                self._rollout_request,
                self._retention.hold,
            )
        return self._feed

    def _rollout_request(
        self, groups: Sequence[LedgerGroup], trial: int
    ) -> rollout_pb.RolloutRequest:
        version = self.fleet.version
        synchronous = self.config.max_staleness == 0
        versions = engine_pb.VersionBounds(
            exact_version=version if synchronous else None,
            min_version=None if synchronous else version,
        )
        tasks = [(group.group_id, self._prompts.task(group.position)) for group in groups]
        return build_request(self.config, tasks, versions, trial)

    async def _publish(self) -> CommitReport:
        """Publish the trainer's weights and bring the engines to them."""
        assert self._retention is not None
        published = await self.trainer.publish_weights()
        weights = published.weights
        faults.point("published")
        self._check_step(published.step, "published weights")
        await self._retention.hold_weights(weights.version)
        self.ledger.record_version(weights.version, weights.digest, self.step)
        faults.point("version")
        committed = await self.fleet.commit(weights, self.config.service_timeout_seconds)
        faults.point("committed")
        self._weights = weights
        await self._retention.release_weights(weights.version)
        return committed

    async def _cut(self) -> None:
        """Save a checkpoint, then the manifest that makes it the place to resume from."""
        assert self._retention is not None
        assert self._weights is not None
        await self._retention.settle()
        saved = await self.trainer.save_checkpoint(self._retention.new_checkpoint_id(self.step))
        self._check_step(saved.step, "checkpoint")
        faults.point("checkpoint")
        cut = Cut(
            step=self.step,
            optimizer_step=saved.step,
            checkpoint=saved.checkpoint,
            weight_version=self._weights.version,
            weight_digest=self._weights.digest,
            position=self.ledger.next_position(),
            seed=self.config.seed,
        )
        write_cut(self._cuts, cut)
        faults.point("cut")
        await self._retention.take_cut()

    def _has_last_cut(self) -> bool:
        """The end is worth a cut too, unless the run takes none."""
        cut = latest_cut(self._cuts)
        return not self.config.checkpoint_every or (cut is not None and cut.step == self.step)

    def _check_step(self, step: int, what: str) -> None:
        """A front that came back has forgotten the steps since its start, and answers."""
        if step != self.optimizer_step:
            raise TrainerLostError(f"{what} of step {step}, this run is at {self.optimizer_step}")

    async def _restore(self, cut: Cut) -> None:
        """Go back to a cut: groups consumed since are generated again, none is lost."""
        assert self._retention is not None
        if self._feed is not None:
            await self._feed.close()
            self._feed = None
        loaded = await self.trainer.load_checkpoint(cut.checkpoint)
        returned = self.ledger.roll_back(cut.step)
        await self._retention.resume()
        self.step, self.optimizer_step = cut.step, loaded.step
        self._rewards = self.report.truncate(cut.step)
        logger.info("restored step %d; %d groups wait to be trained on again", cut.step, returned)
        await self._publish()

    async def _evaluate(self, when: str) -> None:
        if self.config.evaluation is not None:
            score = await evaluate(self.config, self.workers, self.fleet.version, self.step)
            self.report.evaluation(when, self.step, score)

    async def _evaluate_in_between(self) -> None:
        evaluation = self.config.evaluation
        if evaluation is None or not evaluation.every_steps:
            return
        if self.step % evaluation.every_steps == 0:
            await self._evaluate("during")

    def _report_step(
        self,
        groups: Sequence[LedgerGroup],
        trained: StepReport,
        committed: CommitReport,
        seconds: dict[str, float],
    ) -> None:
        samples = sum(group.sample_count for group in groups)
        reward = sum(g.reward_mean * g.sample_count for g in groups) / samples
        self._rewards.append(reward)
        ages = [self.step - 1 - group.oldest_step for group in groups]
        row: dict[str, Any] = {
            "step": self.step,
            "optimizer_step": self.optimizer_step,
            "weight_version": self.fleet.version,
            **trained.metrics,
            "reward_mean": reward,
            "response_length_mean": sum(g.response_tokens for g in groups) / samples,
            "staleness_max": max(ages),
            "staleness_mean": sum(ages) / len(ages),
            "skipped": list(trained.skipped_reasons),
            "engines": committed.engine_count,
            "prepare_seconds": committed.prepare_seconds,
            "pause_seconds": committed.pause_seconds,
            **seconds,
        }
        self.report.step(row)
