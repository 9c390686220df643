"""Keeps every engine of the pool on the current weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.client import ClientCache, EngineClient, RemoteError, RouterClient
from sluice.config import ConfigError
from sluice.loop import trace
from sluice.runtime.recovery import NotReadyError, is_passing, wait_until_ready
from sluice.runtime.security import SecurityConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")
POOL = "policy"  # of the engines that are given weights, sampled from and scored
STAGE_SECONDS = 600.0  # for the shards of a version and its commit

PAUSE_MODES = {
    "wait": engine_pb.PAUSE_MODE_WAIT,
    "abort": engine_pb.PAUSE_MODE_ABORT,
    "in_place": engine_pb.PAUSE_MODE_IN_PLACE,
}


class NoEngineError(Exception):
    """No engine could be brought to the current weights; the message says why each failed."""


@dataclass(frozen=True, kw_only=True)
class CommitReport:
    """Seconds of the slowest engine, how many engines serve the version, and why others do not."""

    engine_count: int
    prepare_seconds: float
    pause_seconds: float
    failures: Mapping[str, str]  # by engine id


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """`deterministic`: only engines that say they are so are given weights.

    `shares_devices`: engines sleep while trainers work, and are resumed when they have weights.
    """

    pause_mode: str
    deterministic: bool = False
    shares_devices: bool = False
    poll_seconds: float = 1.0


class EngineFleet:
    """Prepares and commits weights on the engines that the router knows."""

    def __init__(self, router: RouterClient, security: SecurityConfig, config: FleetConfig) -> None:
        self._router, self._config = router, config
        self._clients = ClientCache(EngineClient, security)
        self._weights: sample_pb2.WeightVersion | None = None
        self._updating = asyncio.Lock()
        self._is_asleep = False  # or is to be: engines that come late are put to sleep too
        self._staging: set[asyncio.Task[None]] = set()
        self._alive: list[router_pb.Engine] = []  # when they were last asked for

    @property
    def version(self) -> int:
        assert self._weights is not None, "no weights were committed yet"
        return self._weights.version

    async def close(self) -> None:
        for task in self._staging:
            task.cancel()
        await asyncio.gather(*self._staging, return_exceptions=True)
        await self._clients.close()

    async def commit(self, weights: sample_pb2.WeightVersion, wait_seconds: float) -> CommitReport:
        """Bring every engine to `weights`; waits until at least one is there.

        An engine that fails is named in the log and left behind: version bounds keep requests
        away from it, and `keep_up` tries again.
        """
        async with self._updating:
            self._weights, self._is_asleep = weights, False
            what = f"an engine with weight version {weights.version}"
            return await self._wait(what, self._update_some, wait_seconds)

    async def sleep(self, wait_seconds: float) -> None:
        """Have every engine give up its device; requests that are there end. Weights wake them.

        Raises NoEngineError where one does not in time; one that is lost has no device. Raises
        ConfigError where one cannot.
        """
        async with self._updating:
            self._is_asleep = True
            what = "all engines to sleep"
            await self._wait(what, self._sleep_all, wait_seconds)

    async def _sleep_all(self) -> None:
        alive = await self._list_alive()
        results = await asyncio.gather(*(self._sleep(engine) for engine in alive))
        outcomes = zip(alive, results, strict=True)
        if awake := [f"{engine.engine_id}: {why}" for engine, why in outcomes if why]:
            raise NotReadyError("; ".join(awake))

    async def _sleep(self, engine: router_pb.Engine) -> str:
        """Why it does not sleep; empty once it does."""
        client = self._clients[engine.address]
        try:
            if not (await client.get()).asleep:
                await client.pause(engine_pb.PAUSE_MODE_ABORT)
                await client.sleep()
        except RemoteError as error:
            if error.reason == "NO_SLEEP":
                raise ConfigError(
                    f"placement: colocated needs engines that sleep, and {engine.engine_id} at "
                    f"{engine.address} does not: {error.message}"
                ) from error
            return str(error)
        return ""

    async def _wait(self, what: str, probe: Callable[[], Awaitable[T]], wait_seconds: float) -> T:
        poll_seconds = self._config.poll_seconds
        return await wait_until_ready(what, probe, wait_seconds, NoEngineError, every=poll_seconds)

    async def _update_some(self) -> CommitReport:
        report = await self._update_all()
        if not report.engine_count:
            causes = "; ".join(f"{name}: {cause}" for name, cause in report.failures.items())
            raise NotReadyError(causes or "the router knows no engine")
        return report

    async def targets(self) -> list[trainer_pb.TransferTarget]:
        """The engines that the router knows, for a trainer to send weights to."""
        try:
            engines = await self._list_alive()
        except RemoteError as error:
            if not is_passing(error):
                raise
            logger.warning("router: %s", error)
            return []  # all read the version from the store
        return [
            trainer_pb.TransferTarget(engine_id=engine.engine_id, address=engine.address)
            for engine in engines
        ]

    @asynccontextmanager
    async def streaming(self) -> AsyncIterator[Callable[[int], None]]:
        """Has engines read a version while the block publishes it, once it knows the number.

        Where the block raises they forget it. `commit` goes on from what they have; an engine
        that cannot take part reads the version then.
        """
        tasks: list[asyncio.Task[None]] = []
        try:
            yield lambda version: tasks.append(asyncio.create_task(self._stage_all(version)))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        for task in tasks:  # each ends with the commit of its version
            self._staging.add(task)
            task.add_done_callback(self._staging.discard)

    async def _stage_all(self, version: int) -> None:
        """Those that have come since prepare the version once it is there."""
        try:
            alive = self._alive or await self._list_alive()
        except RemoteError as error:
            logger.info("no engine reads ahead: %s", error)
            return
        await asyncio.gather(*(self._stage(engine, version) for engine in alive))

    async def _stage(self, engine: router_pb.Engine, version: int) -> None:
        try:
            with trace.span(engine.engine_id, "stage", f"version {version}"):
                await self._clients[engine.address].stage_weights(version, STAGE_SECONDS)
        except RemoteError as error:  # perhaps of an earlier release; it prepares the version later
            logger.info("engine %s does not read ahead: %s", engine.engine_id, error)

    async def keep_up(self) -> None:
        """Bring engines that come late, or come back, to the current weights; until cancelled.

        While the others sleep, to sleep.
        """
        while True:
            await asyncio.sleep(self._config.poll_seconds)
            async with self._updating:
                if self._weights is None and not self._is_asleep:
                    continue
                try:
                    await (self._sleep_all() if self._is_asleep else self._update_all())
                except NotReadyError as error:
                    logger.warning("not asleep: %s", error)
                except RemoteError as error:
                    logger.warning("router: %s", error)

    async def check_deterministic(self, wait_seconds: float) -> None:
        """Raise ConfigError if an engine does not say it is; waits for the first engine."""
        for engine in await self._wait("an engine", self._list_some, wait_seconds):
            try:
                described = await self._clients[engine.address].get()
            except RemoteError as error:
                logger.warning("engine %s: %s", engine.engine_id, error)
                continue  # it is asked again before it is given weights
            if not described.deterministic:
                raise ConfigError(
                    f"deterministic: engine {engine.engine_id} at {engine.address} is not; "
                    "set engine.deterministic"
                )

    async def longest_sample(self, wait_seconds: float) -> int:
        """Tokens that a sample may have, by the engines at hand; waits for the first of them."""
        longest = 0
        for engine in await self._wait("an engine", self._list_some, wait_seconds):
            try:
                described = await self._clients[engine.address].get()
            except RemoteError as error:
                logger.warning("engine %s: %s", engine.engine_id, error)
                continue
            longest = max(longest, described.max_model_length)
        return longest

    async def addresses(self) -> dict[str, str]:
        """By name where the engines are that the router knows now."""
        return {f"engine {each.engine_id}": each.address for each in await self._list_alive()}

    async def _list_some(self) -> list[router_pb.Engine]:
        if not (engines := await self._list_alive()):
            raise NotReadyError("the router knows no engine")
        return engines

    async def _list_alive(self) -> list[router_pb.Engine]:
        """Those of the policy: a teacher's engines keep the weights they have."""
        engines = await self._router.list_engines(router_pb.ROLE_ENGINE)
        self._alive = [
            engine
            for engine in engines
            if engine.state != router_pb.ENGINE_STATE_LOST and (engine.pool or POOL) == POOL
        ]
        return self._alive

    async def _update_all(self) -> CommitReport:
        assert self._weights is not None
        alive = await self._list_alive()
        shares = self._config.shares_devices  # the router does not know which is asleep or paused
        stale = [e for e in alive if shares or e.weights != self._weights]
        results = await asyncio.gather(*(self._update(engine) for engine in stale))
        done = [result for result in results if not isinstance(result, str)]
        outcomes = zip(stale, results, strict=True)
        failures = {engine.engine_id: why for engine, why in outcomes if isinstance(why, str)}
        for name, why in failures.items():
            logger.warning("engine %s is left behind: %s", name, why)
        return CommitReport(
            engine_count=len(alive) - len(stale) + len(done),
            prepare_seconds=max((prepare for prepare, _ in done), default=0.0),
            pause_seconds=max((pause for _, pause in done), default=0.0),
            failures=failures,
        )

    async def _update(self, engine: router_pb.Engine) -> tuple[float, float] | str:
        """(prepare, pause) seconds, or why it failed."""
        assert self._weights is not None
        client = self._clients[engine.address]
        try:
            described = await client.get()
            if self._config.deterministic and not described.deterministic:
                return "it is not deterministic, and the run is"
            if described.HasField("weights") and described.weights == self._weights:
                if self._config.shares_devices and described.paused:
                    await client.resume()
                return 0.0, 0.0  # the router has not heard of it yet
            if described.asleep:
                with trace.span(engine.engine_id, "wake"):
                    await client.wake()
            version = f"version {self._weights.version}"
            with trace.span(engine.engine_id, "prepare", version):
                prepare = await client.prepare_weights(self._weights)
            mode = PAUSE_MODES[self._config.pause_mode]
            with trace.span(engine.engine_id, "commit", version):
                pause = await client.commit_weights(self._weights, mode)
            if described.asleep or (described.paused and self._config.shares_devices):
                await client.resume()  # it was paused to sleep
            return prepare, pause
        except RemoteError as error:
            return str(error)
