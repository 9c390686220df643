"""Keeps every engine of the pool on the current weights."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import grpc

from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.client import ClientCache, EngineClient, RemoteError, RouterClient
from sluice.config import ConfigError
from sluice.loop import trace
from sluice.runtime.security import SecurityConfig

logger = logging.getLogger(__name__)

PAUSE_MODES = {
    "wait": engine_pb.PAUSE_MODE_WAIT,
    "abort": engine_pb.PAUSE_MODE_ABORT,
    "in_place": engine_pb.PAUSE_MODE_IN_PLACE,
}
_AWAY = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,  # a router that stops ends its calls so
    grpc.StatusCode.UNKNOWN,
}


class NoEngineError(Exception):
    """No engine could be brought to the current weights; the message says why each failed."""


@dataclass(frozen=True, kw_only=True)
class CommitReport:
    """Seconds of the slowest engine, and how many engines serve the version."""

    engine_count: int
    prepare_seconds: float
    pause_seconds: float


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """`deterministic`: only engines that say they are so are given weights."""

    pause_mode: str
    deterministic: bool = False
    poll_seconds: float = 1.0


class EngineFleet:
    """Prepares and commits weights on the engines that the router knows."""

    def __init__(self, router: RouterClient, security: SecurityConfig, config: FleetConfig) -> None:
        self._router, self._config = router, config
        self._clients = ClientCache(EngineClient, security)
        self._weights: sample_pb2.WeightVersion | None = None
        self._updating = asyncio.Lock()

    @property
    def version(self) -> int:
        assert self._weights is not None, "no weights were committed yet"
        return self._weights.version

    async def close(self) -> None:
        await self._clients.close()

    async def commit(self, weights: sample_pb2.WeightVersion, wait_seconds: float) -> CommitReport:
        """Bring every engine to `weights`; waits until at least one is there.

        An engine that fails is named in the log and left behind: version bounds keep requests
        away from it, and `keep_up` tries again.
        """
        async with self._updating:
            self._weights = weights
            failures: dict[str, str] = {}
            try:
                async with asyncio.timeout(wait_seconds):
                    while True:
                        report = await self._update_all(failures)
                        if report.engine_count:
                            return report
                        await asyncio.sleep(self._config.poll_seconds)
            except TimeoutError:
                causes = "; ".join(f"{name}: {cause}" for name, cause in failures.items())
                raise NoEngineError(
                    f"no engine took weight version {weights.version} in {wait_seconds:g} s: "
                    f"{causes or 'the router knows no engine'}"
                ) from None

    async def targets(self) -> list[trainer_pb.TransferTarget]:
        """The engines that the router knows, for a trainer to send weights to."""
        return [
            trainer_pb.TransferTarget(engine_id=engine.engine_id, address=engine.address)
            for engine in await self._list_alive({})
        ]

    async def keep_up(self) -> None:
        """Bring engines that come late, or come back, to the current weights; until cancelled."""
        while True:
            await asyncio.sleep(self._config.poll_seconds)
            if self._weights is None:
                continue
            async with self._updating:
                try:
                    await self._update_all({})
                except RemoteError as error:
                    logger.warning("router: %s", error)

    async def check_deterministic(self, wait_seconds: float) -> None:
        """Raise ConfigError if an engine does not say it is; waits for the first engine."""
        try:
            async with asyncio.timeout(wait_seconds):
                while True:
                    if engines := await self._list_alive({}):
                        break
                    await asyncio.sleep(self._config.poll_seconds)
        except TimeoutError:
            raise NoEngineError(f"the router knew no engine for {wait_seconds:g} s") from None
        for engine in engines:
            try:
                known = await self._clients[engine.address].get()
            except RemoteError as error:
                logger.warning("engine %s: %s", engine.engine_id, error)
                continue  # it is asked again before it is given weights
            if not known.deterministic:
                raise ConfigError(
                    f"deterministic: engine {engine.engine_id} at {engine.address} is not; "
                    "set engine.deterministic"
                )

    async def _list_alive(self, failures: dict[str, str]) -> list[router_pb.Engine]:
        """Engines as the router knows them; none while it is away."""
        try:
            engines = await self._router.list_engines(router_pb.ROLE_ENGINE)
        except RemoteError as error:
            if error.code not in _AWAY:
                raise
            failures["router"] = str(error)
            logger.warning("router: %s", error)
            return []
        return [e for e in engines if e.state != router_pb.ENGINE_STATE_LOST]

    async def _update_all(self, failures: dict[str, str]) -> CommitReport:
        assert self._weights is not None
        alive = await self._list_alive(failures)
        stale = [e for e in alive if e.weights != self._weights]
        results = await asyncio.gather(*(self._update(engine) for engine in stale))
        done = [result for result in results if not isinstance(result, str)]
        for engine, result in zip(stale, results, strict=True):
            if isinstance(result, str):
                failures[engine.engine_id] = result
                logger.warning("engine %s is left behind: %s", engine.engine_id, result)
        return CommitReport(
            engine_count=len(alive) - len(stale) + len(done),
            prepare_seconds=max((prepare for prepare, _ in done), default=0.0),
            pause_seconds=max((pause for _, pause in done), default=0.0),
        )

    async def _update(self, engine: router_pb.Engine) -> tuple[float, float] | str:
        """(prepare, pause) seconds, or why it failed."""
        assert self._weights is not None
        client = self._clients[engine.address]
        try:
            known = await client.get()
            if self._config.deterministic and not known.deterministic:
                return "it is not deterministic, and the run is"
            if known.HasField("weights") and known.weights == self._weights:
                return 0.0, 0.0  # the router has not heard of it yet
            version = f"version {self._weights.version}"
            with trace.span(engine.engine_id, "prepare", version):
                prepare = await client.prepare_weights(self._weights)
            mode = PAUSE_MODES[self._config.pause_mode]
            with trace.span(engine.engine_id, "commit", version):
                return prepare, await client.commit_weights(self._weights, mode)
        except RemoteError as error:
            return str(error)
