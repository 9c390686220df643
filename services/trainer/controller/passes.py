"""Passes over batches: log-probabilities, advantages, gradients, and the step they lead to."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from services.trainer import metrics
from services.trainer.adam import optim_to_proto
from services.trainer.config import OptimConfig
from services.trainer.controller.algorithms import Algorithms
from services.trainer.controller.incarnation import Build, RankIncarnation
from services.trainer.controller.memory_cuts import MemoryCuts
from services.trainer.controller.planning import (
    Planner,
    find_missing,
    weigh_pass,
)
from services.trainer.controller.rank_group import RankGroup
from services.trainer.controller.state import (
    Batch,
    PassPlan,
    PassRecord,
    PassScalars,
    PolicyState,
    TrainerState,
    Turns,
    in_turn,
    learning_rate,
)
from services.trainer.errors import (
    ColumnMissingError,
    MicroBatchesCutError,
    RankError,
    RankLostError,
    SkippedTooOftenError,
    TemperatureMismatchError,
)
from services.trainer.rows import OLD_LOGPROBS
from sluice.algo.aggregation import Moments, relate_siblings
from sluice.algo.estimator import Sibling
from sluice.algo.plugins import PluginSettingError
from sluice.algo.spec import AdvantageSpec, LossSpec
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.runtime.errors import InvalidFieldError, ServiceError, StepMismatchError
from sluice.runtime.wire import advantage_to_proto, invalid_setting, loss_to_proto
from sluice.samples.sample import SEVERAL, top_columns

COLUMN_OF_MODEL = {
    trainer_pb.ComputeLogprobsRequest.MODEL_POLICY: OLD_LOGPROBS,
    trainer_pb.ComputeLogprobsRequest.MODEL_REFERENCE: "reference_logprobs",
}
NO_TOKENS = "no trained tokens"
SCORES_PER_COMMAND = 100_000  # of 8 bytes
SIBLING_BYTES = 900_000  # of a command
ROWS_PER_COMMAND = 50_000  # a row takes at most 16 bytes of a command, which has 1 MiB


@dataclass(frozen=True)
class AdvantageScalars:
    reward_mean: float
    advantage_abs_mean: float
    silent_group_count: int
    group_count: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class GradientsRequest:
    """A part to add: which rows under which loss, by a caller who believes to be at a step."""

    part_id: str
    body: str  # digest of the request
    expected_step: int
    loss: LossSpec
    sample_ids: Sequence[str]
    any_temperature: bool = False
    adapter: str = ""
    keep_logprobs: bool = False


@dataclass(frozen=True)
class StepScalars:
    step: int
    skipped_reason: str
    grad_norm: float
    learning_rate: float
    seconds: float
    skipped_count: int
    skips_in_a_row: int
    metrics: dict[str, float]


class TrainerPasses:
    """What the ranks compute over batches, and the steps of the optimizer."""

    def __init__(
        self,
        state: TrainerState,
        ranks: RankGroup,
        planner: Planner,
        algorithms: Algorithms,
        turns: Turns,
        cuts: MemoryCuts,
        on_step: Callable[[Sequence[pb.CommandResult]], None],
        find_reference: Callable[[int], str],
    ) -> None:
        """`on_step` takes what the ranks answer to a step. `find_reference` says where ranks read a
        version from, and blocks."""
        self._find_reference = find_reference
        self._on_step, self._cuts = on_step, cuts
        self._state, self._ranks, self._planner = state, ranks, planner
        self.algorithms = algorithms
        self.turns = turns

    @in_turn
    async def compute_logprobs(
        self,
        name: str,
        model: int,
        temperature: float,
        *,
        any_temperature: bool = False,
        adapter: str = "",
        top_count: int = 0,
        reference_version: int = 0,
    ) -> PassScalars:
        """Add a column of log-probabilities to all rows of a batch.

        And with `top_count` the likeliest tokens at each place. The reference is that of the
        settings, or a version of the weights.
        """
        self._state.check_awake()
        batch = self._state.batch(name, adapter)
        if not any_temperature:
            check_temperature(batch, np.arange(batch.row_count), temperature)
        directory = ""
        if reference_version:
            directory = await asyncio.to_thread(self._find_reference, reference_version)
        command = pb.LogprobsCommand(
            batch_id=batch.batch_id,
            model=model,  # type: ignore[arg-type]
            temperature=temperature,
            top_count=top_count,
            reference_directory=directory,
        )
        message = pb.FollowResponse(compute_logprobs=command, adapter=adapter)
        columns = [COLUMN_OF_MODEL[model], *(top_columns(top_count) if top_count else ())]  # type: ignore[index]
        scalars = await self._add_columns(name, columns, "logprobs", message)
        batch.scored_at |= dict.fromkeys(columns, temperature)
        if not adapter:
            _note_mismatch(scalars.metrics)
        return scalars

    @in_turn
    async def compute_values(self, name: str) -> PassScalars:
        """Add the column `values` to all rows of a batch."""
        self._state.check_awake()
        command = pb.ValuesCommand(batch_id=self._state.batches.get(name).batch_id)
        message = pb.FollowResponse(compute_values=command)
        return await self._add_columns(name, ["values"], "values", message)

    @in_turn
    async def compute_advantages(self, name: str, spec: AdvantageSpec) -> AdvantageScalars:
        """Add `advantages` (and `returns`) to all rows of a batch."""
        batch, ranks = self._state.batches.get(name), self._ranks.incarnation
        traits = await self.algorithms.advantage(spec)
        what = f"advantage {spec.name}"
        self._check_columns(batch, np.arange(batch.row_count), traits.columns, what)
        command = pb.AdvantagesCommand(
            batch_id=batch.batch_id, advantage=advantage_to_proto(spec), moments_only=traits.whitens
        )
        with metrics.PASS_SECONDS.labels("advantages").time():
            told = pb.PassSums()
            if traits.compares_siblings:
                told = await self._exchange_scores(batch, command, spec, traits.width)
            if traits.whitens:
                totals = await self._advantages(ranks, command)
                merged = merge_moments([result.advantages.moments for result in totals])
                command.moments_only = False
                command.moments.CopyFrom(merged)
            given = batch.present.get("returns")
            batch.unmark("advantages", "returns")
            results = await self._advantages(ranks, command)
        batch.mark("advantages")
        if any(result.advantages.has_returns for result in results):
            batch.mark("returns")
        elif given is not None:  # an estimator without any leaves them as they are
            batch.present["returns"] = given
        batch.zero_advantage[:] = False
        for result in results:
            batch.zero_advantage[np.asarray(result.advantages.silent_rows, dtype=np.int64)] = True
        means = find_means(add_sums([told, *(result.sums for result in results)]))
        return AdvantageScalars(
            reward_mean=means.pop("reward", float("nan")),
            advantage_abs_mean=means.pop("advantage_abs", 0.0),
            silent_group_count=_count_zero_advantage_groups(batch),
            group_count=len(set(batch.facts.group_ids)),
            metrics=means,
        )

    @in_turn
    async def describe(
        self, loss: LossSpec | None, advantage: AdvantageSpec | None
    ) -> tuple[frozenset[str], frozenset[str]]:
        """Return the columns that the loss and the estimator read."""
        of_loss = frozenset[str]() if loss is None else (await self.algorithms.loss(loss)).columns
        if advantage is None:
            return of_loss, frozenset()
        return of_loss, (await self.algorithms.advantage(advantage)).columns

    @in_turn
    async def forward_backward(self, name: str, request: GradientsRequest) -> PassScalars:
        """Add the gradients of a part of a batch, once."""
        self._state.check_awake()
        batch, ranks = self._state.batch(name, request.adapter), self._ranks.incarnation
        state, loss = self._state.policy(request.adapter), request.loss
        _check_step(state, request.expected_step)
        ledger = state.ledger
        known = ledger.find(request.part_id, request.body)
        if known is not None:
            return known
        limit = state.optim.max_consecutive_skips
        if limit and state.skips_in_a_row >= limit:
            raise SkippedTooOftenError(
                f"{state.skips_in_a_row} steps in a row were skipped, the last for "
                f"{state.last_skip}: load a checkpoint, or discard gradients to go on",
                count=state.skips_in_a_row,
                cause=state.last_skip,
            )
        aggregation = (loss.aggregation, loss.constant_length)
        ledger.check_aggregation(aggregation)
        traits = await self.algorithms.loss(loss)
        selection = batch.select(request.sample_ids)
        self._check_columns(batch, selection, traits.columns, f"loss {loss.name}")
        temperature = loss.temperature or 1.0
        if request.keep_logprobs and traits.head == "value":
            raise InvalidFieldError("keep_logprobs", f"loss {loss.name} has values, no log-probs")
        if request.keep_logprobs and batch.has_others(OLD_LOGPROBS, selection):
            check_scored_at(batch, frozenset([OLD_LOGPROBS]), temperature)
        if traits.head != "value" and not request.any_temperature:
            check_temperature(batch, selection, temperature)
            check_scored_at(batch, traits.columns, temperature)
        weighed = weigh_pass(batch, selection, loss)
        computed = selection
        if traits.silent and not request.keep_logprobs:  # zero advantages: no loss, no gradient
            computed = selection[~batch.zero_advantage[selection]]
        await self._plan(batch, computed)  # what is refused has changed nothing
        weights = dict(zip(selection.tolist(), weighed.weights.tolist(), strict=True))
        measured = await self.algorithms.measure(batch, selection, loss, traits.rounds)
        command = pb.GradientsCommand(
            batch_id=batch.batch_id,
            loss=loss_to_proto(loss),
            measured=measured,
            keep_logprobs=request.keep_logprobs,
            normalizer=weighed.normalizer,
        )
        message = pb.FollowResponse(forward_backward=command, adapter=request.adapter)
        if request.keep_logprobs:
            batch.mark(OLD_LOGPROBS, selection, present=False)
        undo = None if ledger.parts else _discard(request.adapter)
        try:
            with metrics.PASS_SECONDS.labels("forward_backward").time():
                plan, total = await self._run(ranks, batch, computed, message, weights, undo)
        except BaseException as error:
            ledger.broken = str(error) or type(error).__name__
            raise
        if request.keep_logprobs:
            batch.mark(OLD_LOGPROBS, selection)
            batch.scored_at[OLD_LOGPROBS] = temperature
        answer = PassScalars(
            loss=total.loss / weighed.normalizer if weighed.normalizer else 0.0,
            token_count=int(batch.mask_counts[selection].sum()),
            metrics=find_means(total),
            micro_batch_count=plan.micro_batch_count,
            silent_row_count=len(selection) - len(computed),
            metric_weights={name: v.weight for name, v in total.metrics.items() if v.weight},
        )
        ledger.parts[request.part_id] = PassRecord(
            request.body, answer, aggregation, weighed.normalizer
        )
        _note_truncation(batch, selection, answer)
        metrics.TOKENS.inc(answer.token_count)
        if batch.begun_at is None:
            batch.begun_at = state.step
        if not request.adapter:
            metrics.LOSS.set(answer.loss)
            if state.step == batch.begun_at:  # later ones have its own movement in it, or repeat it
                _note_mismatch(answer.metrics)
        return answer

    @in_turn
    async def step(
        self,
        expected_step: int,
        part_ids: Sequence[str],
        rate: float | None,
        adapter: str = "",
        optim: OptimConfig | None = None,
    ) -> StepScalars:
        """Apply exactly the parts named and advance the step.

        `optim` has other numbers for this one.
        """
        self._state.check_awake()
        ranks, state = self._ranks.incarnation, self._state.policy(adapter)
        _check_step(state, expected_step)
        ledger = state.ledger
        ledger.check_expected(part_ids)
        used = learning_rate(state.optim, state.step) if rate is None else rate
        started = time.perf_counter()
        if ledger.normalizer == 0:  # nothing to divide by, and no gradient
            await ranks.run(_discard(adapter))
            outcome = pb.StepResult(grad_norm=0.0, learning_rate=used, skipped_reason=NO_TOKENS)
        else:
            outcome = await self._apply(ranks, state, used, optim)
        ledger.clear()
        seconds = time.perf_counter() - started
        self._note_step(state, outcome, seconds)
        return StepScalars(
            step=state.step,
            skipped_reason=outcome.skipped_reason,
            grad_norm=outcome.grad_norm,
            learning_rate=outcome.learning_rate,
            seconds=seconds,
            skipped_count=state.skipped_count,
            skips_in_a_row=state.skips_in_a_row,
            metrics=dict(outcome.metrics),
        )

    @in_turn
    async def discard(self, adapter: str = "") -> list[str]:
        """Forget gathered gradients; a streak of skipped steps counts as seen."""
        self._state.check_awake()
        state = self._state.policy(adapter)
        await self._ranks.incarnation.run(_discard(adapter))
        state.skips_in_a_row = 0
        if not adapter:
            metrics.SKIPS_IN_A_ROW.set(0)
        return state.ledger.clear()

    async def _apply(
        self, ranks: RankIncarnation, state: PolicyState, rate: float, optim: OptimConfig | None
    ) -> pb.StepResult:
        command = pb.StepCommand(
            normalizer=state.ledger.normalizer,
            learning_rate=rate,
            adam=None if optim is None else optim_to_proto(optim),
        )
        try:
            results = await ranks.run(pb.FollowResponse(step=command, adapter=state.adapter))
        except ServiceError as error:
            # Some ranks may have stepped and others not: only a checkpoint is whole again.
            ranks.fail(error)
            if isinstance(error, (RankError, RankLostError)) and error.lacked_memory:
                raise self._cuts.explain(error) from error
            raise
        self._on_step(results)
        fullest = max(
            (result.memory for result in results),
            key=lambda memory: memory.peak_bytes / max(1, memory.total_bytes),
        )
        outcome = results[0].step
        if fullest.total_bytes:
            metrics.MEMORY_PEAK.set(fullest.peak_bytes)
            metrics.MEMORY_TOTAL.set(fullest.total_bytes)
            outcome.metrics["memory_peak_gib"] = fullest.peak_bytes / 2**30
        return outcome

    def _note_step(self, state: PolicyState, outcome: pb.StepResult, seconds: float) -> None:
        state.step += 1
        skipped = bool(outcome.skipped_reason)
        state.skips_in_a_row = state.skips_in_a_row + 1 if skipped else 0
        state.skipped_count += skipped
        state.last_skip = outcome.skipped_reason or state.last_skip
        self._ranks.note_progress()
        metrics.STEP_SECONDS.observe(seconds)
        metrics.STEPS.labels("skipped" if skipped else "applied").inc()
        if state.adapter:  # what follows is one number, that of the policy of the settings
            return
        metrics.SKIPS_IN_A_ROW.set(state.skips_in_a_row)
        metrics.STEP.set(state.step)
        metrics.GRAD_NORM.set(outcome.grad_norm)
        metrics.LEARNING_RATE.set(outcome.learning_rate)
        for name, gauge in metrics.OF_STEPS.items():
            gauge.set(outcome.metrics.get(name, math.nan))

    async def _plan(self, batch: Batch, selection: np.ndarray) -> PassPlan:
        """Plan off the event loop, which many rows would hold up."""
        known = self._planner.find(batch, selection)
        if known is not None:
            return known
        return await asyncio.to_thread(self._planner.plan, batch, selection)

    def _check_columns(
        self, batch: Batch, selection: np.ndarray, columns: Iterable[str], reader: str
    ) -> None:
        missing = find_missing(batch, selection, sorted(columns))
        if missing is not None:
            row, lacking = missing
            raise ColumnMissingError(lacking, batch.facts.sample_ids[row], reader)

    async def _add_columns(
        self, name: str, columns: Sequence[str], kind: str, command: pb.FollowResponse
    ) -> PassScalars:
        batch, ranks = self._state.batches.get(name), self._ranks.incarnation
        rows = np.arange(batch.row_count)
        await self._plan(batch, rows)  # what is refused has changed nothing
        batch.unmark(*columns)
        with metrics.PASS_SECONDS.labels(kind).time():
            plan, total = await self._run(ranks, batch, rows, command)
        for column in columns:
            batch.mark(column)
        return PassScalars(0.0, total.token_count, find_means(total), plan.micro_batch_count)

    async def _advantages(
        self, ranks: RankIncarnation, command: pb.AdvantagesCommand
    ) -> list[pb.CommandResult]:
        return ranks.reporting(await ranks.run(pb.FollowResponse(compute_advantages=command)))

    async def _exchange_scores(
        self, batch: Batch, command: pb.AdvantagesCommand, spec: AdvantageSpec, width: int
    ) -> pb.PassSums:
        """Give every rank the scores of its rows relative to their siblings on all ranks.

        Return what the estimator tells of groups; nothing where one rank has them all, and tells.
        """
        ranks, data_size = self._ranks.incarnation, self._planner.limits.data_size
        rows_of = [np.flatnonzero(batch.owners == rank) for rank in range(data_size)]
        if len(rows_of) == 1:
            return pb.PassSums()
        question = pb.AdvantagesCommand()
        question.CopyFrom(command)
        question.scores_only, question.moments_only = True, False
        results = [result.advantages for result in await self._advantages(ranks, question)]
        met = await asyncio.to_thread(SiblingTable.gather, batch, rows_of, results, width)
        if spec.plugins:
            relative, told = await self._relate_on_ranks(ranks, command, met)
        else:
            try:
                relative, told = await asyncio.to_thread(met.relate, batch, spec)
            except PluginSettingError as error:
                raise invalid_setting(error, "advantage") from None

        def part(start: int) -> Build:
            def build(data_rank: int) -> pb.FollowResponse:
                answer = pb.AdvantagesCommand(batch_id=batch.batch_id, advantage=command.advantage)
                rows = rows_of[data_rank][start : start + SCORES_PER_COMMAND]
                answer.relative.scores.extend(relative[rows].tolist())
                return pb.FollowResponse(compute_advantages=answer)

            return build

        for start in range(0, max(map(len, rows_of)), SCORES_PER_COMMAND):
            await ranks.run(part(start))
        return told

    async def _relate_on_ranks(
        self, ranks: RankIncarnation, command: pb.AdvantagesCommand, met: SiblingTable
    ) -> tuple[np.ndarray, pb.PassSums]:
        """Have ranks relate all scores, which alone can import who does."""
        answer = pb.CommandResult()
        for scores in met.split():
            question = pb.AdvantagesCommand(
                batch_id=command.batch_id, advantage=command.advantage, siblings=scores
            )
            results = await self._advantages(ranks, question)
            answer = results[0]
        return np.array(answer.advantages.scores), answer.sums

    async def _run(
        self,
        ranks: RankIncarnation,
        batch: Batch,
        rows: np.ndarray,
        message: pb.FollowResponse,
        weights: Mapping[int, float] | None = None,
        undo: pb.FollowResponse | None = None,
    ) -> tuple[PassPlan, pb.PassSums]:
        """Run a pass over rows, in smaller micro-batches where there is no memory for the planned.

        `undo` takes back what a pass has added before it failed; without it nothing was, or what
        others have added would go too. Raises OutOfMemoryError where nothing is left to cut,
        RankLostError where ranks have to restart first, and MicroBatchesCutError.
        """
        while True:
            plan = await self._plan(batch, rows)
            try:
                return plan, await self._sum(ranks, split_pass(plan, message, weights))
            except (RankError, RankLostError) as error:
                if not error.lacked_memory:
                    raise
                if not self._cuts.redoes_in_place:
                    ranks.fail(RankLostError(error.rank, f"cannot go on: {error}"))
                self._cuts.cut(batch, plan, ranks.links[error.rank].data_rank, error)
                self._ranks.note_progress()  # smaller ones, which end somewhere
                if ranks.lost.done():
                    raise ranks.lost.result() from error
            if undo is not None:
                await ranks.run(undo)
            elif message.HasField("forward_backward"):
                raise MicroBatchesCutError(
                    "there was no memory for the pass, and micro-batches are smaller from now on: "
                    "discard the gradients, and add all parts of the step again"
                )

    async def _sum(self, ranks: RankIncarnation, builds: Sequence[Build]) -> pb.PassSums:
        sums = []
        for build in builds:
            sums += [result.sums for result in ranks.reporting(await ranks.run(build))]
        return add_sums(sums)


@dataclass(frozen=True)
class SiblingTable:
    """What all rows of a batch are compared by.

    scores: float64[N, width]. episodes: int64[N], different ones where rows are of different
    rollouts of a group. lengths: trained tokens, int64[N]. groups: int64[N].
    """

    scores: np.ndarray
    episodes: np.ndarray
    lengths: np.ndarray
    groups: np.ndarray

    @classmethod
    def gather(
        cls,
        batch: Batch,
        rows_of: Sequence[np.ndarray],
        results: Sequence[pb.AdvantageResult],
        width: int,
    ) -> SiblingTable:
        """Put together what ranks answered; `rows_of` and `results` are by rank."""
        scores = np.zeros((batch.row_count, width))
        episodes = -1 - np.arange(batch.row_count)  # a row without one is a rollout of its own
        has_episode = batch.present.get("episode", np.zeros(batch.row_count, dtype=np.bool_))
        for rows, result in zip(rows_of, results, strict=True):
            scores[rows] = np.reshape(result.scores, (len(rows), width))
            if result.episodes:
                own = np.asarray(result.episodes)
                episodes[rows] = np.where(has_episode[rows], own, episodes[rows])
        groups = np.unique(batch.facts.group_ids, return_inverse=True)[1]
        return cls(scores, episodes, batch.mask_counts, groups)

    def relate(self, batch: Batch, spec: AdvantageSpec) -> tuple[np.ndarray, pb.PassSums]:
        """Return the relative score of every row, float64[N], and what is told of groups.

        Raises PluginSettingError.
        """
        siblings = [
            Sibling(tuple(scores), length, episode)
            for scores, length, episode in zip(
                self.scores.tolist(), self.lengths.tolist(), self.episodes.tolist(), strict=True
            )
        ]
        related = relate_siblings(siblings, batch.facts.group_ids, spec.estimator)
        told = pb.PassSums(
            metrics={
                name: pb.WeightedSum(sum=total, weight=weight)
                for name, (total, weight) in related.metrics.items()
            }
        )
        return np.array(related.scores), told

    def split(self) -> Iterable[pb.SiblingScores]:
        """Yield all rows in messages that fit a command."""
        count, each = len(self.groups), SIBLING_BYTES // (32 + 8 * self.scores.shape[1])
        for start in range(0, count, each):
            part = slice(start, start + each)
            yield pb.SiblingScores(
                scores=self.scores[part].ravel().tolist(),
                groups=self.groups[part].tolist(),
                episodes=self.episodes[part].tolist(),
                lengths=self.lengths[part].tolist(),
                last=start + each >= count,
            )


def _check_step(state: PolicyState, expected: int) -> None:
    if expected != state.step:
        who = f"adapter {state.adapter!r}" if state.adapter else "the trainer"
        told = f"expected step {expected}, {who} is at step {state.step}"
        facts: dict[str, object] = {"expected": expected, "actual": state.step}
        if state.undone is not None and expected <= state.undone.step:
            facts |= {"undone_step": state.undone.step, "cause": state.undone.cause}
            told += (
                f": its ranks were restarted ({state.undone.cause}), which undid steps up to "
                f"{state.undone.step}; load a checkpoint, or train again from here"
            )
        raise StepMismatchError(told, **facts)


def _discard(adapter: str) -> pb.FollowResponse:
    return pb.FollowResponse(discard=pb.DiscardCommand(), adapter=adapter)


def check_temperature(batch: Batch, selection: np.ndarray, asked: float) -> None:
    """Raises TemperatureMismatchError for the first row that was sampled at another one.

    Rows that do not say at which are taken. Requests carry float32.
    """
    sampled = batch.temperatures[selection]
    wrong = np.abs(sampled - asked) > 1e-6 * asked  # a NaN is not
    if not wrong.any():
        return
    sample_id, found = batch.facts.sample_ids[selection[wrong][0]], float(sampled[wrong][0])
    which = "several temperatures" if found == SEVERAL else f"temperature {found:g}"
    raise TemperatureMismatchError(
        f"sample {sample_id!r} was sampled at {which}, this pass is of {asked:g}: its log-probs "
        "would be of another distribution; give that temperature, or allow_other_temperature",
        sample_id=sample_id,
        sampled=f"{found:g}",
        asked=f"{asked:g}",
    )


def check_scored_at(batch: Batch, columns: frozenset[str], asked: float) -> None:
    """Raises TemperatureMismatchError for log-probs of another temperature that a loss reads."""
    for column in sorted(columns & batch.scored_at.keys()):
        if batch.scored_at[column] != asked:
            found = f"{batch.scored_at[column]:g}"
            raise TemperatureMismatchError(
                f"{column} were computed at temperature {found}, this pass is of {asked:g}: they "
                "are of another distribution; give one temperature, or allow_other_temperature",
                column=column,
                sampled=found,
                asked=f"{asked:g}",
            )


def _note_truncation(batch: Batch, selection: np.ndarray, answer: PassScalars) -> None:
    """Adds the share of rows whose tokens come from a part of the distribution."""
    cut = np.zeros(batch.row_count, dtype=np.bool_)
    for name in ("top_p", "top_k"):
        cut |= batch.present.get(name, False)
    if cut[selection].any():
        answer.metrics["sampling_truncated"] = float(cut[selection].mean())
        answer.metric_weights["sampling_truncated"] = float(len(selection))


def split_pass(
    plan: PassPlan, command: pb.FollowResponse, weights: Mapping[int, float] | None = None
) -> list[Build]:
    """Return commands that run the micro-batches of `plan` in order, a part of them each.

    Every one has the same count of micro-batches on every rank.
    """
    kind = command.WhichOneof("command") or ""

    def count(start: int, end: int) -> int:
        return sum(len(rows) for rank in plan.ranks for rows in rank[start:end])

    def part(start: int, end: int) -> Build:
        share = count(start, end) / max(1, count(0, plan.micro_batch_count))

        def build(data_rank: int) -> pb.FollowResponse:
            own = pb.FollowResponse()
            own.CopyFrom(command)
            if kind == "forward_backward":
                own.forward_backward.normalizer *= share
            micro_batches = getattr(own, kind).micro_batches
            for rows in plan.ranks[data_rank][start:end]:
                factors = None if weights is None else [weights[row] for row in rows]
                micro_batches.add(rows=rows, loss_weights=factors)
            return own

        return build

    return [part(start, end) for start, end in _stretches(plan)]


def _stretches(plan: PassPlan) -> Iterable[tuple[int, int]]:
    """Yield ranges of micro-batches whose rows fit a command on every rank."""
    start = 0
    counts = [0] * len(plan.ranks)
    for index in range(plan.micro_batch_count):
        rows = [len(rank[index]) for rank in plan.ranks]
        full = any(h + r > ROWS_PER_COMMAND for h, r in zip(counts, rows, strict=True))
        if full and index > start:
            yield start, index
            start, counts = index, [0] * len(plan.ranks)
        counts = [h + r for h, r in zip(counts, rows, strict=True)]
    yield start, plan.micro_batch_count


def add_sums(sums: Sequence[pb.PassSums]) -> pb.PassSums:
    """Add up sums over all data-parallel ranks and commands."""
    total = pb.PassSums()
    for part in sums:
        total.loss += part.loss
        total.token_count += part.token_count
        for name, value in part.metrics.items():
            metric = total.metrics[name]
            metric.sum += value.sum
            metric.weight += value.weight
            if value.HasField("max"):
                metric.max = max(metric.max, value.max) if metric.HasField("max") else value.max
    return total


def find_means(total: pb.PassSums) -> dict[str, float]:
    """Return means and maxima of the metrics that anything was measured for."""
    means = {}
    for name, value in total.metrics.items():
        if value.weight:
            means[name] = value.sum / value.weight
        if value.HasField("max"):
            means[f"{name}_max"] = value.max
    return means


def merge_moments(parts: Sequence[pb.TokenMoments]) -> pb.TokenMoments:
    """Returns the moments of all parts together, merged in the order given."""
    whole = reduce(Moments.merge, (Moments(p.count, p.mean, p.m2) for p in parts), Moments())
    return pb.TokenMoments(count=whole.count, mean=whole.mean, m2=whole.m2)


def _count_zero_advantage_groups(batch: Batch) -> int:
    speaking = {
        group
        for group, silent in zip(batch.facts.group_ids, batch.zero_advantage.tolist(), strict=True)
        if not silent
    }
    return len(set(batch.facts.group_ids) - speaking)


def _note_mismatch(means: dict[str, float]) -> None:
    if "rollout_mismatch" in means:
        metrics.MISMATCH.set(means["rollout_mismatch"])
