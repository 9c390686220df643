"""Commands for the ranks, each at most 1 MiB, and the sums of their answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from services.trainer.controller.batches import Batch
from services.trainer.controller.planning import PassPlan
from services.trainer.controller.rank_incarnation import Build
from sluice.api.trainer.v1 import loss_pb2
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.runtime.wire import blob_to_proto

ROWS_PER_COMMAND = 50_000  # a row takes at most 16 bytes of a command
BLOBS_PER_COMMAND = 2_000  # a blob's name takes about 50


def add_rows(batch: Batch) -> list[Build]:
    """Commands that give every rank its rows of `batch`."""
    starts: list[int] = []
    rows = blobs = 0
    for index, stored in enumerate(batch.stored):
        if not starts or rows + stored.count > ROWS_PER_COMMAND or blobs == BLOBS_PER_COMMAND:
            starts.append(index)
            rows = blobs = 0
        rows, blobs = rows + stored.count, blobs + 1
    ends = [*starts[1:], len(batch.stored)]
    return [_add_rows(batch, start, end) for start, end in zip(starts, ends, strict=True)]


def _add_rows(batch: Batch, start: int, end: int) -> Build:
    def build(data_rank: int) -> pb.FollowResponse:
        command = pb.AddRows(batch_id=batch.batch_id)
        for stored in batch.stored[start:end]:
            owners = batch.owners[stored.first_row : stored.first_row + stored.count]
            indices = np.flatnonzero(owners == data_rank)
            if len(indices):
                command.blobs.append(
                    pb.BlobRows(
                        blob=blob_to_proto(stored.blob),
                        indices=(indices + stored.first_index).tolist(),
                        rows=(indices + stored.first_row).tolist(),
                    )
                )
        return pb.FollowResponse(add_rows=command)

    return build


def pass_commands(
    plan: PassPlan,
    weights: dict[int, float] | None,
    wrap: Callable[[list[pb.MicroBatchRows]], pb.FollowResponse],
) -> list[Build]:
    """Commands that run the micro-batches of `plan` in order, a part of them each.

    Every command has the same count of micro-batches on every rank.
    """
    return [_pass(plan, weights, wrap, start, end) for start, end in _stretches(plan)]


def _pass(
    plan: PassPlan,
    weights: dict[int, float] | None,
    wrap: Callable[[list[pb.MicroBatchRows]], pb.FollowResponse],
    start: int,
    end: int,
) -> Build:
    def build(data_rank: int) -> pb.FollowResponse:
        return wrap(
            [
                pb.MicroBatchRows(
                    rows=rows,
                    loss_weights=None if weights is None else [weights[row] for row in rows],
                )
                for rows in plan.ranks[data_rank][start:end]
            ]
        )

    return build


def _stretches(plan: PassPlan) -> Iterable[tuple[int, int]]:
    """Ranges of micro-batches whose rows fit a command on every rank."""
    start = 0
    held = [0] * len(plan.ranks)
    for index in range(plan.micro_batch_count):
        rows = [len(rank[index]) for rank in plan.ranks]
        full = any(h + r > ROWS_PER_COMMAND for h, r in zip(held, rows, strict=True))
        if full and index > start:
            yield start, index
            start, held = index, [0] * len(plan.ranks)
        held = [h + r for h, r in zip(held, rows, strict=True)]
    yield start, plan.micro_batch_count


def forward_backward(
    batch: Batch, loss: loss_pb2.LossSpec, plan: PassPlan, weights: dict[int, float]
) -> list[Build]:
    return pass_commands(
        plan,
        weights,
        lambda micro_batches: pb.FollowResponse(
            forward_backward=pb.GradientsCommand(
                batch_id=batch.batch_id, loss=loss, micro_batches=micro_batches
            )
        ),
    )


def compute_logprobs(batch: Batch, model: int, temperature: float, plan: PassPlan) -> list[Build]:
    return pass_commands(
        plan,
        None,
        lambda micro_batches: pb.FollowResponse(
            compute_logprobs=pb.LogprobsCommand(
                batch_id=batch.batch_id,
                model=model,  # type: ignore[arg-type]
                temperature=temperature,
                micro_batches=micro_batches,
            )
        ),
    )


def compute_values(batch: Batch, plan: PassPlan) -> list[Build]:
    return pass_commands(
        plan,
        None,
        lambda micro_batches: pb.FollowResponse(
            compute_values=pb.ValuesCommand(batch_id=batch.batch_id, micro_batches=micro_batches)
        ),
    )


def same_for_all(command: pb.FollowResponse) -> Build:
    """One command for every rank."""

    def build(data_rank: int) -> pb.FollowResponse:
        return command

    return build


def add_sums(sums: Sequence[pb.PassSums]) -> pb.PassSums:
    """Sums over all data-parallel ranks and commands."""
    total = pb.PassSums()
    for part in sums:
        total.loss += part.loss
        total.token_count += part.token_count
        for name, value in part.metrics.items():
            held = total.metrics[name]
            held.sum += value.sum
            held.weight += value.weight
            if value.HasField("max"):
                held.max = max(held.max, value.max) if held.HasField("max") else value.max
    return total


def means(total: pb.PassSums) -> dict[str, float]:
    """Means and maxima of the metrics that anything was measured for."""
    found = {}
    for name, value in total.metrics.items():
        if value.weight:
            found[name] = value.sum / value.weight
        if value.HasField("max"):
            found[f"{name}_max"] = value.max
    return found
