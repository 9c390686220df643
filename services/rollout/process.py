"""Runs the roles of a rollout process and registers them with the router."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from services.rollout.config import RolloutConfig
from services.rollout.engine.interface import Engine, EngineStatus, create_engine
from services.rollout.engine.servicer import (
    EngineCollector,
    EngineServicer,
    Generations,
    bound_requests,
)
from services.rollout.engine.weights import EngineWeights
from services.rollout.engine.wire import MediaReader, loads_to_proto
from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.rollout.v1 import engine_service_pb2_grpc, rollout_service_pb2_grpc
from sluice.api.rollout.v1 import rollout_service_pb2 as rollout_pb
from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.api.router.v1 import router_service_pb2_grpc as pb_grpc
from sluice.client import RemoteError, typed_errors
from sluice.imports import keep_loaded
from sluice.place import Place, directory_of, place_of
from sluice.runtime.channel import create_channel
from sluice.runtime.idempotency import cancel_all
from sluice.runtime.server import Server
from sluice.runtime.store_checks import add_store_service
from sluice.runtime.waits import Waits
from sluice.runtime.wire import seconds_of
from sluice.samples.blob_store import open_blobs
from sluice.samples.vocabulary import vocabulary_digest
from sluice.weights.host_cache import HostCache
from sluice.weights.store import WeightStore

if TYPE_CHECKING:
    from services.rollout.engine.sglang.node import FollowerNode
    from services.rollout.episodes.worker import EpisodeWorker
    from services.rollout.openai.server import OpenAIServer

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.5  # until the router answers
ANNOUNCE_SECONDS = 3.0
HEARTBEATS_PER_INTERVAL = 3


class RouterSightings:
    """Which routers answer this process.

    One that was started anew takes the place of the one before for good. Two that answer in turn
    are reached by one address by mistake: the one started first is `refused`, the other `kept`,
    until one of them has not answered for REMEMBER_SECONDS.
    """

    REMEMBER_SECONDS = 60.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._answered: dict[str, float] = {}  # when, by router, the latest last
        self._pair: set[str] = set()

    def note(self, router: str) -> None:
        """Take that a router has answered."""
        if not router:  # of a release before
            return
        self._forget()
        if router in self._answered and router != (latest := [*self._answered][-1]):
            if self._pair != {router, latest}:
                self._pair = {router, latest}
                logger.error(
                    "two routers answer in turn: [%s] is refused, [%s] kept", *sorted(self._pair)
                )
            del self._answered[router]
        self._answered[router] = self._clock()

    def pair(self) -> tuple[str, str]:
        """Returns who is refused and who is kept, empty where there is no such pair."""
        self._forget()
        if not self._pair:
            return "", ""
        refused, kept = sorted(self._pair)
        return refused, kept

    def _forget(self) -> None:
        oldest = self._clock() - self.REMEMBER_SECONDS
        self._answered = {name: at for name, at in self._answered.items() if at > oldest}
        if not self._pair <= self._answered.keys():
            self._pair = set()


class Registration:
    """Registers a role, then sends heartbeats; each calls `describe` and `measure`."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        describe: Callable[[], pb.Engine],
        waits: Waits,
        measure: Callable[[], list[engine_pb.RankLoad]] | None = None,
    ) -> None:
        """`measure` is of engines, which alone have weights."""
        self._stub = pb_grpc.RouterServiceStub(channel)
        self._describe, self._measure, self._waits = describe, measure, waits
        self._task: asyncio.Task[None] | None = None
        self._is_registered = False
        self._epoch, self._router_id = 0, ""  # of the router that answered last
        self._last_error = ""  # that was logged
        self._sightings = RouterSightings()

    def start(self) -> None:
        """Starts the heartbeats; the router may come later."""
        self._task = asyncio.create_task(self._keep(), name="registration")

    async def announce(self) -> None:
        """Registers an engine now, for new weights; where that fails the next heartbeat does."""
        if self._measure is None:
            return
        try:
            await self._register(reports=False)
        except RemoteError as error:
            logger.warning("router: %s", error)

    async def close(self) -> None:
        """Stops the heartbeats and asks the router to lease this process no more."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._is_registered:
            request = pb.DrainEngineRequest(engine_id=self._describe().engine_id)
            try:
                with typed_errors():
                    await self._stub.DrainEngine(request, timeout=ANNOUNCE_SECONDS)
            except RemoteError as error:
                logger.warning("router: %s", error)

    async def _register(self, *, reports: bool = True) -> float:
        """Registers once; returns the seconds until the next heartbeat.

        Without `reports` the load is told to a router alone that has heard none of this engine.
        """
        refused, kept = self._sightings.pair()
        request = pb.RegisterEngineRequest(
            engine=self._describe(),
            known_epoch=self._epoch,
            refused_router_id=refused,
            kept_router_id=kept,
        )
        try:
            with typed_errors():
                response = await self._stub.RegisterEngine(request, timeout=ANNOUNCE_SECONDS)
        except RemoteError as error:
            if error.reason == "SECOND_ROUTER":
                self._sightings.note(error.metadata["router"])
            raise
        self._sightings.note(response.router_id)
        with typed_errors():
            is_new = not self._is_registered or response.router_id != self._router_id
            if self._measure is not None and (reports or is_new):
                load = pb.ReportLoadRequest(
                    engine_id=request.engine.engine_id, rank_loads=self._measure()
                )
                await self._stub.ReportLoad(load, timeout=ANNOUNCE_SECONDS)
        if not self._is_registered:
            logger.info("registered as %s", request.engine.engine_id)
        self._is_registered, self._last_error = True, ""
        self._epoch, self._router_id = response.epoch, response.router_id
        return seconds_of(response.heartbeat_interval) / HEARTBEATS_PER_INTERVAL

    async def _keep(self) -> None:
        while True:
            try:
                delay = await self._register()
            except RemoteError as error:
                self._is_registered, self._last_error = False, str(error)
                logger.warning("router: %s", error)
                with self._waits.waiting(
                    "registration", on=["router"], explain=lambda: self._last_error
                ):
                    delay = await self._register_again()
            await asyncio.sleep(delay)

    async def _register_again(self) -> float:
        """Tries until the router answers; returns the seconds until the next heartbeat."""
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            try:
                return await self._register()
            except RemoteError as error:
                if self._last_error != str(error):  # once each, not twice a second
                    self._last_error = str(error)
                    logger.warning("router: %s", error)


def is_stuck(status: EngineStatus, seconds: float) -> bool:
    """Whether the thread of the device has been at one thing for longer than that."""
    return status.busy_seconds > seconds


def engine_description(
    engine: Engine, *, engine_id: str, address: str, pool: str, stuck_seconds: float
) -> Callable[[], pb.Engine]:
    """Returns a function that describes an engine to the router as it stands when called."""
    incarnation = uuid.uuid4().hex

    def describe() -> pb.Engine:
        status = engine.status()
        weights = None
        is_well = not (status.failure or is_stuck(status, stuck_seconds))
        if status.version is not None and is_well:  # else it is given no leases
            weights = sample_pb2.WeightVersion(version=status.version, digest=status.digest)
        return pb.Engine(
            engine_id=engine_id,
            address=address,
            role=pb.ROLE_ENGINE,
            pool=pool,
            dp_size=len(status.rank_loads),
            max_running_count=status.max_running,
            weights=weights,
            incarnation=incarnation,
        )

    return describe


def episodes_description(
    *, engine_id: str, address: str, pool: str, incarnation: str
) -> Callable[[], pb.Engine]:
    """Returns a function that describes an episode worker to the router."""
    engine = pb.Engine(
        engine_id=engine_id,
        address=address,
        role=pb.ROLE_EPISODES,
        pool=pool,
        incarnation=incarnation,
    )
    return lambda: engine


ENGINE_SERVICE = "sluice.api.rollout.v1.EngineService"
ROLLOUT_SERVICE = "sluice.api.rollout.v1.RolloutService"
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
        self.server.disks["store"] = [directory_of(config.store) or config.store_cache.directory]
        places: dict[str, Place] = {}
        if "episodes" in config.roles:
            places["store"] = config.store
        if "engine" in config.roles:
            places["weights"] = place_of(config.weights_location)
        add_store_service(self.server, places)
        if config.weights_cache is not None:
            self.server.disks["cache"] = [config.weights_cache]
        self._resources = contextlib.AsyncExitStack()
        self._registrations: list[Registration] = []
        self._leaving: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self.engine: Engine | None = None
        self.openai: OpenAIServer | None = None
        self.failure = ""  # why the engine broke and took the process with it
        self._router: grpc.aio.Channel | None = None
        if config.router and not config.is_further_node:
            self._router = create_channel(config.router, config.server.security)

    async def run(self) -> None:
        """Serves until a signal; one that comes while the model loads ends the loading."""
        try:
            await self.server.run(self.start)
        finally:
            await self.close()

    async def start(self) -> None:
        """Opens the port, loads the model and registers; then the services are ready."""
        config = self._config
        if self._router is not None:
            self._resources.push_async_callback(self._router.close)
        if config.is_further_node:
            await self._start_node()
            return
        engine = self._add_engine() if "engine" in config.roles else None
        episodes = self._add_episodes() if "episodes" in config.roles else None
        openai = self._add_openai(engine, episodes)
        if openai is not None:
            await openai.start()
            self.server.further_addresses["openai_url"] = openai.url
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
        if openai is not None:
            openai.set_ready()
        await self.server.set_serving()
        keep_loaded()
        self._register(None if engine is None else engine.engine, episodes)
        self._leaving = asyncio.create_task(self._leave(episodes, openai), name="leave")
        if engine is not None:
            self._watching = asyncio.create_task(self._watch(engine.engine), name="watch engine")

    async def _start_node(self) -> None:
        """Opens the port, for health checks alone, and follows the engine's first node."""
        # Imported here: other engines do without it.
        from services.rollout.engine.sglang.node import FollowerNode

        config, server = self._config, self.server
        security = config.server.security
        node = FollowerNode(config.placed_engine, config.engine_id, security, server.waits)
        await server.start()
        self._resources.push_async_callback(node.close)
        following = asyncio.create_task(node.run(), name="node")
        self._resources.push_async_callback(cancel_all, (following,))
        server.depend_on(following)
        self._watching = asyncio.create_task(self._watch_node(node), name="watch node")

    async def _watch_node(self, node: FollowerNode) -> None:
        """Ready is a node that its engine knows."""
        while True:
            await self.server.set_serving(node.follows.is_set())
            await asyncio.sleep(WATCH_SECONDS)

    async def close(self) -> None:
        """Releases everything; the server has stopped before."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._leaving is not None:
            self.server.stopping.set()
            await self._leaving
        await self._resources.aclose()

    async def _watch(self, engine: Engine) -> None:
        """Stops the process once its engine has failed; a new one starts without its state."""
        while not (failure := engine.status().failure):
            if is_stuck(engine.status(), self._config.engine.stuck_seconds):
                await self._see_through(engine)
            await asyncio.sleep(WATCH_SECONDS)
        self.failure = failure
        logger.error("the engine broke: %s", failure)
        self.server.request_stop()

    async def _see_through(self, engine: Engine) -> None:
        """Says that nothing is served, and why, while the thread of the device is stuck."""
        status, limit = engine.status(), self._config.engine.stuck_seconds
        what = f"{status.busy} on the device of {self._config.engine_id}"
        told = what, status.busy_seconds, status.busy_at
        logger.error("%s takes %.0f s at %s: not ready until it ends", *told)
        await self.server.set_serving(False)

        def explain() -> str:
            return f"it stands at {engine.status().busy_at}"

        on = [self._config.engine_id]
        with self.server.waits.waiting(what, on=on, explain=explain) as wait:
            wait.began -= status.busy_seconds
            while True:
                await asyncio.sleep(WATCH_SECONDS)
                status = engine.status()
                if status.failure or not is_stuck(status, limit):
                    break
        if not status.failure and not self.server.stopping.is_set():
            logger.warning("%s has ended: ready again", what)
            await self.server.set_serving()

    async def _leave(self, episodes: EpisodeWorker | None, openai: OpenAIServer | None) -> None:
        """Deregisters and drains the episodes once the server stops, while running calls end."""
        await self.server.stopping.wait()
        loop = asyncio.get_running_loop()
        end = loop.time() + self._config.server.drain_seconds * DRAIN_SHARE
        await asyncio.gather(*(registration.close() for registration in self._registrations))
        seconds = max(0.0, end - loop.time())  # a slow router takes none of the server's own share
        await asyncio.gather(
            *([openai.close()] if openai is not None else []),
            *([episodes.drain(seconds)] if episodes is not None else []),
        )

    def _add_engine(self) -> _EngineRole:
        config = self._config
        engine = create_engine(
            config.engine.backend, config.placed_engine, config.tokenizer_directory
        )
        self.engine = engine
        collector = EngineCollector(engine)
        generations = Generations(engine, config.engine.remembered_tokens)
        store = WeightStore(config.weights_location, durable=config.store_sync)
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
        directory = config.tokenizer_directory
        servicer = EngineServicer(
            engine,
            generations,
            weights,
            self.server.waits,
            engine_id=config.engine_id,
            backend=config.engine.backend,
            media=MediaReader(open_blobs(config.store, config.store_cache, sync=config.store_sync)),
            profiles=config.profiles,
            vocabulary=vocabulary_digest(directory) if directory is not None else "",
            settings=config.engine.shaping,
            records_experts=config.engine.routed_experts,
        )
        for service in engine.services():
            self.server.add(service.register, service.servicer, service.name)
        bound_requests(self.server, config.engine)
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
        episodes = config.episodes
        samples = episodes.max_samples, "episodes.max_samples"
        self.server.bound(rollout_pb.RolloutRequest, "sample_count", *samples)
        self.server.bound(rollout_pb.GroupRequest, "seeds", *samples)
        self.server.bound(rollout_pb.EvaluateRequest, "pass_at", *samples)
        groups = episodes.max_open_groups, "episodes.max_open_groups"
        self.server.bound(rollout_pb.RolloutRequest, "groups", *groups)
        self.server.bound(rollout_pb.CancelRolloutRequest, "group_ids", *groups)
        self.server.add(
            rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server,
            worker.servicer,
            ROLLOUT_SERVICE,
        )
        return worker

    def _add_openai(
        self, engine: _EngineRole | None, episodes: EpisodeWorker | None
    ) -> OpenAIServer | None:
        """Adds the OpenAI port: over the leases of the episodes role, else on the engine alone."""
        config = self._config
        if config.openai is None:
            return None
        # Imported here: aiohttp takes a quarter of a second.
        from services.rollout.openai.generation import Generator
        from services.rollout.openai.server import create_server, local_generator

        if episodes is not None:
            generator = Generator(
                episodes.tokenizer, episodes.sampler, config.pool, episodes.images
            )
        else:
            assert engine is not None
            generator = local_generator(config, engine.engine, self.server.waits)
        self.openai = create_server(config, generator, config.server.drain_seconds * DRAIN_SHARE)
        self._resources.push_async_callback(self.openai.close)
        return self.openai

    def _register(self, engine: Engine | None, episodes: EpisodeWorker | None) -> None:
        """Starts heartbeats; with both roles the episodes have an id of their own."""
        config, address = self._config, self.server.address
        if self._router is None:
            return
        if engine is not None:
            describe = engine_description(
                engine,
                engine_id=config.engine_id,
                address=address,
                pool=config.pool,
                stuck_seconds=config.engine.stuck_seconds,
            )
            self._registrations.append(
                Registration(
                    self._router,
                    describe,
                    self.server.waits,
                    lambda: loads_to_proto(engine.status()),
                )
            )
        if episodes is not None:
            suffix = "" if engine is None else "-episodes"
            describe = episodes_description(
                engine_id=config.engine_id + suffix,
                address=address,
                pool=config.pool,
                incarnation=episodes.incarnation,
            )
            self._registrations.append(Registration(self._router, describe, self.server.waits))
        for registration in self._registrations:
            registration.start()

    async def _announce(self) -> None:
        """Registers new weights before their commit is answered."""
        await asyncio.gather(*(registration.announce() for registration in self._registrations))
