"""Training on the groups that an earlier run trained on, without whoever sampled them."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.config import ConfigError
from sluice.loop.config import ReplayConfig, RunConfig
from sluice.loop.ledger import Ledger, LedgerDamagedError, LedgerGroup, read_trained
from sluice.loop.policy_run import PolicyRun
from sluice.loop.report import RunReport
from sluice.loop.routing_replay import check_recorded
from sluice.loop.run_directory import (
    LEDGER,
    RunCheckpoint,
    RunDirectoryError,
    check_resumed,
    digest_of,
    settings_digests,
)
from sluice.loop.run_page.page import SeenRun, read_run, tokenizer_places
from sluice.loop.training import Critic, Work
from sluice.place import Place, StoreCacheConfig
from sluice.samples.blob_store import has_blob, open_blobs, read_blob
from sluice.samples.blobs import BlobDigestError, BlobNotFoundError, BlobReference
from sluice.samples.vocabulary import check_same, vocabulary_digest

if TYPE_CHECKING:
    from sluice.loop.run_archive import RunArchive  # nobody else needs obstore

# what decides which groups a run has: those of a replay are there
_OF_ROLLOUTS = (
    "environment",
    "environment_schedule",
    "filters",
    "group_attempts",
    "group_timeout_seconds",
    "groups_per_step",
    "max_dropped_in_a_row",
    "max_filtered_in_a_row",
    "max_staleness",
    "over_sampling",
    "pause_mode",
    "prompts",
    "router",
    "straggler_seconds",
    "surplus",
)


@dataclass(frozen=True)
class ReplayedRun:
    """An earlier run: by step, from `first_step` on, the groups it trained on; only read."""

    run: SeenRun
    first_step: int
    steps: tuple[tuple[LedgerGroup, ...], ...]
    weights: dict[int, str]  # digests of what it published, by step

    @staticmethod
    def read(
        config: ReplayConfig, own: Path, temperature: float, cache: StoreCacheConfig
    ) -> ReplayedRun:
        """Raises ConfigError for what cannot be replayed as a whole, naming the first step."""
        where = f"replay.run_dir: {config.run_dir}"
        if os.path.isdir(config.run_dir) and config.run_dir.resolve() == own.resolve():
            raise ConfigError(f"{where} is that of this run; give this one another")
        run = read_run(config.run_dir)
        if (kind := run.start.get("kind", "train")) != "train":
            raise ConfigError(f"{where} is of sluice {kind}: a replay is of what sluice train did")
        try:
            trained = read_trained(config.run_dir)
        except LedgerDamagedError as error:
            raise ConfigError(f"{where}: {error}") from None
        if not trained.groups:
            raise ConfigError(f"{where} has trained on no groups")
        sampling = run.config.get("sampling")
        had = sampling.get("temperature") if isinstance(sampling, dict) else None
        if had not in (None, temperature):
            raise ConfigError(
                f"sampling.temperature: {temperature:g}, and {config.run_dir} sampled at {had:g}: "
                "the loss is of the distribution that was sampled from"
            )
        by_step = {
            step: tuple(groups)
            for step, groups in itertools.groupby(trained.groups, lambda g: g.consumed_step or 0)
        }
        first = config.first_step
        last = max(first, max(by_step) if config.last_step is None else config.last_step)
        for step in range(first, last + 1):
            if step not in by_step:
                raise ConfigError(
                    f"{where}: has no groups of step {step}; it has trained {max(by_step)} steps"
                )
        steps = tuple(by_step[step] for step in range(first, last + 1))
        found = ReplayedRun(run, first, steps, trained.weights)
        found._check_blobs(cache)
        return found

    def _check_blobs(self, cache: StoreCacheConfig) -> None:
        for step, groups in enumerate(self.steps, self.first_step):
            for reference in references_of(groups):
                if not has_blob(self.run.store, reference, cache):
                    raise self.gone(step, reference.digest)

    def check_mini_batches(self, count: int) -> None:
        """Raises ConfigError for more of them than a step has groups."""
        _check_mini_batches(count, enumerate(self.steps, self.first_step))

    @property
    def environments(self) -> frozenset[str]:
        """Those of its groups; empty where the run had but one."""
        return frozenset(g.environment for groups in self.steps for g in groups if g.environment)

    def gone(self, step: int, digest: str) -> ConfigError:
        """What to say of a blob that is not there."""
        return ConfigError(
            f"replay.run_dir: {self.run.run_dir}: blob {digest} of step {step} is gone from "
            f"{self.run.store}: a run keeps them with retention.keep_blobs: true"
        )

    def copy(self, step: int, store: Place, cache: StoreCacheConfig) -> list[str]:
        """Has the blobs of a step, counted from 0, in a store too; their digests.

        Those that it has, as it is the earlier run's own, are read as well. Raises ConfigError for
        one that is gone, or damaged.
        """
        blobs, references = open_blobs(store, cache), list(references_of(self.steps[step]))
        for reference in references:
            try:
                blobs.put(read_blob(self.run.store, reference, cache))
            except BlobNotFoundError:
                raise self.gone(self.first_step + step, reference.digest) from None
            except BlobDigestError as error:
                raise ConfigError(
                    f"replay.run_dir: {self.run.run_dir}: step {self.first_step + step}: {error}"
                ) from None
        return [reference.digest for reference in references]


def _check_mini_batches(count: int, steps: Iterable[tuple[int, Sequence[LedgerGroup]]]) -> None:
    """Raises ConfigError for more of them than one of the steps has groups: it would make fewer."""
    for step, groups in steps:
        if count > len(groups):
            raise ConfigError(
                f"algorithm.mini_batches: {count} cannot be made of the {len(groups)} groups "
                f"of step {step}"
            )


def references_of(groups: Sequence[LedgerGroup]) -> Iterator[BlobReference]:
    """The blobs of groups, and of what they show; the size of the latter is not known."""
    for group in groups:
        if group.blob is not None:
            yield group.blob
        yield from (BlobReference(digest, 0) for digest in group.media)


def open_replay(config: RunConfig) -> tuple[RunConfig, ReplayedRun | None]:
    """Returns the settings with as many steps as there are to replay, and the earlier run.

    That is None where this run has taken over its groups before. Raises ConfigError.
    """
    assert config.replay is not None
    count = _taken_over(config.run_dir / LEDGER) if config.resume else 0
    source = None
    if not count:
        temperature = config.sampling.temperature
        source = ReplayedRun.read(config.replay, config.run_dir, temperature, config.store_cache)
        source.check_mini_batches(config.algorithm.mini_batches)
        count = len(source.steps)
    config = config.model_copy(update={"steps": count})
    try:
        config.check_warmup()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return config, source


def _taken_over(path: Path) -> int:
    """Steps whose groups are in a ledger."""
    if not path.exists():
        return 0
    ledger = Ledger(path)
    try:
        return ledger.last_issue_step() + 1
    finally:
        ledger.close()


class ReplayRun(PolicyRun):
    """One run over the groups of an earlier one. `start`, `train`, then `close`.

    They are in its ledger before the first step, and in its store: it goes on without the earlier
    run.
    """

    def __init__(
        self,
        config: RunConfig,
        source: ReplayedRun | None,
        report: RunReport,
        critic: Critic | None = None,
        archive: RunArchive | None = None,
    ) -> None:
        """`source` may be None where this run has its groups. Raises ConfigError."""
        assert config.replay is not None
        replayed = digest_of(config.replay.model_dump(mode="json"))
        settings = settings_digests(config, replayed)
        check_resumed(config, settings, report.note)
        super().__init__(config, report, settings, critic, archive)
        self._source, self._replay = source, config.replay
        self._groups: list[list[LedgerGroup]] = []  # by step
        self._begins_alike = False  # with the weights that the earlier run had then
        self._published = False
        given = config.model_fields_set
        if without := [name for name in _OF_ROLLOUTS if name in given and getattr(config, name)]:
            report.note(
                f"replay: the groups are those of {config.replay.run_dir}; without effect: "
                f"{', '.join(without)}"
            )
        if source is not None and (others := source.environments - config.environments.keys()):
            report.note(
                f"replay: {', '.join(sorted(others))}: environments of the groups that "
                "`environments` does not name have no means of their own, and each group counts as "
                f"samples_per_group {config.samples_per_group} in reward_mean"
            )

    async def train(self) -> None:
        """All steps that are left, a last run checkpoint, and the weights published."""
        await self._do_work()

    def _next_work(self) -> Work | None:
        if not self._is_done():
            return self._one_step
        if not self._has_last_run_checkpoint():
            return self._save_last
        return None if self._published else self._publish

    async def _check_services(self, trainer: trainer_pb.Trainer) -> None:
        check_recorded(self.config.algorithm, trainer)
        if self._source is None:
            return
        for place in tokenizer_places(self._source.run):
            if theirs := vocabulary_digest(place):
                check_same(f"replay.run_dir: the tokenizer {place}", theirs, trainer.vocabulary)
                return
        self.report.note("replay: whether the earlier run had this vocabulary is not known")

    async def _begin_weights(self) -> None:
        await self._take_over()
        self._read_groups()
        published = (await self._publish_weights()).weights
        had = self._source.weights.get(self._replay.first_step - 1) if self._source else None
        self._begins_alike = had == published.digest
        if had is not None and not self._begins_alike:
            self.report.note(
                f"replay: begins with other weights ({published.digest}) than the earlier run had "
                f"at step {self._replay.first_step - 1} ({had})"
            )
        await self._retention.release_weights(published.version)

    async def _restore(self, run_checkpoint: RunCheckpoint) -> None:
        await self._go_back(run_checkpoint)
        self._read_groups()

    async def _take_over(self) -> None:
        """Has the groups in the ledger, once; their blobs are in the store then, and pinned."""
        source = self._source
        if self.ledger.next_position():
            await self._retention.resume()
            return
        assert source is not None, "a run without groups reads the earlier one"
        try:
            await self._hold_blobs(source)
        except ConfigError:
            await self._retention.release_blobs()
            raise
        with self.ledger.transaction():
            for step, groups in enumerate(source.steps):
                self._issue(step, groups)

    async def _hold_blobs(self, source: ReplayedRun) -> None:
        store, cache = self.config.store_place, self.config.store_cache
        for step in range(len(source.steps)):
            digests = await asyncio.to_thread(source.copy, step, store, cache)
            self._retention.hold(*digests)
        await self._retention.settle()
        for step, groups in enumerate(source.steps):  # what was there may have gone before its pin
            for reference in references_of(groups):
                if not await asyncio.to_thread(has_blob, store, reference, cache):
                    raise source.gone(source.first_step + step, reference.digest)

    def _issue(self, step: int, groups: Sequence[LedgerGroup]) -> None:
        first = self.ledger.next_position()
        placed = list(enumerate(groups, first))
        self.ledger.issue([(place, group.group_id) for place, group in placed], step)
        self.ledger.assign(
            (place, group.environment, group.task_number)
            for place, group in placed
            if group.environment
        )
        for place, group in placed:
            later = step + 1 - (group.consumed_step or 0)  # of as many steps ago as they were then
            oldest, newest = group.oldest_step + later, group.newest_step + later
            self.ledger.generated(
                replace(group, position=place, oldest_step=oldest, newest_step=newest)
            )

    def _read_groups(self) -> None:
        """Raises RunDirectoryError where the blobs of one are gone, ConfigError as for new runs."""
        if lost := self.ledger.groups("issued"):
            step = min(group.issue_step for group in lost)
            raise RunDirectoryError(
                f"replay: blobs of step {step + 1} are gone from {self.config.store_place}; begin "
                "another run_dir"
            )
        self._groups = [[] for _ in range(self.config.steps)]
        for group in self.ledger.groups("generated"):
            self._groups[group.issue_step].append(group)
        left = list(enumerate(self._groups, self._replay.first_step))[self.step :]
        _check_mini_batches(self.config.algorithm.mini_batches, left)

    async def _one_step(self) -> None:
        start = time.monotonic()
        await self._note_saved()
        groups = self._groups[self.step]
        limit = self._mismatch_limit(groups) if self._begins_alike and not self.step else 0.0
        trained = await self._train_on(groups, limit)
        self._note_trained(groups, trained)
        seconds = time.monotonic() - start
        self._report_step(groups, trained, {"train_seconds": seconds, "step_seconds": seconds})
        every = self.config.checkpoint_every
        if every and self.step % every == 0:
            await self._save()

    async def _publish(self) -> None:
        weights = (await self._publish_weights()).weights
        await self._retention.release_weights(weights.version)
        self._published = True
        self.report.note(f"published weight version {weights.version} ({weights.digest})")
