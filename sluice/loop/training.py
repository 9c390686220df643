"""One training step: batch up, columns, gradients, optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from sluice import faults
from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.client import TrainerClient, new_request_id
from sluice.loop.config import AlgorithmConfig
from sluice.loop.ledger import LedgerGroup


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What a training step told; `optimizer_step` counts the trainer's steps after it."""

    optimizer_step: int
    metrics: dict[str, float] = field(default_factory=dict)
    skipped_reasons: tuple[str, ...] = ()


async def train_step(
    trainer: TrainerClient,
    algorithm: AlgorithmConfig,
    groups: Sequence[LedgerGroup],
    *,
    optimizer_step: int,
    name: str,
) -> StepReport:
    """Train on finished groups: `mini_batches` optimizer steps over references alone.

    Raises RemoteError; then nothing is known of gradients, and the caller restores a cut.
    """
    blobs = [group.blob for group in groups if group.blob is not None]
    sample_count = sum(group.sample_count for group in groups)
    batch_id = f"{name}-{new_request_id()[:8]}"  # a step tried again is another batch
    upload = await trainer.upload_batch(batch_id, sample_count, blobs=blobs)
    batch = upload.batch
    faults.point("uploaded")
    metrics = await _add_columns(trainer, algorithm, batch)
    reports = []
    for part, share in enumerate(_mini_batches(groups, algorithm.mini_batches)):
        sample_ids = [] if len(share) == len(groups) else _sample_ids(share)
        part_id = f"{batch_id}-{part}"
        gradients = await trainer.forward_backward(
            batch,
            algorithm.loss,
            expected_step=optimizer_step,
            part_id=part_id,
            sample_ids=sample_ids,
        )
        faults.point("gradients")
        step = await trainer.step_optimizer(optimizer_step, [part_id])
        faults.point("stepped")
        optimizer_step = step.step
        reports.append((gradients, step))
    await trainer.delete_batch(batch)
    return _report(optimizer_step, metrics, reports)


async def _add_columns(
    trainer: TrainerClient, algorithm: AlgorithmConfig, batch: str
) -> dict[str, float]:
    temperature, needed = algorithm.loss.temperature, algorithm.columns
    if "old_logprobs" in needed:
        await trainer.compute_logprobs(batch, temperature=temperature)
    if "reference_logprobs" in needed:
        await trainer.compute_logprobs(batch, reference=True, temperature=temperature)
    if algorithm.loss.name == "sft":
        return {}
    advantages = await trainer.compute_advantages(batch, algorithm.advantage)
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
    tokens = sum(gradients.token_count for gradients, _ in reports)
    for gradients, _ in reports:
        share = gradients.token_count / max(1, tokens)
        for name, value in {"loss": gradients.loss, **gradients.metrics}.items():
            metrics[name] = metrics.get(name, 0.0) + value * share
    metrics["tokens"] = float(tokens)
    metrics["grad_norm"] = sum(step.grad_norm for _, step in reports) / len(reports)
    metrics["learning_rate"] = reports[-1][1].learning_rate
    skipped = tuple(step.skipped_reason for _, step in reports if step.skipped_reason)
    return StepReport(optimizer_step=optimizer_step, metrics=metrics, skipped_reasons=skipped)
