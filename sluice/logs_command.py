"""`sluice logs`: what the services of a run directory have logged, and what they log next."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from sluice.config import ConfigError
from sluice.durable import LockTimeoutError, locked
from sluice.logs import printable
from sluice.run_commands import take_switch, take_value
from sluice.service_logs import LogLine, LogSource, file_logs, merged, since_time
from sluice.stack import STACK_FILE

LOGS_USAGE = "sluice logs RUN_DIR [SERVICE ...] [--follow] [--since 10m|TIME] [--address HOST:PORT]"
FOLLOW_SECONDS = 0.2
WHOLE_SECONDS = 1.0  # that a line without an end waits for it


async def logs(arguments: Sequence[str]) -> None:
    """Print logs by time, each line with its service. Raises ConfigError.

    With `--follow` until Ctrl-C, or until `sluice up` of the directory has ended.
    """
    rest = list(arguments)
    follow, since = take_switch(rest, "--follow"), since_time(take_value(rest, "--since") or "")
    address = take_value(rest, "--address")
    if unknown := [each for each in rest if each.startswith("-")]:
        raise ConfigError(f"unknown flag {unknown[0][:100]}: {LOGS_USAGE}")
    run_dir, names = Path(rest[0]) if rest else Path(), rest[1:]
    if not rest:
        raise ConfigError(f"RUN_DIR comes first: {LOGS_USAGE}")
    sources = await asyncio.to_thread(_sources, run_dir, names, address)
    try:
        width = max((len(name) for name in sources), default=0)
        await _print(merged(sources.values(), since), width)
        if follow:
            await _follow(run_dir, names, sources, since, is_local=address is None)
    except BrokenPipeError:  # whoever reads has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _sources(run_dir: Path, names: Sequence[str], address: str | None) -> dict[str, LogSource]:
    if "\0" in str(run_dir):
        raise ConfigError("RUN_DIR can be no path")
    if address is not None:
        from sluice.ray_stack import stack_logs

        return stack_logs(run_dir, names, address)
    try:
        is_there = (run_dir / "logs").is_dir()
    except OSError as error:  # a name that is too long
        raise ConfigError(f"{str(run_dir)[:200]}: {error.strerror}") from None
    if not is_there:
        raise ConfigError(
            f"{run_dir}/logs is not here; where it is on nodes of a Ray cluster alone, give "
            "--address HOST:PORT"
        )
    return file_logs(run_dir / "logs", names)


async def _print(lines: Iterable[LogLine], width: int) -> None:
    for count, line in enumerate(lines):
        text = "\t".join(printable(part) for part in line.text.split("\t"))
        sys.stdout.write(f"{printable(line.name):{width}} | {text}\n")
        if count % 1000 == 0:
            await asyncio.sleep(0)  # Ctrl-C comes here
    sys.stdout.flush()


async def _follow(
    run_dir: Path,
    names: Sequence[str],
    sources: dict[str, LogSource],
    since: float,
    *,
    is_local: bool,
) -> None:
    loop, told = asyncio.get_running_loop(), dict.fromkeys(sources, math.inf)
    while True:
        is_over = is_local and await asyncio.to_thread(_has_ended, run_dir)
        found = list[LogLine]()
        for name, source in sources.items():
            whole = not is_over and loop.time() - told[name] < WHOLE_SECONDS
            lines = await asyncio.to_thread(source.lines, whole=whole)
            if lines:
                told[name] = loop.time()
                found += lines
        width = max((len(name) for name in sources), default=0)
        await _print(
            (line for line in sorted(found, key=lambda line: line.time) if line.time >= since),
            width,
        )
        if found:
            continue
        if is_over:
            return
        if is_local:  # services that are new
            for name, source in _new(run_dir, names, sources).items():
                sources[name], told[name] = source, loop.time()
        await asyncio.sleep(FOLLOW_SECONDS)


def _new(run_dir: Path, names: Sequence[str], known: dict[str, LogSource]) -> dict[str, LogSource]:
    try:
        now = file_logs(run_dir / "logs", names)
    except ConfigError:  # a name that is gone
        return {}
    return {name: source for name, source in now.items() if name not in known}


def _has_ended(run_dir: Path) -> bool:
    """Whether nobody writes there any more, as far as this host can tell."""
    if not (run_dir / "logs").is_dir():
        return True
    lock = run_dir / ".up.lock"
    if (run_dir / STACK_FILE).exists() or not lock.exists():
        return False  # on Ray, or under Slurm: until Ctrl-C
    try:
        with locked(lock, timeout_seconds=0):
            return True
    except LockTimeoutError:
        return False
