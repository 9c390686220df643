"""Whether services that were just started can take work."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.api.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from sluice.client import RemoteError, RouterClient
from sluice.loop.readiness import TrainerFailedError
from sluice.runtime.channel import create_channel
from sluice.runtime.security import SecurityConfig

TRAINER_SERVICE = "sluice.api.trainer.v1.TrainerService"


async def is_serving(address: str, service: str, security: SecurityConfig) -> bool:
    """Whether the server at `address` says that `service` is ready; False if it has none.

    Raises TrainerFailedError for a trainer that never will be, with its own reason.
    """
    async with create_channel(address, security) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service)
            )
            serving = bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
            if not serving and service == TRAINER_SERVICE:
                _check_trainer(await TrainerServiceStub(channel).GetTrainer(pb.GetTrainerRequest()))
        except grpc.aio.AioRpcError:
            return False
    return serving


def _check_trainer(answer: pb.GetTrainerResponse) -> None:
    if answer.trainer.state == pb.Trainer.STATE_FAILED:
        raise TrainerFailedError(f"trainer failed: {answer.trainer.failure}")


async def registered_addresses(router: str, security: SecurityConfig) -> set[str]:
    """Addresses of the processes that the router knows; none while it does not answer."""
    async with RouterClient(router, security) as client:
        try:
            return {engine.address for engine in await client.list_engines()}
        except RemoteError:
            return set()
