"""`python -m services.router --config router.yaml`: leases over engines and their ranks."""

from __future__ import annotations

import asyncio
import sys

import uvloop
from prometheus_client import REGISTRY, CollectorRegistry

from services.router.config import RouterConfig
from services.router.episode_workers import EpisodeRegistry
from services.router.pools import PoolCollector, Pools
from services.router.proxy import SERVICE as ENGINE_SERVICE
from services.router.proxy import Proxy, describe_proxied
from services.router.rivals import Rivals, identify
from services.router.servicer import RouterServicer
from sluice import logs
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.router.v1 import router_service_pb2_grpc as pb_grpc
from sluice.config import ConfigError, load_config
from sluice.imports import keep_loaded, run_process
from sluice.runtime.server import Server

SERVICE = "sluice.api.router.v1.RouterService"


class RouterProcess:
    """Runs the servers of a router over its pools, and the clock that expires things."""

    def __init__(self, config: RouterConfig, registry: CollectorRegistry = REGISTRY) -> None:
        self._config = config
        self.server = Server(config.server)
        self.pools = Pools(config)
        self.episodes = EpisodeRegistry(config.default_pool.engine_ttl, self.pools.clock)
        self._rivals = Rivals(self.pools.clock, self.server.waits)
        self._servicer = RouterServicer(self.pools, self.episodes, self.server.waits, self._rivals)
        self._proxy = Proxy(self.pools, config.proxy, config.server.security, self._rivals.check)
        self._collector = PoolCollector(self.pools, registry)
        self._tasks: list[asyncio.Task[None]] = []
        self.server.add(pb_grpc.add_RouterServiceServicer_to_server, self._servicer, SERVICE)
        samples = config.proxy.max_samples, "proxy.max_samples"
        self.server.bound(engine_pb.GenerateRequest, "sample_count", *samples)
        self.server.bound(engine_pb.SamplingParams, "seeds", *samples)
        self.server.add(Proxy.add_to_server, self._proxy, ENGINE_SERVICE)
        self.server.describe = describe_proxied

    async def run(self) -> None:
        """Serve until a signal."""
        self.server.stop_on_signals()
        await self.start()
        keep_loaded()
        try:
            await self.server.run_until_signal()
        finally:
            await self.close()

    async def start(self) -> None:
        await self.server.start()
        self._rivals.identity = identify(self.server.address)
        self._tasks = [
            asyncio.create_task(self._tick(), name="expiry"),
            asyncio.create_task(self._let_go(), name="stop"),
        ]
        for task in self._tasks:
            self.server.depend_on(task)
        await self.server.set_serving()

    async def close(self) -> None:
        """Let go of everything; the server has stopped before."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._servicer.close()
        await self._proxy.close()
        self._collector.close()
        self._rivals.close()

    async def _let_go(self) -> None:
        await self.server.stopping.wait()
        self.pools.close()
        self._servicer.end_streams()

    async def _tick(self) -> None:
        is_ready = True
        while True:
            await asyncio.sleep(self._config.tick_seconds)
            self._proxy.heartbeat()
            self.pools.expire()
            self.episodes.expire()
            self._rivals.expire()
            if is_ready == self._rivals.refused:
                is_ready = not is_ready
                await self.server.set_serving(is_ready)


async def serve(config: RouterConfig) -> int:
    process = RouterProcess(config)  # built inside the loop that its server belongs to
    await process.run()
    return 1 if process.server.failed else 0


def main() -> int:
    logs.configure()
    try:
        config = load_config(RouterConfig)
        return uvloop.run(serve(config))
    except ConfigError as error:
        print(f"services.router: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    run_process(main)
