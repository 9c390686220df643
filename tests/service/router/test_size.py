"""What a router weighs with a large fleet and many leases, and how evenly it gives them."""

from __future__ import annotations

from collections import Counter

import grpc
import psutil

from sluice.api.common.v1 import sample_pb2
from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.api.router.v1 import router_service_pb2_grpc as pb_grpc
from tests import warm
from tests.patience import PATIENCE
from tests.service.router.processes import processes

ENGINES, RANKS, CLIENTS, LEASES, BATCH = 256, 8, 64, 100_000, 1000


async def test_a_full_router_is_small_and_even(tmp_path):
    async with processes(tmp_path) as started:
        with warm.cold():
            router = psutil.Process((await started.router(ttl=600)).pid)
        async with grpc.aio.insecure_channel(started.address) as channel:
            stub = pb_grpc.RouterServiceStub(channel)
            for number in range(ENGINES):
                engine = pb.Engine(
                    engine_id=f"e{number}",
                    address="localhost:1",
                    role=pb.ROLE_ENGINE,
                    dp_size=RANKS,
                    weights=sample_pb2.WeightVersion(version=1),
                )
                await stub.RegisterEngine(pb.RegisterEngineRequest(engine=engine), timeout=PATIENCE)
            charges: Counter[int] = Counter()
            epoch = 0
            for call in range(LEASES // BATCH):
                request = pb.AcquireLeasesRequest(
                    client_id=f"c{call % CLIENTS}",
                    count=BATCH,
                    group_ids=[f"{call}-{group}" for group in range(BATCH // 8)],
                    group_sizes=[8] * (BATCH // 8),
                    known_epoch=epoch,
                )
                answer = await stub.AcquireLeases(request, timeout=PATIENCE)
                epoch = answer.epoch
                charges.update(answer.target_indices)
                assert len(charges) <= ENGINES * RANKS
                if len(charges) == ENGINES * RANKS:
                    assert max(charges.values()) - min(charges.values()) <= 1
            assert charges.total() == LEASES
            assert router.memory_info().rss < 150 * 2**20
            libraries = {one.path for one in router.memory_maps()}
            assert not [path for path in libraries if "torch" in path or "transformers" in path]
