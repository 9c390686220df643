"""Rollout processes: how they start, show themselves and stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import REGISTRY

from services.rollout import process as process_module
from services.rollout.__main__ import main
from services.rollout.engine.reference.engine import ReferenceEngine
from services.rollout.process import ENGINE_SERVICE, ROLLOUT_SERVICE
from services.router.__main__ import SERVICE as ROUTER_SERVICE
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.client import EngineClient, RemoteError, RouterClient
from sluice.ports import free_port
from tests.patience import PATIENCE
from tests.service.rollout.harness import (
    SERVER,
    Models,
    Store,
    copy_rows,
    load_weights,
    named,
    rollout_request,
    running_episodes,
    running_rollout,
    running_router,
    wait_for_engines,
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.rollout", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_a_wrong_configuration_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()  # main sets its handlers
    store = ("--store", str(tmp_path))
    no_tokenizer = ("--roles", '["episodes"]', "--router", "localhost:1")
    for arguments, message in (
        ((), "store"),
        ((*store, "--engine.max_running", "many"), "engine.max_running"),
        ((*store,), "router: the episodes role needs one"),
        ((*store, *no_tokenizer), "tokenizer: the episodes role needs one"),
        ((*store, *no_tokenizer, "--tokenizer", str(tmp_path)), "tokenizer.json does not exist"),
        ((*store, "--roles", '["judge"]'), "roles"),
        ((*store, "--roles", "[]"), "roles"),
    ):
        monkeypatch.setattr(sys, "argv", ["services.rollout", *arguments])
        monkeypatch.setattr(root, "handlers", [])
        assert main() == 2
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert message in last and last.startswith("services.rollout: "), arguments


def test_an_unknown_key_of_the_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rollout.yaml"
    file.write_text("store: x\nroles: [engine]\nepisodes: {max_open_grups: 3}\n")
    result = run("--config", str(file))
    assert result.returncode == 2 and "episodes.max_open_grups: unknown key" in result.stderr


def test_an_environment_that_is_none_is_refused_at_start(tmp_path: Path, models: Models) -> None:
    result = run(
        *("--roles", '["episodes"]', "--store", str(tmp_path), "--router", "localhost:1"),
        *("--tokenizer", str(models.first), "--episodes.environments", '{"x": "json:loads"}'),
    )
    assert result.returncode == 2 and "json:loads names no Environment" in result.stderr


def test_an_episode_worker_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, services.rollout.__main__, services.rollout.episodes.worker;"
        "heavy = {'torch', 'transformers', 'reasoning_gym'} & set(sys.modules);"
        "sys.exit(', '.join(heavy) or None)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@contextlib.asynccontextmanager
async def ending(process: asyncio.subprocess.Process) -> AsyncIterator[None]:
    """Whatever happens, the process does not outlive the test."""
    try:
        yield
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_process_ends_well_on_sigterm(store: Store, models: Models, tmp_path: Path) -> None:
    file = tmp_path / "address.json"
    async with running_router() as router:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.rollout", "--store", str(store.root)),
            *("--engine.model", str(models.first), "--engine.threads", "1"),
            *("--router", router.server.address, "--server.address_file", str(file)),
        )
        async with (
            ending(process),
            asyncio.timeout(PATIENCE),  # it imports torch
            RouterClient(router.server.address) as client,
        ):
            (engine,) = await wait_for_engines(router.server.address, 1)
            while not (workers := await client.list_engines(router_pb.ROLE_EPISODES)):
                await asyncio.sleep(0.02)  # each role registers on its own
            assert [worker.engine_id for worker in workers] == ["rollout-0-episodes"]
            async with EngineClient(engine.address) as direct:
                completions = await direct.generate([1, 10], max_new_tokens=2)
                assert completions[0].spans[0].weights.version == 0, "the configured model"
            addresses = json.loads(file.read_text())
            metrics = await asyncio.to_thread(_read, addresses["metrics_address"])
            decoded = f"decoded_tokens_total {len(completions[0].token_ids)}.0"
            hours = 'group_duration_seconds_bucket{le="10800.0"}'  # groups of agents take some
            for name in ("weight_version 0.0", decoded, "samples_total{", hours):
                assert f"sluice_rollout_{name}" in metrics
            owners = set(re.findall(r"^# TYPE sluice_([a-z]+)", metrics, re.M))
            assert owners.isdisjoint({"converter", "loop", "router", "trainer"}), "none of others"
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
            states = {e.engine_id: e.state for e in await client.list_engines()}
            gone = {router_pb.ENGINE_STATE_DRAINING}
            assert set(states.values()) <= gone, "the router was told before it ended"


def _read(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE) as response:
        return str(response.read().decode())


async def test_the_router_knows_new_weights_when_their_commit_is_answered(
    store: Store, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "ANNOUNCE_SECONDS", PATIENCE)  # later, a heartbeat tells it
    async with running_router() as router, RouterClient(router.server.address) as client:
        values: dict[str, Any] = {"roles": ["engine"], "router": router.server.address}
        incarnations = set()
        for _ in range(2):
            async with (
                running_rollout(store, engine_id="rollout-7", **values) as process,
                EngineClient(process.server.address) as engine,
            ):
                await load_weights(engine, store.first)
                (known,) = await client.list_engines(router_pb.ROLE_ENGINE)
                assert (known.weights, known.max_running_count) == (named(store.first), 32)
                await load_weights(engine, store.second)
                (known,) = await client.list_engines(router_pb.ROLE_ENGINE)
                assert known.weights == named(store.second)
                incarnations.add(known.incarnation)
        assert len(incarnations) == 2, "leases of the former process are void"


async def test_new_weights_are_told_of_the_engine_and_not_of_the_episodes(
    store: Store, models: Models
) -> None:
    """Nothing that a router knows of an episode worker changes with them."""

    def answered(method: str) -> float:
        of = {"method": f"/{ROUTER_SERVICE}/{method}", "code": "OK"}
        return REGISTRY.get_sample_value("sluice_rpc_duration_seconds_count", of) or 0.0

    before = answered("RegisterEngine")
    no_heartbeat = {"engine_ttl": 3600.0}
    async with running_router(default_pool=no_heartbeat) as router:
        values: dict[str, Any] = {"router": router.server.address, "tokenizer": str(models.first)}
        async with (
            running_rollout(store, roles=["engine", "episodes"], **values) as process,
            EngineClient(process.server.address) as engine,
            asyncio.timeout(PATIENCE),
        ):
            while answered("RegisterEngine") < before + 2:  # each role on its own
                await asyncio.sleep(0.02)
            await load_weights(engine, store.first)
            assert answered("RegisterEngine") == before + 3
            told = answered("ReportLoad")
            await load_weights(engine, store.second)
            assert answered("RegisterEngine") == before + 4
            assert answered("ReportLoad") == told  # which weights do not change


async def test_an_engine_finds_its_router_when_it_comes_late(store: Store) -> None:
    port = free_port("127.0.0.1")  # nobody else is given it meanwhile
    address = f"127.0.0.1:{port}"
    async with running_rollout(store, roles=["engine"], router=address) as process:
        async with EngineClient(process.server.address) as engine:
            await load_weights(engine, store.first)
        async with running_router(server={**SERVER, "port": port}):
            await wait_for_engines(address, 1)


def test_a_model_that_cannot_be_served_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    arguments = ["--store", str(tmp_path), "--engine.model", str(tmp_path), "--roles", '["engine"]']
    monkeypatch.setattr(sys, "argv", ["services.rollout", *arguments])
    assert main() == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("services.rollout: UNFIT_WEIGHTS: ")


async def test_an_engine_that_broke_ends_its_process(store: Store) -> None:
    """So that whoever supervises it starts another one."""
    async with running_rollout(store, roles=["engine"]) as process:
        async with EngineClient(process.server.address) as engine:
            await load_weights(engine, store.first)
            core = process.engine._core  # type: ignore[union-attr]
            core.step = None  # a bug in the device thread
            with pytest.raises(RemoteError) as caught:
                await engine.generate([1, 10], max_new_tokens=2)
            assert caught.value.reason == "ENGINE_FAILED"
        async with asyncio.timeout(PATIENCE):
            await process.server.run_until_signal()
        assert process.failure


async def test_services_are_ready_by_name(store: Store, models: Models) -> None:
    async with running_episodes(store, models.first, split=True) as episodes:
        for channel, service in (
            (episodes.engine.channel, ENGINE_SERVICE),
            (episodes.client.channel, ROLLOUT_SERVICE),
        ):
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_pins_of_a_former_process_are_let_go(store: Store, models: Models) -> None:
    for version in (store.first.version, store.second.version):
        store.weights.pin(version, "rollout-0")
    store.weights.pin(store.first.version, "someone else")
    async with running_rollout(store, roles=["engine"], engine_id="rollout-0"):
        assert store.weights.pins() == {store.first.version: {"someone else"}}


async def test_a_hang_explains_itself(store: Store, models: Models) -> None:
    async with running_episodes(store, models.first, split=True) as episodes:
        pause = engine_pb.PauseRequest(mode=engine_pb.PAUSE_MODE_IN_PLACE)
        await episodes.engine.stub.Pause(pause)
        request = rollout_request(copy_rows(1))
        stream = episodes.client.stub.Rollout(request)
        expected = [("samples of group g0", ["rollout-0"])]
        async with asyncio.timeout(PATIENCE):
            while True:  # it waits for leases first
                waits = await episodes.client.list_waits()
                if [(wait.what, list(wait.on)) for wait in waits] == expected:
                    break
                await asyncio.sleep(0.02)
        await episodes.client.cancel(request.request_id)
        assert (await stream.read()).failed.group_id == "g0"


@pytest.mark.parametrize("split", [False, True])
async def test_an_engine_is_asked_the_same_way_near_and_far(
    store: Store, models: Models, split: bool
) -> None:
    """Errors and samples do not depend on where the engine runs."""
    async with running_episodes(store, models.first, split=split) as episodes:
        long = rollout_request([{"prompt": "1" * 80, "answer": "1"}])
        error = (await episodes.failed(long))["g0"].error
        assert error.message.startswith("INVALID_ARGUMENT/PROMPT_TOO_LONG: a prompt of 80 tokens")
        request = rollout_request(copy_rows(1), sample_count=2)
        request.groups[0].seeds.extend([7, 8])
        finished = await episodes.finished(request)
        drawn = [s.token_ids.tolist()[5:] for s in store.samples(finished["g0"])]
        direct = await episodes.engine.generate(
            [0, 0, 0, 0, 10], max_new_tokens=5, sample_count=2, seeds=[7, 8]
        )
        assert drawn == [list(completion.token_ids) for completion in direct]


async def test_an_engine_whose_device_is_stuck_is_not_ready_and_says_what_it_does(
    store: Store, models: Models
) -> None:
    """It answers all the while: only the thread of the device is held up."""
    settings = {
        "engine_id": "rollout-0",
        "engine": {"model": str(models.first), "threads": 1, "stuck_seconds": 0.3},
    }
    let_go = threading.Event()

    def hold_up() -> None:
        assert let_go.wait(PATIENCE)

    async with (
        running_router() as router,
        running_rollout(
            store, roles=["engine"], router=router.server.address, **settings
        ) as process,
        EngineClient(process.server.address) as client,
        RouterClient(router.server.address) as fleet,
    ):
        health = health_pb2_grpc.HealthStub(client.channel)

        async def ready() -> bool:
            request = health_pb2.HealthCheckRequest(service=ENGINE_SERVICE)
            answer = await health.Check(request, timeout=PATIENCE)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        async def state() -> int:
            (engine,) = await fleet.list_engines(router_pb.ROLE_ENGINE)
            return engine.state

        async def comes(condition: Callable[[], Awaitable[bool]]) -> None:
            async with asyncio.timeout(PATIENCE):
                while not await condition():
                    await asyncio.sleep(0.05)

        async def is_leased() -> bool:
            return await state() == router_pb.ENGINE_STATE_ACTIVE

        async def is_empty() -> bool:
            return await state() == router_pb.ENGINE_STATE_EMPTY

        async def is_not_ready() -> bool:
            return not await ready()

        await comes(ready)
        await comes(is_leased)
        assert isinstance(process.engine, ReferenceEngine)
        held = asyncio.create_task(process.engine._thread.call(hold_up))
        try:
            await comes(is_not_ready)
            (wait,) = [w for w in await client.list_waits() if "hold_up" in w.what]
            assert list(wait.on) == ["rollout-0"]
            line = hold_up.__code__.co_firstlineno + 1
            assert "it stands at threading:" in wait.explanation
            assert f"called by {__name__}:{line} hold_up" in wait.explanation
            assert wait.start_time.ToSeconds() > 0
            await comes(is_empty)
        finally:
            let_go.set()
        await held
        await comes(ready)
        await comes(is_leased)
        assert not [w for w in await client.list_waits() if "hold_up" in w.what]
