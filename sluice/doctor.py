"""`sluice doctor`: what this machine has for a run, each finding with its remedy."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from pydantic import Field

from sluice import platform
from sluice.address import join_address, plain_host
from sluice.config import ENV_PREFIX, RESERVED_ENV, ProcessConfig, load_config
from sluice.finding import OK, WARNING, WRONG, Finding, UnfitError, show
from sluice.operations import OPERATIONS, chosen
from sluice.platform import PlatformError

DOCTOR_USAGE = "sluice doctor [--store DIR] [--port N] ..."
OPEN_PORTS = (
    (
        "`sluice doctor`, and `sluice check`, for a moment",
        "`--host` (loopback), `--port` or a free one; ports that services name",
        "nothing",
    ),
)
LEAST_FILES = 4096
LEAST_DISK_BYTES = 10 << 30
LEAST_MEMORY_BYTES = 2 << 30
CLOCK_SECONDS = 2.0


class DoctorConfig(ProcessConfig):
    """What `sluice doctor` looks at."""

    foreign_keys = ("security",)  # it calls nobody

    store: Path = Field(Path("."), description="Where a run would keep its store.")
    host: str = Field("127.0.0.1", description="Where services would listen.")
    port: int = Field(0, ge=0, le=65535, description="That a service is to have; 0 is any.")


async def doctor(arguments: Sequence[str]) -> None:
    """Print findings, a line each. Raises UnfitError if one is wrong."""
    config = load_config(DoctorConfig, list(arguments), DOCTOR_USAGE)
    wrong = show(examine(config))
    if wrong:
        raise UnfitError(f"doctor: not fit for a run: {', '.join(wrong)}")


def examine(config: DoctorConfig) -> Iterator[Finding]:
    """Findings in an order in which they can be mended."""
    yield _python()
    yield from _packages()
    yield _environment()
    yield _device()
    yield _memory()
    yield _open_files()
    yield look_at_port(config.host, config.port)
    yield from look_at_store(config.store)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", OK, f"{version}, {sys.executable}")


def _packages() -> Iterator[Finding]:
    """Of the package itself, then of the extra that local trainers and engines need."""
    try:
        required = metadata.requires("sluice") or []
        version = metadata.version("sluice")
    except metadata.PackageNotFoundError:
        yield Finding("sluice", WARNING, "is not installed as a package", "pip install sluice")
        return
    yield Finding("sluice", OK, version)
    for extra, state in (("", WRONG), ("reference", WARNING)):
        problems = [problem for text in required if (problem := _unmet(text, extra))]
        name = extra or "packages"
        what = "sluice" if not extra else f"'sluice[{extra}]'"
        if problems:
            yield Finding(name, state, "; ".join(problems), f"pip install --upgrade {what}")
        else:
            yield Finding(name, OK, "all requirements are met")


def _unmet(text: str, extra: str) -> str:
    """What is wrong with a requirement; empty if it is met, or is none of `extra`."""
    requirement = Requirement(text)
    of_extra = "extra ==" in str(requirement.marker or "")
    if of_extra != bool(extra):
        return ""
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
        return ""
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement.name} is missing"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name} {version} is not {requirement.specifier}"
    return ""


def _environment() -> Finding:
    """Variables that every process would read, or refuse."""
    found = [n for n in os.environ if n.startswith(ENV_PREFIX) and n not in RESERVED_ENV]
    if found:
        names = ", ".join(sorted(found))
        return Finding(
            "environment",
            WARNING,
            f"{names}: settings of every command that knows them, and an error for all others",
            "unset what is not meant for all",
        )
    return Finding("environment", OK, "no settings in variables")


def _device() -> Finding:
    if metadata_missing("torch"):
        return Finding("device", WARNING, "no torch: a router and a loop alone can run here")
    try:
        found = platform.current()
        kind = found.device_type
        described = ", ".join(f"{name} {value}" for name, value in found.describe().items())
        running = ", ".join(f"{name} by {chosen(name, kind)}" for name in OPERATIONS)
    except PlatformError as error:
        return Finding("device", WRONG, str(error), "see docs/accelerators.md")
    return Finding("device", OK, f"{kind}: {described}; {running}")


def metadata_missing(name: str) -> bool:
    """Whether a package is not installed."""
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return True
    return False


def _memory() -> Finding:
    free = psutil.virtual_memory().available
    told = f"{free / 2**30:.1f} GiB free, {os.cpu_count()} cores"
    if free < LEAST_MEMORY_BYTES:
        return Finding("memory", WARNING, told, "end other programs; the demo takes 2 GiB")
    return Finding("memory", OK, told)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < LEAST_FILES:
        return Finding(
            "open files", WARNING, f"at most {soft}", f"ulimit -n {min(hard, 65536)} before `up`"
        )
    return Finding("open files", OK, f"at most {soft}")


def look_at_port(host: str, port: int) -> Finding:
    """Whether a server can be there; port 0 is any."""
    host = plain_host(host)
    name = join_address(host, port) if port else host
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with socket.socket(found[0][0]) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(found[0][4])
            server.listen()
            with socket.create_connection(server.getsockname()[:2], timeout=5):
                pass
    except (OSError, UnicodeError) as error:
        return Finding(
            "ports", WRONG, f"{name}: {error}", "choose another port or host (server.port, .host)"
        )
    return Finding("ports", OK, f"{name} can be listened on, and reached")


def look_at_store(store: Path) -> Iterator[Finding]:
    """What a store does with files: whole writes, renames, locks, links; disk and clock."""
    if not os.path.isdir(store):  # false for names that cannot be, too
        remedy = "make it, or give another --store"
        yield Finding("store", WRONG, f"{str(store)[:200]} is no directory", remedy)
        return
    try:
        with tempfile.TemporaryDirectory(prefix=".sluice-doctor-", dir=store) as folder:
            yield from _store_files(store, Path(folder))
    except OSError as error:
        yield Finding(
            "store",
            WRONG,
            f"{store.absolute()}: {error.strerror or error}",
            "give rights to write there, or another --store",
        )
        return
    free = shutil.disk_usage(store).free
    told = f"{free / 2**30:.1f} GiB free"
    if free < LEAST_DISK_BYTES:
        yield Finding("disk", WARNING, told, "weights and checkpoints of a step must fit in twice")
    else:
        yield Finding("disk", OK, told)


def _store_files(store: Path, folder: Path) -> Iterator[Finding]:
    import fcntl

    first, second = folder / "a", folder / "b"
    begun = time.time()
    with first.open("wb") as file:
        file.write(b"x" * 4096)
        file.flush()
        os.fsync(file.fileno())
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    seconds = time.time() - begun
    first.replace(second)
    if second.read_bytes() != b"x" * 4096:
        raise OSError(0, "what was written is not what is read")
    told = f"{store.absolute()}: files are written, renamed and locked; a sync took {seconds:.3f} s"
    slow = seconds > 1
    yield Finding("store", WARNING if slow else OK, told, "a faster disk: each group is synced")
    apart = second.stat().st_mtime - begun
    if not -CLOCK_SECONDS < apart < seconds + CLOCK_SECONDS:
        yield Finding(
            "clock",
            WRONG,
            f"the store's is {apart:+.1f} s from this machine's",
            "let both follow NTP: blobs are collected by their age",
        )
    else:
        yield Finding("clock", OK, f"the store's agrees within {CLOCK_SECONDS:g} s")
