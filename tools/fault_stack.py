"""A stack of real services for fault injection."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from examples.demo import write_prompts
from sluice import faults
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.client import Client, RouterClient, TrainerClient
from sluice.loop.training import wait_for_trainer
from sluice.runtime.recovery import NotReadyError, wait_until_ready
from sluice.supervise import read_services
from tools.fault_network import Network

STOP_SECONDS = 60.0
START_SECONDS = 600.0  # of services on a machine with other work
SILENT_SECONDS = 20.0  # of a process that hangs: a host with other work holds one up for long, too
PARTED = ("router", "converter", "trainer", "engine-0", "engine-1", "episodes")


class NotUpError(Exception):
    """The services did not start; the message is the end of their log."""


def small_services(model: Path) -> dict[str, Any]:
    """One process of each kind."""
    return {
        "router": {"kind": "router"},
        "trainer": {"kind": "trainer", "config": _trainer(model, ranks=1)},
        "rollout": {
            "kind": "rollout",
            "config": {"tokenizer": str(model), "engine": _ENGINE, "episodes": _EPISODES},
        },
    }


def wide_services(model: Path) -> dict[str, Any]:
    """Two ranks, two engines, an episode worker of its own, and a converter."""
    engines = {
        f"engine-{index}": {
            "kind": "rollout",
            "config": {"roles": ["engine"], "engine": _ENGINE},
        }
        for index in range(2)
    }
    worker = {"roles": ["episodes"], "tokenizer": str(model), "episodes": _EPISODES}
    return {
        "router": {"kind": "router"},
        "converter": {"kind": "converter"},
        "trainer": {"kind": "trainer", "config": _trainer(model, ranks=2)},
        **engines,
        "episodes": {"kind": "rollout", "config": worker},
    }


def behind_services(
    model: Path, like: Callable[[Path], dict[str, Any]] = wide_services
) -> dict[str, Any]:
    """As others, but the trainer sends weights first and writes them behind; all versions stay."""
    services = like(model)
    services["trainer"]["config"] |= {
        "transfer": {"enabled": True, "write_behind": True, "timeout_seconds": 20.0},
        "keep_versions": 0,
    }
    return services


# Settings of the trainer, by backend. A hand-over has its own in each.
BACKENDS: Mapping[str, Mapping[str, Any]] = {
    "fsdp": {"backend": "fsdp"},
    "megatron": {"backend": "megatron", "megatron": {"tensor": 2, "dtype": "float32"}},
}


def backend_services(backend: str, model: Path) -> dict[str, Any]:
    """As wide ones, with a trainer of another backend."""
    services = wide_services(model)
    services["trainer"]["config"] |= BACKENDS[backend]
    return services


SGLANG_PYTHON = Path("build/sglang/bin/python").absolute()


def sglang_services(model: Path) -> dict[str, Any]:
    """As wide ones, with one engine, which has a real SGLang."""
    services = wide_services(model)
    del services["engine-1"]
    services["engine-0"]["config"]["engine"] = {
        "max_running": 16,
        "max_model_length": 16,
        "threads": 1,
        "backend": "sglang",
        "sglang": {"python": str(SGLANG_PYTHON), "server_args": {"enable_memory_saver": True}},
    }
    return services


_ENGINE = {"max_running": 16, "max_model_length": 16, "deterministic": True}
_EPISODES = {
    "kept_rollouts": 4,
    "user_modules": ["tools"],
    "graders": {"size": 1, "timeout_seconds": 10.0, "attempts": 4},  # one of them is stopped
}


def _trainer(model: Path, ranks: int) -> dict[str, Any]:
    return {
        "model": str(model),
        "optim": {"learning_rate": 2e-3},
        "ranks": {
            "count": ranks,
            "restart_backoff": 0.1,
            "heartbeat_seconds": 0.5,
            "silent_seconds": 2.0,
            "lost_seconds": SILENT_SECONDS,
        },
        "keep_versions": 2,
    }


@dataclass
class Stack:
    """`sluice up` in a directory, started and ended as often as a test likes.

    With a network all services are reached through its forwarders.
    """

    directory: Path
    described: Callable[[Path], dict[str, Any]]
    network: Network | None = None
    initial_checkpoint: str = ""
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _services: dict[str, Any] = field(default_factory=dict, repr=False)

    def prepare(self) -> None:
        """Build the model and the prompts."""
        self.directory.mkdir(parents=True, exist_ok=True)
        build = [sys.executable, "-m", "examples.models.tiny_qwen3", str(self.model)]
        subprocess.run(build, check=True, timeout=300, env=environment(), stderr=subprocess.DEVNULL)
        write_prompts(self.directory / "prompts.jsonl", 0)
        services = self.described(self.model)
        for name, entry in services.items():
            if self.network is not None and name in PARTED:
                server = self.network.settings(name)
                entry["config"] = {**entry.get("config", {}), "server": server}
        config = {
            "run_dir": str(self.directory),
            "services": services,
            "restarts": 1000,
            "start_timeout_seconds": START_SECONDS,
            "liveness": {
                "interval_seconds": 0.5,
                "timeout_seconds": SILENT_SECONDS / 2,
                "failures": 2,
            },
        }
        (self.directory / "services.yaml").write_text(yaml.safe_dump(config))

    @property
    def model(self) -> Path:
        return self.directory / "model"

    @property
    def faults(self) -> Path:
        return self.directory / "faults"

    def services(self) -> dict[str, Any]:
        """What services.json says, or said before the supervisor was killed."""
        with suppress(FileNotFoundError):
            self._services = json.loads((self.directory / "services.json").read_text())
        return self._services

    def orphans(self) -> list[dict[str, Any]]:
        """Processes that have no parent any more; those that are about to end get the time to."""
        deadline = time.monotonic() + STOP_SECONDS
        while found := orphans_of(self.directory, faults.VARIABLE, os.getpid()):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return found

    def start(self, seconds: float) -> None:
        """Raises NotUpError."""
        ready = self.directory / "services.json"
        ready.unlink(missing_ok=True)  # of a life that was killed
        with (self.directory / "up.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*CLI, "up", str(self.directory / "services.yaml")],
                env=environment(self.faults),
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + seconds
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise NotUpError((self.directory / "up.log").read_text()[-2000:])
            time.sleep(0.05)

    def wait_whole(self, seconds: float) -> None:
        """Until all services take work, those too that the last case has killed: else the next
        one is about fewer of them. Raises NotUpError."""
        asyncio.run(self._whole(seconds))

    async def _whole(self, seconds: float) -> None:
        services = read_services(self.directory / "services.json")
        rollouts = {services[n] for n, each in self.services().items() if each["kind"] == "rollout"}
        async with RouterClient(services["router"]) as router:

            async def registered() -> None:
                engines = await router.list_engines()
                if missing := rollouts - {e.address for e in engines if e.state in _ALIVE}:
                    raise NotReadyError(f"the router lacks {sorted(missing)}")

            for name, address in services.items():
                async with Client(address) as client:
                    await wait_until_ready(name, client.list_waits, seconds, NotUpError)
            await wait_until_ready("router", registered, seconds, NotUpError)
        async with TrainerClient(services["trainer"]) as trainer:
            await wait_for_trainer(trainer, seconds)

    def stop(self) -> None:
        """SIGINT, as Ctrl-C would."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """kill -9 of the supervisor and of every service at once."""
        assert self.process is not None
        try:
            tree = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            tree = []
        self.process.kill()
        for process in tree:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(STOP_SECONDS)
        psutil.wait_procs(tree, timeout=STOP_SECONDS)

    def cpu_seconds(self) -> float:
        """Of the supervisor and all its services so far."""
        assert self.process is not None
        root = psutil.Process(self.process.pid)
        total = 0.0
        for process in (root, *root.children(recursive=True)):
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
            total += times.children_user + times.children_system
        return total


_ALIVE = (router_pb.ENGINE_STATE_ACTIVE, router_pb.ENGINE_STATE_EMPTY)
CLI = (sys.executable, "-m", "sluice.cli")


def environment(fault_directory: Path | None = None) -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop(faults.VARIABLE, None)
    if fault_directory is not None:
        environment[faults.VARIABLE] = str(fault_directory)
    return environment


def orphans_of(directory: Path, variable: str, parent: int) -> list[dict[str, Any]]:
    """Processes of the stack in `directory` that do not descend from `parent`.

    Of the stack is whose environment has `variable` with a path in there.
    """
    family = {parent}
    with suppress(psutil.Error):
        family |= {child.pid for child in psutil.Process(parent).children(recursive=True)}
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid in family or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(variable, "").startswith(f"{directory}/"):
                found.append({"pid": process.pid, "command": " ".join(process.cmdline())})
    return found
