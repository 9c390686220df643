"""`sluice up` with an engine of two nodes: what dies or falls silent is started again whole."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from sluice.client import EngineClient, RemoteError
from sluice.config import ConfigError, parse_config
from sluice.stack import UpConfig
from sluice.supervise import Supervisor
from tests.patience import PATIENCE
from tests.service.trainer.harness import process_exists
from tests.sglang_stand_in import expected, write_program
from tests.unit.sglang.test_weights import write_model

PROMPT = [2, 7, 1, 8]


def settings(tmp_path: Path, **sglang: Any) -> UpConfig:
    model = tmp_path / "model"
    engine = {
        "backend": "sglang",
        "model": str(model),
        "max_model_length": 512,
        "sglang": {
            "python": str(write_program(tmp_path)),
            "nnodes": 2,
            "server_args": {"tp_size": 2},
            "silent_seconds": 5,
            "backoff_seconds": 0.1,
            "stop_seconds": 0.5,
            "environment": {"STAND_IN_SECONDS": "0.05"},
            **sglang,
        },
    }
    rollout = {"kind": "rollout", "config": {"roles": ["engine"], "engine": engine}}
    services = {"router": {"kind": "router"}, "rollout": rollout}
    liveness = {"interval_seconds": 1, "timeout_seconds": 10, "failures": 2}
    values = {"run_dir": tmp_path / "run", "services": services, "liveness": liveness}
    return parse_config(UpConfig, values)


def known(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "services.json").read_text()))


def servers(run_dir: Path) -> set[int]:
    """Processes of SGLang below the services."""
    found = set()
    for service in known(run_dir).values():
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(service["pid"]).children(recursive=True):
                if any(word.endswith("sglang_stand_in.py") for word in child.cmdline()):
                    found.add(child.pid)
    return found


class Asking:
    """Asks for the same completion over and over, whatever happens; keeps what is answered."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.answers: list[list[int]] = []
        self.failures: list[str] = []

    async def keep(self) -> None:
        async with EngineClient(self._address) as client:
            while True:
                try:
                    (found,) = await client.generate(PROMPT, max_new_tokens=8)
                    self.answers.append(list(found.token_ids))
                except RemoteError as error:
                    self.failures.append(error.reason)
                    await asyncio.sleep(0.1)

    async def until_answered(self) -> None:
        """Waits until a request has been answered that began after this."""
        count = len(self.answers)
        async with asyncio.timeout(PATIENCE):
            while len(self.answers) < count + 2:
                await asyncio.sleep(0.05)


async def test_an_engine_of_two_nodes_outlives_each_of_its_processes(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    config = settings(tmp_path)
    supervisor = Supervisor(config)
    await supervisor.start()
    watching = asyncio.create_task(supervisor.watch())
    run_dir = config.run_dir
    try:
        assert sorted(known(run_dir)) == ["rollout", "rollout-node1", "router"]
        asking = Asking(known(run_dir)["router"]["address"])
        keeping = asyncio.create_task(asking.keep())
        await asking.until_answered()
        assert len(servers(run_dir)) == 2
        for name, number in (
            ("rollout-node1", signal.SIGKILL),
            ("rollout", signal.SIGKILL),
            ("rollout-node1", signal.SIGSTOP),
        ):
            before = servers(run_dir)
            os.kill(known(run_dir)[name]["pid"], number)
            async with asyncio.timeout(PATIENCE):
                while len(now := servers(run_dir)) < 2 or now & before:
                    await asyncio.sleep(0.1)
            assert not any(map(process_exists, before))
            await asking.until_answered()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        assert all(answer == expected(PROMPT, 8, model) for answer in asking.answers)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await supervisor.stop()
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in f"{p.info}"]


@pytest.mark.parametrize("value", [0, -1, "two", True, 5000, 1.5, float("nan")])
def test_a_number_of_nodes_that_is_none_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(ConfigError, match=r"services\.rollout.*nnodes"):
        settings(tmp_path, nnodes=value)
