"""Supervised training: rows of a file, by the trainer's loss `sft`; no engine takes part."""

from __future__ import annotations

import asyncio
import logging
import time

from sluice import faults
from sluice.client import TrainerClient
from sluice.config import ConfigError
from sluice.loop.config import AlgorithmConfig
from sluice.loop.ledger import Ledger, LedgerGroup
from sluice.loop.recovery import Survival, check_step, wait_for_trainer
from sluice.loop.report import RunReport
from sluice.loop.run_checkpoint import Retention, RunCheckpoint, latest_cut, write_cut
from sluice.loop.run_directory import CUTS, LEDGER, check_ledger, last_cut
from sluice.loop.sft_config import SftConfig
from sluice.loop.sft_rows import ConversationRows, StepRows
from sluice.loop.training import StepReport, train_step
from sluice.samples.blobs import BlobStore
from sluice.samples.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

LINE = "loss {loss:.4f}  tokens {tokens:.0f}  lr {learning_rate:.1e}"


class SftRun:
    """One supervised run over a running trainer. `start`, `train`, then `close`.

    A step's rows are one blob and one entry of the ledger, at the step's number.
    """

    def __init__(
        self, config: SftConfig, trainer: str, rows: ConversationRows, report: RunReport
    ) -> None:
        """Raises ConfigError and RunDirectoryError for a run_dir that does not fit."""
        self.config, self.report, self._rows = config, report, rows
        last_cut(config.run_dir, resume=config.resume, seed=config.seed)
        self.steps = step_count(config, rows)
        self.trainer = TrainerClient(trainer, config.security)
        self.ledger = Ledger(config.run_dir / LEDGER)
        self._blobs = BlobStore(config.store_dir)
        self._cuts = config.run_dir / CUTS
        self._algorithm = AlgorithmConfig(loss=config.loss)
        self._survival = Survival(self.trainer, self._begin, config.service_timeout_seconds)
        self._retention: Retention | None = None
        self._published = False
        self.step = 0  # of the loop
        self.optimizer_step = 0  # of the trainer

    async def start(self) -> None:
        """Bring the trainer to its first state, or to that of the last cut."""
        config = self.config
        check_ledger(self.ledger, latest_cut(self._cuts))
        await wait_for_trainer(self.trainer, config.service_timeout_seconds)
        self._retention = Retention(config.retention, config.store_dir, config.run_dir, self.ledger)
        await self._survival.run(self._begin)

    async def train(self) -> None:
        """All steps that are left, a last cut, and the weights published."""
        while not self._published:
            if self.step < self.steps:
                await self._survival.run(self._one_step)
            else:
                await self._survival.run(self._publish)

    async def close(self) -> None:
        """End what runs in the background and close the connection."""
        if self._retention is not None:
            await self._retention.close()
        await self.trainer.close()
        self.ledger.close()

    async def _begin(self) -> None:
        """What the trainer holds, or what the last cut names."""
        cut = latest_cut(self._cuts)
        if cut is not None:
            await self._restore(cut)
            return
        if self.config.initial_checkpoint:
            loaded = await self.trainer.load_checkpoint(self.config.initial_checkpoint)
            self.optimizer_step = loaded.step
        else:
            self.optimizer_step = (await self.trainer.get()).step
        await self._cut()

    async def _restore(self, cut: RunCheckpoint) -> None:
        """Go back to a cut; rows trained on since are trained on again, from there."""
        assert self._retention is not None
        loaded = await self.trainer.load_checkpoint(cut.checkpoint)
        self.ledger.roll_back(cut.step)
        await self._check_rows()
        await self._retention.resume()
        self.step, self.optimizer_step = cut.step, loaded.step
        self.report.truncate(cut.step)
        logger.info("restored step %d", cut.step)

    async def _check_rows(self) -> None:
        """Other rows in a step would be trained on twice, or never."""
        for group in self.ledger.groups("consumed")[-1:]:
            rows = await asyncio.to_thread(self._rows.step, group.position)
            if group.blob is not None and group.blob.digest != rows.digest:
                raise ConfigError(
                    f"resume: {self.config.run_dir} was run with another rows.file, "
                    "rows_per_step, seed or tokenizer"
                )

    async def _one_step(self) -> None:
        start = time.monotonic()
        rows = await asyncio.to_thread(self._rows.step, self.step)
        group = await self._spool(rows)
        spooled = time.monotonic()
        trained = await train_step(
            self.trainer,
            self._algorithm,
            [group],
            optimizer_step=self.optimizer_step,
            name=f"step-{self.step}",
        )
        self.ledger.consume([group.group_id], self.step + 1)
        faults.point("consumed")
        self.step, self.optimizer_step = self.step + 1, trained.optimizer_step
        self._survival.progressed()
        self._report_step(trained, len(rows.row_indices), spooled - start, start)
        every = self.config.checkpoint_every
        if every and (self.step % every == 0 or self.step == self.steps):
            await self._cut()

    async def _spool(self, rows: StepRows) -> LedgerGroup:
        """Put the rows of this step into the store, as one blob, and into the ledger."""
        assert self._retention is not None
        if self.ledger.next_position() <= self.step:
            self.ledger.issue([(self.step, f"sft-{self.step:08}")], self.step)
        blob = await asyncio.to_thread(self._blobs.put, rows.data)
        self._retention.hold(blob)
        group = LedgerGroup(
            position=self.step,
            group_id=f"sft-{self.step:08}",
            state="generated",
            issue_step=self.step,
            blob=blob,
            sample_count=rows.sample_count,
            response_tokens=rows.trained_tokens,
        )
        self.ledger.generated(group)  # false where the run was here before
        return group

    async def _cut(self) -> None:
        """Save a checkpoint, then the manifest that makes it the place to resume from."""
        assert self._retention is not None
        await self._retention.settle()
        saved = await self.trainer.save_checkpoint(self._retention.new_checkpoint_id(self.step))
        check_step(saved.step, self.optimizer_step, "checkpoint")
        cut = RunCheckpoint(
            step=self.step,
            optimizer_step=saved.step,
            checkpoint=saved.checkpoint,
            weight_version=0,
            weight_digest="",
            position=self.ledger.next_position(),
            seed=self.config.seed,
        )
        write_cut(self._cuts, cut)
        faults.point("cut")
        await self._retention.take_cut()

    async def _publish(self) -> None:
        assert self._retention is not None
        published = await self.trainer.publish_weights()
        check_step(published.step, self.optimizer_step, "published weights")
        weights = published.weights
        await self._retention.hold_weights(weights.version)
        self.ledger.record_version(weights.version, weights.digest, self.step)
        await self._retention.release_weights(weights.version)
        self._published = True
        self.report.note(f"published weight version {weights.version} ({weights.digest})")

    def _report_step(
        self, trained: StepReport, row_count: int, spool_seconds: float, start: float
    ) -> None:
        self.report.step(
            {
                "step": self.step,
                "optimizer_step": self.optimizer_step,
                "epoch": self.step / self._rows.steps_per_epoch,
                "rows": row_count,
                **trained.metrics,
                "skipped": list(trained.skipped_reasons),
                "spool_seconds": spool_seconds,
                "step_seconds": time.monotonic() - start,
            }
        )


def load_rows(config: SftConfig) -> ConversationRows:
    """The rows a run is to learn. Raises ConfigError."""
    return ConversationRows(
        config.rows, TextTokenizer(config.tokenizer), config.rows_per_step, config.seed
    )


def step_count(config: SftConfig, rows: ConversationRows) -> int:
    """Steps of the whole run."""
    steps = config.epochs * rows.steps_per_epoch
    return steps if config.steps is None else min(steps, config.steps)
