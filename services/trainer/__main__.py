"""`python -m services.trainer --config trainer.yaml`: the controller of a trainer."""

from __future__ import annotations

import asyncio
import logging
import sys

import uvloop

from services.trainer.config import TrainerConfig
from services.trainer.controller.launch import WorkerServer
from services.trainer.controller.rank_group import RankGroup
from services.trainer.controller.trainer import Trainer
from services.trainer.errors import StoreRefusedError, disk_errors
from services.trainer.servicer import TrainerServicer, bound_requests
from sluice import logs, platform
from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.api.trainer.v1 import trainer_service_pb2_grpc as pb_grpc
from sluice.config import ConfigError, load_config
from sluice.durable import DirectoryError
from sluice.imports import keep_loaded, run_process
from sluice.place import Place, directory_of, place_of
from sluice.runtime.server import Server
from sluice.runtime.store_checks import add_store_service

logger = logging.getLogger(__name__)

SERVICE = "sluice.api.trainer.v1.TrainerService"


def main() -> int:
    try:
        config = load_config(TrainerConfig)
        logs.configure(config.log_level)
        if config.ranks.launch == "local":
            platform.declared().visible_devices(range(config.ranks.count))  # are there enough?
        return uvloop.run(serve(config))
    except (ConfigError, DirectoryError, platform.PlatformError) as error:
        print(f"trainer: {error}", file=sys.stderr)
        return 2


async def serve(config: TrainerConfig) -> int:
    """Serve until a signal; the ranks load meanwhile. Returns the exit status."""
    server = Server(config.server)
    server.disks["store"] = [directory_of(config.store) or config.store_cache.directory]
    if config.weights and (weights := directory_of(config.weights)) is not None:
        server.disks["weights"] = [weights]
    trainer = Trainer(config, server.waits)
    servicer = TrainerServicer(trainer, server.operations)
    workers = WorkerServer(config, trainer.ranks)
    bound_requests(server, config)
    server.add(pb_grpc.add_TrainerServiceServicer_to_server, servicer, SERVICE)
    places: dict[str, Place] = {"store": config.store}
    if config.head == "policy":  # a critic's weights are its own
        places["weights"] = place_of(config.weights_location)
    add_store_service(server, places)
    server.stop_on_signals()
    await server.start()
    await workers.start()
    keep_loaded()
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


async def _keep_ranks(server: Server, trainer: Trainer, controller: str) -> None:
    """For as long as the trainer has ranks or may get some.

    After too many losses in a row the process ends with an error: whoever keeps it alive starts it
    again, with a pause. So does one whose store cannot be written. One whose model cannot be
    loaded, or whose ranks crashed each time, stays, and says why.
    """
    try:
        with disk_errors():
            await trainer.start(controller)
    except StoreRefusedError as error:
        logger.error("the process ends: %s", error)
        server.failed = True
        server.request_stop()
        return
    telling = asyncio.create_task(_tell_readiness(server, trainer.ranks), name="readiness")
    try:
        await trainer.ranks.wait_given_up()
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
    await server.set_serving(False)
    if trainer.ranks.state != pb.Trainer.STATE_FAILED:
        logger.error("the process ends: ranks were lost too often: %s", trainer.ranks.failure)
        server.failed = True
        server.request_stop()


async def _tell_readiness(server: Server, ranks: RankGroup) -> None:
    while True:
        await ranks.wait_active(True)
        await server.set_serving()
        logger.info("trainer is active")
        await ranks.wait_active(False)
        await server.set_serving(False)


if __name__ == "__main__":
    run_process(main)
