"""Whether a trainer takes work: told by its health while ranks come and go, and by its end."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.patience import PATIENCE
from tests.service.trainer.harness import ACTIVE, RESTART_SECONDS, end, running_trainer, until

TRAINER_SERVICE = "sluice.api.trainer.v1.TrainerService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_readiness_falls_with_the_ranks_and_a_trainer_that_loses_them_for_good_ends(
    model: Path, tmp_path: Path
) -> None:
    ranks = {"max_restarts": 1, "restart_backoff": RESTART_SECONDS}
    with running_trainer(tmp_path, model, ranks=ranks) as running:
        async with running.client() as client:
            request = health_pb2.HealthCheckRequest(service=TRAINER_SERVICE)
            watch = health_pb2_grpc.HealthStub(client.channel).Watch(request, timeout=2 * PATIENCE)
            await until(client, lambda now: now.state == ACTIVE)
            await tells(watch, SERVING)
            end((await client.get()).ranks[0].process_id, signal.SIGKILL)
            await tells(watch, NOT_SERVING)
            again = await until(client, lambda now: now.state == ACTIVE and now.restart_count == 1)
            await tells(watch, SERVING)
            end(again.ranks[0].process_id, signal.SIGKILL)
            assert await asyncio.to_thread(running.process.wait, PATIENCE) == 1


async def tells(watch: grpc.aio.UnaryStreamCall, status: int) -> None:
    """Until this is among the changes, which are all told, however late one listens."""
    async with asyncio.timeout(PATIENCE):
        while (await watch.read()).status != status:
            pass


async def test_ranks_may_reach_their_controller_over_ipv6(model: Path, tmp_path: Path) -> None:
    with running_trainer(tmp_path, model, ranks={"listen_host": "::1"}) as trainer:
        async with trainer.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
