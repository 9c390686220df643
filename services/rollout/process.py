"""A rollout process: builds the roles it was given, serves them, takes them down."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from services.rollout.config import RolloutConfig
from services.rollout.engine import Engine, create_engine
from services.rollout.engine_servicer import EngineServicer
from services.rollout.engine_weights import EngineWeights
from services.rollout.generations import Generations
from services.rollout.media import MediaReader
from services.rollout.metrics import EngineCollector
from services.rollout.registration import (
    Registration,
    engine_description,
    episodes_description,
)
from services.rollout.wire import loads_to_proto
from sluice.api.rollout.v1 import engine_service_pb2_grpc, rollout_service_pb2_grpc
from sluice.runtime.channel import create_channel
from sluice.runtime.server import Server
from sluice.samples.blobs import BlobStore
from sluice.weights.cache import HostCache
from sluice.weights.open import open_store

if TYPE_CHECKING:
    from services.rollout.episodes.worker import EpisodeWorker
    from services.rollout.openai.face import OpenAIFace

logger = logging.getLogger(__name__)

ENGINE_SERVICE = "sluice.api.rollout.v1.EngineService"
ROLLOUT_SERVICE = "sluice.api.rollout.v1.RolloutService"
REMEMBERED_TOKENS = 4_000_000
WATCH_SECONDS = 1.0
DRAIN_SHARE = 0.8  # of the server's drain time, for rollouts to settle


@dataclass(frozen=True)
class _EngineRole:
    engine: Engine
    weights: EngineWeights


class RolloutProcess:
    """Owns the server, the engine, the episodes and the registrations of one process."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self.server = Server(config.server)
        self._resources = contextlib.AsyncExitStack()
        self._registrations: list[Registration] = []
        self._leaving: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self.engine: Engine | None = None
        self.face: OpenAIFace | None = None
        self.failure = ""  # why the engine broke and took the process with it
        self._router: grpc.aio.Channel | None = None
        if config.router:
            self._router = create_channel(config.router, config.server.security)

    async def run(self) -> None:
        """Serve until a signal; one that comes while the model loads ends the loading."""
        starting = asyncio.create_task(self.start())
        self.server.stop_on_signals(starting.cancel)  # which does nothing once it has ended
        try:
            await asyncio.wait([starting])
            if not starting.cancelled():
                await starting  # raises what it failed with
                await self.server.run_until_signal()
        finally:
            await self.close()

    async def start(self) -> None:
        """Open the port, load the model, register; then the services are ready."""
        config = self._config
        if self._router is not None:
            self._resources.push_async_callback(self._router.close)
        engine = self._add_engine() if "engine" in config.roles else None
        episodes = self._add_episodes() if "episodes" in config.roles else None
        face = self._add_face(engine, episodes)
        if face is not None:
            await face.start()
            self.server.further_addresses["openai_url"] = face.url
        await self.server.start()
        try:
            if engine is not None:
                await engine.engine.start()
                await engine.weights.forget_old_pins()
        except BaseException:
            await self.server.stop()
            raise
        if engine is not None and episodes is not None:
            episodes.engines.add_local(self.server.address, engine.engine)
        if face is not None:
            face.set_ready()
        await self.server.set_serving()
        gc.collect()
        gc.freeze()  # modules stay; looking through them again and again is a third of all work
        self._register(None if engine is None else engine.engine)
        self._leaving = asyncio.create_task(self._leave(episodes, face), name="leave")
        if engine is not None:
            self._watching = asyncio.create_task(self._watch(engine.engine), name="watch engine")

    async def close(self) -> None:
        """Let go of everything; the server has stopped before."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._leaving is not None:
            self.server.stopping.set()
            await self._leaving
        await self._resources.aclose()

    async def _watch(self, engine: Engine) -> None:
        """An engine that broke serves no more; a new process will."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if failure := engine.status().failure:
                break
        self.failure = failure
        logger.error("the engine broke: %s", failure)
        self.server.request_stop()

    async def _leave(self, episodes: EpisodeWorker | None, face: OpenAIFace | None) -> None:
        """Once no new work is wanted, while running calls still end."""
        await self.server.stopping.wait()
        loop = asyncio.get_running_loop()
        end = loop.time() + self._config.server.drain_seconds * DRAIN_SHARE
        await asyncio.gather(*(registration.close() for registration in self._registrations))
        seconds = max(0.0, end - loop.time())  # a slow router takes none of the server's own share
        await asyncio.gather(
            *([face.close()] if face is not None else []),
            *([episodes.drain(seconds)] if episodes is not None else []),
        )

    def _add_engine(self) -> _EngineRole:
        config = self._config
        engine = create_engine(config.engine.backend, config.engine_here)
        self.engine = engine
        collector = EngineCollector(engine)
        generations = Generations(engine, REMEMBERED_TOKENS)
        store = open_store(config.weights_location, durable=config.store_sync)
        weights = EngineWeights(
            engine,
            store,
            config.engine_id,
            self._announce,
            cache=HostCache(config.cache_directory, store),
            in_place=config.weights_cache is None,
        )
        self._resources.callback(collector.close)
        self._resources.push_async_callback(engine.close)
        self._resources.push_async_callback(weights.close)
        self._resources.push_async_callback(generations.close)
        servicer = EngineServicer(
            engine,
            generations,
            weights,
            self.server.waits,
            engine_id=config.engine_id,
            backend=config.engine.backend,
            media=MediaReader(BlobStore(config.store, sync=config.store_sync)),
        )
        self.server.add(
            engine_service_pb2_grpc.add_EngineServiceServicer_to_server, servicer, ENGINE_SERVICE
        )
        return _EngineRole(engine, weights)

    def _add_episodes(self) -> EpisodeWorker:
        # Imported here: an engine needs neither tokenizers nor jinja2.
        from services.rollout.episodes.worker import EpisodeWorker

        config = self._config
        assert self._router is not None
        worker = EpisodeWorker(config, self._router, self.server.waits)
        self._resources.push_async_callback(worker.close)
        self.server.add(
            rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server,
            worker.servicer,
            ROLLOUT_SERVICE,
        )
        return worker

    def _add_face(
        self, engine: _EngineRole | None, episodes: EpisodeWorker | None
    ) -> OpenAIFace | None:
        """Through the leases of the episodes role, else to the engine alone."""
        config = self._config
        if config.openai is None:
            return None
        # Imported here: aiohttp takes a quarter of a second.
        from services.rollout.openai.build import create_face, local_backing, worker_backing

        if episodes is not None:
            backing = worker_backing(config, episodes)
        else:
            assert engine is not None
            backing = local_backing(config, engine.engine, self.server.waits)
        self.face = create_face(config, backing, config.server.drain_seconds * DRAIN_SHARE)
        self._resources.push_async_callback(self.face.close)
        return self.face

    def _register(self, engine: Engine | None) -> None:
        """Begin heartbeats; with both roles the episodes have an id of their own."""
        config, address = self._config, self.server.address
        if self._router is None:
            return
        if engine is not None:
            describe = engine_description(
                engine, engine_id=config.engine_id, address=address, pool=config.pool
            )
            self._registrations.append(
                Registration(self._router, describe, lambda: loads_to_proto(engine.status()))
            )
        if "episodes" in config.roles:
            suffix = "" if engine is None else "-episodes"
            describe = episodes_description(
                engine_id=config.engine_id + suffix, address=address, pool=config.pool
            )
            self._registrations.append(Registration(self._router, describe))
        for registration in self._registrations:
            registration.start()

    async def _announce(self) -> None:
        """Tell the router of new weights before their commit is answered."""
        await asyncio.gather(*(registration.announce() for registration in self._registrations))
