"""Whether a trainer takes work: told by its health while ranks come and go, and by its end."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice.client import TrainerClient
from tests.patience import PATIENCE
from tests.service.trainer.harness import ACTIVE, RESTART_SECONDS, end, poll, running_trainer, until

TRAINER_SERVICE = "sluice.api.trainer.v1.TrainerService"
SERVING = health_pb2.HealthCheckResponse.SERVING


async def test_readiness_falls_with_the_ranks_and_a_trainer_that_loses_them_for_good_ends(
    model: Path, tmp_path: Path
) -> None:
    ranks = {"max_restarts": 1, "restart_backoff": RESTART_SECONDS}
    with running_trainer(tmp_path, model, ranks=ranks) as running:
        async with running.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
            await poll(lambda: is_ready(client))
            end((await client.get()).ranks[0].process_id, signal.SIGKILL)
            await poll(lambda: is_not_ready(client), interval=0.01)
            again = await until(client, lambda now: now.state == ACTIVE and now.restart_count == 1)
            await poll(lambda: is_ready(client))
            end(again.ranks[0].process_id, signal.SIGKILL)
            assert await asyncio.to_thread(running.process.wait, PATIENCE) == 1


async def is_ready(client: TrainerClient) -> bool:
    health = health_pb2_grpc.HealthStub(client.channel)
    request = health_pb2.HealthCheckRequest(service=TRAINER_SERVICE)
    return (await health.Check(request, timeout=PATIENCE)).status == SERVING


async def is_not_ready(client: TrainerClient) -> bool:
    return not await is_ready(client)


async def test_ranks_may_reach_their_controller_over_ipv6(model: Path, tmp_path: Path) -> None:
    with running_trainer(tmp_path, model, ranks={"listen_host": "::1"}) as trainer:
        async with trainer.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
