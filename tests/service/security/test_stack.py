"""Every port of a stack under mTLS and a token: the right callers work, the others do not."""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest

from examples import access, generate
from services.trainer.config import TrainerConfig
from sluice.client import RemoteError, TrainerClient
from sluice.config import parse_config
from sluice.runtime.security import SecurityConfig
from sluice.runtime.server import ServerConfig
from sluice.stack import LOOPBACK
from tests.e2e.conftest import ENVIRONMENT, Stack, wait_until
from tests.patience import PATIENCE
from tests.service.security.ports import (
    TOKEN_REFUSED,
    UNREACHABLE,
    ask_metrics,
    ask_service,
    ask_workers_port,
)
from tests.service.security.trust import Trust

Ask = Callable[[str, SecurityConfig], Awaitable[str]]


@dataclass(frozen=True)
class Port:
    name: str
    address: str
    ask: Ask
    right_answer: str = "OK"


def listening(process: psutil.Process) -> dict[int, str]:
    """Address by port."""
    sockets = process.net_connections("tcp")
    return {s.laddr.port: s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN}


def known_ports(stack: Stack) -> list[Port]:
    """Ports of every service; the trainer's controller listens on that of the ranks too."""
    ports: list[Port] = []
    for name, service in stack.services.items():
        ports.append(Port(f"{name} gRPC", service["address"], ask_service))
        ports.append(Port(f"{name} metrics", service["metrics_address"], ask_metrics))
    named = {int(port.address.rpartition(":")[2]) for port in ports}
    (workers,) = listening(psutil.Process(stack.pid("trainer"))).keys() - named
    taken = "INVALID_ARGUMENT/INVALID_FIELD"
    return [*ports, Port("trainer ranks", f"127.0.0.1:{workers}", ask_workers_port, taken)]


@pytest.fixture(scope="module")
def trained(secured: Stack, trust: Trust) -> Stack:
    """The stack, after two steps of a loop that has the right credentials."""
    training = secured.train("secured", steps=2, security=trust.right.model_dump(mode="json"))
    training.finish()
    assert [row["step"] for row in training.rows()] == [1, 2]
    return secured


async def ask_all(ports: list[Port], callers: dict[str, SecurityConfig]) -> dict[str, str]:
    """Answer by `port, caller`."""
    asked = [(port, name) for port in ports for name in callers]
    answers = await asyncio.gather(*(port.ask(port.address, callers[name]) for port, name in asked))
    return {f"{p.name}, {name}": a for (p, name), a in zip(asked, answers, strict=True)}


async def test_the_right_caller_is_served_on_every_port(trained: Stack, trust: Trust) -> None:
    ports = known_ports(trained)
    assert len(ports) == 7
    found = await ask_all(ports, {"right": trust.right})
    assert found == {f"{port.name}, right": port.right_answer for port in ports}


async def test_a_wrong_certificate_is_refused_on_every_port(trained: Stack, trust: Trust) -> None:
    found = await ask_all(known_ports(trained), trust.strangers)
    assert len(found) == 7 * 5
    assert {key: value for key, value in found.items() if value != UNREACHABLE} == {}


async def test_a_wrong_token_is_refused_on_every_port(trained: Stack, trust: Trust) -> None:
    found = await ask_all(known_ports(trained), trust.tokenless)
    assert len(found) == 7 * 2
    assert {key: value for key, value in found.items() if value != TOKEN_REFUSED} == {}


def test_nothing_listens_beyond_loopback(trained: Stack) -> None:
    """Ports of the collectives between ranks included, which torch opens."""
    root = psutil.Process(trained.process.pid)
    found = {child.pid: listening(child) for child in root.children(recursive=True)}
    assert sum(map(len, found.values())) > len(known_ports(trained))
    hosts = {host for ports in found.values() for host in ports.values()}
    assert hosts <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


async def test_the_examples_take_tls_and_a_token(
    trained: Stack, trust: Trust, capsys: pytest.CaptureFixture[str]
) -> None:
    """By their flags; without, they are refused as anybody."""
    tls = trust.right.tls
    assert tls is not None
    files = {"ca": tls.ca, "cert": tls.cert, "key": tls.key, "token-file": trust.right.token_file}
    parser = argparse.ArgumentParser()
    access.add_flags(parser)
    flags = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    security = access.security_of(parser.parse_args(flags))
    assert security == trust.right
    services = trained.run_dir / "services.json"
    await generate.main(services, "1234=", security)
    assert len(capsys.readouterr().out.splitlines()) == 4
    address = trained.services["trainer"]["metrics_address"]
    page = await asyncio.to_thread(access.read_metrics_page, address, security)
    assert "sluice_trainer_step_number" in page
    for wrong in (trust.tokenless["wrong token"], access.security_of(parser.parse_args([]))):
        with pytest.raises(RemoteError):
            await generate.main(services, "1234=", wrong)


async def test_a_loop_with_the_wrong_token_ends_in_one_line(trained: Stack, trust: Trust) -> None:
    wrong = trust.tokenless["wrong token"].model_dump(mode="json")
    training = trained.train("wrong-token", security=wrong)
    output, _ = await asyncio.to_thread(partial(training.process.communicate, timeout=PATIENCE))
    assert training.process.returncode == 2
    last = output.splitlines()[-1]
    assert last.startswith("sluice: trainer at ") and "UNAUTHENTICATED/TOKEN_MISSING_OR" in last
    assert "Traceback" not in output


async def test_a_loop_that_trusts_another_authority_says_so(trained: Stack, trust: Trust) -> None:
    wrong = trust.strangers["trusts another CA"].model_dump(mode="json")
    training = trained.train("wrong-ca", security=wrong, service_timeout_seconds=8)
    output, _ = await asyncio.to_thread(partial(training.process.communicate, timeout=PATIENCE))
    assert training.process.returncode == 2
    assert "was not ready in 8 s: UNAVAILABLE" in output and "CERTIFICATE_VERIFY" in output


async def ask_as_rank(stack: Stack, security: SecurityConfig, directory: Path) -> str:
    """What a rank process of these credentials says in the end, started by hand."""
    config = parse_config(
        TrainerConfig,
        {
            "model": str(stack.run_dir / "model"),
            "store": str(stack.run_dir / "store"),
            "server": ServerConfig(security=security),
        },
    )
    file = directory / "config.json"
    file.write_text(config.model_dump_json())
    front = known_ports(stack)[-1].address
    # Behind torch it waits for rank 1, which never comes: what it hears of the front ends it.
    with socket.create_server((LOOPBACK, 0)) as meeting:
        rank = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.trainer.rank", "--config", str(file)),
            *("--front", front),
            env={
                **ENVIRONMENT,
                "RANK": "0",
                "WORLD_SIZE": "2",
                "MASTER_ADDR": LOOPBACK,
                "MASTER_PORT": str(meeting.getsockname()[1]),
                "MASTER_LISTEN_FD": str(meeting.fileno()),
            },
            pass_fds=[meeting.fileno()],
            stderr=asyncio.subprocess.PIPE,
        )
    try:
        _, said = await asyncio.wait_for(rank.communicate(), PATIENCE)
    finally:
        if rank.returncode is None:
            rank.kill()
            await rank.wait()
    return said.decode()


async def test_a_rank_proves_itself_to_the_front(
    trained: Stack, trust: Trust, tmp_path: Path
) -> None:
    """The right one gets as far as being told that rank 0 is there already."""
    wrong_token, stranger = trust.tokenless["wrong token"], trust.strangers["expired certificate"]
    right, tokenless, strange = await asyncio.gather(
        *(
            ask_as_rank(trained, security, tmp_path_of(tmp_path, index))
            for index, security in enumerate((trust.right, wrong_token, stranger))
        )
    )
    assert "INVALID_ARGUMENT: rank: 0 is connected already" in right
    assert "UNAUTHENTICATED" in tokenless
    assert "UNAVAILABLE" in strange


def tmp_path_of(parent: Path, index: int) -> Path:
    path = parent / str(index)
    path.mkdir()
    return path


def run_waits(stack: Stack, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sluice.cli", "waits", stack.services["trainer"]["address"]]
    return subprocess.run(
        [*command, *flags], env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE
    )


def test_waits_are_listed_for_who_may_ask(trained: Stack, trust: Trust) -> None:
    tls = trust.right.tls
    assert tls is not None
    flags = [
        *("--security.tls.ca", str(tls.ca), "--security.tls.cert", str(tls.cert)),
        *("--security.tls.key", str(tls.key)),
    ]
    token = ["--security.token_file", str(trust.right.token_file)]

    def is_at_rest() -> bool:
        """No rank has been too slow just now to say that it lives."""
        allowed = run_waits(trained, *flags, *token)
        assert allowed.returncode == 0, allowed.stderr
        return allowed.stdout == "waits for nothing\n"

    wait_until(is_at_rest)
    refused = run_waits(trained, *flags)
    assert refused.returncode == 2
    assert "TOKEN_MISSING_OR_WRONG" in refused.stderr


async def test_health_needs_a_certificate_but_no_token(trained: Stack, trust: Trust) -> None:
    """What a container's health check has."""
    address, tls = trained.services["router"]["address"], trust.right.tls
    assert tls is not None
    command = [sys.executable, "-m", "sluice.runtime.healthcheck", address]
    service = "sluice.api.router.v1.RouterService"
    files = ["--ca", str(tls.ca), "--cert", str(tls.cert), "--key", str(tls.key)]
    for arguments, expected in (([service, *files], 0), ([service], 1), ([service, *files[:2]], 1)):
        checked = await asyncio.create_subprocess_exec(*command, *arguments)
        assert await asyncio.wait_for(checked.wait(), PATIENCE) == expected, arguments


async def test_the_stack_serves_on_after_all_that(trained: Stack, trust: Trust) -> None:
    async with TrainerClient(trained.services["trainer"]["address"], trust.right) as client:
        assert (await client.get()).restart_count == 0
