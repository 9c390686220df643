"""`sluice profile`: records what the next steps of a trainer cost, and says what took the time."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import zlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from sluice.api.common.v1 import profile_pb2
from sluice.client import EngineClient, RemoteError, TrainerClient
from sluice.config import ConfigError, ProcessConfig, load_config
from sluice.logs import printable
from sluice.loop.status import NO_ANSWER, StatusConfig, read_status, security_of
from sluice.profiler import new_name
from sluice.run_commands import UnansweredError
from sluice.runtime.recovery import is_passing
from sluice.runtime.security import SecurityConfig

PROFILE_USAGE = (
    "sluice profile RUN_DIR|ADDRESS [--steps 1] [--ranks 0,1] [--engines] [--stacks] [--memory] ..."
)
HELP = ("-h", "--help")
POLL_SECONDS = 0.5
QUIET_SECONDS = 10.0
ANSWER_SECONDS = 5.0  # of who is asked what there is
LARGEST_READ = 1 << 26  # bytes of a compressed trace; a larger one is for a viewer alone
ROWS = 12
HOST = frozenset({"cpu_op"})  # kinds of events
DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_UNREADABLE = (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zlib.error)

Ask = Callable[[], Awaitable[profile_pb2.Profile]]


class ProfileConfig(ProcessConfig):
    """What `sluice profile` records."""

    security: SecurityConfig | None = Field(
        None, description="None is that of the run, or none at all for an address."
    )
    steps: int = Field(1, ge=1, le=100, description="Optimizer steps, of trainers.")
    ranks: tuple[int, ...] = Field((), description="That record; none is the first alone.")
    engines: bool = Field(False, description="Whether the engines that a router knows record, too.")
    passes: int = Field(20, ge=1, le=1000, description="Of the model, of engines.")
    stacks: bool = Field(
        False, description="With the lines of Python: larger files, 1.5 KB of memory a call."
    )
    memory: bool = Field(False, description="With what is allocated.")
    timeout_seconds: float = Field(600, gt=0, le=86_400, description="Until the files are there.")


@dataclass(frozen=True)
class OperationCost:
    """What the operations of one name took, without those that they called."""

    name: str
    seconds: float
    count: int


async def profile(arguments: Sequence[str]) -> None:
    """Record, wait for the files, and print where they are and what took the time.

    Raises ConfigError, RemoteError, and UnansweredError for what is not written in the end.
    """
    target, *flags = arguments if arguments[0] not in HELP else ("", "--help")
    if target.startswith("-"):
        raise ConfigError(f"RUN_DIR or ADDRESS comes first: {PROFILE_USAGE}")
    config = load_config(ProfileConfig, flags, PROFILE_USAGE)
    security = config.security or security_of(target)
    asked = StatusConfig(security=security, timeout_seconds=ANSWER_SECONDS)
    status, name = await read_status(target, asked), new_name()
    async with AsyncExitStack() as clients:
        begun = await _begin(status, name, config, security, clients)
        if not begun:
            raise ConfigError(f"profile: {target}: {_nobody_text(status)}")
        async with asyncio.TaskGroup() as group:
            ends = {
                who: group.create_task(ended(who, ask, name, config.timeout_seconds))
                for who, ask in begun.items()
            }
        failures: list[str] = []
        for who, end in ends.items():
            for line in _lines(who, end.result()):
                print(line, flush=True)
            failures += _failures(who, end.result(), name, config)
    if failures:
        raise UnansweredError("\n".join(failures))


async def _begin(
    status: Mapping[str, Any],
    name: str,
    config: ProfileConfig,
    security: SecurityConfig,
    clients: AsyncExitStack,
) -> dict[str, Ask]:
    """Have all record that are meant; how to ask each for its profile, by name."""
    options = profile_pb2.ProfileOptions(stacks=config.stacks, memory=config.memory)
    named: dict[str, Any] = {"options": options, "name": name}
    begun: dict[str, Ask] = {}
    for who, address in _addresses(status, engines=False).items():
        trainer = TrainerClient(address, security)
        clients.push_async_callback(trainer.close)
        await trainer.profile(steps=config.steps, ranks=config.ranks, **named)
        begun[who] = partial(_told, trainer)
    is_engine = any(service["kind"] == "rollout" for service in status["services"])
    if config.engines or (is_engine and not begun):
        for who, address in _addresses(status, engines=True).items():
            engine = EngineClient(address, security)
            clients.push_async_callback(engine.close)
            await engine.profile(passes=config.passes, **named)
            begun[who] = partial(_told, engine)
    return begun


def _addresses(status: Mapping[str, Any], *, engines: bool) -> dict[str, str]:
    """Of trainers, or of engines: those that routers know, or else that which was asked."""
    kind = "rollout" if engines else "trainer"
    listed = {each["id"]: each["address"] for each in status["engines"]} if engines else {}
    services = [each for each in status["services"] if each["kind"] == kind]
    own = {each["name"]: each["address"] for each in services}
    return listed or own


def _nobody_text(status: Mapping[str, Any]) -> str:
    silent = [each for each in status["services"] if each["health"] == NO_ANSWER]
    if silent:
        who = "" if silent[0]["name"] == status["target"] else f"{silent[0]['name']}: "
        return f"{who}{silent[0]['detail']}"
    return "no trainer is there; give --engines for engines"


async def _told(client: TrainerClient | EngineClient) -> profile_pb2.Profile:
    return (await client.get()).profile


async def ended(
    who: str, ask: Ask, name: str, seconds: float, quiet_seconds: float = QUIET_SECONDS
) -> profile_pb2.Profile:
    """The profile of that name once it has ended, or as it is after so many seconds.

    Another one where that took its place. Says on stderr, once, where nothing was recorded for
    `quiet_seconds`. Raises RemoteError.
    """
    now = asyncio.get_running_loop().time
    deadline, quiet_until, left = now() + seconds, now() + quiet_seconds, -1
    while True:
        is_late = now() > deadline
        try:
            found = await ask()
        except RemoteError as error:  # it may be stopped, or its connection
            if is_late or not is_passing(error):
                raise
        else:
            if is_late or found.name != name or _has_ended(found):
                return found
            if found.left_count != left:
                left, quiet_until = found.left_count, max(quiet_until, now() + quiet_seconds)
            elif now() > quiet_until:
                quiet_until = deadline + quiet_seconds
                print(_quiet_text(who, left, quiet_seconds, seconds), file=sys.stderr, flush=True)
        await asyncio.sleep(POLL_SECONDS)


def _quiet_text(who: str, left: int, quiet: float, seconds: float) -> str:
    return (
        f"profile: {printable(who)}: {left} to come and nothing to record for {quiet:g} s; waits "
        f"for {seconds:g} s in all (--timeout_seconds). `sluice waits` says what holds a run up"
    )


def _has_ended(found: profile_pb2.Profile) -> bool:
    return bool(found.failure) or not found.left_count


def _failures(
    who: str, found: profile_pb2.Profile, name: str, config: ProfileConfig
) -> Iterator[str]:
    if found.name != name:
        yield f"profile: {who}: another profile, or a restart, took the place of this one"
    elif found.failure:
        yield f"profile: {who}: {found.failure}"
    elif found.left_count:
        yield (
            f"profile: {who}: {found.left_count} are still to come after "
            f"{config.timeout_seconds:g} s (--timeout_seconds); it goes on recording"
        )


def _lines(who: str, found: profile_pb2.Profile) -> Iterator[str]:
    for file in found.files:
        path = Path(found.directory, file)
        yield f"{printable(who)}: {printable(str(path))}"
        if file.endswith(".trace.json.gz"):
            yield from summary(path)


def summary(path: Path) -> Iterator[str]:
    """What took the time of a trace, where it can be read here."""
    try:
        if path.stat().st_size > LARGEST_READ:
            yield "  too large to be summed up here: open it in https://ui.perfetto.dev"
            return
        with gzip.open(path) as trace:
            events = json.load(trace)["traceEvents"]
        found = {"device": costs(events, DEVICE), "host": costs(events, HOST)}
    except FileNotFoundError:
        yield "  on the host of who recorded it"
    except _UNREADABLE as error:
        yield f"  cannot be read: {printable(str(error))[:200]}"
    else:
        for where, dearest in found.items():
            if dearest:
                yield from _table(dearest, where)


def _table(found: Sequence[OperationCost], where: str) -> Iterator[str]:
    total = sum(cost.seconds for cost in found)
    yield f"  {where}: {total * 1e3:,.1f} ms in {sum(cost.count for cost in found):,} operations"
    for cost in found[:ROWS]:
        share = f"{cost.seconds / total:6.1%}" if total else ""
        name = printable(cost.name)[:60]
        yield f"  {share}  {cost.seconds * 1e3:10,.1f} ms  {cost.count:8,} x  {name}"


def costs(events: Iterable[Mapping[str, Any]], kinds: frozenset[str]) -> list[OperationCost]:
    """Sums up the events of some kinds by name, each without those inside it; dearest first.

    Events are of Chrome's format, whose times are in us; those of a thread nest, those of a
    device's stream do not overlap.
    """
    threads: dict[tuple[Any, Any], list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in kinds:
            start, span = float(event["ts"]), float(event.get("dur", 0))
            threads[event.get("pid"), event.get("tid")].append((start, -span, str(event["name"])))
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for thread in threads.values():
        around: list[tuple[float, str]] = []  # ends and names of those that the next is inside
        for start, negative, name in sorted(thread):
            while around and around[-1][0] <= start:
                around.pop()
            if around:
                seconds[around[-1][1]] += negative * 1e-6
            seconds[name] -= negative * 1e-6
            counts[name] += 1
            around.append((start - negative, name))
    found = [OperationCost(name, seconds[name], counts[name]) for name in counts]
    return sorted(found, key=lambda cost: (-cost.seconds, cost.name))
