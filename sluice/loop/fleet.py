"""Keeps every engine of the pool on the current weights."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.client import ClientCache, EngineClient, RemoteError, RouterClient
from sluice.config import ConfigError
from sluice.loop import trace
from sluice.runtime.idempotency import all_of
from sluice.runtime.recovery import NotReadyError, is_passing, wait_until_ready
from sluice.runtime.security import SecurityConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Taken = tuple[float, float] | str  # seconds of prepare and pause, or why weights were not taken
POOL = "policy"  # of the engines that are given weights, sampled from and scored
STAGE_SECONDS = 600.0  # for the shards of a version and its commit
UNSUPPORTED = "UNSUPPORTED_MODEL"  # why an engine takes no version at all

PAUSE_MODES = {
    "wait": engine_pb.PAUSE_MODE_WAIT,
    "abort": engine_pb.PAUSE_MODE_ABORT,
    "in_place": engine_pb.PAUSE_MODE_IN_PLACE,
}


class _ForGood(str):
    """Why an engine takes no weights, whichever they are and however often they are offered."""


class NoEngineError(Exception):
    """No engine could be brought to the current weights; the message says why each failed."""


@dataclass(frozen=True, kw_only=True)
class CommitReport:
    """Seconds of the slowest engine, how many engines serve the version, and why others do not.

    late: what is to be told of those that the run has just gone on without, by engine id.
    """

    engine_count: int
    prepare_seconds: float
    pause_seconds: float
    failures: Mapping[str, str]  # by engine id
    late: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """`deterministic`: only engines that say they are so are given weights.

    `shares_devices`: engines sleep while trainers work, and are resumed when they have weights.
    `straggler_seconds`: what the others have to take weights once the first has them; None is
    until they do, or fail.
    """

    pause_mode: str
    deterministic: bool = False
    shares_devices: bool = False
    poll_seconds: float = 1.0
    straggler_seconds: float | None = None


@dataclass(eq=False)
class _Update:
    """Bringing one engine to the current weights, at the address that it had.

    is_late: nobody waits for it any longer; the engine is given newer weights once it has ended.
    """

    task: asyncio.Task[_Taken]
    weights: sample_pb2.WeightVersion
    is_late: bool = False


@dataclass(frozen=True)
class DescribedEngine:
    """An engine by id and address, and what it says of itself."""

    name: str
    said: engine_pb.GetEngineResponse


def check_deterministic(engines: Iterable[DescribedEngine]) -> None:
    """Raises ConfigError if an engine does not say it is."""
    for each in engines:
        if not each.said.deterministic:
            raise ConfigError(f"deterministic: engine {each.name} is not; set engine.deterministic")


def check_min_new_tokens(engines: Iterable[DescribedEngine]) -> None:
    """Raises ConfigError if an engine does not take it."""
    for each in engines:
        if not each.said.takes_min_new_tokens:
            raise ConfigError(
                f"sampling.min_new_tokens: engine {each.name}, {each.said.backend}, does not take "
                "it; the reference engine does"
            )


def engine_settings(engines: Iterable[DescribedEngine]) -> dict[str, str]:
    """By name those that numbers depend on, all values of each."""
    values: dict[str, set[str]] = {}
    for each in engines:
        for name, value in each.said.settings.items():
            values.setdefault(name, set()).add(value)
    return {name: " or ".join(sorted(found)) for name, found in values.items()}


def longest_sample(engines: Iterable[DescribedEngine]) -> int:
    """Tokens that a sample may have on one of them."""
    return max((each.said.max_model_length for each in engines), default=0)


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
        self._listed = -math.inf  # when that was
        self._updates: dict[tuple[str, str], _Update] = {}  # by engine id and address
        self._told: dict[tuple[str, str], str] = {}  # why an engine was left behind
        self._known: set[tuple[str, str]] = set()  # that took weights, and have not failed since
        self._failure: BaseException | None = None  # of an update, and no engine's

    @property
    def version(self) -> int:
        assert self._weights is not None, "no weights were committed yet"
        return self._weights.version

    async def close(self) -> None:
        tasks = [*self._staging, *(update.task for update in self._updates.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._clients.close()

    async def commit(self, weights: sample_pb2.WeightVersion, wait_seconds: float) -> CommitReport:
        """Bring every engine to `weights`; waits until at least one is there.

        An engine that fails is named in the log and left behind: version bounds keep requests
        away from it, and `keep_up` tries again. So is one that takes `straggler_seconds` longer
        than the first; what it was told to do it is left to do, and nothing else is asked of it
        meanwhile.
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

    @property
    def _patience(self) -> float | None:
        """Engines that share devices have given them back before anybody else is at work."""
        return None if self._config.shares_devices else self._config.straggler_seconds

    async def _wait(self, what: str, probe: Callable[[], Awaitable[T]], wait_seconds: float) -> T:
        poll_seconds = self._config.poll_seconds
        return await wait_until_ready(what, probe, wait_seconds, NoEngineError, every=poll_seconds)

    async def _update_some(self) -> CommitReport:
        report = await self._update_all(await self._list_recent(), self._patience)
        if not report.engine_count:
            causes = "; ".join(f"{name}: {cause}" for name, cause in report.failures.items())
            if causes and all(isinstance(why, _ForGood) for why in report.failures.values()):
                raise NoEngineError(f"no engine can run the model: {causes}")
            raise NotReadyError(causes or "the router knows no engine")
        return report

    async def targets(self) -> list[trainer_pb.TransferTarget]:
        """The engines that the router knows, for a trainer to send weights to; none that is late
        with those of before."""
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
            if not self._is_late(engine)
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
        ready = [engine for engine in alive if not self._is_late(engine)]
        await asyncio.gather(*(self._stage(engine, version) for engine in ready))

    async def _stage(self, engine: router_pb.Engine, version: int) -> None:
        try:
            with trace.span(engine.engine_id, "stage", f"version {version}"):
                await self._clients[engine.address].stage_weights(version, STAGE_SECONDS)
        except RemoteError as error:  # perhaps of an earlier release; it prepares the version later
            logger.info("engine %s does not read ahead: %s", engine.engine_id, error)

    async def keep_up(self) -> None:
        """Bring engines that come late, or come back, to the current weights; until cancelled.

        While the others sleep, to sleep. What keeps it from that is told once for as long as it
        lasts.
        """
        patience = None if self._patience is None else 0.0  # commits come first
        told = ""
        while True:
            await asyncio.sleep(self._config.poll_seconds)
            async with self._updating:
                if self._weights is None and not self._is_asleep:
                    continue
                try:
                    if self._is_asleep:
                        await self._sleep_all()
                    else:
                        await self._update_all(await self._list_alive(), patience)
                    trouble = ""
                except NotReadyError as error:
                    trouble = f"not asleep: {error}"
                except RemoteError as error:
                    trouble = f"router: {error}"
            if trouble and trouble != told:
                logger.warning("%s", trouble)
            told = trouble

    async def describe(self, wait_seconds: float) -> list[DescribedEngine]:
        """What the engines at hand say of themselves; waits for the first of them."""
        engines = await self._wait("an engine", self._list_some, wait_seconds)
        found = await all_of(map(self._ask, engines))
        return [each for each in found if each is not None]

    async def _ask(self, engine: router_pb.Engine) -> DescribedEngine | None:
        try:
            said = await self._clients[engine.address].get()
        except RemoteError as error:  # it is asked again before it is given weights
            logger.warning("engine %s: %s", engine.engine_id, error)
            return None
        return DescribedEngine(f"{engine.engine_id} at {engine.address}", said)

    async def addresses(self, wait_seconds: float) -> dict[str, str]:
        """By name where the engines are that the router knows; waits for the first of them."""
        engines = await self._wait("an engine", self._list_some, wait_seconds)
        return {f"engine {each.engine_id}": each.address for each in engines}

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
        self._listed = time.monotonic()
        return self._alive

    async def _list_recent(self) -> list[router_pb.Engine]:
        """As they were up to two polls ago, which is as soon as `keep_up` finds who has come since;
        as they are now once one has failed."""
        is_recent = time.monotonic() - self._listed < 2 * self._config.poll_seconds
        return self._alive if self._alive and is_recent else await self._list_alive()

    async def _update_all(
        self, alive: Sequence[router_pb.Engine], patience: float | None
    ) -> CommitReport:
        """Those that are not there `patience` seconds after the first, or ever, are left at it."""
        assert self._weights is not None
        if self._failure is not None:
            raise self._failure
        here = {(engine.engine_id, engine.address) for engine in alive}
        self._told = {key: why for key, why in self._told.items() if key in here}
        self._known &= here
        shares = self._config.shares_devices  # the router does not know which is asleep or paused
        stale = [e for e in alive if shares or e.weights != self._weights]
        updates = {engine.engine_id: self._begin_update(engine) for engine in stale}
        late = await self._wait_updates(updates, patience, serving=len(stale) < len(alive))
        results = {name: self._result(update) for name, update in updates.items()}
        done = [result for result in results.values() if not isinstance(result, str)]
        return CommitReport(
            engine_count=len(alive) - len(stale) + len(done),
            prepare_seconds=max((prepare for prepare, _ in done), default=0.0),
            pause_seconds=max((pause for _, pause in done), default=0.0),
            failures={name: result for name, result in results.items() if isinstance(result, str)},
            late=late,
        )

    def _is_late(self, engine: router_pb.Engine) -> bool:
        update = self._updates.get((engine.engine_id, engine.address))
        return update is not None and self._is_behind(update)

    def _is_behind(self, update: _Update) -> bool:
        return update.is_late or update.weights != self._weights

    def _begin_update(self, engine: router_pb.Engine) -> _Update:
        """What the engine is at yet, if it is; that may be older weights."""
        assert self._weights is not None
        key = engine.engine_id, engine.address
        if (update := self._updates.get(key)) is None or update.task.done():
            task = asyncio.create_task(self._update(engine, self._weights), name=f"update {key[0]}")
            update = self._updates[key] = _Update(task, self._weights)
            task.add_done_callback(lambda task: self._note_end(key, task))
        return update

    def _note_end(self, key: tuple[str, str], task: asyncio.Task[_Taken]) -> None:
        if self._updates[key].task is task:  # else it was given the next weights at once
            del self._updates[key]
        if task.cancelled():
            return
        if (failure := task.exception()) is not None:  # a bug
            self._failure = failure
            return
        if not isinstance(why := task.result(), str):
            self._told.pop(key, None)
            self._known.add(key)
            return
        self._known.discard(key)
        self._listed = -math.inf
        if self._told.get(key) != why:  # it is tried again every `poll_seconds`
            self._told[key] = why
            logger.warning("engine %s is left behind: %s", key[0], why)

    def _result(self, update: _Update) -> _Taken:
        if not update.task.done():
            return "it is still at the weights that it was given"
        result = update.task.result()
        outdated = update.weights != self._weights and not isinstance(result, str)
        return "it has taken older weights" if outdated else result

    async def _wait_updates(
        self, updates: Mapping[str, _Update], patience: float | None, *, serving: bool
    ) -> dict[str, str]:
        """Wait for those that are not late; who is from now on, and what to say of it.

        Where all are late, and nobody is `serving`, it is waited for one of them.
        """
        timely = {name: each for name, each in updates.items() if not self._is_behind(each)}
        waited = {each.task for each in (timely if timely or serving else updates).values()}
        try:
            while waited and not serving:
                done, waited = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                serving = not timely or any(not isinstance(task.result(), str) for task in done)
            if timely and waited:
                await asyncio.wait(waited, timeout=patience)
        except asyncio.CancelledError:
            tasks = [each.task for each in timely.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        late = {name: each for name, each in timely.items() if not each.task.done()}
        for each in late.values():
            each.is_late = True
        return dict.fromkeys(late, f"it has not taken weights within {patience or 0:g} s of others")

    async def _update(self, engine: router_pb.Engine, weights: sample_pb2.WeightVersion) -> _Taken:
        client = self._clients[engine.address]
        is_known = (engine.engine_id, engine.address) in self._known
        try:
            if is_known and not (self._config.deterministic or self._config.shares_devices):
                return await self._swap(client, engine.engine_id, weights)
            described = await client.get()
            if self._config.deterministic and not described.deterministic:
                return "it is not deterministic, and the run is"
            if described.HasField("weights") and described.weights == weights:
                if self._config.shares_devices and described.paused:
                    await client.resume()
                return 0.0, 0.0  # the router has not heard of it yet
            if described.asleep:
                with trace.span(engine.engine_id, "wake"):
                    await client.wake()
            taken = await self._swap(client, engine.engine_id, weights)
            if described.asleep or (described.paused and self._config.shares_devices):
                await client.resume()  # it was paused to sleep
            return taken
        except RemoteError as error:
            return _ForGood(error) if error.reason == UNSUPPORTED else str(error)

    async def _swap(
        self, client: EngineClient, name: str, weights: sample_pb2.WeightVersion
    ) -> tuple[float, float]:
        """(prepare, pause) seconds; none where the engine serves these weights."""
        version = f"version {weights.version}"
        with trace.span(name, "prepare", version):
            prepare = await client.prepare_weights(weights)
        mode = PAUSE_MODES[self._config.pause_mode]
        with trace.span(name, "commit", version):
            return prepare, await client.commit_weights(weights, mode)
