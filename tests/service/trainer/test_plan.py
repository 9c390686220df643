"""PlanBatch: what ForwardBackward would run, and what other limits would make of it."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.client import TrainerClient
from tests.service.trainer.harness import (
    ACTIVE,
    PPO,
    make_group,
    make_groups,
    running_trainer,
    until,
    upload,
)
from tests.service.trainer.test_errors import INVALID, assert_is, refusal

Rows = list[tuple[int, int, int]]  # length, prompt length, group


def request_of(rows: Rows, **options: int) -> pb.PlanBatchRequest:
    bare = [pb.BareRow(length=n, prompt_length=p, group=g) for n, p, g in rows]
    return pb.PlanBatchRequest(bare_rows=bare, **options)  # type: ignore[arg-type]


async def test_the_plan_is_what_runs(client: TrainerClient) -> None:
    samples = make_groups("plan")
    batch = await upload(client, "plan", samples)
    plan = await client.plan_batch(pb.PlanBatchRequest(batch=batch))
    step = (await client.get()).step
    passed = await client.forward_backward(batch, PPO, expected_step=step, part_id="p")
    assert plan.micro_batch_count == passed.micro_batch_count
    (rank,) = plan.ranks
    ran = [name for part in rank.micro_batches for name in part.sample_ids]
    assert sorted(ran) == sorted(sample.sample_id for sample in samples)
    prompts = {sample.group_id: sample.prompt_length for sample in samples}
    tokens = sum(prompts.values()) + sum(sample.response_length for sample in samples)
    if plan.micro_batch_count == 1:
        assert plan.token_count == tokens
    assert plan.token_count == sum(part.token_count for part in rank.micro_batches)
    few = [samples[0].sample_id, samples[5].sample_id]
    plan = await client.plan_batch(pb.PlanBatchRequest(batch=batch, sample_ids=few))
    assert [list(part.rows) for part in plan.ranks[0].micro_batches] == [[0, 5]]


async def test_bare_lengths_under_other_limits(client: TrainerClient) -> None:
    rows = [(10, 4, 0), (8, 4, 0), (9, 3, 1), (30, 2, 2)]
    plan = await client.plan_batch(request_of(rows, max_tokens_per_micro_batch=32))
    parts = plan.ranks[0].micro_batches
    assert sorted(row for part in parts for row in part.rows) == [0, 1, 2, 3]
    assert sorted(part.token_count for part in parts) == [23, 30]  # 4 + 6 + 4 and 9; 30
    assert plan.token_count == 53
    assert all(not part.sample_ids for part in parts)
    plan = await client.plan_batch(
        request_of(rows, max_tokens_per_micro_batch=32, micro_batch_multiple=5)
    )
    assert (plan.micro_batch_count, plan.dummy_count) == (5, 1)
    assert plan.imbalance == pytest.approx(1.0)


async def test_what_does_not_fit(client: TrainerClient) -> None:
    rows = [(10, 4, 0), (30, 2, 1)]
    error = await refusal(client.plan_batch(request_of(rows, max_tokens_per_micro_batch=20)))
    assert_is(error, INVALID, "OVERSIZE_SAMPLE", row="1", length="30", cap="20")
    samples = make_groups("over")
    batch = await upload(client, "over", samples)
    longest = max(samples, key=lambda sample: len(sample.token_ids))
    tight = len(longest.token_ids) - 1
    error = await refusal(
        client.plan_batch(pb.PlanBatchRequest(batch=batch, max_tokens_per_micro_batch=tight))
    )
    assert_is(error, INVALID, "OVERSIZE_SAMPLE", cap=str(tight), length=str(tight + 1))
    assert (
        len(next(s for s in samples if s.sample_id == error.metadata["sample_id"]).token_ids)
        > tight
    )
    plan = await client.plan_batch(
        request_of(rows, max_tokens_per_micro_batch=20, oversize_policy=pb.OVERSIZE_POLICY_TRUNCATE)
    )
    assert [(cut.row, cut.length) for cut in plan.truncated_rows] == [(1, 20)]
    assert plan.token_count == 30
    plan = await client.plan_batch(
        request_of(rows, max_tokens_per_micro_batch=20, oversize_policy=pb.OVERSIZE_POLICY_ALONE)
    )
    assert sorted(list(part.rows) for part in plan.ranks[0].micro_batches) == [[0], [1]]
    assert not plan.truncated_rows


async def test_groups_beyond_the_limit_are_left_over(client: TrainerClient) -> None:
    rows = [(10, 4, group) for group in (0, 0, 1, 1, 2, 2)]
    plan = await client.plan_batch(
        request_of(rows, max_tokens_per_micro_batch=16, max_micro_batches=2)
    )
    assert list(plan.leftover_rows) == [4, 5]
    ran = sorted(row for part in plan.ranks[0].micro_batches for row in part.rows)
    assert ran == [0, 1, 2, 3]
    error = await refusal(
        client.plan_batch(request_of(rows, max_tokens_per_micro_batch=10, max_micro_batches=1))
    )
    assert_is(error, INVALID, "INVALID_FIELD", field="max_micro_batches")


async def test_requests_that_make_no_sense(client: TrainerClient) -> None:
    cases = {
        "batch": pb.PlanBatchRequest(),
        "bare_rows[0].length": request_of([(-1, 0, 0)]),
        "bare_rows[1].prompt_length": request_of([(3, 1, 0), (3, 4, 0)]),
        "max_tokens_per_micro_batch": request_of([(3, 1, 0)], max_tokens_per_micro_batch=0),
        "micro_batch_multiple": request_of([(3, 1, 0)], micro_batch_multiple=-1),
        "max_micro_batches": request_of([(3, 1, 0)], max_micro_batches=0),
        "oversize_policy": request_of([(3, 1, 0)], oversize_policy=77),
    }
    for field, request in cases.items():
        assert_is(await refusal(client.plan_batch(request)), INVALID, "INVALID_FIELD", field=field)
    error = await refusal(client.plan_batch(pb.PlanBatchRequest(batch="batches/none")))
    assert_is(error, grpc.StatusCode.NOT_FOUND, "BATCH_NOT_FOUND")


async def test_the_limits_of_the_settings_are_those_of_requests(
    model: Path, tmp_path: Path
) -> None:
    limits = {"max_rows": 3, "max_micro_batch_multiple": 2}
    with running_trainer(tmp_path, model, **limits) as running:
        async with running.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
            rows = [(3, 1, 0)] * 4
            samples = make_group("many")
            await client.plan_batch(request_of(rows[:3], micro_batch_multiple=2))
            batch = (await client.upload_batch("few", 3, samples=samples[:3])).batch
            sizes = "max_rows"
            for call, field, setting in (
                (client.plan_batch(request_of(rows)), "bare_rows", sizes),
                (client.upload_batch("many", 4, samples=samples), "header.sample_count", sizes),
                (client.get_columns(batch, ["reward"], sample_ids=["a"] * 4), "sample_ids", sizes),
                (
                    client.plan_batch(request_of(rows[:1], micro_batch_multiple=3)),
                    "micro_batch_multiple",
                    "max_micro_batch_multiple",
                ),
            ):
                error = await refusal(call)
                assert_is(error, INVALID, "INVALID_FIELD", field=field)
                assert setting in str(error)
