"""Passes over batches: log-probabilities, advantages, gradients, and the step they lead to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from services.trainer import metrics
from services.trainer.config import OptimConfig
from services.trainer.controller import commands
from services.trainer.controller.batches import Batch
from services.trainer.controller.planning import (
    PassPlan,
    Planner,
    find_missing,
    skips_silent_rows,
    weigh_pass,
)
from services.trainer.controller.rank_group import RankGroup
from services.trainer.controller.rank_incarnation import Build, RankIncarnation
from services.trainer.controller.state import PassRecord, PassScalars, TrainerState, learning_rate
from services.trainer.errors import ColumnMissingError, SkippedTooOftenError
from sluice.algo.moments import Moments
from sluice.algo.spec import AdvantageSpec, LossSpec, required_columns
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.runtime.errors import ServiceError, StepMismatchError
from sluice.runtime.wire import advantage_to_proto, loss_to_proto

COLUMN_OF_MODEL = {
    trainer_pb.ComputeLogprobsRequest.MODEL_POLICY: "old_logprobs",
    trainer_pb.ComputeLogprobsRequest.MODEL_REFERENCE: "reference_logprobs",
}
NO_TOKENS = "no trained tokens"


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


@dataclass(frozen=True)
class StepScalars:
    step: int
    skipped_reason: str
    grad_norm: float
    learning_rate: float
    seconds: float
    skipped_count: int
    skips_in_a_row: int


class TrainerPasses:
    """What the ranks compute for the front. Callers hold the trainer's lock."""

    def __init__(
        self, optim: OptimConfig, state: TrainerState, ranks: RankGroup, planner: Planner
    ) -> None:
        self._optim, self._state, self._ranks, self._planner = optim, state, ranks, planner

    async def compute_logprobs(self, batch: Batch, model: int, temperature: float) -> PassScalars:
        """Add a column of log-probabilities to all rows."""
        generation = self._ranks.generation
        plan = await self._plan(batch, np.arange(batch.row_count))
        builds = commands.compute_logprobs(batch, model, temperature, plan)
        batch.unmark(COLUMN_OF_MODEL[model])  # type: ignore[index]
        with metrics.PASS_SECONDS.labels("logprobs").time():
            total = await self._sum(generation, builds)
        batch.mark(COLUMN_OF_MODEL[model])  # type: ignore[index]
        found = commands.means(total)
        _note_mismatch(found)
        return PassScalars(0.0, total.token_count, found, plan.micro_batch_count)

    async def compute_values(self, batch: Batch) -> PassScalars:
        """Add the column `values` to all rows."""
        generation = self._ranks.generation
        plan = await self._plan(batch, np.arange(batch.row_count))
        batch.unmark("values")
        with metrics.PASS_SECONDS.labels("values").time():
            total = await self._sum(generation, commands.compute_values(batch, plan))
        batch.mark("values")
        found = commands.means(total)
        return PassScalars(0.0, total.token_count, found, plan.micro_batch_count)

    async def compute_advantages(self, batch: Batch, spec: AdvantageSpec) -> AdvantageScalars:
        """Add `advantages` (and `returns`) to all rows."""
        generation = self._ranks.generation
        everything = np.arange(batch.row_count)
        self._check_columns(batch, everything, spec)
        command = pb.AdvantagesCommand(
            batch_id=batch.batch_id, advantage=advantage_to_proto(spec), moments_only=spec.whitens
        )
        with metrics.PASS_SECONDS.labels("advantages").time():
            if spec.whitens:
                found = await self._advantages(generation, command)
                merged = merge_moments([result.advantages.moments for result in found])
                command.moments_only = False
                command.moments.CopyFrom(merged)
            batch.unmark("advantages", "returns")
            results = await self._advantages(generation, command)
        batch.mark("advantages")
        if any(result.advantages.has_returns for result in results):
            batch.mark("returns")
        batch.silent[:] = False
        for result in results:
            batch.silent[np.asarray(result.advantages.silent_rows, dtype=np.int64)] = True
        total = commands.add_sums([result.sums for result in results])
        means = commands.means(total)
        return AdvantageScalars(
            reward_mean=means.pop("reward", float("nan")),
            advantage_abs_mean=means.pop("advantage_abs", 0.0),
            silent_group_count=_count_silent_groups(batch),
            group_count=len(set(batch.facts.group_ids)),
            metrics=means,
        )

    async def forward_backward(self, batch: Batch, request: GradientsRequest) -> PassScalars:
        """Add the gradients of a part, once."""
        generation = self._ranks.generation
        state, loss = self._state, request.loss
        self.check_step(request.expected_step)
        ledger = state.ledger
        known = ledger.find(request.part_id, request.body)
        if known is not None:
            return known
        limit = self._optim.max_consecutive_skips
        if limit and state.skips_in_a_row >= limit:
            raise SkippedTooOftenError(
                f"{state.skips_in_a_row} steps in a row were skipped, the last for "
                f"{state.last_skip}: load a checkpoint, or discard gradients to go on",
                count=state.skips_in_a_row,
                cause=state.last_skip,
            )
        aggregation = (loss.aggregation, loss.constant_length)
        ledger.check_aggregation(aggregation)
        selection = batch.select(request.sample_ids)
        self._check_columns(batch, selection, loss)
        weighed = weigh_pass(batch, selection, loss)
        computed = selection
        if skips_silent_rows(loss):
            computed = selection[~batch.silent[selection]]
        plan = await self._plan(batch, computed)
        weights = dict(zip(selection.tolist(), weighed.weights.tolist(), strict=True))
        builds = commands.forward_backward(batch, loss_to_proto(loss), plan, weights)
        try:
            with metrics.PASS_SECONDS.labels("forward_backward").time():
                total = await self._sum(generation, builds)
        except BaseException as error:
            ledger.broken = str(error) or type(error).__name__
            raise
        answer = PassScalars(
            loss=total.loss / weighed.normalizer if weighed.normalizer else 0.0,
            token_count=int(batch.mask_counts[selection].sum()),
            metrics=commands.means(total),
            micro_batch_count=plan.micro_batch_count,
            silent_row_count=len(selection) - len(computed),
        )
        ledger.parts[request.part_id] = PassRecord(
            request.body, answer, aggregation, weighed.normalizer
        )
        metrics.TOKENS.inc(answer.token_count)
        metrics.LOSS.set(answer.loss)
        _note_mismatch(answer.metrics)
        return answer

    async def step(
        self, expected_step: int, part_ids: Sequence[str], rate: float | None
    ) -> StepScalars:
        """Apply exactly the parts named and advance the step."""
        generation = self._ranks.generation
        self.check_step(expected_step)
        state, ledger = self._state, self._state.ledger
        ledger.check_expected(part_ids)
        used = learning_rate(self._optim, state.step) if rate is None else rate
        started = time.perf_counter()
        if ledger.normalizer == 0:  # nothing to divide by, and no gradient
            await self._run(generation, pb.FollowResponse(discard=pb.DiscardCommand()))
            outcome = pb.StepResult(grad_norm=0.0, learning_rate=used, skipped_reason=NO_TOKENS)
        else:
            outcome = await self._apply(generation, ledger.normalizer, used)
        ledger.clear()
        seconds = time.perf_counter() - started
        self._note_step(outcome, seconds)
        return StepScalars(
            step=state.step,
            skipped_reason=outcome.skipped_reason,
            grad_norm=outcome.grad_norm,
            learning_rate=outcome.learning_rate,
            seconds=seconds,
            skipped_count=state.skipped_count,
            skips_in_a_row=state.skips_in_a_row,
        )

    async def discard(self) -> list[str]:
        """Forget gathered gradients; a streak of skipped steps counts as seen."""
        generation = self._ranks.generation
        await self._run(generation, pb.FollowResponse(discard=pb.DiscardCommand()))
        self._state.skips_in_a_row = 0
        metrics.SKIPS_IN_A_ROW.set(0)
        return self._state.ledger.clear()

    def check_step(self, expected: int) -> None:
        if expected != self._state.step:
            raise StepMismatchError(
                f"expected step {expected}, the trainer is at step {self._state.step}",
                expected=expected,
                actual=self._state.step,
            )

    async def _apply(
        self, generation: RankIncarnation, normalizer: float, rate: float
    ) -> pb.StepResult:
        command = pb.StepCommand(normalizer=normalizer, learning_rate=rate)
        try:
            results = await self._run(generation, pb.FollowResponse(step=command))
        except ServiceError as error:
            # Some ranks may have stepped and others not: only a checkpoint is whole again.
            generation.fail(error)
            raise
        return results[0].step

    def _note_step(self, outcome: pb.StepResult, seconds: float) -> None:
        state = self._state
        state.step += 1
        skipped = bool(outcome.skipped_reason)
        state.skips_in_a_row = state.skips_in_a_row + 1 if skipped else 0
        state.skipped_count += skipped
        state.last_skip = outcome.skipped_reason or state.last_skip
        self._ranks.note_progress()
        metrics.STEP_SECONDS.observe(seconds)
        metrics.STEPS.labels("skipped" if skipped else "applied").inc()
        metrics.SKIPS_IN_A_ROW.set(state.skips_in_a_row)
        metrics.STEP.set(state.step)
        metrics.GRAD_NORM.set(outcome.grad_norm)
        metrics.LEARNING_RATE.set(outcome.learning_rate)

    async def _plan(self, batch: Batch, selection: np.ndarray) -> PassPlan:
        """Off the event loop, which many rows would hold up."""
        return await asyncio.to_thread(self._planner.plan, batch, selection)

    def _check_columns(
        self, batch: Batch, selection: np.ndarray, spec: LossSpec | AdvantageSpec
    ) -> None:
        missing = find_missing(batch, selection, sorted(required_columns(spec)))
        if missing is not None:
            row, columns = missing
            kind = "loss" if isinstance(spec, LossSpec) else "advantage"
            raise ColumnMissingError(columns, batch.facts.sample_ids[row], f"{kind} {spec.name}")

    async def _advantages(
        self, generation: RankIncarnation, command: pb.AdvantagesCommand
    ) -> list[pb.CommandResult]:
        message = pb.FollowResponse(compute_advantages=command)
        return generation.reporting(await self._run(generation, message))

    async def _sum(self, generation: RankIncarnation, builds: Sequence[Build]) -> pb.PassSums:
        sums = []
        for build in builds:
            results = await self._ranks.run_on(generation, build)
            sums += [result.sums for result in generation.reporting(results)]
        return commands.add_sums(sums)

    async def _run(
        self, generation: RankIncarnation, command: pb.FollowResponse
    ) -> list[pb.CommandResult]:
        return await self._ranks.run_on(generation, commands.same_for_all(command))


def merge_moments(parts: Sequence[pb.TokenMoments]) -> pb.TokenMoments:
    """Returns the moments of all parts together, merged in the order given."""
    whole = reduce(Moments.merge, (Moments(p.count, p.mean, p.m2) for p in parts), Moments())
    return pb.TokenMoments(count=whole.count, mean=whole.mean, m2=whole.m2)


def _count_silent_groups(batch: Batch) -> int:
    speaking = {
        group
        for group, silent in zip(batch.facts.group_ids, batch.silent.tolist(), strict=True)
        if not silent
    }
    return len(set(batch.facts.group_ids) - speaking)


def _note_mismatch(found: dict[str, float]) -> None:
    if "rollout_mismatch" in found:
        metrics.MISMATCH.set(found["rollout_mismatch"])
