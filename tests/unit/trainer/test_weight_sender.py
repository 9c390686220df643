"""Whom the controller sends weights to, and over which group."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest

from services.trainer import metrics
from services.trainer.config import TransferConfig
from services.trainer.controller.transfer import BROKEN, Shipment, Target, WeightSender
from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.rollout.v1 import engine_service_pb2_grpc as engine_grpc
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.client import RemoteError
from sluice.runtime.security import SecurityConfig
from sluice.runtime.server import Server, ServerConfig
from sluice.runtime.waits import Waits
from tests.patience import PATIENCE

WEIGHTS = sample_pb2.WeightVersion(version=7, digest="d" * 32)
PREPARED = engine_pb.GetEngineResponse(prepared_versions=[7])
SERVING = engine_pb.GetEngineResponse(weights=WEIGHTS)  # where there is no room for two


class Engine:
    """Takes what it is sent; GetEngine tells of it by `has`."""

    def __init__(
        self,
        has: engine_pb.GetEngineResponse = PREPARED,
        *,
        loses_answer: bool = False,
        dies: bool = False,
        unfit: str = "",
        fails: str = "",
    ) -> None:
        self.unfit, self._fails = unfit, fails
        self.groups: list[str] = []  # over which it was sent something
        self._loses_answer, self._dies = loses_answer, dies
        self._state = engine_pb.GetEngineResponse(transfer_rank_count=1)
        self._has = has

    async def get(self, seconds: float) -> engine_pb.GetEngineResponse:
        if self._dies and self.groups:
            raise RemoteError(grpc.StatusCode.UNAVAILABLE, "", "it is gone", {})
        return self._state

    async def check_transfer(self, weights: sample_pb2.WeightVersion) -> None:
        if self.unfit:
            raise RemoteError(grpc.StatusCode.FAILED_PRECONDITION, self.unfit, "it is not", {})

    async def join_transfer_group(self, request: engine_pb.JoinTransferGroupRequest) -> None:
        self._state.transfer_group = request.transfer_group

    async def prepare_weights(
        self, weights: sample_pb2.WeightVersion, transfer: engine_pb.WeightTransfer
    ) -> None:
        self.groups.append(transfer.transfer_group)
        if self._fails:
            raise RemoteError(grpc.StatusCode.DATA_LOSS, self._fails, "it came damaged", {})
        self._state.MergeFrom(self._has)
        if self._loses_answer or self._dies:
            raise RemoteError(grpc.StatusCode.ABORTED, BROKEN, "another member is gone", {})


class Ranks:
    """One that sends, and says `failure` of it."""

    def __init__(self) -> None:
        self.incarnation = self
        self.commands: list[str] = []
        self.failure = ""

    async def run(self, message: pb.FollowResponse) -> list[pb.CommandResult]:
        command = message.WhichOneof("command") or ""
        self.commands.append(command)
        if command == "open_transfer":
            return [pb.CommandResult(transfer_address="127.0.0.1:1", transfer_backend="gloo")]
        return [pb.CommandResult(transfer_failure=self.failure)]


def stage(**engines: Engine) -> tuple[WeightSender, Ranks, list[Target]]:
    fake = Ranks()
    ranks: Any = fake
    sender = WeightSender(TransferConfig(enabled=True), SecurityConfig(), ranks, Waits())
    clients: Any = engines  # by address, here the name
    sender._clients = clients
    return sender, fake, [Target(name, name) for name in engines]


SHIPMENT = Shipment(
    weights=WEIGHTS, rank_files=[["a"]], pause_mode=engine_pb.PAUSE_MODE_UNSPECIFIED
)


@pytest.mark.parametrize("has", [PREPARED, SERVING], ids=["prepared", "serving"])
async def test_an_engine_that_has_the_version_is_not_sent_it_again(
    has: engine_pb.GetEngineResponse,
) -> None:
    """It would join another group and receive nothing, and the sender wait for it in vain."""
    engine, dead = Engine(has, loses_answer=True), Engine(dies=True)
    sender, ranks, targets = stage(engine=engine, dead=dead)
    outcomes = await sender.send(SHIPMENT, targets)
    assert outcomes["engine"] is None
    assert outcomes["dead"] is not None
    assert ranks.commands == ["open_transfer", "send_weights"]
    assert len(engine.groups) == 1


@pytest.mark.parametrize("failure", ["", "a peer is gone"])
async def test_a_group_that_its_sender_has_left_is_not_used_again(failure: str) -> None:
    """However well the engines received what came before."""
    engine = Engine()
    sender, ranks, targets = stage(engine=engine)
    ranks.failure = failure
    assert await sender.send(SHIPMENT, targets) == {"engine": None}
    ranks.failure = ""
    following = sample_pb2.WeightVersion(version=8, digest="e" * 32)
    assert await sender.send(replace(SHIPMENT, weights=following), targets) == {"engine": None}
    assert len(set(engine.groups)) == (2 if failure else 1)


def failures(cause: str) -> float:
    return metrics.TRANSFER_FAILURES.labels(cause)._value.get()


async def test_what_an_engine_says_of_its_failure_is_what_is_told(caplog) -> None:
    """It alone lacks the version, and is not sent it again."""
    before = failures("DIGEST_MISMATCH")
    damaged, well = Engine(fails="DIGEST_MISMATCH"), Engine()
    sender, ranks, targets = stage(damaged=damaged, well=well)
    outcomes = await sender.send(SHIPMENT, targets)
    assert outcomes["well"] is None
    assert outcomes["damaged"] is not None
    assert outcomes["damaged"].reason == "DIGEST_MISMATCH"
    assert "it came damaged" in str(outcomes["damaged"])
    assert ranks.commands == ["open_transfer", "send_weights"]
    assert failures("DIGEST_MISMATCH") == before + 1


async def test_who_cannot_take_part_is_not_in_the_group() -> None:
    unfit, well = Engine(unfit="UNFIT_WEIGHTS"), Engine()
    sender, _, targets = stage(unfit=unfit, well=well)
    outcomes = await sender.send(SHIPMENT, targets)
    assert outcomes["well"] is None
    assert outcomes["unfit"] is not None
    assert outcomes["unfit"].reason == "UNFIT_WEIGHTS"
    assert unfit.groups == []


async def test_who_goes_without_for_another_hears_of_whom() -> None:
    torn, damaged = (
        Engine(has=engine_pb.GetEngineResponse(), loses_answer=True),
        Engine(fails="DIGEST_MISMATCH"),
    )
    sender, ranks, targets = stage(torn=torn, damaged=damaged)
    ranks.failure = "no route to engine"
    outcomes = await sender.send(SHIPMENT, targets)
    assert "no route to engine" in str(outcomes["torn"])
    assert len(torn.groups) == 2  # the second time without the other


class SlowEngine(engine_grpc.EngineServiceServicer):
    """A real one: stalled in one call for as long as it is asked, or slow within its time."""

    def __init__(self, stalls_in: str = "") -> None:
        self.stalls_in = stalls_in
        self.seconds = 0.0  # that it was given for its first answer

    async def GetEngine(self, request, context):
        self.seconds = context.time_remaining()
        await self._stall("GetEngine")
        return engine_pb.GetEngineResponse(transfer_rank_count=1)

    async def CheckTransfer(self, request, context):
        await self._stall("CheckTransfer")
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "it answers, and is not fit")

    async def _stall(self, call: str) -> None:
        if self.stalls_in == call:
            await asyncio.Event().wait()


async def ask(engine: SlowEngine, **settings: float) -> RemoteError:
    server = Server(ServerConfig(host="127.0.0.1", drain_seconds=0))
    server.add(engine_grpc.add_EngineServiceServicer_to_server, engine, "engine")
    await server.start()
    ranks: Any = Ranks()
    config = TransferConfig(enabled=True, **settings)  # type: ignore[arg-type]
    sender = WeightSender(config, SecurityConfig(), ranks, Waits())
    try:
        async with asyncio.timeout(PATIENCE):
            (outcome,) = (await sender.send(SHIPMENT, [Target("e", server.address)])).values()
    finally:
        await sender.close()
        await server.stop()
    assert outcome is not None
    return outcome


async def test_an_engine_that_is_slow_to_answer_is_waited_for() -> None:
    """Longer than a client waits by itself: without it the whole version is read from the store."""
    engine = SlowEngine()
    assert "it answers, and is not fit" in (await ask(engine)).message
    assert 5 < engine.seconds <= 21  # grpc rounds a deadline up to a second
    await ask(engine, answer_seconds=100)
    assert 20 < engine.seconds <= 101  # gRPC rounds it up to whole seconds


@pytest.mark.parametrize("call", ["GetEngine", "CheckTransfer"])
async def test_an_engine_that_is_stalled_is_left_out_in_time(call: str) -> None:
    error = await ask(SlowEngine(call), answer_seconds=0.2)
    assert "does not answer" in error.message
