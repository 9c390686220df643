"""A run of steps over finished groups, wherever those come from."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sluice import faults
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.config import ConfigError
from sluice.loop import trace
from sluice.loop.config import RunConfig
from sluice.loop.ledger import LedgerGroup
from sluice.loop.report import RunReport
from sluice.loop.run_directory import RunCheckpoint, latest_run_checkpoint
from sluice.loop.run_samples import SampleKeeper
from sluice.loop.trainer_run import TrainerRun
from sluice.loop.training import (
    Critic,
    SavingCheckpoint,
    StepReport,
    Teach,
    Work,
    train_step,
    wait_for_trainer,
)

if TYPE_CHECKING:
    from sluice.loop.run_archive import RunArchive  # nobody else needs obstore

logger = logging.getLogger(__name__)


class PolicyRun(TrainerRun[RunConfig]):
    """Trains a policy, and its critic if it has one, on groups; who inherits says on which."""

    def __init__(
        self,
        config: RunConfig,
        report: RunReport,
        settings: dict[str, str],
        critic: Critic | None = None,
        archive: RunArchive | None = None,
    ) -> None:
        """`settings` are digests of those that shape the run."""
        super().__init__(config, report, config.weights, archive)
        self._settings, self._shares = settings, config.shares
        self.critic = critic
        self._trace = trace.RunTrace(config.run_dir, config.trace)
        self._samples = SampleKeeper(
            config.run_dir, config.store_place, config.trace, config.store_cache
        )
        self._rewards = deque[float](maxlen=config.stop_window)
        self._mismatch_checked = False  # since the services were last brought to a state

    async def start(self) -> None:
        trace.use(self._trace)
        await super().start()

    @abstractmethod
    async def train(self) -> None:
        """Trains until the end that the config names; where the trainer is lost, goes back."""

    @abstractmethod
    def _next_work(self) -> Work | None:
        """What is to be done next; None where nothing is left."""

    async def _do_work(self) -> None:
        """All that is left, each step that was made in a span of its own."""
        while (work := self._next_work()) is not None:
            before, began = self.step, trace.now()
            await self._recovery.run(work)
            if self.step > before:
                trace.add_since(began, trace.LOOP, trace.STEP, f"step {before + 1}")
                self._trace.flush(self.step)

    async def close(self) -> None:
        self._trace.flush(self.step + 1)  # what came after the last step
        if self.critic is not None:
            await self.critic.close()
        await super().close()

    @property
    def _deterministic(self) -> bool:
        return self.config.deterministic

    @property
    def _warmup_steps(self) -> int:
        return 0 if self.config.critic is None else self.config.critic.warmup_steps

    def _is_done(self) -> bool:
        config = self.config
        reached = (
            config.stop_at_reward is not None
            and len(self._rewards) == config.stop_window
            and sum(self._rewards) / config.stop_window >= config.stop_at_reward
        )
        return reached or self.step >= config.steps

    async def _begin_anew(self) -> None:
        if self.optimizer_step and not self.config.initial_checkpoint:
            self._begin_late(self.optimizer_step)
        if self.critic is not None:
            await self.critic.begin()
            if self.critic.optimizer_step:
                self._begin_late(self.critic.optimizer_step)
        await self._begin_weights()
        await self._save()
        await self._settle_saving()  # a step that no run checkpoint precedes could not be repeated

    async def _begin_weights(self) -> None:
        """What is done with the weights that training begins with, before the first step."""

    def _begin_late(self, step: int) -> None:
        """The trainer is another run's, or was: say so."""
        where = f"the trainer is at step {step}"
        if self.config.deterministic:
            raise ConfigError(
                f"deterministic: {where}, which no other run can begin with; "
                "give initial_checkpoint, or restart the trainer"
            )
        self.report.note(f"{where}; the run goes on from there")

    async def _take_devices(self) -> None:
        if self.critic is not None:
            await wait_for_trainer(self.critic.client, self.config.service_timeout_seconds)
        await super()._take_devices()
        if self.critic is not None and (await self._described(self.critic.client)).asleep:
            await self.critic.client.wake()

    async def _train_on(
        self, groups: Sequence[LedgerGroup], max_mismatch: float, teach: Teach | None = None
    ) -> StepReport:
        """Trains on these, as `train_step` does, and keeps samples of some steps."""
        looked_at = self._samples.choose(self.step + 1, groups)
        trained = await train_step(
            self.trainer,
            self.config.tempered_algorithm,
            groups,
            optimizer_step=self.optimizer_step,
            name=f"step-{self.step}",
            seed=self.config.seed,
            critic=self.critic,
            critic_alone=self.step < self._warmup_steps,
            max_mismatch=max_mismatch,
            teach=teach,
            looked_at=looked_at,
            reference_version=self._reference.version,
        )
        if looked_at:
            await asyncio.to_thread(self._samples.keep, self.step + 1, looked_at, trained.columns)
        self._mismatch_checked |= max_mismatch > 0 and "rollout_mismatch" in trained.metrics
        return trained

    def _mismatch_limit(self, groups: Sequence[LedgerGroup]) -> float:
        """Of a step whose groups are all of the weights it begins with, until one was checked."""
        on_policy = all(group.age(self.step) == 0 for group in groups)
        return self.config.max_mismatch if on_policy and not self._mismatch_checked else 0.0

    def _note_trained(self, groups: Sequence[LedgerGroup], trained: StepReport) -> None:
        self.ledger.consume((group.group_id for group in groups), self.step + 1)
        faults.point("consumed")
        self.step, self.optimizer_step = self.step + 1, trained.optimizer_step
        self._recovery.note_step()

    async def _trainers(self) -> dict[str, trainer_pb.Trainer]:
        found = await super()._trainers()
        return found if self.critic is None else {**found, "critic": await self.critic.describe()}

    async def _begin_critic_checkpoint(self, checkpoint_id: str) -> SavingCheckpoint | None:
        return None if self.critic is None else await self.critic.begin_checkpoint(checkpoint_id)

    async def _save_last(self) -> None:
        """A run checkpoint of the end, which the run waits for."""
        await self._settle_saving()
        if not self._has_last_run_checkpoint():
            await self._save()
            await self._settle_saving()

    def _has_last_run_checkpoint(self) -> bool:
        """The end is worth a run checkpoint too, unless the run takes none."""
        run_checkpoint = latest_run_checkpoint(self._run_checkpoints)
        return not self.config.checkpoint_every or (
            run_checkpoint is not None and run_checkpoint.step == self.step
        )

    async def _go_back(self, run_checkpoint: RunCheckpoint) -> None:
        """Brings trainers, ledger and report back; groups since are to be trained on again."""
        if self.critic is not None:
            await self.critic.load(
                run_checkpoint.critic_checkpoint, run_checkpoint.critic_optimizer_step
            )
        group_count = await self._load(run_checkpoint)
        self._mismatch_checked = False
        self._rewards.clear()
        self._rewards.extend(self.report.truncate(self.step))
        logger.info("restored step %d; %d groups are trained on again", self.step, group_count)

    def _episodes(self, environment: str) -> int:
        """Of each group of an environment, also of one that the run had before it was resumed."""
        share = self._shares.get(environment)
        return (share and share.samples_per_group) or self.config.samples_per_group

    def _report_step(
        self,
        groups: Sequence[LedgerGroup],
        trained: StepReport,
        more: Mapping[str, float],
    ) -> None:
        """`more`: further numbers of the step's row."""
        reward, length = step_means(groups, self._episodes)
        self._rewards.append(reward)
        of_environments: dict[str, float] = {}
        for name in self.config.environments:
            own = [group for group in groups if group.environment == name]
            of_environments[f"groups/{name}"] = len(own)
            if own:
                mean, tokens = step_means(own, self._episodes)
                of_environments[f"reward_mean/{name}"] = mean
                of_environments[f"response_length_mean/{name}"] = tokens
        ages = [group.age(self.step - 1) for group in groups]
        row: dict[str, Any] = {
            "step": self.step,
            "optimizer_step": self.optimizer_step,
            "weight_version": self._weights.version,
            **trained.metrics,
            "reward_mean": reward,
            "response_length_mean": length,
            **of_environments,
            "staleness_max": max(ages),
            "staleness_mean": sum(ages) / len(ages),
            "skipped": list(trained.skipped_reasons),
            **more,
        }
        self.report.step(row)


def step_means(
    groups: Sequence[LedgerGroup], episodes: Callable[[str], int]
) -> tuple[float, float]:
    """Mean reward of their episodes, `episodes` a group of an environment, and mean response
    tokens of their samples."""
    samples = sum(group.sample_count for group in groups)
    weights = [episodes(group.environment) for group in groups]
    rewards = sum(g.reward_mean * weight for g, weight in zip(groups, weights, strict=True))
    return rewards / sum(weights), sum(group.response_tokens for group in groups) / samples
