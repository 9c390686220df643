"""How the processes of services end: in order on a signal, with an error where they are of no
more use."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from tests.service.runtime.ends import run_service
from tests.unit.trainer.stage import MODEL

SIGTERM_ONCE_OPEN = """
import os, signal
from sluice.runtime.server import Server
write = Server._write_address
def write_and_end(server):
    write(server)
    os.kill(os.getpid(), signal.SIGTERM)
Server._write_address = write_and_end
"""
TERMINAL_CLOSED = SIGTERM_ONCE_OPEN.replace("SIGTERM", "SIGHUP")
LOADS_FOREVER = """
import asyncio
from services.rollout.engine.reference.engine import ReferenceEngine
async def start(self):
    await asyncio.Event().wait()
ReferenceEngine.start = start
"""
EXPIRY_FAILS = """
from services.router.pools import Pools
def expire(self):
    raise ValueError("what nobody expected")
Pools.expire = expire
"""


def test_a_service_whose_terminal_is_closed_ends_in_order() -> None:
    code, log = run_service("services.router", before=TERMINAL_CLOSED)
    assert code == 0, log
    assert "draining" in log


@pytest.mark.parametrize(
    ("service", "arguments", "before"),
    [
        ("router", "", ""),
        ("converter", '--roots ["HERE"]', ""),
        ("trainer", "--ranks.launch external --model HERE --store HERE/store", ""),
        ("rollout", '--roles ["engine"] --store HERE', LOADS_FOREVER),
    ],
    ids=["router", "converter", "trainer", "rollout"],
)
def test_who_signals_as_soon_as_there_is_an_address_ends_the_process_in_order(
    service: str, arguments: str, before: str, tmp_path: Path
) -> None:
    """Whatever it still loads."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    file = tmp_path / "address.json"
    code, log = run_service(
        f"services.{service}",
        *("--server.address_file", str(file)),
        *arguments.replace("HERE", str(tmp_path)).split(),
        before=SIGTERM_ONCE_OPEN + before,
    )
    assert code == 0, log
    assert file.exists()


def test_a_router_that_can_expire_nothing_any_more_says_why_and_ends() -> None:
    code, log = run_service("services.router", "--tick_seconds", "0.01", before=EXPIRY_FAILS)
    assert code == 1
    assert "expiry failed: the process stops" in log
    assert "ValueError: what nobody expected" in log


OF_FEW_FILES = """
import resource, sys
from sluice.runtime.server import Server

resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

async def tell_and_end(server):
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], file=sys.stderr)

Server.run_until_signal = tell_and_end
"""


def test_a_service_may_open_as_many_files_as_the_system_lets_it() -> None:
    code, log = run_service("services.router", before=OF_FEW_FILES)
    assert code == 0, log
    assert int(log.splitlines()[-1]) == min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 65_536)
