"""What `sluice up` does with services that die, and what is left when it dies itself."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
import yaml

from sluice.config import parse_config
from sluice.supervise import ServiceDiedError, Supervisor, UpConfig
from tests.e2e.conftest import ENVIRONMENT, wait_until


def config(run_dir, **changes) -> UpConfig:
    services = {"router": {"kind": "router"}}
    return parse_config(UpConfig, {"run_dir": run_dir, "services": services, **changes})


def known(run_dir) -> dict:
    return json.loads((run_dir / "services.json").read_text())["router"]


async def pid_after(run_dir, old: int) -> int:
    async with asyncio.timeout(60):
        while (pid := known(run_dir)["pid"]) == old:
            await asyncio.sleep(0.02)
    return pid


async def test_a_killed_service_comes_back_at_its_address(tmp_path):
    supervisor = Supervisor(config(tmp_path))
    await supervisor.start()
    watching = asyncio.create_task(supervisor.watch())
    before = known(tmp_path)
    os.kill(before["pid"], signal.SIGKILL)
    assert await pid_after(tmp_path, before["pid"]) != before["pid"]
    assert known(tmp_path)["address"] == before["address"]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await supervisor.stop()


async def test_a_service_that_dies_while_it_restarts_is_tried_again_and_given_up_at_last(tmp_path):
    supervisor = Supervisor(config(tmp_path, restarts=3))
    await supervisor.start()
    (service,) = supervisor._services
    service.config["no_such_key"] = 1  # every further start ends at once
    watching = asyncio.create_task(supervisor.watch())
    os.kill(known(tmp_path)["pid"], signal.SIGKILL)
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(60):
            await watching
    (error,) = caught.value.exceptions
    assert isinstance(error, ServiceDiedError)
    assert "too often" in str(error)
    assert "no_such_key" in str(error)
    assert service.restarts == 4
    await supervisor.stop()


def test_a_killed_supervisor_leaves_no_service_behind(tmp_path):
    path = tmp_path / "services.yaml"
    services = {"router": {"kind": "router"}}
    path.write_text(yaml.safe_dump({"run_dir": str(tmp_path), "services": services}))
    command = [sys.executable, "-m", "sluice.cli", "up", str(path)]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    wait_until(lambda: (tmp_path / "services.json").exists(), what="sluice up")
    router = psutil.Process(known(tmp_path)["pid"])
    process.kill()
    process.wait(timeout=10)
    gone, alive = psutil.wait_procs([router], timeout=10)
    assert gone and not alive
