"""Evaluate over the wire: router, engine and episode worker are real."""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

import pytest
from prometheus_client import REGISTRY

from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.client import RemoteError
from tests.patience import PATIENCE
from tests.service.rollout.harness import (
    Episodes,
    Models,
    Store,
    copy_rows,
    rollout_request,
    running_episodes,
)

DENSE = {"reward": "position_match"}


def evaluate_request(rollout: pb.RolloutRequest, **fields: Any) -> pb.EvaluateRequest:
    return pb.EvaluateRequest(rollout=rollout, **fields)


async def told(episodes: Episodes, request: pb.EvaluateRequest) -> list[pb.EvaluateResponse]:
    async with asyncio.timeout(PATIENCE):
        return [event async for event in episodes.client.evaluate(request)]


async def test_the_report_sums_up_what_was_told(store: Store, models: Models) -> None:
    rows = [*copy_rows(16), {"prompt": "1" * 80, "answer": "1"}]  # the last one does not fit
    async with running_episodes(store, models.first) as episodes:
        request = evaluate_request(
            rollout_request(rows, settings=DENSE), pass_at=[1, 4], pass_threshold=0.0
        )
        events = await told(episodes, request)
        again = await told(episodes, request)
    assert [event.WhichOneof("event") for event in events].count("report") == 1
    report = events[-1].report
    finished = [event.finished for event in events if event.HasField("finished")]
    assert (report.group_count, report.failed_group_count) == (16, 1)
    means = [statistics.fmean(group.rewards) for group in finished]
    assert report.reward_mean == pytest.approx(statistics.fmean(means))
    assert 0 < report.reward_mean < 1 and report.reward_std > 0
    assert dict(report.pass_at) == {1: 1.0, 4: 1.0}, "every raw reward reaches 0"
    assert (report.min_version, report.max_version) == (1, 1)
    lengths = [length for group in finished for length in group.response_lengths]
    assert report.response_length_mean == pytest.approx(statistics.fmean(lengths))
    assert again[-1].report == report, "the same request is answered from the store"
    assert all(store.samples(group) for group in finished)


def counted(name: str) -> list[float]:
    outcomes = ("finished", "failed", "cancelled")
    return [REGISTRY.get_sample_value(name, {"outcome": each}) or 0 for each in outcomes]


async def test_a_group_counts_once_however_often_it_is_told(store: Store, models: Models) -> None:
    names = ("sluice_rollout_groups_total", "sluice_rollout_evaluated_groups_total")
    rows = [*copy_rows(3), {"prompt": "1" * 80, "answer": "1"}]  # the last one does not fit
    async with running_episodes(store, models.first) as episodes:
        request = evaluate_request(rollout_request(rows, settings=DENSE))
        before = [counted(name) for name in names]
        await told(episodes, request)
        await told(episodes, request)
        for name, start in zip(names, before, strict=True):
            settled = [now - then for now, then in zip(counted(name), start, strict=True)]
            assert settled == [3, 1, 0], name


async def test_neither_lane_waits_for_the_other(store: Store, models: Models) -> None:
    """Judges that stall fill one lane; the other goes on."""
    limits = {"max_running_groups": 1, "max_evaluated_groups": 1}
    stalled = [{"prompt": "12=", "deed": "stall"}] * 2
    async with running_episodes(store, models.first, **limits) as episodes:
        training = rollout_request(stalled, environment="grim")
        stream = episodes.client.stub.Rollout(training)
        await until_a_judge_runs(episodes)
        events = await told(episodes, evaluate_request(rollout_request(copy_rows(2))))
        assert events[-1].report.group_count == 2
        await episodes.client.cancel(training.request_id)
        assert (await stream.read()).HasField("failed")

        evaluation = evaluate_request(rollout_request(stalled, environment="grim"))
        evaluating = asyncio.create_task(told(episodes, evaluation))
        await until_a_judge_runs(episodes)
        assert len(await episodes.finished(rollout_request(copy_rows(2)))) == 2
        await episodes.client.cancel(evaluation.rollout.request_id)
        assert (await evaluating)[-1].report.failed_group_count == 2


async def until_a_judge_runs(episodes: Episodes) -> None:
    async with asyncio.timeout(PATIENCE):
        while not any("reward of" in wait.what for wait in await episodes.client.list_waits()):
            await asyncio.sleep(0.02)


async def test_a_request_has_a_limit_of_its_own(store: Store, models: Models) -> None:
    stalled = [{"prompt": "12=", "deed": "stall"}] * 3
    async with running_episodes(store, models.first, graders={"size": 3}) as episodes:
        request = evaluate_request(
            rollout_request(stalled, environment="grim"), max_running_groups=2
        )
        evaluating = asyncio.create_task(told(episodes, request))
        async with asyncio.timeout(PATIENCE):
            while await judges(episodes) < 2:
                await asyncio.sleep(0.02)
        assert await judges(episodes) == 2, "the third waits for its turn"
        assert await episodes.client.cancel(request.rollout.request_id, ["g0"]) == ["g0"]
        async with asyncio.timeout(PATIENCE):
            while await judges(episodes) < 2:
                await asyncio.sleep(0.02)
        await episodes.client.cancel(request.rollout.request_id)
        await evaluating


async def judges(episodes: Episodes) -> int:
    waits = await episodes.client.list_waits()
    return sum("reward of" in wait.what for wait in waits)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"pass_at": [5]}, "pass_at"),
        ({"pass_at": [0]}, "pass_at"),
        ({"pass_threshold": float("nan")}, "pass_threshold"),
        ({"max_running_groups": -1}, "max_running_groups"),
    ],
)
async def test_a_wrong_field_is_named(refusing: Any, fields: dict[str, Any], field: str) -> None:
    request = evaluate_request(rollout_request(copy_rows(1)), **fields)
    with pytest.raises(RemoteError) as caught:
        await told(refusing, request)
    assert (caught.value.reason, caught.value.metadata["field"]) == ("INVALID_FIELD", field)
