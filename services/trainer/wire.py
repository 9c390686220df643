"""What the servicer answers: scalars, plans and the trainer itself as messages."""

from __future__ import annotations

from typing import get_args

from services.trainer.config import Head
from services.trainer.controller.planning import BareRow, DryPlan, PlanOptions
from services.trainer.controller.publication import Publication
from services.trainer.controller.state import PassScalars
from services.trainer.controller.trainer import Trainer
from sluice.algo.spec import AdvantageName, LossName
from sluice.api.common.v1 import sample_pb2
from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.balance.planner import OversizePolicy
from sluice.runtime.errors import InvalidFieldError, status_of
from sluice.runtime.wire import duration_of

LOSSES: dict[Head, tuple[str, ...]] = {
    "policy": tuple(name for name in get_args(LossName) if name != "value"),
    "value": ("value",),
}
OVERSIZE = {
    pb.OVERSIZE_POLICY_UNSPECIFIED: None,
    pb.OVERSIZE_POLICY_ERROR: OversizePolicy.ERROR,
    pb.OVERSIZE_POLICY_TRUNCATE: OversizePolicy.TRUNCATE,
    pb.OVERSIZE_POLICY_ALONE: OversizePolicy.ALONE,
}


def logprobs_to_proto(column: str, scalars: PassScalars) -> pb.ComputeLogprobsResponse:
    found = scalars.metrics
    response = pb.ComputeLogprobsResponse(
        column=column, mean=found.get("logprob", 0.0), token_count=scalars.token_count
    )
    if "rollout_mismatch" in found:
        response.rollout_mismatch_mean = found["rollout_mismatch"]
        response.rollout_mismatch_max = found["rollout_mismatch_max"]
    return response


def publication_to_proto(publication: Publication) -> pb.PublishWeightsResponse:
    record = publication.record
    return pb.PublishWeightsResponse(
        weights=sample_pb2.WeightVersion(version=record.version, digest=record.digest),
        step=record.step,
        byte_count=publication.stored_bytes,
        full_byte_count=publication.full_bytes,
        engines=[
            pb.TransferOutcome(engine_id=engine_id, error=error and status_of(error))
            for engine_id, error in publication.outcomes.items()
        ],
        transfer=duration_of(publication.transfer_seconds),
    )


def plan_options_from_proto(request: pb.PlanBatchRequest) -> PlanOptions:
    """Raises InvalidFieldError."""
    if request.oversize_policy not in OVERSIZE:
        raise InvalidFieldError("oversize_policy", f"{request.oversize_policy} is unknown")

    def given(name: str) -> int | None:
        return getattr(request, name) if request.HasField(name) else None  # type: ignore[arg-type]

    return PlanOptions(
        token_cap=given("max_tokens_per_micro_batch"),
        oversize=OVERSIZE[request.oversize_policy],
        micro_batch_multiple=given("micro_batch_multiple"),
        max_micro_batches=given("max_micro_batches"),
    )


def bare_rows_from_proto(request: pb.PlanBatchRequest) -> list[BareRow]:
    """Raises InvalidFieldError where rows and a batch are given, or neither."""
    if bool(request.batch) == bool(request.bare_rows):
        raise InvalidFieldError("batch", "or bare_rows must be given, not both")
    if request.bare_rows and request.sample_ids:
        raise InvalidFieldError("sample_ids", "have no effect with bare_rows; leave them out")
    return [
        BareRow(row.length, row.prompt_length, row.group if row.HasField("group") else None)
        for row in request.bare_rows
    ]


def plan_to_proto(dry: DryPlan) -> pb.PlanBatchResponse:
    plan, statistics = dry.plan, dry.plan.statistics
    ids = dry.facts.sample_ids

    def named(rows: tuple[int, ...]) -> list[str]:
        return [ids[row] for row in rows if ids[row]]

    response = pb.PlanBatchResponse(
        micro_batch_count=statistics.micro_batch_count,
        dummy_count=statistics.dummy_count,
        imbalance=statistics.imbalance,
        lockstep_imbalance=statistics.lockstep_imbalance,
        fill=statistics.fill,
        leftover_rows=plan.leftover,
        leftover_sample_ids=named(plan.leftover),
    )
    for rank in plan.ranks:
        planned = response.ranks.add()
        for rows in rank:
            tokens = dry.token_count(rows)
            planned.micro_batches.add(rows=rows, sample_ids=named(rows), token_count=tokens)
            planned.token_count += tokens
        response.token_count += planned.token_count
    for row, length in sorted(plan.truncated.items()):
        response.truncated_rows.add(row=row, sample_id=ids[row], length=length)
    return response


def describe(trainer: Trainer) -> pb.Trainer:
    state, ranks = trainer.state, trainer.ranks
    described = pb.Trainer(
        state=ranks.state,
        step=state.step,
        part_ids=list(state.ledger.parts),
        layout=ranks.layout,
        ranks=[link.to_proto() for link in ranks.links],
        restart_count=ranks.restart_count,
        failure=ranks.failure,
        losses=LOSSES[trainer.config.head],
        advantage_estimators=get_args(AdvantageName),
        batches=[batch.name for batch in state.batches.all()],
        backend=trainer.config.backend,
        skipped_count=state.skipped_count,
        consecutive_skipped_count=state.skips_in_a_row,
        gradients_incomplete=bool(state.ledger.broken),
        checkpoint=state.checkpoint,
        head=trainer.config.head,
    )
    if state.weights is not None:
        described.weights.version = state.weights.version
        described.weights.digest = state.weights.digest
    return described
