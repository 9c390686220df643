"""Training on the rows of a file, of conversations or of preferences; no engine takes part."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from sluice import faults
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.client import RemoteError
from sluice.config import ConfigError
from sluice.loop.config import RowsConfig, RowsRunConfig
from sluice.loop.fit import check_rows_trainer
from sluice.loop.ledger import LedgerGroup
from sluice.loop.pairs import PairRows, ScoredPairRows
from sluice.loop.report import RunReport
from sluice.loop.retention import CRITICS
from sluice.loop.row_files import PromptFileError
from sluice.loop.rows import ConversationRows, StepRows, TrainingRows
from sluice.loop.run_directory import (
    ANOTHER,
    RunCheckpoint,
    checked_run_checkpoint,
    digest_of,
    initial_digest,
    told_changes,
)
from sluice.loop.trainer_run import TrainerRun
from sluice.loop.training import StepReport, measure_rows, train_step
from sluice.place import within
from sluice.samples.blob_store import open_blobs
from sluice.samples.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from sluice.loop.run_archive import RunArchive  # nobody else needs obstore

logger = logging.getLogger(__name__)

_OF_PAIRS = (
    "loss {loss:.4f}  accuracy {accuracy:.3f}  margin {reward_margin:.3f}  lr {learning_rate:.1e}"
)
LINES = {
    "sft": "loss {loss:.4f}  tokens {tokens:.0f}  lr {learning_rate:.1e}",
    "dpo": _OF_PAIRS,
    "reward-model": _OF_PAIRS,
}
ROWS: dict[str, type[TrainingRows]] = {
    "sft": ConversationRows,
    "dpo": PairRows,
    "reward-model": ScoredPairRows,
}
# What a policy gradient tells that stands for the gradient of preferences.
_OF_REWARDS = ("reward_mean", "silent_groups", "advantage", "advantage_abs_mean", "policy_loss")
HELD_OUT = "held_out_"


class RowsRun(TrainerRun[RowsRunConfig]):
    """One run on rows over a running trainer. `start`, `train`, then `close`.

    A step's rows are one blob and one entry of the ledger, at the step's number.
    """

    def __init__(
        self,
        config: RowsRunConfig,
        rows: TrainingRows,
        report: RunReport,
        archive: RunArchive | None = None,
    ) -> None:
        """Raises ConfigError and RunDirectoryError for a run_dir that does not fit."""
        settings = checked_settings(config, rows)
        held_out = None if config.held_out is None else load_held_out(config)
        super().__init__(config, report, archive=archive)
        self._rows, self._held_out, self._settings = rows, held_out, settings
        self.steps = step_count(config, rows)
        self._blobs = open_blobs(config.store_place, config.store_cache)
        self._algorithm = config.algorithm
        self._published = False

    async def _check_services(self, trainer: trainer_pb.Trainer) -> None:
        check_rows_trainer(self.config, trainer, self.config.trainer)
        if trainer.head != "policy":
            own = within(self.config.store_place, CRITICS, trainer.name)
            self._weights_location = str(within(own, "weights"))

    async def train(self) -> None:
        """All steps that are left, a last run checkpoint, and the weights published."""
        if self._held_out is not None and not self.step:
            await self._recovery.run(self._begin_measuring)
        while not self._published:
            if self.step < self.steps:
                await self._recovery.run(self._one_step)
            else:
                await self._recovery.run(self._publish)

    async def _begin_anew(self) -> None:
        await self._save()
        await self._settle_saving()  # a step that no run checkpoint precedes could not be repeated

    async def _restore(self, run_checkpoint: RunCheckpoint) -> None:
        """Goes back; rows trained on since are trained on again, from there."""
        await self._load(run_checkpoint)
        await self._check_rows()
        self.report.truncate(self.step)
        logger.info("restored step %d", self.step)

    async def _check_rows(self) -> None:
        """Other rows in a step would be trained on twice, or never."""
        for group in self.ledger.groups("consumed")[-1:]:
            rows = await asyncio.to_thread(self._rows.step, group.position)
            if group.blob is not None and group.blob.digest != rows.digest:
                raise ConfigError(
                    f"resume: {self.config.run_dir} was run with another rows.file, "
                    "rows_per_step, seed, tokenizer or template"
                )

    async def _one_step(self) -> None:
        start = time.monotonic()
        await self._note_saved()
        rows = await asyncio.to_thread(self._rows.step, self.step)
        group = await self._spool(rows)
        spooled = time.monotonic()
        with _naming_rows(self._rows):
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
        self._recovery.note_step()
        trained.metrics.update(await self._measure_held_out() if self._is_measured() else {})
        self._report_step(trained, len(rows.row_indices), spooled - start, start)
        every = self.config.checkpoint_every
        if every and (self.step % every == 0 or self.step == self.steps):
            await self._save()

    async def _spool(self, rows: StepRows) -> LedgerGroup:
        """Put the rows of this step into the store, as one blob, and into the ledger."""
        if self.ledger.next_position() <= self.step:
            self.ledger.issue([(self.step, f"{self.config.kind}-{self.step:08}")], self.step)
        blob = await asyncio.to_thread(self._blobs.put, rows.data)
        self._retention.hold(blob.digest)
        group = LedgerGroup(
            position=self.step,
            group_id=f"{self.config.kind}-{self.step:08}",
            state="generated",
            issue_step=self.step,
            blob=blob,
            sample_count=rows.sample_count,
            response_tokens=rows.trained_tokens,
        )
        self.ledger.generated(group)  # false where the run was here before
        return group

    def _is_measured(self) -> bool:
        """Whether the weights of now are asked for what they make of held-out rows."""
        every = 0 if self.config.held_out is None else self.config.held_out.every_steps
        is_due = self.step == self.steps or bool(every and self.step % every == 0)
        return self._held_out is not None and is_due

    async def _begin_measuring(self) -> None:
        await self._measure_held_out()

    async def _measure_held_out(self) -> dict[str, float]:
        """Say what the weights of now make of held-out rows: means over all, as keys of a row."""
        rows = self._held_out
        assert rows is not None
        sums, weights = defaultdict[str, float](float), defaultdict[str, float](float)
        for part in range(rows.steps_per_epoch):
            some = await asyncio.to_thread(rows.step, part)
            blob = await asyncio.to_thread(self._blobs.put, some.data)
            self._retention.hold(blob.digest)
            with _naming_rows(rows):
                told = _told(
                    await measure_rows(
                        self.trainer,
                        self._algorithm,
                        blob,
                        some.sample_count,
                        name=f"held-out-{self.step}-{part}",
                    )
                )
            weight = told.pop("tokens", float(len(some.row_indices)))
            for name, value in told.items():
                sums[name] += value * weight
                weights[name] += weight
        found = {f"{HELD_OUT}{name}": sums[name] / weights[name] for name in sums}
        shown = ", ".join(
            f"{name} {found[HELD_OUT + name]:.4f}"
            for name in ("loss", "accuracy")
            if HELD_OUT + name in found
        )
        self.report.note(f"held out, step {self.step}: {shown}")
        return found

    async def _publish(self) -> None:
        await self._settle_saving()
        weights = (await self._publish_weights()).weights
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
                "epoch": self._rows.epochs(self.step),
                "rows": row_count,
                **_told(trained.metrics),
                "skipped": list(trained.skipped_reasons),
                "spool_seconds": spool_seconds,
                "step_seconds": time.monotonic() - start,
            }
        )


def load_rows(config: RowsRunConfig) -> TrainingRows:
    """The rows a run is to learn. Raises ConfigError."""
    return ROWS[config.kind](
        config.rows,
        TextTokenizer(config.tokenizer),
        config.rows_per_step,
        config.seed,
        config.template,
    )


def load_held_out(config: RowsRunConfig) -> TrainingRows:
    """The rows a run is measured by. Raises ConfigError."""
    assert config.held_out is not None
    rows = RowsConfig(file=config.held_out.file, shuffle=False)
    tokenizer = TextTokenizer(config.tokenizer)
    return ROWS[config.kind](rows, tokenizer, config.rows_per_step, 0, config.template, "held_out")


def checked_settings(config: RowsRunConfig, rows: TrainingRows) -> dict[str, str]:
    """Digests of what shapes a run, by setting, as its run checkpoints keep them.

    Raises ConfigError where the run to resume had another, and RunDirectoryError.
    """
    run_checkpoint = checked_run_checkpoint(config)
    settings = {
        "rows": rows.digest,
        "rows_per_step": digest_of(config.rows_per_step),
        "template": digest_of(config.template),
        **{name: digest_of(value) for name, value in config.shape.items()},
        **initial_digest(config),
    }
    for name, before in run_checkpoint.settings.items() if run_checkpoint is not None else ():
        if settings.get(name) != before:
            told = told_changes(config, name)
            raise ConfigError(f"{name}: not as in the run to resume{told}; {ANOTHER}")
    return settings


def step_count(config: RowsRunConfig, rows: TrainingRows) -> int:
    """Steps of the whole run."""
    steps = config.epochs * rows.steps_per_epoch
    return steps if config.steps is None else min(steps, config.steps)


def _told(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics of rows; the loss of preferences in place of that whose gradient it has."""
    if "preference_loss" not in metrics:
        return dict(metrics)
    told = {name: value for name, value in metrics.items() if name not in _OF_REWARDS}
    told["loss"] = told.pop("preference_loss")
    return told


@contextlib.contextmanager
def _naming_rows(rows: TrainingRows) -> Iterator[None]:
    """A sample that no micro-batch holds is named by its place in the file."""
    try:
        yield
    except RemoteError as error:
        if error.reason != "OVERSIZE_SAMPLE":
            raise
        where = rows.place(error.metadata["sample_id"])
        raise PromptFileError(f"{where}: {error}") from None
