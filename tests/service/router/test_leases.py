"""Leases over the wire: packed columns, exactly once, waiting, refusals."""

from __future__ import annotations

import asyncio
from collections import Counter

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from sluice.api.router.v1 import router_service_pb2 as pb
from tests.patience import PATIENCE
from tests.service.router.conftest import new_id, released


def reason(error: grpc.aio.AioRpcError) -> str:
    info = error_details_pb2.ErrorInfo()
    rpc_status.from_call(error).details[0].Unpack(info)
    return info.reason


async def test_a_batch_is_spread_over_all_ranks_of_all_engines(router):
    for name in ("a", "b"):
        await router.register(name, dp_size=4)
    answer = await router.acquire("c", 32)
    assert sorted(Counter(answer.target_indices).values()) == [4] * 8
    places = {e.first_target_index + r for e in answer.engines for r in range(e.dp_size)}
    assert set(answer.target_indices) == places
    assert answer.ttl.ToSeconds() == 60
    again = await router.acquire("c", 1, known_epoch=answer.epoch)
    assert not again.engines and again.epoch == answer.epoch
    assert again.first_lease_id == answer.first_lease_id + 32


async def test_releases_ride_along_and_count_once(router):
    await router.register("a", dp_size=2)
    first = await router.acquire("c", 6)
    ids = range(first.first_lease_id, first.first_lease_id + 6)
    await router.acquire("c", 2, released=released([*ids[:4], *ids[:4]]))
    assert router.leases_out() == 4
    await router.acquire("other", 0, released=released(ids))  # not its leases
    assert router.leases_out() == 4


async def test_what_a_newer_client_says_of_its_releases_is_passed_over(router):
    """Fields that this router does not know, of each kind, with many leases as with few."""
    await router.register("a", dp_size=2)
    unknown = b"\x78\x01\x7d\0\0\0\0\x79\0\0\0\0\0\0\0\0\x7a\x01a\x7b\x7c"
    for count in (2, 40):
        first = (await router.acquire("c", count)).first_lease_id
        known = released(range(first, first + count), token_counts=[3] * count)
        newer = pb.ReleasedLeases.FromString(known.SerializeToString() + unknown)
        await router.acquire("c", 0, released=newer)
        assert router.leases_out() == 0


async def test_a_repeated_request_id_charges_once(router):
    await router.register("a")
    request_id = new_id()
    first = await router.acquire("c", 3, request_id=request_id)
    again = await router.acquire("c", 3, request_id=request_id)
    assert again == first
    assert router.leases_out() == 3
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.acquire("c", 4, request_id=request_id)
    assert reason(caught.value) == "REQUEST_ID_REUSED"


async def test_a_repeated_answer_comes_with_the_engines_of_now(router):
    """So that a thousand remembered answers are not a thousand copies of the fleet."""
    await router.register("a", dp_size=2)
    request_id = new_id()
    first = await router.acquire("c", 3, request_id=request_id)
    await router.register("b")
    again = await router.acquire("c", 3, request_id=request_id)
    assert (again.first_lease_id, again.target_indices) == (
        first.first_lease_id,
        first.target_indices,
    )
    assert [engine.engine_id for engine in first.engines] == ["a"]
    assert [engine.engine_id for engine in again.engines] == ["a", "b"]
    assert again.epoch > first.epoch and again.engines[0].first_target_index == 0
    (remembered,) = router.process._servicer._requests._calls.get(request_id)
    assert not remembered.engines


async def test_leases_beyond_the_credits_wait_for_a_release(router):
    await router.register("a", max_running_count=2)
    wait = {"max_wait": {"seconds": 50}}
    first = await router.acquire("c", 3, **wait)
    assert sorted(first.target_indices) == [-1, 0, 0]
    ids = dict(enumerate(first.target_indices, first.first_lease_id))
    queued = next(lease for lease, target in ids.items() if target == -1)
    other = next(lease for lease, target in ids.items() if target == 0)
    waiting = asyncio.create_task(router.acquire("c", 0, **wait))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    answer = await router.acquire("c", 0, released=released([other]))
    if not answer.bound_lease_ids:  # one of the two calls brings it
        answer = await waiting
    assert (list(answer.bound_lease_ids), list(answer.bound_target_indices)) == ([queued], [0])
    assert router.leases_out() == 2
    waiting.cancel()


@pytest.mark.parametrize(
    ("setup", "fields", "code", "expected"),
    [
        ({}, {}, grpc.StatusCode.UNAVAILABLE, "NO_ENGINE"),
        (
            {"version": 1},
            {"exact_version": 2},
            grpc.StatusCode.UNAVAILABLE,
            "NO_ENGINE_WITH_VERSION",
        ),
        (
            {"version": None},
            {},
            grpc.StatusCode.UNAVAILABLE,
            "NO_ENGINE_WITH_VERSION",
        ),
        (
            {"max_running_count": 1},
            {},
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "NO_CREDIT",
        ),
    ],
)
async def test_refusals_have_a_reason_and_a_delay(router, setup, fields, code, expected):
    if setup:
        await router.register("a", **setup)
    request = pb.AcquireLeasesRequest(client_id="c", count=2, **fields)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.stub.AcquireLeases(request, timeout=PATIENCE)
    assert (caught.value.code(), reason(caught.value)) == (code, expected)
    delay = error_details_pb2.RetryInfo()
    assert rpc_status.from_call(caught.value).details[1].Unpack(delay)
    assert delay.retry_delay.ToMilliseconds() > 0
    assert router.leases_out() == 0


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"count": -1}, "count"),
        ({"count": 2, "session_ids": ["x"]}, "session_ids"),
        ({"count": 2, "group_ids": ["g"], "group_sizes": [1]}, "group_sizes"),
        ({"count": 2, "group_sizes": [2]}, "group_sizes"),
        ({"released": released([1], outcomes=[1, 1])}, "released.outcomes"),
    ],
)
async def test_columns_that_do_not_fit_are_named(router, fields, field):
    await router.register("a")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.stub.AcquireLeases(
            pb.AcquireLeasesRequest(client_id="c", **fields), timeout=PATIENCE
        )
    status = rpc_status.from_call(caught.value)
    bad = error_details_pb2.BadRequest()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert status.details[1].Unpack(bad)
    assert bad.field_violations[0].field == field
    assert router.leases_out() == 0
