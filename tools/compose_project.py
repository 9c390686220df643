"""A docker compose project that a program brings up, looks into, hurts and takes down."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
KILL = "import os, sys; os.kill(int(sys.argv[1]), 9)"


class ComposeError(Exception):
    """Something did not come up, did not come back, or was left behind."""


def run(
    command: Sequence[str], seconds: float = 120.0, env: Mapping[str, str] | None = None
) -> bytes:
    """Standard output. Raises ComposeError with what the command said."""
    ended = subprocess.run(command, capture_output=True, timeout=seconds, env=env, check=False)
    if ended.returncode:
        said = (ended.stderr or ended.stdout).decode(errors="replace").strip()
        raise ComposeError(f"{' '.join(command)} ended with {ended.returncode}: {said[-2000:]}")
    return ended.stdout


def wait_until(what: str, check: Callable[[], T | None], seconds: float) -> T:
    """The first value of `check` that is true. Raises ComposeError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := check()):
        if time.monotonic() > deadline:
            raise ComposeError(f"waited {seconds:g} s for {what}")
        time.sleep(0.5)
    return value


@dataclass(frozen=True)
class Container:
    """What the engine knows of a container."""

    state: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.state["Name"]).removeprefix("/")

    @property
    def pid(self) -> int:
        """Of its init, on the host."""
        return int(self.state["State"]["Pid"])

    @property
    def is_healthy(self) -> bool:
        return str(self.state["State"].get("Health", {}).get("Status")) == "healthy"

    @property
    def has_ended(self) -> bool:
        return str(self.state["State"]["Status"]) == "exited"

    @property
    def exit_code(self) -> int:
        return int(self.state["State"]["ExitCode"])

    @property
    def restarts(self) -> int:
        return int(self.state["RestartCount"])

    @property
    def user(self) -> str:
        return str(self.state["Config"]["User"])

    @property
    def image(self) -> str:
        return str(self.state["Config"]["Image"])

    @property
    def restart_policy(self) -> str:
        return str(self.state["HostConfig"]["RestartPolicy"]["Name"])


@dataclass
class Project:
    """`environment` is that of the compose files; `files` may change between two calls of `up`."""

    name: str
    files: list[Path]
    environment: dict[str, str]
    killer_image: str
    log: Callable[[str], None] = field(default=print)

    def compose(self, *arguments: str, seconds: float = 300.0) -> str:
        files = [part for file in self.files for part in ("-f", str(file))]
        command = ["docker", "compose", "-p", self.name, *files, *arguments]
        return run(command, seconds, self.environment).decode()

    def up(self, seconds: float) -> float:
        """Seconds until every service was healthy."""
        start = time.monotonic()
        wait = ("--wait", "--wait-timeout", str(int(seconds)))
        self.compose("up", "-d", "--no-build", *wait, seconds=seconds + 60)
        return time.monotonic() - start

    def down(self) -> None:
        """Remove everything. Raises ComposeError where something stays."""
        self.compose("--profile", "*", "down", "-v", "--remove-orphans")
        label = f"label=com.docker.compose.project={self.name}"
        for kind in (("ps", "-a"), ("volume", "ls"), ("network", "ls")):
            if left := run(["docker", *kind, "-q", "--filter", label]):
                raise ComposeError(f"down left {kind[0]} behind: {left.decode().split()}")

    def container(self, service: str) -> Container:
        return Container(json.loads(run(["docker", "inspect", self._name_of(service)]))[0])

    def read(self, service: str, path: str) -> str:
        """A file of a service's container, running or not; "" where there is none."""
        try:
            packed = run(["docker", "cp", f"{self._name_of(service)}:{path}", "-"])
        except ComposeError:
            return ""
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            content = archive.extractfile(archive.getmembers()[0])
            return "" if content is None else content.read().decode()

    def logs(self, service: str, lines: int = 20) -> str:
        """The end of what a service's container wrote."""
        command = ["docker", "logs", "--tail", str(lines), self._name_of(service)]
        ended = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, check=False
        )
        return ended.stdout.decode(errors="replace")

    def _name_of(self, service: str) -> str:
        return f"{self.name}-{service}-1"

    def kill(self, service: str, seconds: float) -> None:
        """kill -9 its main process, as a crash would, and wait until it has recovered.

        Not `docker kill`, which the engine takes for a wish that it stay down.
        """
        before = self.container(service)
        listed = run(["docker", "top", before.name, "-eo", "pid,ppid"]).split()[2:]
        processes = zip(listed[::2], listed[1::2], strict=True)
        main = next(pid.decode() for pid, parent in processes if int(parent) == before.pid)
        flags = ("--rm", "--pid=host", "--user=0", "--network=none", "--entrypoint=python")
        run(["docker", "run", *flags, self.killer_image, "-c", KILL, main])
        start = time.monotonic()

        def is_back() -> bool:
            now = self.container(service)
            checked = "Health" in now.state["State"]
            running = now.is_healthy or (not checked and now.state["State"]["Running"])
            return now.restarts > before.restarts and bool(running)

        wait_until(f"{service} to recover", is_back, seconds)
        self.log(f"{service}: killed, back in {time.monotonic() - start:.1f} s")
