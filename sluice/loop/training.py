"""One training step: batch up, columns, gradients, optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from sluice import faults
from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.client import TrainerClient, new_request_id
from sluice.loop import trace
from sluice.loop.config import AlgorithmConfig
from sluice.loop.critic import Critic, CriticPart
from sluice.loop.ledger import LedgerGroup


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What a training step told; `optimizer_step` counts the trainer's steps after it."""

    optimizer_step: int
    metrics: dict[str, float] = field(default_factory=dict)
    skipped_reasons: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _StepRows:
    """The rows of a step, on the actor and on the critic."""

    name: str
    critic_name: str = ""


async def train_step(
    trainer: TrainerClient,
    algorithm: AlgorithmConfig,
    groups: Sequence[LedgerGroup],
    *,
    optimizer_step: int,
    name: str,
    critic: Critic | None = None,
    critic_alone: bool = False,
) -> StepReport:
    """Train on finished groups: `mini_batches` optimizer steps over references alone.

    With critic_alone the actor learns nothing. Raises RemoteError; then nothing is known of
    gradients, and the caller restores a cut.
    """
    batch_id = f"{name}-{new_request_id()[:8]}"  # a step tried again is another batch
    batch = await _upload(trainer, critic, groups, batch_id)
    faults.point("uploaded")
    metrics = await _add_columns(trainer, algorithm, batch, critic)
    reports = []
    lessons: list[CriticPart] = []
    for part, share in enumerate(_mini_batches(groups, algorithm.mini_batches)):
        sample_ids = [] if len(share) == len(groups) else _sample_ids(share)
        part_id = f"{batch_id}-{part}"
        async with AsyncExitStack() as stack:
            if critic is not None:
                learning = critic.learning(batch.critic_name, part_id, sample_ids)
                task = await stack.enter_async_context(learning)
            if not critic_alone:
                with trace.span(trace.TRAINER, "forward_backward"):
                    gradients = await trainer.forward_backward(
                        batch.name,
                        algorithm.loss,
                        expected_step=optimizer_step,
                        part_id=part_id,
                        sample_ids=sample_ids,
                    )
                faults.point("gradients")
                with trace.span(trace.TRAINER, "optimizer"):
                    step = await trainer.step_optimizer(optimizer_step, [part_id])
                faults.point("stepped")
                optimizer_step = step.step
                reports.append((gradients, step))
        if critic is not None:
            lessons.append(task.result())
    await trainer.delete_batch(batch.name)
    if critic is not None:
        await critic.delete_batch(batch.critic_name)
        metrics |= _of_critic(lessons)
    return _report(optimizer_step, metrics, reports)


async def _upload(
    trainer: TrainerClient, critic: Critic | None, groups: Sequence[LedgerGroup], batch_id: str
) -> _StepRows:
    blobs = [group.blob for group in groups if group.blob is not None]
    sample_count = sum(group.sample_count for group in groups)
    with trace.span(trace.TRAINER, "upload"):
        name = (await trainer.upload_batch(batch_id, sample_count, blobs=blobs)).batch
    if critic is None:
        return _StepRows(name=name)
    return _StepRows(name=name, critic_name=await critic.upload(batch_id, sample_count, blobs))


async def _add_columns(
    trainer: TrainerClient, algorithm: AlgorithmConfig, batch: _StepRows, critic: Critic | None
) -> dict[str, float]:
    temperature, needed = algorithm.loss.temperature, algorithm.columns
    if "old_logprobs" in needed:
        with trace.span(trace.TRAINER, "old_logprobs"):
            await trainer.compute_logprobs(batch.name, temperature=temperature)
    if "reference_logprobs" in needed:
        with trace.span(trace.TRAINER, "reference_logprobs"):
            await trainer.compute_logprobs(batch.name, reference=True, temperature=temperature)
    if algorithm.loss.name == "sft":
        return {}
    if critic is not None:
        with trace.span(trace.CRITIC, "values"):
            await critic.lend_values(batch.critic_name, trainer, batch.name)
    with trace.span(trace.TRAINER, "advantages"):
        advantages = await trainer.compute_advantages(batch.name, algorithm.advantage)
    if critic is not None:
        with trace.span(trace.CRITIC, "returns"):
            await critic.take_returns(batch.critic_name, trainer, batch.name)
    return {
        "reward_mean": advantages.reward_mean,
        "advantage_abs_mean": advantages.advantage_abs_mean,
        "silent_groups": float(advantages.silent_group_count),
    }


def _mini_batches(groups: Sequence[LedgerGroup], count: int) -> list[Sequence[LedgerGroup]]:
    """Contiguous shares, as even as can be."""
    bounds = [len(groups) * i // count for i in range(count + 1)]
    return [groups[a:b] for a, b in itertools.pairwise(bounds) if b > a]


def _sample_ids(groups: Sequence[LedgerGroup]) -> list[str]:
    return [f"{group.group_id}/{i}" for group in groups for i in range(group.sample_count)]


def _report(
    optimizer_step: int,
    metrics: dict[str, float],
    reports: list[tuple[pb.ForwardBackwardResponse, pb.StepOptimizerResponse]],
) -> StepReport:
    if not reports:  # the critic alone has learned
        return StepReport(optimizer_step=optimizer_step, metrics=metrics)
    metrics |= _weighted([gradients for gradients, _ in reports])
    metrics["tokens"] = float(sum(gradients.token_count for gradients, _ in reports))
    metrics["grad_norm"] = sum(step.grad_norm for _, step in reports) / len(reports)
    metrics["learning_rate"] = reports[-1][1].learning_rate
    skipped = tuple(step.skipped_reason for _, step in reports if step.skipped_reason)
    return StepReport(optimizer_step=optimizer_step, metrics=metrics, skipped_reasons=skipped)


def _of_critic(lessons: Sequence[CriticPart]) -> dict[str, float]:
    metrics = _weighted([lesson.gradients for lesson in lessons])
    norms = [lesson.step.grad_norm for lesson in lessons]
    found = {f"critic_{name.removeprefix('value_')}": value for name, value in metrics.items()}
    return {**found, "critic_grad_norm": sum(norms) / len(norms)}


def _weighted(passes: Sequence[pb.ForwardBackwardResponse]) -> dict[str, float]:
    """Means over the tokens of all passes."""
    tokens = max(1, sum(each.token_count for each in passes))
    metrics: dict[str, float] = {}
    for each in passes:
        for name, value in {"loss": each.loss, **each.metrics}.items():
            metrics[name] = metrics.get(name, 0.0) + value * each.token_count / tokens
    return metrics
