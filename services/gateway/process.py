"""Runs a gateway: its ports, the models that it goes on with, and what it looks after."""

from __future__ import annotations

import asyncio
import logging

from services.gateway.config import GatewayConfig
from services.gateway.journal import GatewayJournal
from services.gateway.registry import ModelRegistry
from services.gateway.samplers import Engines, Samplers
from services.gateway.server import TinkerServer
from services.gateway.trainer import AdapterTrainer
from sluice.config import ConfigError
from sluice.imports import keep_loaded
from sluice.runtime.errors import RemoteError
from sluice.runtime.server import Server
from sluice.runtime.waits import listed_in
from sluice.runtime.wire import replay_of
from sluice.samples.vocabulary import check_same, vocabulary_digest

logger = logging.getLogger(__name__)

GATEWAY = "sluice.Gateway"  # over HTTP: health of gRPC tells whether it is ready


class GatewayProcess:
    """Owns the servers, the journal and the models."""

    def __init__(self, config: GatewayConfig) -> None:
        """Raises ConfigError, and DirectoryError where another gateway has the journal."""
        self.server = Server(config.server)
        self.server.add_port(GATEWAY)
        self.journal = GatewayJournal(config.journal)
        self._model, self._address = config.model, config.trainer
        self._trainer = AdapterTrainer(config.trainer, config.server.security)
        self._engines = Engines(config)
        self.registry = ModelRegistry(config, self.journal, self._trainer, self._engines)
        samplers = Samplers(config, self._engines)
        self.tinker = TinkerServer(config, self.registry, self._engines, samplers)
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Serve until a signal."""
        try:
            with listed_in(self.server.waits):
                await self.server.run(self.start)
        finally:
            await self.close()

    async def start(self) -> None:
        """Open the ports. Raises ConfigError."""
        await self._check_trainer()
        await self.registry.start()  # first: a model that is not there yet would be told as gone
        await self.tinker.start()
        self.server.further_addresses["tinker_url"] = self.tinker.url
        await self.server.start()
        self._tasks = [
            asyncio.create_task(self.registry.sweep(), name="sweep"),
            asyncio.create_task(self._leave(), name="leave"),
        ]
        for task in self._tasks:
            self.server.depend_on(task)
        keep_loaded()
        await self.server.set_serving()

    async def _check_trainer(self) -> None:
        """Raises ConfigError where clients would train nothing, or encode texts for another model.

        The engines of a trainer of whole models would answer for the base with what it trained.
        """
        try:
            trainer = await self._trainer.get()
        except RemoteError as error:
            logger.warning("the trainer was not asked what it trains: %s", error)
            return
        if trainer.HasField("trains_adapters") and not trainer.trains_adapters:
            raise ConfigError(
                f"trainer: {self._address} trains the whole model, and models of a gateway are "
                "adapters: set lora in the trainer's settings"
            )
        setting, _ = replay_of(trainer)
        if setting:
            raise ConfigError(
                f"trainer: {self._address} takes experts again, and clients of Tinker bring none: "
                f"set its {setting} to off"
            )
        check_same(f"model: {self._model}", vocabulary_digest(self._model), trainer.vocabulary)

    async def close(self) -> None:
        """Let go of everything; the server has stopped before."""
        await self.tinker.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.registry.close()
        await self._engines.close()
        await self._trainer.close()
        self.journal.close()

    async def _leave(self) -> None:
        """End the port while the other one drains."""
        await self.server.stopping.wait()
        await self.tinker.close()
