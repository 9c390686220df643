"""The fleet over real servers that play router and engines."""

import asyncio
import re

import grpc
import pytest

from services.rollout.errors import UnfitWeightsError, UnsupportedModelError
from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.rollout.v1 import engine_service_pb2_grpc as engine_grpc
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.api.router.v1 import router_service_pb2_grpc as router_grpc
from sluice.client import RouterClient
from sluice.config import ConfigError
from sluice.loop.fleet import (
    EngineFleet,
    FleetConfig,
    NoEngineError,
    check_deterministic,
    check_min_new_tokens,
)
from sluice.runtime.errors import ServiceError
from sluice.runtime.security import SecurityConfig
from sluice.runtime.server import Server, ServerConfig
from tests.patience import PATIENCE, told_late

FIRST = sample_pb2.WeightVersion(version=1, digest="one")


class RefusedSleepError(ServiceError):
    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__("it does not")
        self.code, self.reason = code, reason


class Engine(engine_grpc.EngineServiceServicer):
    def __init__(self, *, deterministic: bool) -> None:
        self.deterministic = deterministic
        self.takes_min_new_tokens = True
        self.weights: sample_pb2.WeightVersion | None = None
        self.staging: list[int] = []  # versions that it is asked to read ahead
        self.forgotten: list[int] = []
        self.committed = asyncio.Event()
        self.paused = self.asleep = False
        self.asked: list[str] = []  # of sleep and its end
        self.looks = 0
        self.refusal: tuple[grpc.StatusCode, str] | None = None  # of Sleep
        self.prepared: list[int] = []
        self.moves = asyncio.Event()  # or hangs in a commit
        self.moves.set()
        self.unfit: ServiceError | None = None  # why it takes no weights
        self.refused = 0  # times that it said so
        self.together: asyncio.Barrier | None = None  # that all who are asked meet at

    async def GetEngine(self, request, context):
        self.looks += 1
        if self.together is not None:
            await self.together.wait()
        return engine_pb.GetEngineResponse(
            weights=self.weights,
            deterministic=self.deterministic,
            takes_min_new_tokens=self.takes_min_new_tokens,
            backend="reference",
            paused=self.paused,
            asleep=self.asleep,
        )

    async def Pause(self, request, context):
        self.paused = True
        return engine_pb.PauseResponse()

    async def Resume(self, request, context):
        self.asked.append("resume")
        self.paused = False
        return engine_pb.ResumeResponse()

    async def Sleep(self, request, context):
        assert self.paused
        if self.refusal is not None:
            raise RefusedSleepError(*self.refusal)
        self.asked.append("sleep")
        self.asleep, self.weights = True, None
        return engine_pb.SleepResponse()

    async def Wake(self, request, context):
        self.asked.append("wake")
        self.asleep = False
        return engine_pb.WakeResponse()

    async def StageWeights(self, request, context):
        self.staging.append(request.version)
        try:
            await self.committed.wait()
        except asyncio.CancelledError:
            self.forgotten.append(request.version)
            raise
        return engine_pb.StageWeightsResponse()

    async def PrepareWeights(self, request, context):
        if self.unfit is not None:
            self.refused += 1
            raise self.unfit
        self.prepared.append(request.weights.version)
        return engine_pb.PrepareWeightsResponse()

    async def CommitWeights(self, request, context):
        assert not self.asleep
        await self.moves.wait()
        self.weights = request.weights
        return engine_pb.CommitWeightsResponse()


class Router(router_grpc.RouterServiceServicer):
    """Knows the engines named; refuses the first `failures` questions."""

    def __init__(self) -> None:
        self.engines: dict[str, str] = {}
        self.pools: dict[str, str] = {}
        self.failures: list[grpc.StatusCode] = []
        self.asked = 0

    async def ListEngines(self, request, context):
        self.asked += 1
        if self.failures:
            await context.abort(self.failures.pop(), "router restarts")
        engines = [
            router_pb.Engine(
                engine_id=name,
                address=address,
                state=router_pb.ENGINE_STATE_ACTIVE,
                pool=self.pools.get(name, ""),
            )
            for name, address in self.engines.items()
        ]
        return router_pb.ListEnginesResponse(engines=engines)


class World:
    def __init__(self) -> None:
        self.router, self.engines = Router(), {}
        self._servers: list[Server] = []
        self._closing: list = []

    async def serve(self, register, servicer) -> str:
        server = Server(ServerConfig(drain_seconds=0.1))
        server.add(register, servicer, "test")
        await server.start()
        self._servers.append(server)
        return server.address

    async def add_engine(self, name: str, *, deterministic: bool = True) -> Engine:
        engine = Engine(deterministic=deterministic)
        register = engine_grpc.add_EngineServiceServicer_to_server
        self.router.engines[name] = await self.serve(register, engine)
        return engine

    async def fleet(self, **settings) -> EngineFleet:
        register = router_grpc.add_RouterServiceServicer_to_server
        client = RouterClient(await self.serve(register, self.router))
        config = FleetConfig(**{"pause_mode": "in_place", "poll_seconds": 0.02} | settings)
        fleet = EngineFleet(client, SecurityConfig(), config)
        self._closing += [fleet, client]
        return fleet

    async def close(self) -> None:
        for each in self._closing:
            await each.close()
        for server in self._servers:
            await server.stop()


@pytest.fixture
async def world():
    world = World()
    yield world
    await world.close()


async def test_a_teacher_s_engines_keep_the_weights_they_have(world):
    policy, teacher = await world.add_engine("e"), await world.add_engine("t")
    world.router.pools = {"e": "policy", "t": "teacher"}
    fleet = await world.fleet()
    report = await fleet.commit(FIRST, PATIENCE)
    assert report.engine_count == 1 and policy.weights == FIRST and teacher.weights is None
    assert [target.engine_id for target in await fleet.targets()] == ["e"]


async def test_a_router_that_restarts_is_waited_for(world):
    engine = await world.add_engine("e")
    fleet = await world.fleet()
    world.router.failures = [grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN]
    report = await fleet.commit(FIRST, wait_seconds=PATIENCE)
    assert (report.engine_count, engine.weights) == (1, FIRST)


async def test_a_router_that_refuses_is_an_error_at_once(world):
    fleet = await world.fleet()
    world.router.failures = [grpc.StatusCode.UNAUTHENTICATED]
    with pytest.raises(Exception, match="UNAUTHENTICATED"):
        async with asyncio.timeout(PATIENCE):
            await fleet.commit(FIRST, wait_seconds=200)


async def test_no_engine_at_all_is_an_error_in_time(world):
    fleet = await world.fleet()
    told = await told_late(lambda seconds: fleet.commit(FIRST, seconds), NoEngineError, 0.1)
    assert "the router knows no engine" in told


async def test_where_no_engine_can_run_the_model_it_is_said_at_once(world):
    for name in ("a", "b"):
        (await world.add_engine(name)).unfit = UnsupportedModelError("sinks are not recorded")
    fleet = await world.fleet()
    with pytest.raises(NoEngineError) as told:
        async with asyncio.timeout(PATIENCE):
            await fleet.commit(FIRST, wait_seconds=10 * PATIENCE)
    assert str(told.value).startswith("no engine can run the model: a: ")
    assert str(told.value).count("sinks are not recorded") == 2


async def test_while_one_of_them_may_take_it_engines_are_waited_for(world):
    (await world.add_engine("a")).unfit = UnsupportedModelError("sinks are not recorded")
    late = await world.add_engine("b")
    late.unfit = UnfitWeightsError("is being replaced")
    fleet = await world.fleet()
    committing = asyncio.create_task(fleet.commit(FIRST, wait_seconds=PATIENCE))
    async with asyncio.timeout(PATIENCE):
        while late.looks < 3:
            await asyncio.sleep(0.01)
        assert not committing.done()
        late.unfit = None
        report = await committing
    assert report.engine_count == 1 and set(report.failures) == {"a"}


async def test_an_engine_that_is_not_deterministic_is_named(world):
    await world.add_engine("good")
    await world.add_engine("loose", deterministic=False)
    fleet = await world.fleet(deterministic=True)
    with pytest.raises(ConfigError, match=r"deterministic: engine loose at .* is not"):
        check_deterministic(await fleet.describe(PATIENCE))


async def test_an_engine_that_cannot_keep_a_sample_from_ending_is_named(world):
    await world.add_engine("good")
    fleet = await world.fleet()
    check_min_new_tokens(await fleet.describe(PATIENCE))
    (await world.add_engine("short")).takes_min_new_tokens = False
    with pytest.raises(ConfigError, match=r"sampling\.min_new_tokens: engine short .*reference"):
        check_min_new_tokens(await fleet.describe(PATIENCE))


async def test_all_engines_are_asked_what_they_are_at_once(world):
    """Each answers only when all others have been asked."""
    together = asyncio.Barrier(8)
    engines = [await world.add_engine(f"e{number}") for number in range(8)]
    for engine in engines:
        engine.together = together
    fleet = await world.fleet()
    async with asyncio.timeout(PATIENCE):
        described = await fleet.describe(PATIENCE)
    assert [each.name.split()[0] for each in described] == [f"e{number}" for number in range(8)]
    assert [engine.looks for engine in engines] == [1] * 8


async def test_one_that_comes_later_is_given_no_weights(world):
    good = await world.add_engine("good")
    fleet = await world.fleet(deterministic=True)
    check_deterministic(await fleet.describe(PATIENCE))
    loose = await world.add_engine("loose", deterministic=False)
    report = await fleet.commit(FIRST, wait_seconds=PATIENCE)
    assert report.engine_count == 1
    assert good.weights == FIRST
    assert loose.weights is None  # so that version bounds keep every request away from it


async def test_an_engine_that_comes_late_is_brought_up(world):
    await world.add_engine("first")
    fleet = await world.fleet()
    await fleet.commit(FIRST, wait_seconds=PATIENCE)
    late = await world.add_engine("late")
    keeping = asyncio.create_task(fleet.keep_up())
    async with asyncio.timeout(PATIENCE):
        while late.weights is None:
            await asyncio.sleep(0.01)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    assert late.weights == FIRST


async def test_a_router_that_is_slow_to_say_where_engines_are_is_asked_again(world):
    await world.add_engine("first")
    fleet = await world.fleet()
    world.router.failures = [grpc.StatusCode.DEADLINE_EXCEEDED] * 2
    assert await fleet.addresses(PATIENCE) == {"engine first": world.router.engines["first"]}
    assert not world.router.failures


async def test_a_router_that_is_away_is_told_of_once_for_each_time(world, caplog):
    await world.add_engine("first")
    fleet = await world.fleet()
    await fleet.commit(FIRST, wait_seconds=PATIENCE)
    keeping = asyncio.create_task(fleet.keep_up())

    def told() -> list[str]:
        return [each.getMessage() for each in caplog.records if "router: " in each.getMessage()]

    for times in (1, 2):
        world.router.failures = [grpc.StatusCode.DEADLINE_EXCEEDED] * 3
        async with asyncio.timeout(PATIENCE):
            await until(lambda: not world.router.failures)
            asked = world.router.asked
            await until(lambda asked=asked: world.router.asked >= asked + 2)
        assert told() == ["router: DEADLINE_EXCEEDED/-: router restarts"] * times
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_why_an_engine_is_left_behind_is_told_when_it_is_another_reason(world, caplog):
    """It is asked again every second, perhaps for days."""
    await world.add_engine("first")
    odd = await world.add_engine("odd", deterministic=False)
    fleet = await world.fleet(deterministic=True)
    await fleet.commit(FIRST, wait_seconds=PATIENCE)
    keeping = asyncio.create_task(fleet.keep_up())

    def told() -> list[str]:
        return [each.getMessage() for each in caplog.records if "left behind" in each.getMessage()]

    async with asyncio.timeout(PATIENCE):
        await until(lambda: odd.looks >= 6)
        once = ["engine odd is left behind: it is not deterministic, and the run is"]
        assert told() == once
        odd.deterministic = True
        await until(lambda: odd.weights == FIRST)
        odd.deterministic = False
        await fleet.commit(sample_pb2.WeightVersion(version=2, digest="two"), wait_seconds=PATIENCE)
        assert told() == once * 2
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


def version(number: int) -> sample_pb2.WeightVersion:
    return sample_pb2.WeightVersion(version=number, digest=str(number))


async def test_of_engines_that_took_weights_nothing_is_asked_before_the_next(world):
    """Nor of the router, as long as somebody polls it."""
    engines = [await world.add_engine(name) for name in "ab"]
    fleet = await world.fleet(poll_seconds=PATIENCE)
    for number in range(1, 50):  # at some of them both answer at once
        report = await fleet.commit(version(number), PATIENCE)
        assert report.engine_count == 2
        assert [engine.weights for engine in engines] == [version(number)] * 2
    assert (world.router.asked, [engine.looks for engine in engines]) == (1, [1, 1])


async def test_a_deterministic_run_asks_every_time_whether_an_engine_is(world):
    """Another may stand at its address since."""
    engines = [await world.add_engine(name) for name in "ab"]
    fleet = await world.fleet(deterministic=True, poll_seconds=PATIENCE)
    await fleet.commit(version(1), PATIENCE)
    engines[0].deterministic = False
    report = await fleet.commit(version(2), PATIENCE)
    assert list(report.failures) == ["a"] and engines[0].weights == version(1)


async def test_one_that_fails_is_asked_what_it_is_and_where_it_is(world):
    engine = await world.add_engine("e")
    fleet = await world.fleet(poll_seconds=0.2)
    await fleet.commit(version(1), PATIENCE)
    fleet._listed += PATIENCE  # as if just now, however long it takes to come to the next
    engine.unfit = UnfitWeightsError("stops")
    moved = await world.add_engine("e")  # the router knows its new address from now on
    await fleet.commit(version(2), PATIENCE)
    assert (moved.weights, engine.weights, engine.refused) == (version(2), version(1), 1)
    moved.asleep = True  # another client has put it to sleep
    await fleet.commit(version(3), PATIENCE)
    assert (moved.asleep, moved.weights) == (False, version(3))


async def test_a_run_goes_on_without_an_engine_that_hangs_in_a_commit(world):
    """Nothing is asked of it until it moves; then it is brought to the weights of now."""
    quick, stuck = await world.add_engine("quick"), await world.add_engine("stuck")
    fleet = await world.fleet(straggler_seconds=0.05)
    stuck.moves.clear()
    keeping = asyncio.create_task(fleet.keep_up())
    async with asyncio.timeout(PATIENCE):
        first = await fleet.commit(FIRST, wait_seconds=PATIENCE)
        assert (first.engine_count, list(first.late)) == (1, ["stuck"])
        assert "within 0.05 s" in first.late["stuck"]
        assert [target.engine_id for target in await fleet.targets()] == ["quick"]
        for number in range(2, 5):
            wanted = version(number)
            async with fleet.streaming() as note:
                note(number)
                await until(lambda: quick.staging[-1:] == [number])  # noqa: B023
            report = await fleet.commit(wanted, wait_seconds=PATIENCE)
            assert (report.engine_count, report.late) == (1, {})  # it was told once
            assert quick.weights == wanted
        assert (stuck.prepared, stuck.staging, stuck.weights) == ([1], [], None)
        stuck.moves.set()
        await until(lambda: stuck.weights == wanted)
    assert stuck.prepared == [1, 4]
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    quick.committed.set()


async def test_where_all_engines_hang_one_is_waited_for(world):
    engines = [await world.add_engine(name) for name in "ab"]
    fleet = await world.fleet(straggler_seconds=0.05)
    engines[0].moves.clear(), engines[1].moves.clear()
    first = asyncio.create_task(fleet.commit(FIRST, wait_seconds=PATIENCE))
    await until(lambda: all(engine.prepared for engine in engines))
    first.cancel()  # as where the version is lost
    await asyncio.gather(first, return_exceptions=True)
    second = sample_pb2.WeightVersion(version=2, digest="two")
    committing = asyncio.create_task(fleet.commit(second, wait_seconds=PATIENCE))
    await until(lambda: all(engine.prepared == [1, 2] for engine in engines))
    assert not committing.done()
    engines[1].moves.set()
    report = await committing
    assert (report.engine_count, list(report.late)) == (1, ["a"])
    assert (engines[0].weights, engines[1].weights) == (None, second)


async def test_engines_sleep_and_weights_wake_them(world):
    engines = [await world.add_engine(name) for name in "ab"]
    fleet = await world.fleet(shares_devices=True)
    for _ in range(2):
        await fleet.sleep(PATIENCE)
        await fleet.sleep(PATIENCE)  # free
        assert all(engine.asleep for engine in engines)
        report = await fleet.commit(FIRST, PATIENCE)
        assert report.engine_count == 2
    for engine in engines:
        assert engine.asked == ["sleep", "wake", "resume"] * 2
        assert (engine.asleep, engine.paused, engine.weights) == (False, False, FIRST)


async def test_an_engine_that_comes_late_sleeps_with_the_others(world):
    await world.add_engine("first")
    fleet = await world.fleet(shares_devices=True)
    await fleet.sleep(PATIENCE)
    late = await world.add_engine("late")
    keeping = asyncio.create_task(fleet.keep_up())
    await until(lambda: late.asleep)
    await fleet.commit(FIRST, PATIENCE)
    late.paused = True  # nobody heard the answer to its resumption, or it never came
    await until(lambda: not late.paused)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_an_engine_that_cannot_sleep_ends_the_run_and_one_that_does_not_is_named(world):
    engine = await world.add_engine("e")
    fleet = await world.fleet(shares_devices=True)
    engine.refusal = grpc.StatusCode.UNIMPLEMENTED, "NO_SLEEP"
    with pytest.raises(ConfigError, match=r"placement: colocated .* e at .* it does not"):
        await fleet.sleep(PATIENCE)
    engine.refusal = grpc.StatusCode.FAILED_PRECONDITION, "NOT_QUIET"
    told = await told_late(fleet.sleep, NoEngineError, 0.3)
    assert re.search("all engines to sleep .* e: .*NOT_QUIET", told)


async def until(condition) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


async def test_engines_read_ahead_while_a_version_is_published(world):
    engines = [await world.add_engine(name) for name in "ab"]
    fleet = await world.fleet()
    async with fleet.streaming() as note:
        note(7)
        await until(lambda: [engine.staging for engine in engines] == [[7], [7]])
    await fleet.commit(FIRST, wait_seconds=PATIENCE)  # which does not wait for them
    assert [engine.forgotten for engine in engines] == [[], []]
    for engine in engines:
        engine.committed.set()


async def test_engines_forget_a_version_whose_publication_fails(world):
    engines = [await world.add_engine(name) for name in "ab"]
    fleet = await world.fleet()
    with pytest.raises(RuntimeError):
        async with fleet.streaming() as note:
            note(7)
            await until(lambda: all(engine.staging for engine in engines))
            raise RuntimeError
    await until(lambda: [engine.forgotten for engine in engines] == [[7], [7]])


async def test_a_router_that_is_gone_costs_the_head_start_alone(world):
    engine = await world.add_engine("e")
    fleet = await world.fleet()
    world.router.failures = [grpc.StatusCode.UNAUTHENTICATED]
    async with fleet.streaming() as note:
        note(7)
        await until(lambda: not world.router.failures)
    report = await fleet.commit(FIRST, wait_seconds=PATIENCE)
    assert (report.engine_count, engine.staging) == (1, [])
