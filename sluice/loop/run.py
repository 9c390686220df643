"""The main job: roll out, train, publish, and again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import grpc

from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.rollout.v1 import rollout_service_pb2 as rollout_pb
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.client import RemoteError, RouterClient, TrainerClient
from sluice.config import ConfigError
from sluice.loop.config import RunConfig
from sluice.loop.cut import Cut, latest_cut, write_cut
from sluice.loop.evaluation import evaluate
from sluice.loop.feed import FeedConfig, GroupFeed
from sluice.loop.fleet import CommitReport, EngineFleet
from sluice.loop.ledger import Ledger, LedgerGroup
from sluice.loop.prompts import load_prompts
from sluice.loop.report import Report
from sluice.loop.requests import build_request
from sluice.loop.training import StepReport, train_step
from sluice.loop.workers import EpisodeWorkers

logger = logging.getLogger(__name__)

# What a trainer answers whose ranks went away and came back at its last checkpoint.
_TRAINER_LOST = {
    "RANK_LOST",
    "LOADING",
    "STEP_MISMATCH",
    "BATCH_NOT_FOUND",
    "COLUMN_MISSING",
    "GRADIENTS_INCOMPLETE",
    "PARTS_MISMATCH",
    "NO_GRADIENTS",
}


class TrainerFailedError(Exception):
    """The trainer cannot go on; the message carries its reason."""


class Run:
    """One training run over running services. `start`, `train`, then `close`."""

    def __init__(self, config: RunConfig, trainer: str, router: str, report: Report) -> None:
        self.config, self.report = config, report
        self._prompts = load_prompts(config.prompts, config.seed)
        self._check_directory()
        self.trainer = TrainerClient(trainer, config.security)
        self.router = RouterClient(router, config.security)
        self.fleet = EngineFleet(self.router, config.security, config.pause_mode, poll_seconds=1.0)
        self.workers = EpisodeWorkers(self.router, config.security, config.service_timeout_seconds)
        self.ledger = Ledger(config.run_dir / "ledger.sqlite")
        self._cuts = config.run_dir / "cuts"
        self._feed: GroupFeed | None = None
        self._keeping_up: asyncio.Task[None] | None = None
        self.step = 0  # of the loop
        self.optimizer_step = 0  # of the trainer
        self._rewards: list[float] = []

    def _check_directory(self) -> None:
        ledger = self.config.run_dir / "ledger.sqlite"
        if ledger.exists() and not self.config.resume:
            raise ConfigError(
                f"run_dir: {self.config.run_dir} holds a run; give resume: true or another run_dir"
            )
        if self.config.resume and latest_cut(self.config.run_dir / "cuts") is None:
            raise ConfigError(f"resume: {self.config.run_dir} holds no cut to resume from")

    async def start(self) -> None:
        """Bring trainer and engines to the first weights, or to those of the last cut."""
        await self._trainer_ready()
        await self.workers.refresh()
        if latest_cut(self._cuts) is None:
            trainer = await self.trainer.get()
            self.optimizer_step = trainer.step
            await self._publish()
            await self._cut()
        else:
            await self._restore()
        self._keeping_up = asyncio.create_task(self.fleet.keep_up())

    async def train(self) -> None:
        """Steps until the end the config names; a lost trainer is restored from the last cut."""
        await self._evaluate("before")
        failures = 0
        while not self._is_done():
            try:
                await self._one_step()
                failures = 0
            except RemoteError as error:
                failures += 1
                if not _is_trainer_lost(error) or failures > 5:
                    raise
                logger.warning("trainer: %s; going back to the last cut", error)
                await self._trainer_ready()
                await self._restore()
        await self._evaluate("after")

    async def close(self) -> None:
        """End what runs in the background and close every connection."""
        if self._keeping_up is not None:
            self._keeping_up.cancel()
            await asyncio.gather(self._keeping_up, return_exceptions=True)
        if self._feed is not None:
            await self._feed.close()
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

    async def _one_step(self) -> None:
        start = time.monotonic()
        feed = self._open_feed()
        await feed.fill(self.step)
        groups = await feed.take(self.step)
        rolled_out = time.monotonic()
        try:
            trained = await train_step(
                self.trainer,
                self.config.algorithm,
                groups,
                optimizer_step=self.optimizer_step,
                name=f"step-{self.step}",
            )
        except BaseException:
            feed.put_back(groups)
            raise
        self.ledger.consume((group.group_id for group in groups), self.step + 1)
        self.step, self.optimizer_step = self.step + 1, trained.optimizer_step
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

    def _open_feed(self) -> GroupFeed:
        if self._feed is None:
            feed_config = FeedConfig(
                groups_per_step=self.config.groups_per_step,
                max_staleness=self.config.max_staleness,
                attempts=self.config.group_attempts,
            )
            self._feed = GroupFeed(feed_config, self.ledger, self.workers, self._rollout_request)
        return self._feed

    def _rollout_request(self, groups: Sequence[LedgerGroup]) -> rollout_pb.RolloutRequest:
        version = self.fleet.version
        synchronous = self.config.max_staleness == 0
        versions = engine_pb.VersionBounds(
            exact_version=version if synchronous else None,
            min_version=None if synchronous else version,
        )
        tasks = [(group.group_id, self._prompts.task(group.position)) for group in groups]
        return build_request(self.config, tasks, versions)

    async def _publish(self) -> CommitReport:
        """Publish the trainer's weights and bring the engines to them."""
        published = await self.trainer.publish_weights()
        weights = published.weights
        self.ledger.record_version(weights.version, weights.digest, self.step)
        return await self.fleet.commit(weights, self.config.service_timeout_seconds)

    async def _cut(self) -> None:
        """Save a checkpoint, then the manifest that makes it the place to resume from."""
        checkpoint_id = f"{self.config.run_dir.name}-{self.step:08}-{time.time_ns():x}"
        saved = await self.trainer.save_checkpoint(checkpoint_id)
        trainer = await self.trainer.get()
        cut = Cut(
            step=self.step,
            optimizer_step=saved.step,
            checkpoint=saved.checkpoint,
            weight_version=trainer.weights.version,
            weight_digest=trainer.weights.digest,
            position=self.ledger.next_position(),
            seed=self.config.seed,
        )
        write_cut(self._cuts, cut)

    async def _restore(self) -> None:
        """Go back to the last cut: groups consumed since are generated again, none is lost."""
        cut = latest_cut(self._cuts)
        if cut is None:
            raise TrainerFailedError("the trainer lost its state and the run holds no cut")
        if self._feed is not None:
            await self._feed.close()
            self._feed = None
        loaded = await self.trainer.load_checkpoint(cut.checkpoint)
        returned = self.ledger.roll_back(cut.step)
        self.step, self.optimizer_step = cut.step, loaded.step
        self._rewards = self.report.truncate(cut.step)
        logger.info("restored step %d; %d groups wait to be trained on again", cut.step, returned)
        await self._publish()

    async def _trainer_ready(self) -> None:
        """Wait until the trainer takes work. Raises TrainerFailedError with its own reason."""
        state = "no answer"
        try:
            async with asyncio.timeout(self.config.service_timeout_seconds):
                while True:
                    try:
                        trainer = await self.trainer.get()
                    except RemoteError as error:
                        if error.code is not grpc.StatusCode.UNAVAILABLE:
                            raise
                        state = str(error)
                    else:
                        state = trainer_pb.Trainer.State.Name(trainer.state)
                        if trainer.state == trainer_pb.Trainer.STATE_ACTIVE:
                            return
                        if trainer.state == trainer_pb.Trainer.STATE_FAILED:
                            raise TrainerFailedError(f"trainer failed: {trainer.failure}")
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise TrainerFailedError(
                f"trainer {self.trainer.address} was not ready in "
                f"{self.config.service_timeout_seconds:g} s: {state}"
            ) from None

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
        row: dict[str, Any] = {
            "step": self.step,
            "optimizer_step": self.optimizer_step,
            "weight_version": self.fleet.version,
            **trained.metrics,
            "reward_mean": reward,
            "response_length_mean": sum(g.response_tokens for g in groups) / samples,
            "staleness_max": self.step - 1 - min(g.oldest_step for g in groups),
            "skipped": list(trained.skipped_reasons),
            "engines": committed.engine_count,
            "prepare_seconds": committed.prepare_seconds,
            "pause_seconds": committed.pause_seconds,
            **seconds,
        }
        self.report.step(row)


def _is_trainer_lost(error: RemoteError) -> bool:
    return error.reason in _TRAINER_LOST or error.code is grpc.StatusCode.UNAVAILABLE
