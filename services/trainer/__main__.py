"""`python -m services.trainer --config trainer.yaml`: the controller of a trainer."""

from __future__ import annotations

import asyncio
import logging
import sys

from services.trainer.config import TrainerConfig
from services.trainer.controller.launch import WorkerServer
from services.trainer.controller.trainer import Trainer
from services.trainer.servicer import TrainerServicer
from sluice import logs, platform
from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.api.trainer.v1 import trainer_service_pb2_grpc as pb_grpc
from sluice.config import ConfigError, load_config
from sluice.runtime.server import Server

logger = logging.getLogger(__name__)

SERVICE = "sluice.api.trainer.v1.TrainerService"


def main() -> int:
    try:
        config = load_config(TrainerConfig)
        logs.configure(config.log_level)
        if config.ranks.launch == "local":
            platform.declared().visible_devices(range(config.ranks.count))  # are there enough?
        return asyncio.run(serve(config))
    except (ConfigError, platform.PlatformError) as error:
        print(f"trainer: {error}", file=sys.stderr)
        return 2


async def serve(config: TrainerConfig) -> int:
    """Serve until a signal; the ranks load meanwhile. Returns the exit status."""
    server = Server(config.server)
    trainer = Trainer(config, server.waits)
    servicer = TrainerServicer(trainer, server.operations)
    workers = WorkerServer(config, trainer.ranks)
    server.add(pb_grpc.add_TrainerServiceServicer_to_server, servicer, SERVICE)
    server.stop_on_signals()
    await server.start()
    await workers.start()
    ranks = asyncio.create_task(_keep_ranks(server, trainer, workers.address), name="ranks")
    server.depend_on(ranks)
    try:
        await server.run_until_signal()
    finally:
        ranks.cancel()
        await asyncio.gather(ranks, return_exceptions=True)
        await servicer.close()
        await trainer.close()
        await workers.close()
    return 1 if server.failed else 0


async def _keep_ranks(server: Server, trainer: Trainer, front: str) -> None:
    """For as long as the trainer has ranks or may get some."""
    await trainer.start(front)
    if trainer.ranks.state == pb.Trainer.STATE_ACTIVE:
        await server.set_serving()
        logger.info("trainer is active")
    await trainer.ranks.wait_given_up()


if __name__ == "__main__":
    sys.exit(main())
