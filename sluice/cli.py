"""`sluice up | train | sft | waits`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from sluice import logs
from sluice.client import Client, RemoteError
from sluice.config import ConfigError, ProcessConfig, load_config
from sluice.loop.config import RunConfig
from sluice.loop.evaluation import EvaluationError
from sluice.loop.feed import RolloutFailedError
from sluice.loop.fleet import NoEngineError
from sluice.loop.readiness import TrainerFailedError, TrainerLostError
from sluice.loop.report import Report
from sluice.loop.run import Run
from sluice.loop.sft_config import SftConfig
from sluice.loop.workers import NoWorkerError
from sluice.platform import PlatformError
from sluice.runtime.security import SecurityConfig
from sluice.supervise import ServiceDiedError, Supervisor, UpConfig, read_services, read_store

USAGE = """usage:
  sluice up SERVICES.yaml [--key value ...]      start services, keep them alive until Ctrl-C
  sluice train RUN.yaml [--up SERVICES.yaml] [--key value ...]
  sluice sft RUN.yaml [--up SERVICES.yaml] [--key value ...]
  sluice waits ADDRESS [--security.token_file FILE] [--security.tls.ca FILE ...]
                                                 what a server is waiting for, and on whom
"""


class WaitsConfig(ProcessConfig):
    """How `sluice waits` proves itself."""

    security: SecurityConfig = SecurityConfig()


_EXPECTED = (
    ConfigError,
    EvaluationError,
    NoEngineError,
    NoWorkerError,
    PlatformError,
    RemoteError,
    RolloutFailedError,
    ServiceDiedError,
    TrainerFailedError,
    TrainerLostError,
)


async def up(arguments: Sequence[str]) -> None:
    """Run services until SIGINT or SIGTERM."""
    supervisor = Supervisor(load_config(UpConfig, ["--config", *arguments]))
    console = Console(stderr=True)
    async with supervised(supervisor):
        console.print(f"services are up; addresses in {supervisor.services_file}", highlight=False)
        await _until_signal()
        console.print("stopping", highlight=False)


async def train(arguments: Sequence[str]) -> None:
    """Train; with `--up` over services that live as long as the run."""
    rest = list(arguments)
    services_yaml = _take(rest, "--up")
    config = load_config(RunConfig, ["--config", *rest])
    async with _own_services(services_yaml):
        await run_training(config)


async def sft(arguments: Sequence[str]) -> None:
    """Supervised training; with `--up` over services that live as long as the run."""
    rest = list(arguments)
    services_yaml = _take(rest, "--up")
    config = load_config(SftConfig, ["--config", *rest])
    async with _own_services(services_yaml):
        await run_sft(config)


@contextlib.asynccontextmanager
async def _own_services(services_yaml: str | None) -> AsyncIterator[None]:
    if services_yaml is None:
        yield
        return
    supervisor = Supervisor(load_config(UpConfig, ["--config", services_yaml]))
    async with supervised(supervisor):
        yield


async def run_sft(config: SftConfig) -> None:
    """One supervised run and its report."""
    from sluice.loop.sft import LINE, SftRun, load_rows, step_count

    trainer = config.trainer
    if config.services is not None:
        trainer = trainer or read_services(config.services)["trainer"]
        if config.store is None:
            config = config.model_copy(update={"store": read_store(config.services)})
    rows = load_rows(config)
    with Report(config.run_dir, step_count(config, rows), line=LINE) as report:
        run = SftRun(config, trainer, rows, report)
        try:
            await run.start()
            await run.train()
        finally:
            await run.close()


async def run_training(
    config: RunConfig, on_end: Callable[[Run], Awaitable[None]] | None = None
) -> None:
    """One run, its report and its plot. `on_end` is called before anything is closed."""
    addresses = {}
    if config.services is not None:
        addresses = read_services(config.services)
        if config.store is None:
            config = config.model_copy(update={"store": read_store(config.services)})
    trainer = config.trainer or addresses["trainer"]
    router = config.router or addresses["router"]
    with Report(config.run_dir, config.steps) as report:
        run = Run(config, trainer, router, report)
        try:
            await run.start()
            await run.train()
            if on_end is not None:
                await on_end(run)
        finally:
            await run.close()
            if (plot := report.plot()) is not None:
                report.note(f"plot: {plot}")


async def waits(arguments: Sequence[str]) -> None:
    """Print what a server waits for."""
    address, *flags = arguments
    config = load_config(WaitsConfig, flags)
    async with Client(address, config.security) as client:
        table = Table("what", "on", "for", "explanation")
        for wait in await client.list_waits():
            age = time.time() - wait.start_time.ToNanoseconds() / 1e9
            table.add_row(wait.what, ", ".join(wait.on), f"{age:.1f} s", wait.explanation)
    Console().print(table)


@contextlib.asynccontextmanager
async def supervised(supervisor: Supervisor) -> AsyncIterator[Supervisor]:
    """Services that live as long as the block; one that dies for good ends the block."""
    await supervisor.start()
    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(supervisor.watch())
            try:
                yield supervisor
            finally:
                watching.cancel()
    finally:
        await supervisor.stop()


async def _until_signal() -> None:
    """Wait for SIGINT or SIGTERM."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()


def _take(arguments: list[str], flag: str) -> str | None:
    """Remove `flag value`."""
    if flag not in arguments:
        return None
    index = arguments.index(flag)
    if index + 1 == len(arguments):
        raise ConfigError(f"{flag} needs a value")
    value = arguments[index + 1]
    del arguments[index : index + 2]
    return value


def main() -> int:
    """Entry point; a refusal is one line on stderr and exit code 2, never a trace."""
    commands = {"up": up, "train": train, "sft": sft, "waits": waits}
    arguments = sys.argv[1:]
    if not arguments or arguments[0] not in commands or len(arguments) < 2:
        print(USAGE, end="", file=sys.stderr)
        return 2
    logs.configure("WARNING")
    return exit_code(commands[arguments[0]](arguments[1:]))


def exit_code(work: Coroutine[Any, Any, None]) -> int:
    """Run to the end: 0, or 2 with one line a refusal on stderr, or 130 after Ctrl-C."""
    code = 0
    try:
        asyncio.run(work)
    except* _EXPECTED as errors:
        for error in _flatten(errors):
            print(f"sluice: {error}", file=sys.stderr)
        code = 2
    except* KeyboardInterrupt:
        code = 130
    return code


def _flatten(group: BaseExceptionGroup) -> list[BaseException]:
    flat: list[BaseException] = []
    for error in group.exceptions:
        flat += _flatten(error) if isinstance(error, BaseExceptionGroup) else [error]
    return flat


if __name__ == "__main__":
    sys.exit(main())
