"""`sluice status`: looks at runs, and changes nothing."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live

from sluice.config import ConfigError, load_config
from sluice.loop.screen import status_screen
from sluice.loop.status import NO_ANSWER, StatusConfig, read_status


class UnansweredError(Exception):
    """Nobody answers at an address."""


STATUS_USAGE = "sluice status RUN_DIR|ADDRESS [--json] [--once] [--timeout_seconds 3] ..."


async def status(arguments: Sequence[str]) -> None:
    """One screen of how a run and its services do; anew every so often on a terminal.

    Raises UnansweredError where ADDRESS gives no answer.
    """
    rest = list(arguments)
    as_json, once = take_switch(rest, "--json"), take_switch(rest, "--once")
    if rest and rest[0] in ("-h", "--help"):
        load_config(StatusConfig, ["--help"], STATUS_USAGE)
    if not rest or rest[0].startswith("-"):
        raise ConfigError(f"RUN_DIR or ADDRESS comes first: {STATUS_USAGE}")
    target, *flags = rest
    config = load_config(StatusConfig, flags, STATUS_USAGE)
    found = await read_status(target, config)
    dead = found["run"] is None and found["services"][0]["health"] == NO_ANSWER
    if as_json:
        print(json.dumps(found, allow_nan=False))
    elif dead:
        pass  # told below
    elif once or not sys.stdout.isatty():
        Console().print(status_screen(found))
    else:
        with Live(status_screen(found), auto_refresh=False, screen=True) as live:
            while True:
                await asyncio.sleep(config.refresh_seconds)
                live.update(status_screen(await read_status(target, config)), refresh=True)
    if dead:
        raise UnansweredError(f"status: {target}: {found['services'][0]['detail']}")


def take_switch(arguments: list[str], flag: str) -> bool:
    """Remove `flag`; whether it was there."""
    found = flag in arguments
    if found:
        arguments.remove(flag)
    return found
