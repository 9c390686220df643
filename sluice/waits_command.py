"""`sluice waits`: what a process waits for, and what those wait for that it waits for."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sluice import logs
from sluice.api.common.v1.wait_service_pb2 import Wait
from sluice.client import Client, RemoteError
from sluice.config import ConfigError, ProcessConfig, load_config
from sluice.loop.status import (
    ADDRESS,
    LOOP_ADDRESS,
    no_target_text,
    placed,
    unreachable_text,
)
from sluice.run_commands import UnansweredError
from sluice.runtime.security import SecurityConfig
from sluice.runtime.waits import age_of
from sluice.starting import NO_ADDRESS, read_starting

WAITS_USAGE = "sluice waits ADDRESS|RUN_DIR [--security.token_file FILE] [--security.tls.ca X] ..."
FURTHER_SECONDS = 3.0  # for a service that somebody waits for to say what it waits for
DEEPEST = 6


class WaitsConfig(ProcessConfig):
    """How `sluice waits` proves itself."""

    security: SecurityConfig = SecurityConfig()


@dataclass(frozen=True)
class ToldWait:
    """A row of the table; `depth` counts whom was asked before who tells it."""

    what: str
    on: str
    age: str
    explanation: str
    depth: int = 0

    @property
    def texts(self) -> list[Text]:
        indent = "  " * (self.depth - 1) + "└ " if self.depth else ""
        told = indent + self.what, self.on, self.age, self.explanation
        return [Text(logs.printable(text)) for text in told]


async def waits(arguments: Sequence[str]) -> None:
    """Print what a server waits for, or the loop of a run directory."""
    helps = ("-h", "--help")
    if arguments[0].startswith("-") and arguments[0] not in helps:
        raise ConfigError(f"ADDRESS comes first: {WAITS_USAGE}")
    address, *flags = arguments if arguments[0] not in helps else ("", "--help")
    config = load_config(WaitsConfig, flags, WAITS_USAGE)
    table = Table("what", "on", "for", "explanation")
    starting = [each for each in read_starting(Path(address)) if each.reason]
    for service in starting:
        on, age = service.address or NO_ADDRESS, f"{service.seconds:.1f} s"
        told = ToldWait(f"start of {service.name}", on, age, service.reason)
        table.add_row(*told.texts)
    try:
        async for told in follow(_address_to_ask(address), config.security):
            table.add_row(*told.texts)
    except (ConfigError, RemoteError) as error:  # the loop begins after its services
        if not starting:
            nobody = unreachable_text(error) if isinstance(error, RemoteError) else ""
            raise UnansweredError(f"waits: {address}: {nobody}") if nobody else error from None
    Console().print(table if table.row_count else "waits for nothing")


async def follow(address: str, security: SecurityConfig) -> AsyncIterator[ToldWait]:
    """Yield what a process waits for, each wait with those of the processes that it is for.

    None is asked twice. Raises RemoteError and ConfigError for the first.
    """
    listed = await _listed(address, security)
    async for told in _with_further(listed, security, {address}, depth=0):
        yield told


async def _with_further(
    listed: Sequence[Wait], security: SecurityConfig, asked: set[str], depth: int
) -> AsyncIterator[ToldWait]:
    for wait in listed:
        age = f"{age_of(wait):.1f} s"
        yield ToldWait(wait.what, ", ".join(wait.on), age, wait.explanation, depth)
        for on in wait.on:
            if depth < DEEPEST and on not in asked and ADDRESS.fullmatch(on):
                asked.add(on)
                async for told in _further(on, security, asked, depth + 1):
                    yield told


async def _further(
    address: str, security: SecurityConfig, asked: set[str], depth: int
) -> AsyncIterator[ToldWait]:
    """Yield what a process that is waited for waits for itself, or that it does not answer."""
    try:
        async with asyncio.timeout(FURTHER_SECONDS):  # for itself: others may take theirs
            listed = await _listed(address, security)
    except TimeoutError:
        why = f"gives no answer in {FURTHER_SECONDS:g} s: it is stopped, or cut off"
        yield ToldWait("(does not tell)", address, "", why, depth)
    except (ConfigError, RemoteError) as error:
        yield ToldWait("(does not tell)", address, "", str(error), depth)
    else:
        async for told in _with_further(listed, security, asked, depth):
            yield told


async def _listed(address: str, security: SecurityConfig) -> Sequence[Wait]:
    async with Client(address, security) as client:
        return await client.list_waits()


def _address_to_ask(given: str) -> str:
    """The address, or that of the loop of a run directory. Raises ConfigError if none is there."""
    if not os.path.isdir(given):
        address = placed(given)
        if not ADDRESS.fullmatch(address):
            raise ConfigError(f"waits: {no_target_text(given)}")
        return address
    run_dir = Path(given)
    try:
        return str(json.loads((run_dir / LOOP_ADDRESS).read_text())["address"])
    except (OSError, ValueError, KeyError, TypeError):
        up = (run_dir / "services.json").exists()
        more = f"; its services are up: ask {run_dir}/services.json#NAME" if up else ""
        raise ConfigError(
            f"waits: no loop is at work in {run_dir}, or it has no port{more}"
        ) from None
