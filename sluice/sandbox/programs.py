"""Runs Python programs of strangers where they see, reach and leave nothing (Linux namespaces).

A program sees the interpreter with its standard library, read-only, and an empty directory of its
own. What it writes to its output comes back; nothing else does. Where the kernel grants less than
all of that, nothing is run.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from pydantic import Field

from sluice.config import Config
from sluice.sandbox import jail

JAIL = Path(jail.__file__)
START_SECONDS = 60.0  # for the isolation to stand: a limit that only a hang reaches
REMEDY = (
    "it needs Linux 5.14 or later on x86-64 or arm64 with user namespaces: sysctl "
    "user.max_user_namespaces above 0 (Debian: kernel.unprivileged_userns_clone=1; Ubuntu: "
    "kernel.apparmor_restrict_unprivileged_userns=0), in a container --security-opt "
    "seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined"
)


class SandboxLimits(Config):
    """What one program may take, with all its processes and threads."""

    seconds: float = Field(10.0, gt=0, le=3600, description="Of time, from its start.")
    cpu_seconds: int = Field(10, ge=1, le=3600, description="Of each process.")
    memory_mib: int = Field(
        512, ge=32, le=1 << 20, description="Of all together; of address space, of each."
    )
    processes: int = Field(8, ge=1, le=1024, description="Threads count too.")
    file_mib: int = Field(16, ge=1, le=1 << 20, description="For one file.")
    disk_mib: int = Field(64, ge=1, le=1 << 20, description="For all its files, in memory.")
    output_bytes: int = Field(1 << 20, ge=1, le=1 << 28)


class SandboxUnavailableError(Exception):
    """This machine does not isolate a program; the message says what was refused, and a remedy."""


class Ending(StrEnum):
    """How a program ended."""

    EXIT = "exit"
    SIGNAL = "signal"
    TIME = "time"
    MEMORY = "memory"
    OUTPUT = "output"


@dataclass(frozen=True)
class ProgramOutcome:
    """What a program wrote, and how it ended: an exit status, or the number of a signal."""

    ending: Ending
    code: int
    output: bytes


def run_program(
    files: Mapping[str, str], arguments: Sequence[str], given: str, limits: SandboxLimits
) -> ProgramOutcome:
    """Runs `python arguments` beside `files`, with `given` as its input, and ends all it started.

    Blocks; call it in a thread that lives until then: the program dies with its thread. Raises
    SandboxUnavailableError where the kernel refuses a part of the isolation.
    """
    if sys.platform != "linux":
        raise SandboxUnavailableError(f"{sys.platform} has no namespaces; {REMEDY}")
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    job = {
        "command": [python, "-I", "-S", "-B", *arguments],
        "files": dict(files),
        "input": given,
        "visible": _visible(python),
        "hidden": ["site-packages", "dist-packages", "python3/dist-packages"],
        "limits": limits.model_dump(),
    }
    hears, tells = os.pipe()
    with _as_file(json.dumps(job).encode()) as source, os.fdopen(hears, "rb") as status:
        try:
            keeper = subprocess.Popen(
                [python, "-I", "-S", "-B", str(JAIL), str(os.getpid()), str(tells)],
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={},
                pass_fds=(tells,),
                start_new_session=True,
            )
        finally:
            os.close(tells)
        with keeper:
            try:
                return _follow(keeper, status.fileno(), limits)
            finally:
                keeper.kill()


def check_sandbox() -> None:
    """Runs a program that tries the walls. Raises SandboxUnavailableError unless all stand."""
    limits = SandboxLimits(seconds=START_SECONDS, processes=2)
    outcome = run_program({"probe.py": _PROBE}, ["probe.py"], "", limits)
    if outcome.output != b"closed\n":
        told = outcome.output.decode(errors="replace").strip() or f"{outcome.ending} {outcome.code}"
        raise SandboxUnavailableError(f"a program is not kept in: {told}; {REMEDY}")


_PROBE = """
import os, signal, socket
open_walls = []
try:
    socket.socket()
    open_walls.append("sockets")
except PermissionError:
    pass
for path in ("/proc/1", "/etc/passwd", "/home", "/var"):
    if os.path.exists(path):
        open_walls.append(path)
try:
    open("/probe", "w")
    open_walls.append("writing")
except OSError:
    pass
if len(os.listdir("/tmp")) != 1 or os.getpid() > 9 or os.getuid() == 0:
    open_walls.append("processes and users")
children = []
try:
    for _ in range(9):
        child = os.fork()
        if not child:
            signal.pause()
        children.append(child)
    open_walls.append("the number of processes")
except OSError:
    pass
print(", ".join(open_walls) or "closed", flush=True)
"""


def _as_file(data: bytes) -> IO[bytes]:
    """A file, not a pipe: a job may be larger than a pipe takes while nobody reads."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(data)
    file.seek(0)
    return file


def _visible(python: str) -> list[str]:
    """The interpreter, its standard library and shared libraries; not what is installed beside."""
    bases = {"installed_base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    standard = [sysconfig.get_path(name, vars=bases) for name in ("stdlib", "platstdlib")]
    shared = Path(sys.base_prefix, "lib")
    libraries = [str(path) for path in shared.glob("libpython*")]
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
    wanted = [python, *standard, *libraries, *system, "/dev/null", "/dev/urandom"]
    return [path for path in dict.fromkeys(wanted) if Path(path).exists()]


def _follow(keeper: subprocess.Popen[bytes], status: int, limits: SandboxLimits) -> ProgramOutcome:
    """Reads until the program has ended, with all that it started, or has had its share."""
    assert keeper.stdout is not None
    output, told = bytearray(), bytearray()
    deadline, started = time.monotonic() + START_SECONDS, False
    with selectors.DefaultSelector() as selector:
        selector.register(keeper.stdout, selectors.EVENT_READ, output)
        selector.register(status, selectors.EVENT_READ, told)
        while selector.get_map():
            left = deadline - time.monotonic()
            events = selector.select(max(left, 0))
            if not events and left <= 0:
                if not started:
                    raise SandboxUnavailableError(f"not set up in {START_SECONDS:g} s; {REMEDY}")
                return ProgramOutcome(Ending.TIME, 0, bytes(output))
            for key, _ in events:
                if data := os.read(key.fd, 65536):
                    key.data.extend(data)
                else:
                    selector.unregister(key.fileobj)
            if len(output) > limits.output_bytes:
                return ProgramOutcome(Ending.OUTPUT, 0, bytes(output[: limits.output_bytes]))
            if not started and b"\n" in told:
                started = True
                deadline = time.monotonic() + limits.seconds
            if started and time.monotonic() > deadline:  # also one that writes on and on
                return ProgramOutcome(Ending.TIME, 0, bytes(output))
    values: dict[str, Any] = {}
    for line in told.splitlines():
        values.update(json.loads(line))
    if "failed" in values or not started:
        raise SandboxUnavailableError(f"{values.get('failed', 'no isolation')}; {REMEDY}")
    if "memory" in values:
        return ProgramOutcome(Ending.MEMORY, 0, bytes(output))
    if "exit" not in values:  # killed from outside, for want of memory say
        return ProgramOutcome(Ending.SIGNAL, 9, bytes(output))
    code = values["exit"]
    if code == -signal.SIGXCPU:
        return ProgramOutcome(Ending.TIME, 0, bytes(output))
    return ProgramOutcome(Ending.EXIT if code >= 0 else Ending.SIGNAL, abs(code), bytes(output))
