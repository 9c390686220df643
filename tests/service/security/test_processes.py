"""Single processes: what their clients refuse, what they say of bad files, what they accept."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from examples.models.tiny_qwen3 import build_tiny_qwen3
from services.rollout.process import Registration
from services.router.__main__ import RouterProcess
from services.router.__main__ import main as router_main
from services.router.config import RouterConfig
from services.trainer.__main__ import main as trainer_main
from services.trainer.config import TrainerConfig
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.rollout.v1 import engine_service_pb2_grpc as engine_grpc
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.client import EngineClient, RouterClient
from sluice.config import ConfigError, load_config, parse_config
from sluice.runtime import metrics
from sluice.runtime.channel import create_channel
from sluice.runtime.security import SecurityConfig, TlsConfig, server_credentials
from sluice.runtime.server import Server, ServerConfig
from sluice.runtime.waits import Waits
from tests.patience import PATIENCE
from tests.service.security.ports import UNREACHABLE, answer_of, ask_metrics, ask_service
from tests.service.security.trust import Trust, with_tls


@asynccontextmanager
async def running_router(security: SecurityConfig) -> AsyncIterator[RouterProcess]:
    server = {"drain_seconds": 0.1, "security": security}
    values = {"server": server, "proxy": {"attempts": 1}}
    process = RouterProcess(parse_config(RouterConfig, values))
    await process.start()
    try:
        yield process
    finally:
        await process.server.stop()
        await process.close()


@asynccontextmanager
async def running_server(**config: object) -> AsyncIterator[Server]:
    server = Server(ServerConfig(drain_seconds=0.1, **config))  # type: ignore[arg-type]
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


class Engine(engine_grpc.EngineServiceServicer):
    async def Generate(self, request, context):
        return engine_pb.GenerateResponse(completions=[engine_pb.Completion(token_ids=[7])])


@pytest.mark.parametrize("known", [True, False], ids=["right engine", "stranger"])
async def test_the_routers_proxy_asks_only_engines_that_prove_themselves(
    trust: Trust, known: bool
) -> None:
    """One with a certificate for this host, and one whose certificate is for another."""
    security = trust.right if known else trust.issue("elsewhere", ("elsewhere",))
    assert security.tls is not None
    engine = grpc.aio.server()
    engine_grpc.add_EngineServiceServicer_to_server(Engine(), engine)
    port = engine.add_secure_port("127.0.0.1:0", server_credentials(security.tls))
    await engine.start()
    async with running_router(trust.right) as router:
        address = router.server.address
        async with RouterClient(address, trust.right) as client:
            await client.stub.RegisterEngine(
                router_pb.RegisterEngineRequest(
                    engine=router_pb.Engine(
                        engine_id="e",
                        address=f"127.0.0.1:{port}",
                        role=router_pb.ROLE_ENGINE,
                        incarnation="a",
                        weights={"version": 1, "digest": "d"},
                    )
                )
            )
        async with EngineClient(address, trust.right) as proxy:
            if known:
                assert len(await proxy.generate([1], max_new_tokens=1)) == 1
            else:
                request = engine_pb.GenerateRequest(
                    request_id="r", prompt_token_ids=[1], sampling={"max_new_tokens": 1}
                )
                assert (
                    await answer_of(proxy.stub.Generate(request, timeout=PATIENCE)) == UNREACHABLE
                )
    await engine.stop(0)


async def test_a_rollout_the_router_does_not_trust_says_so_once(
    trust: Trust, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("services.rollout.process.RETRY_SECONDS", 0.01)
    monkeypatch.setattr("services.rollout.process.ANNOUNCE_SECONDS", 60.0)
    callers = {
        "stranger": (trust.strangers["another CA's certificate"], "router: UNAVAILABLE"),
        "tokenless": (trust.tokenless["wrong token"], "router: UNAUTHENTICATED/TOKEN_MISSING"),
        "known": (trust.right, "registered as known"),
    }
    async with running_router(trust.right) as router:
        for name, (security, told) in callers.items():
            attempts: list[str] = []

            def describe(name: str = name, attempts: list[str] = attempts) -> router_pb.Engine:
                attempts.append(name)
                role = router_pb.ROLE_EPISODES
                return router_pb.Engine(engine_id=name, address="localhost:1", role=role)

            async with create_channel(router.server.address, security) as channel:
                registration = Registration(channel, describe, Waits())
                registration.start()
                await eventually(lambda told=told: told in caplog.text)
                if name == "tokenless":
                    await eventually(lambda attempts=attempts: len(attempts) > 3)
                    assert caplog.text.count(told) == 1
                await registration.close()
        async with RouterClient(router.server.address, trust.right) as client:
            assert [engine.engine_id for engine in await client.list_engines()] == ["known"]


async def eventually(check: Callable[[], bool], seconds: float = PATIENCE) -> None:
    async with asyncio.timeout(seconds):
        while not check():
            await asyncio.sleep(0.01)


async def test_a_certificate_for_another_host_is_refused_unless_that_name_is_expected(
    trust: Trust,
) -> None:
    """Ranks reach a controller over loopback whose certificate is for the name it advertises."""
    security = trust.issue("trainer", ("trainer",))
    assert security.tls is not None
    engine = grpc.aio.server()
    engine_grpc.add_EngineServiceServicer_to_server(Engine(), engine)
    address = f"127.0.0.1:{engine.add_secure_port('127.0.0.1:0', server_credentials(security.tls))}"
    await engine.start()
    answers = []
    for name in ("", "trainer"):
        async with create_channel(address, trust.right, name=name) as channel:
            stub = engine_grpc.EngineServiceStub(channel)
            answers.append(
                await answer_of(stub.Generate(engine_pb.GenerateRequest(), timeout=PATIENCE))
            )
    await engine.stop(0)
    assert answers == [UNREACHABLE, "OK"]


@pytest.mark.parametrize("host, name", [("127.0.0.1", "trainer"), ("0.0.0.0", "")])
def test_ranks_expect_the_advertised_name_on_loopback(
    trust: Trust, tmp_path: Path, host: str, name: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    server = ServerConfig(advertise="trainer:50051", security=trust.right)
    ranks = {"listen_host": host, "launch": "external"}
    values = {"model": str(tmp_path), "store": str(tmp_path), "ranks": ranks, "server": server}
    assert parse_config(TrainerConfig, values).controller_name == name


async def test_tls_without_client_certificates_still_needs_the_token(trust: Trust) -> None:
    tls = trust.right.tls
    assert tls is not None
    one_way = with_tls(trust.right, tls.model_copy(update={"client_certificates": False}))
    caller = with_tls(trust.right, TlsConfig(ca=tls.ca))
    async with running_server(security=one_way) as server:
        addresses = ((server.address, ask_service), (server.metrics_address, ask_metrics))
        for address, ask in addresses:
            assert await ask(address, caller) == "OK"
            tokenless = caller.model_copy(update={"token_file": None})
            assert (await ask(address, tokenless)).startswith("UNAUTHENTICATED")
            assert await ask(address, trust.strangers["trusts another CA"]) == UNREACHABLE


async def test_strangers_get_no_further_than_the_handshake(trust: Trust) -> None:
    async with running_server(security=trust.right) as server:
        for address, ask in (
            (server.address, ask_service),
            (server.metrics_address, ask_metrics),
        ):
            assert await ask(address, trust.right) == "OK"
            found = {name: await ask(address, caller) for name, caller in trust.strangers.items()}
            assert found == dict.fromkeys(trust.strangers, UNREACHABLE)


async def test_a_peer_that_says_nothing_stalls_no_scrape(
    trust: Trust, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.runtime.metrics.SILENT_SECONDS", 10 * PATIENCE)
    async with running_server(security=trust.right) as server:
        port = int(server.metrics_address.rpartition(":")[2])
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        answer = await asyncio.wait_for(ask_metrics(server.metrics_address, trust.right), PATIENCE)
        for peer in silent:
            peer.close()
        assert answer == "OK"


async def test_many_peers_that_say_nothing_take_no_more_threads_and_stall_no_scrape(
    trust: Trust, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.runtime.metrics.SILENT_SECONDS", 10 * PATIENCE)
    async with running_server(security=trust.right) as server:
        threads, most = threading.active_count(), metrics.MOST_CONNECTIONS
        port = int(server.metrics_address.rpartition(":")[2])
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(most + 20)]
        answer = await asyncio.wait_for(ask_metrics(server.metrics_address, trust.right), PATIENCE)
        assert answer == "OK"
        silent[0].settimeout(PATIENCE)
        assert await asyncio.to_thread(silent[0].recv, 1) == b""
        async with asyncio.timeout(PATIENCE):
            while threading.active_count() > threads + most + 4:  # of this test, some
                await asyncio.sleep(0.1)
        for peer in silent:
            peer.close()


def write_rubbish(directory: Path) -> Path:
    path = directory / "rubbish.pem"
    path.write_text("not a certificate\n")
    return path


def test_files_that_cannot_be_used_are_one_line_and_exit_code_2(
    trust: Trust,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tls, other = trust.right.tls, trust.strangers["another CA's certificate"].tls
    assert tls is not None and other is not None
    empty = tmp_path / "empty"
    empty.touch()
    both = {"cert": tls.cert, "key": tls.key}
    cases: list[tuple[dict[str, Path | None], str]] = [
        ({"token_file": tmp_path / "absent"}, "security.token_file"),
        ({"token_file": empty}, "is empty"),
        ({"tls.cert": tls.cert}, "cert and key go together"),
        ({"tls.ca": tls.ca}, "a server needs cert and key"),
        ({"tls.cert": tmp_path / "absent", "tls.key": tls.key}, "security.tls.cert"),
        ({"tls.cert": tls.cert, "tls.key": other.key}, "no certificate and its key"),
        ({f"tls.{k}": v for k, v in both.items()} | {"tls.ca": write_rubbish(tmp_path)}, "tls.ca"),
    ]
    root = logging.getLogger()  # main sets its handlers
    build_tiny_qwen3(tmp_path, 0)
    trainer = ["--model", str(tmp_path), "--store", str(tmp_path)]
    for main, needed in ((router_main, []), (trainer_main, trainer)):
        for flags, message in cases:
            security = [f"--server.security.{key}={path}" for key, path in flags.items()]
            monkeypatch.setattr(sys, "argv", ["service", *needed, *security])
            monkeypatch.setattr(root, "handlers", [])
            assert main() == 2, flags
            last = capsys.readouterr().err.strip().splitlines()[-1]
            assert message in last, flags


def test_security_comes_from_the_environment(trust: Trust, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty variables, as compose makes of unset ones, are as none."""
    tls = trust.right.tls
    assert tls is not None
    monkeypatch.setenv("SLUICE_SERVER__SECURITY__TOKEN_FILE", "")
    assert load_config(RouterConfig, []).server.security == SecurityConfig()
    monkeypatch.setenv("SLUICE_SERVER__SECURITY__TOKEN_FILE", str(trust.right.token_file))
    for name in ("ca", "cert", "key"):
        monkeypatch.setenv(f"SLUICE_SERVER__SECURITY__TLS__{name.upper()}", str(getattr(tls, name)))
    assert load_config(RouterConfig, []).server.security == trust.right
    monkeypatch.setenv("SLUICE_SERVER__SECURITY__TOKEN", "secret")
    with pytest.raises(ConfigError, match="SLUICE_SERVER__SECURITY__TOKEN"):
        load_config(RouterConfig, [])


def test_beyond_loopback_needs_tls_or_a_word(trust: Trust, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings = {"model": str(tmp_path), "store": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"host 0\.0\.0\.0 is not loopback"):
        parse_config(RouterConfig, {"server": {"host": "0.0.0.0"}})
    parse_config(RouterConfig, {"server": {"host": "0.0.0.0", "allow_insecure": True}})
    parse_config(RouterConfig, {"server": {"host": "0.0.0.0", "security": trust.right}})
    ranks = {"launch": "external", "listen_host": "0.0.0.0"}
    with pytest.raises(ConfigError, match=r"listen_host 0\.0\.0\.0 is not loopback"):
        parse_config(TrainerConfig, {**settings, "ranks": ranks})
    parse_config(TrainerConfig, {**settings, "ranks": ranks, "server": {"security": trust.right}})
