"""A process that is stopped: who waits for it says so."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from sluice.config import parse_config
from sluice.loop.status import StatusConfig, read_status
from sluice.stack import UpConfig
from sluice.starting import read_starting
from sluice.supervise import Supervisor
from tests.e2e.conftest import ENVIRONMENT, Stack, wait_until
from tests.patience import PATIENCE
from tests.unit.trainer.stage import MODEL


def waits_of(target: str | Path) -> str:
    """What `sluice waits` prints."""
    command = [sys.executable, "-m", "sluice.cli", "waits", str(target)]
    environment = {**ENVIRONMENT, "COLUMNS": "300"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("service", "call"), [("trainer", "TrainerService."), ("rollout", "Service.")]
)
def test_the_loop_names_the_service_that_it_waits_for(stack: Stack, service: str, call: str):
    training = stack.train(f"waits-for-{service}", stops_at=("consumed", 2))
    address = stack.services[service]["address"]
    with ExitStack() as stopping:
        with training.held():
            stopping.enter_context(stopped(stack.pid(service)))
        listed = wait_until(
            lambda: next(
                (line for line in waits_of(training.run_dir).splitlines() if address in line), ""
            )
        )
        assert call in listed
        further = wait_until(
            lambda: [x for x in waits_of(training.run_dir).splitlines() if "└" in x]
        )
        assert address in further[0] and "it is stopped, or cut off" in further[0]
    training.finish()
    assert not (training.run_dir / "loop.address.json").exists()


def test_the_loop_shows_what_keeps_whom_it_waits_for(stack: Stack):
    """A rank is stopped: its trainer answers, and what is asked of the run tells of the rank."""
    training = stack.train("waits-for-a-rank", stops_at=("consumed", 2))
    with ExitStack() as stopping:
        with training.held():
            for child in psutil.Process(stack.pid("trainer")).children(recursive=True):
                stopping.enter_context(stopped(child.pid))
        told = wait_until(
            lambda: [x for x in waits_of(training.run_dir).splitlines() if "on all ranks" in x]
        )
        assert "└" in told[0] and "rank 0" in told[0]
    training.finish()


def test_a_run_that_waits_to_go_on_shows_the_step_that_it_goes_back_to(stack: Stack):
    """It was at step 0 for as long as a trainer took to load its model."""
    stack.train("goes-on", steps=2).finish()
    with stopped(stack.pid("trainer")):
        training = stack.train("goes-on", steps=3, resume=True)
        file = training.run_dir / "loop.address.json"
        wait_until(file.exists, what="the loop's port")
        address = json.loads(file.read_text())["metrics_address"]

        def shown() -> str:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE) as answer:
                page = answer.read().decode()
            return next(line for line in page.splitlines() if line.startswith("sluice_loop_step "))

        wait_until(lambda: shown() == "sluice_loop_step 2.0", what="the step")
    training.finish()


def test_a_rollout_process_names_the_router(stack: Stack):
    with stopped(stack.pid("router")):
        wait_until(lambda: "registration" in waits_of(stack.services["rollout"]["address"]))
    wait_until(lambda: "nothing" in waits_of(stack.services["rollout"]["address"]))


async def test_who_looks_at_a_start_sees_whom_it_waits_for(tmp_path: Path):
    """From its first second: a user who waits for a model to load asked in vain."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    external = {"model": str(tmp_path), "ranks": {"launch": "external"}}  # ranks that never come
    services = {"router": {"kind": "router"}, "trainer": {"kind": "trainer", "config": external}}
    up = parse_config(UpConfig, {"run_dir": tmp_path, "services": services})
    starting = asyncio.create_task(Supervisor(up).start())
    await asyncio.sleep(0)  # it has begun
    try:
        async with asyncio.timeout(PATIENCE):
            while "no rank" not in (told := await asyncio.to_thread(waits_of, tmp_path)):
                assert "start of trainer" in told
                assert not starting.done()
        assert "start of router" not in told, "it is up"
        named = f"{tmp_path}/services.json#trainer"
        assert "rank 0" in await asyncio.to_thread(waits_of, named)
        found = await read_status(str(tmp_path), parse_config(StatusConfig, {}))
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
    by_name = {service["name"]: service for service in found["services"]}
    assert {name: each["health"] for name, each in by_name.items()} == {
        "router": "serving",
        "trainer": "starting",
    }
    assert read_starting(tmp_path) == []


def test_a_run_tells_of_the_start_of_services_in_another_directory(tmp_path: Path):
    """Nothing is in its own yet that would name theirs."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    external = {"model": str(tmp_path), "ranks": {"launch": "external"}}  # ranks that never come
    services = {"router": {"kind": "router"}, "trainer": {"kind": "trainer", "config": external}}
    run_dir, up = tmp_path / "run", {"run_dir": str(tmp_path / "services"), "services": services}
    run = {"run_dir": str(run_dir), "services": str(tmp_path / "services/services.json")}
    run |= {"prompts": {"index_count": 1}, "environment": {"name": "prompts"}}
    run |= {"sampling": {"max_new_tokens": 1}, "algorithm": {"loss": {"name": "reinforce"}}}
    for name, settings in (("run", run), ("up", up)):
        (tmp_path / f"{name}.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "sluice.cli", "train", str(tmp_path / "run.yaml")]
    log = (tmp_path / "log").open("wb")
    training = subprocess.Popen(
        [*command, "--up", str(tmp_path / "up.yaml")], env=ENVIRONMENT, stdout=log, stderr=log
    )
    try:
        wait_until(lambda: read_starting(run_dir) or training.poll() is not None)
        assert "start of trainer" in waits_of(run_dir)
    finally:
        training.terminate()
        training.wait(PATIENCE)
        log.close()
    assert read_starting(run_dir) == []
    assert not (run_dir / "services").exists()


def test_a_run_directory_without_a_loop_is_refused_in_a_line(tmp_path: Path):
    command = [sys.executable, "-m", "sluice.cli", "waits", str(tmp_path)]
    for content in (None, "", "[]", json.dumps({"pid": 1})):
        if content is not None:
            (tmp_path / "loop.address.json").write_text(content)
        done = subprocess.run(
            command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert "no loop is at work" in done.stderr
