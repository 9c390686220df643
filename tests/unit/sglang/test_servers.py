"""Servers that are started together are ended together."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.sglang import servers as sglang_servers
from services.rollout.engine.sglang.group import ServerGroup
from services.rollout.engine.sglang.servers import Launch, ServerProcess
from services.rollout.errors import EngineFailedError
from sluice.config import ConfigError, parse_config
from tests.patience import PATIENCE, told_late

# The first one that comes is healthy; the second ends once somebody has seen that.
ASKED = 'import sys\nif sys.argv[1] == "-c": sys.exit()\n'  # whether it has SGLang
ENCODER = """\
import http.server, os, pathlib, sys, time
here, port = pathlib.Path(__file__).parent, int(sys.argv[sys.argv.index("--port") + 1])
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
        (here / "seen").touch()
try:
    os.close(os.open(here / "first", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
except FileExistsError:
    deadline = time.monotonic() + 600
    while not (here / "seen").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)  # more than it takes to hear the answer
    sys.exit(3)
(here / "first").write_text(str(os.getpid()))
http.server.HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""


async def test_an_encoder_that_runs_is_ended_when_another_never_does(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\n{ASKED}{ENCODER}")
    program.chmod(0o755)
    values = {"backend": "sglang", "sglang": {"python": str(program), "encoders": 2}}
    servers = ServerGroup(parse_config(EngineConfig, values))
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(EngineFailedError, match="encoder server ended"):
            await servers.start(tmp_path, "1")
    assert (tmp_path / "seen").exists()
    assert not psutil.pid_exists(int((tmp_path / "first").read_text()))
    assert not servers.pids


async def test_a_server_that_never_answers_is_ended_in_time(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\n{ASKED}import signal\nsignal.pause()\n")
    program.chmod(0o755)
    (tmp_path / "config.json").write_text("{}")
    before = psutil.Process().children()

    async def start(seconds: float) -> None:
        values = {"python": str(program), "start_seconds": seconds}
        servers = ServerGroup(parse_config(EngineConfig, {"backend": "sglang", "sglang": values}))
        await servers.start(tmp_path, "1")

    async with asyncio.timeout(PATIENCE):
        told = await told_late(start, EngineFailedError, 0.5)
    assert re.search(r"not ready in [0-9.]+ s: it does not answer", told)
    assert set(psutil.Process().children()) <= set(before)


SERVER = """\
import http.server, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""


@pytest.mark.parametrize("turns", range(5))
async def test_who_is_called_off_while_ending_a_server_leaves_it_to_the_next(
    tmp_path: Path, turns: int
) -> None:
    """As when a process ends just when a node of its engine has gone."""
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\n{ASKED}{SERVER}")
    program.chmod(0o755)
    (tmp_path / "config.json").write_text("{}")
    values = {"backend": "sglang", "sglang": {"python": str(program)}}
    servers = ServerGroup(parse_config(EngineConfig, values))
    async with asyncio.timeout(PATIENCE):
        await servers.start(tmp_path, "1")
        (pid,) = servers.pids
        ending = asyncio.create_task(servers.kill())
        for _ in range(turns):
            await asyncio.sleep(0)
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
        await servers.stop()
    assert not psutil.pid_exists(pid)
    assert not servers.pids


def with_key(program: str, key: str) -> ServerProcess:
    command = (program, "--api-key", key, "--last")
    return ServerProcess(Launch(role="regular", url="http://127.0.0.1:9", command=command), 1.0)


async def test_a_key_is_in_a_file_of_its_user_and_gone_with_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program, told = tmp_path / "python", tmp_path / "told"
    program.write_text(
        f"#!{sys.executable}\nimport json, pathlib, sys\nfile = pathlib.Path(sys.argv[-2])\n"
        "found = [sys.argv[-1], file.read_text(), file.stat().st_mode & 0o777]\n"
        f"pathlib.Path({str(told)!r}).write_text(json.dumps([sys.argv, *found]))\n"
    )
    program.chmod(0o755)
    key = "not: 'for' \"others\""
    server = with_key(str(program), key)
    await server.spawn()
    assert await asyncio.wait_for(server.wait(), PATIENCE) == 0
    await server.kill()
    words, *found = json.loads(told.read_text())
    assert key not in words
    assert found == ["--last", json.dumps({"api-key": key}), 0o600]
    assert sorted(os.listdir(tmp_path)) == ["python", "told"]


async def test_a_server_that_cannot_be_started_leaves_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    server = with_key(str(tmp_path / "python"), "secret")
    with pytest.raises(FileNotFoundError):
        await server.spawn()
    assert not os.listdir(tmp_path)


def test_another_interpreter_without_sglang_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    """By its own path of modules, to which `environment` may add; what does not say starts."""
    named = {"python": sys.executable}
    config = parse_config(EngineConfig, {"backend": "sglang", "sglang": named})
    refused = rf"engine\.sglang\.python: {sys.executable} has no SGLang; name an interpreter"
    with pytest.raises(ConfigError, match=refused):
        ServerGroup(config)
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    found = {**named, "environment": {"PYTHONPATH": str(tmp_path)}}
    ServerGroup(parse_config(EngineConfig, {"backend": "sglang", "sglang": found}))
    other = tmp_path / "program"
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(0o755)
    ServerGroup(parse_config(EngineConfig, {"backend": "sglang", "sglang": {"python": str(other)}}))


def test_an_interpreter_that_does_not_answer_is_asked_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_servers, "PROBE_SECONDS", 0.1)
    waiting = tmp_path / "program"
    waiting.write_text("#!/bin/sh\nexec tail -f /dev/null\n")
    waiting.chmod(0o755)
    sglang = {"python": str(waiting)}
    ServerGroup(parse_config(EngineConfig, {"backend": "sglang", "sglang": sglang}))


def test_an_interpreter_without_sglang_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process's own, where none is named; one that is attached to needs none."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    config = parse_config(EngineConfig, {"backend": "sglang"})
    with pytest.raises(ConfigError, match=r"engine\.sglang\.python: .* has no SGLang; name an"):
        ServerGroup(config)
    attached = {"backend": "sglang", "sglang": {"url": "http://127.0.0.1:1"}}
    ServerGroup(parse_config(EngineConfig, attached))
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    importlib.invalidate_caches()
    ServerGroup(config)
