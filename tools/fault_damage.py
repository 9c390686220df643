"""What is done to a stack from outside: signals, damaged files, full and read-only disks."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from services.rollout.environments.isolation import WORKER_MODULE
from sluice.durable import replace_file
from sluice.loop.ledger import Ledger
from sluice.samples.blob_store import read_blob
from sluice.samples.blobs import BlobNotFoundError
from tools.fault_cases import Disturbance
from tools.fault_network import Network, part_processes
from tools.fault_stack import Stack

KILLS_IN_A_ROW = 5  # more than a trainer starts its ranks again
PAIR = re.compile(r"(\w+?(?:-\d)?)-(\w+(?:-\d)?)")  # engine-0-router
NO_GROWTH = 1  # byte that a file may have on a full disk


@dataclass
class Scene:
    """Where a disturbance takes place."""

    stack: Stack
    run_dir: Path
    loop: int  # process id
    network: Network | None = None

    @property
    def store(self) -> Path:
        return self.stack.directory / "store"

    def process_ids(self, target: str) -> list[int]:
        """Of a service, a rank, an environment or its keeper, the supervisor, the loop, or all.

        Those that live.
        """
        services = self.stack.services()
        pids = {name: entry["pid"] for name, entry in services.items()}
        pids |= _ranks(pids["trainer"]) | {"loop": self.loop}
        for entry in services.values():
            if entry["kind"] == "rollout":
                pids |= _environment(entry["pid"])
        if self.stack.process is not None:
            pids["supervisor"] = self.stack.process.pid
        if target == "all":
            return list(pids.values())
        return [pids[target]] if target in pids else []


def _ranks(trainer: int) -> dict[str, int]:
    found = {}
    with suppress(psutil.Error):
        for child in psutil.Process(trainer).children(recursive=True):
            with suppress(psutil.Error):
                rank = child.environ().get("RANK")
                if rank is not None and "services.trainer.rank" in child.cmdline():
                    found[f"rank{rank}"] = child.pid
    return found


def _environment(worker: int) -> dict[str, int]:
    """The process of a grader, and the one that ends it and all that it starts."""
    found = {}
    with suppress(psutil.Error):
        for keeper in psutil.Process(worker).children():
            with suppress(psutil.Error, IndexError):
                if WORKER_MODULE in keeper.cmdline():
                    found["keeper"] = keeper.pid
                    found["environment"] = keeper.children()[0].pid
    return found


def _newest(directory: Path, pattern: str) -> list[Path]:
    return sorted(directory.glob(pattern))[-1:]


def _blobs(scene: Scene, state: str) -> list[Path]:
    """Of the groups of a state; of consumed ones those that the last step took.

    Each gets a file of its own, as one that was written alone has, so that it alone is damaged.
    """
    ledger = Ledger(scene.run_dir / "ledger.sqlite")
    try:
        groups = [group for group in ledger.groups(state) if group.blob is not None]
        last = max((group.consumed_step or 0 for group in groups), default=0)
        blobs = [g.blob for g in groups if g.blob and (g.consumed_step or 0) == last]
    finally:
        ledger.close()
    folder, found = scene.store / "blobs", []
    for blob in blobs:
        path = folder / blob.digest
        with suppress(BlobNotFoundError):
            replace_file(path, read_blob(scene.store, blob), temporary=folder / "tmp")
            found.append(path)
    return found


def _of_version(pattern: str) -> Callable[[Scene], list[Path]]:
    def find(scene: Scene) -> list[Path]:
        (version,) = _newest(scene.store / "weights" / "versions", "*")
        return sorted(version.glob(pattern))

    return find


def _of_checkpoint(pattern: str) -> Callable[[Scene], list[Path]]:
    """Of the trainer checkpoint that the newest run checkpoint names."""

    def find(scene: Scene) -> list[Path]:
        (newest,) = FILES["run checkpoint"](scene)
        checkpoint = json.loads(newest.read_text())["checkpoint"]
        return sorted((scene.store / checkpoint).glob(pattern))

    return find


FILES: Mapping[str, Callable[[Scene], list[Path]]] = {
    "ledger": lambda scene: [scene.run_dir / "ledger.sqlite"],
    "ledger log": lambda scene: [scene.run_dir / "ledger.sqlite-wal"],
    "run checkpoint": lambda scene: _newest(scene.run_dir / "cuts", "*.json"),
    "prompts": lambda scene: [scene.stack.directory / "prompts.jsonl"],
    "metrics": lambda scene: [scene.run_dir / "metrics.jsonl"],
    "trace": lambda scene: _newest(scene.run_dir / "traces", "*"),
    "blobs consumed": lambda scene: _blobs(scene, "consumed"),
    "blobs generated": lambda scene: _blobs(scene, "generated"),
    "weight shard": _of_version("model-*.safetensors"),
    "weight manifest": _of_version("manifest.json"),
    "weight config": _of_version("config.json"),
    "policy": _of_checkpoint("policy.safetensors"),
    "optimizer": _of_checkpoint("optimizer.safetensors"),
    "random state": _of_checkpoint("random-*.safetensors"),
    "checkpoint record": _of_checkpoint("checkpoint.json"),
    "journals": lambda scene: sorted((scene.store / "rollouts").iterdir()),
    "blob pins": lambda scene: sorted((scene.store / "blob_pins").glob("owner.*")),
    "ports": lambda scene: [scene.stack.directory / "services" / "ports.json"],
    "addresses": lambda scene: sorted((scene.stack.directory / "services").glob("*.address.json")),
    "service settings": lambda scene: sorted((scene.stack.directory / "services").glob("*.yaml")),
    "services.json": lambda scene: [scene.stack.directory / "services.json"],
}
DIRECTORIES: Mapping[str, Callable[[Scene], Path]] = {
    "weights": lambda scene: scene.store / "weights",
    "checkpoints": lambda scene: scene.store / "checkpoints",
    "blobs": lambda scene: scene.store / "blobs",
    "blob_pins": lambda scene: scene.store / "blob_pins",
    "rollouts": lambda scene: scene.store / "rollouts",
    "store": lambda scene: scene.store,
    "run": lambda scene: scene.run_dir,
    "up": lambda scene: scene.stack.directory / "services",
}


def flipped(data: bytes) -> bytes:
    """With one bit changed in the middle."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :] if data else data


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


class NothingToDisturbError(Exception):
    """The case shows nothing: what it is about is not there."""


@dataclass
class Disturbing:
    """A disturbance under way: `begin`, `tick` while the run goes on, `undo`, `finish`."""

    disturbance: Disturbance
    scene: Scene
    began: float = field(default_factory=time.monotonic)
    _undo: list[Callable[[], object]] = field(default_factory=list)
    _replaced: dict[str, int] = field(default_factory=dict)  # who has to come back, as who it was
    _kills: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """Raises NothingToDisturbError."""
        disturbance = self.disturbance
        {
            "kill": lambda: self._kill(disturbance.target),
            "kill again": lambda: None,
            "stop": self._stop,
            "pause": self._pause,
            "flip": lambda: self._damage(flipped),
            "truncate": lambda: self._damage(truncated),
            "full": self._fill,
            "read-only": self._protect,
            "stall": lambda: self._part("stall"),
            "cut": lambda: self._part("cut"),
        }[disturbance.kind]()
        for process in disturbance.killed:
            self._kill(process)

    def go_on(self, seconds: float) -> None:
        """What has to follow at once, while the loop goes on. Raises NotUpError."""
        process = self.scene.stack.process
        assert process is not None
        if "supervisor" in self._replaced:
            process.wait(seconds)
            self.scene.stack.start(seconds)  # as systemd would
            del self._replaced["supervisor"]

    @property
    def is_damage(self) -> bool:
        return self.disturbance.kind in ("flip", "truncate")

    @property
    def may_end_run(self) -> bool:
        """Whether a run may end with a line; lost processes and connections it has to outlive."""
        return self.is_damage or self.disturbance.kind in ("full", "read-only")

    def tick(self) -> None:
        """To be called often."""
        is_over = time.monotonic() - self.began > self.disturbance.seconds
        if is_over and not self.is_damage:
            self.undo()
        if self.disturbance.kind == "kill again" and len(self._kills) < KILLS_IN_A_ROW:
            for pid in self.scene.process_ids(self.disturbance.target):
                if pid not in self._kills:
                    self._kills.append(pid)
                    _send(pid, signal.SIGKILL)

    def undo(self) -> None:
        """Idempotent."""
        while self._undo:
            self._undo.pop()()

    def finish(self, seconds: float) -> str:
        """After the run: all that was lost has come back; why not, otherwise."""
        self.undo()
        deadline = time.monotonic() + seconds
        for name, old in self._replaced.items():
            while (found := self.scene.process_ids(name)) in ([], [old]):
                if time.monotonic() > deadline:
                    return f"{name} was not replaced"
                time.sleep(0.05)
            if found and not psutil.pid_exists(found[0]):
                return f"{name} is gone again"
        return ""

    def _pids(self, target: str) -> list[int]:
        if not (found := self.scene.process_ids(target)):
            raise NothingToDisturbError(f"there is no process {target}")
        return found

    def _kill(self, target: str) -> None:
        for pid in self._pids(target):
            if target != "loop":
                self._replaced[target] = pid
            _send(pid, signal.SIGKILL)

    def _stop(self) -> None:
        for pid in self._pids(self.disturbance.target):
            self._replaced[self.disturbance.target] = pid
            _send(pid, signal.SIGSTOP)

    def _pause(self) -> None:
        for pid in self._pids(self.disturbance.target):
            _send(pid, signal.SIGSTOP)
            self._undo.append(partial(_send, pid, signal.SIGCONT))

    def _damage(self, change: Callable[[bytes], bytes]) -> None:
        contents = {}
        for path in FILES[self.disturbance.target](self.scene):
            with suppress(FileNotFoundError, IsADirectoryError):  # its owner removed it
                contents[path] = path.read_bytes()
        if not contents:
            raise NothingToDisturbError(f"there is no file of {self.disturbance.target}")
        for path, data in contents.items():
            path.write_bytes(change(data))
            self._undo.append(partial(_restore, path, change(data), data))

    def _fill(self) -> None:
        for pid in self._pids(self.disturbance.target):
            if pid == os.getpid():
                continue
            soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            _limit_files(pid, NO_GROWTH, hard)
            self._undo.append(partial(_limit_files, pid, soft, hard))

    def _protect(self) -> None:
        path = str(DIRECTORIES[self.disturbance.target](self.scene))
        aside = tempfile.mkdtemp()  # what is open to be written could not become read-only
        self._undo.append(partial(os.rmdir, aside))
        _run("mount", "--bind", path, aside)
        self._undo.append(lambda: _run("umount", "--lazy", aside))
        _run("mount", "-o", "remount,bind,ro", aside)
        _run("mount", "--bind", aside, path)
        self._undo.append(lambda: _run("umount", "--lazy", path))

    def _part(self, how: str) -> None:
        network = self.scene.network
        assert network is not None, "the stack has forwarders"
        pair = PAIR.fullmatch(self.disturbance.target)
        assert pair is not None, self.disturbance.target
        client, server = pair.groups()
        (pid,) = self._pids(client)
        if not client.startswith("rank"):
            self._undo.append(network.part(pid, server, how))
            return
        (other,) = self._pids(server)
        if (undo := part_processes(pid, other, how)) is None:
            raise NothingToDisturbError(f"{client} and {server} have no connection")
        self._undo.append(undo)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _limit_files(pid: int, soft: int, hard: int) -> None:
    with suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


def _restore(path: Path, damaged: bytes, data: bytes) -> None:
    """Unless somebody has written it anew, or removed it."""
    if path.is_file() and path.read_bytes() == damaged:
        path.write_bytes(data)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=60)
