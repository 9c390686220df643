"""What the router refuses by the field, and what its lists and its reflection say of it."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.duration_pb2 import Duration
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.router.proxy import SERVICE as ENGINE_SERVICE
from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.runtime.errors import RemoteError, typed_errors
from tests.patience import PATIENCE
from tests.service.router.conftest import released

HUGE = (1 << 63) - 1
NO_ADDRESSES = [
    "",
    "nowhere",
    "host:",
    ":80",
    "host:0",
    "host:65536",
    "host:99999999999999999999",
    "host:-1",
    "host:8\u0661",
    "../../etc/passwd:1",
    "a b:1",
    "host\x00:1",
    "http://host:1",
    "h" * 5000 + ":1",
    "::1:80",
]


async def refused(call, request) -> RemoteError:
    with pytest.raises(RemoteError) as caught, typed_errors():
        await call(request, timeout=PATIENCE)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    return caught.value


@pytest.mark.parametrize("role", [pb.ROLE_ENGINE, pb.ROLE_EPISODES])
async def test_an_address_that_is_none_is_refused(router, role):
    for address in NO_ADDRESSES:
        engine = pb.Engine(engine_id="a", address=address, role=role)
        error = await refused(router.stub.RegisterEngine, pb.RegisterEngineRequest(engine=engine))
        assert error.metadata["field"] == "engine.address", address
    assert not (await router.stub.ListEngines(pb.ListEnginesRequest(), timeout=PATIENCE)).engines


@pytest.mark.parametrize("address", ["localhost:1", "10.0.0.7:65535", "[::1]:80", "a_b-c.d:443"])
async def test_an_address_is_taken(router, address):
    await router.register("a", address=address)


async def test_numbers_that_cannot_be_are_refused_by_their_field(router):
    await router.register("a")
    weights = sample_pb2.WeightVersion(version=-1, digest="d")
    engine = {"engine_id": "b", "address": "localhost:1", "role": pb.ROLE_ENGINE}
    requests = [
        (
            router.stub.RegisterEngine,
            pb.RegisterEngineRequest(engine=pb.Engine(**engine, weights=weights)),
            "engine.weights.version",
        ),
        (
            router.stub.RegisterEngine,
            pb.RegisterEngineRequest(engine=pb.Engine(**engine, dp_size=-1)),
            "engine.dp_size",
        ),
        (
            router.stub.AcquireLeases,
            pb.AcquireLeasesRequest(client_id="c", count=1, min_version=-1),
            "min_version",
        ),
        (
            router.stub.AcquireLeases,
            pb.AcquireLeasesRequest(client_id="c", count=1, exact_version=-HUGE),
            "exact_version",
        ),
        (
            router.stub.AcquireLeases,
            pb.AcquireLeasesRequest(client_id="c", count=1, expected_token_counts=[float("inf")]),
            "expected_token_counts",
        ),
        (
            router.stub.AcquireLeases,
            pb.AcquireLeasesRequest(client_id="c", count=1, cached_token_counts=[-1]),
            "cached_token_counts",
        ),
        (
            router.stub.RenewLeases,
            pb.RenewLeasesRequest(
                client_id="c", lease_ids=[1], dp_ranks=[-2], engine_indices=[0], engine_ids=["a"]
            ),
            "dp_ranks",
        ),
        (
            router.stub.RenewLeases,
            pb.RenewLeasesRequest(
                client_id="c",
                lease_ids=[1],
                dp_ranks=[(1 << 31) - 1],
                engine_indices=[0],
                engine_ids=["a"],
            ),
            "dp_ranks",
        ),
        (
            router.stub.ReportLoad,
            pb.ReportLoadRequest(engine_id="a", rank_loads=[engine_pb.RankLoad(running_count=-5)]),
            "rank_loads[0].running_count",
        ),
        (
            router.stub.ReportLoad,
            pb.ReportLoadRequest(engine_id="a", time_per_token=Duration(seconds=-1)),
            "time_per_token",
        ),
        (router.stub.ListEngines, pb.ListEnginesRequest(role=77), "role"),
    ]
    for call, request, field in requests:
        assert (await refused(call, request)).metadata["field"] == field
    assert router.leases_out() == 0


async def test_the_largest_numbers_change_nothing_for_others(router):
    await router.register("a", version=HUGE)
    await router.register("b", max_running_count=(1 << 31) - 1)
    loads = [engine_pb.RankLoad(running_count=(1 << 31) - 1, used_tokens=HUGE, max_tokens=HUGE)]
    report = pb.ReportLoadRequest(engine_id="a", rank_loads=loads * 9)
    await router.stub.ReportLoad(report, timeout=PATIENCE)
    answer = await router.acquire("c", 3, cached_token_counts=[(1 << 31) - 1] * 3)
    assert min(answer.target_indices) >= 0
    assert router.leases_out() == 3


async def test_leases_are_given_back_also_where_nothing_is_known_of_their_tokens(router):
    await router.register("a")
    first = (await router.acquire("c", 2)).first_lease_id
    await router.acquire("c", 0, released=released([first, first + 1], token_counts=[3, -1]))
    assert router.leases_out() == 0


async def test_lists_are_of_the_role_and_the_pool_they_name(router):
    await router.register("a")
    await router.register("b", pool="other")
    await router.register("w", role=pb.ROLE_EPISODES)
    await router.register("x", role=pb.ROLE_EPISODES, pool="other")

    async def names(**wanted: object) -> list[str]:
        answer = await router.stub.ListEngines(pb.ListEnginesRequest(**wanted), timeout=PATIENCE)
        return [engine.engine_id for engine in answer.engines]

    assert await names() == ["a", "b", "w", "x"]
    assert await names(pool="policy") == ["a", "w"]
    assert await names(pool="other", role=pb.ROLE_EPISODES) == ["x"]
    assert await names(role=pb.ROLE_ENGINE) == ["a", "b"]
    assert await names(pool="nobody") == []


async def test_reflection_lists_what_is_served_and_no_more(router):
    stub = reflection_pb2_grpc.ServerReflectionStub(router.channel)

    async def ask(**question: str):
        request = reflection_pb2.ServerReflectionRequest(**question)  # type: ignore[arg-type]
        call = stub.ServerReflectionInfo(iter([request]), timeout=PATIENCE)
        (answer,) = [answer async for answer in call]
        return answer

    listed = (await ask(list_services="")).list_services_response.service
    served: dict[str, set[str]] = {}
    for service in listed:
        answer = await ask(file_containing_symbol=service.name)
        for data in answer.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            for found in file.service:
                methods = {method.name for method in found.method}
                served.setdefault(f"{file.package}.{found.name}", methods)
    assert {service.name for service in listed} <= served.keys()
    assert served[ENGINE_SERVICE] == {"Generate", "StreamGenerate", "Score", "Abort"}
    assert "AcquireLeases" in served["sluice.api.router.v1.RouterService"]
