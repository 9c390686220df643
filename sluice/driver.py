"""A run from its settings to its end: in a directory, with a port, trainers and a report."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from sluice.config import ConfigError
from sluice.loop.claims import BEATS, TAKEOVER_SECONDS
from sluice.loop.config import CommonRunConfig, RowsRunConfig, RunConfig, TeacherConfig
from sluice.loop.policy_run import PolicyRun
from sluice.loop.replay import ReplayedRun, ReplayRun, open_replay
from sluice.loop.report import RunReport
from sluice.loop.run import TrainingRun
from sluice.loop.run_directory import (
    RunDirectoryError,
    checked_run_checkpoint,
    finished_step,
    owned,
    sole_driver,
)
from sluice.loop.status import LOOP_ADDRESS
from sluice.loop.training import Critic
from sluice.place import directory_of, is_bucket
from sluice.runtime.addresses import by_name, read_services
from sluice.runtime.security import SecurityConfig
from sluice.runtime.server import Server
from sluice.runtime.waits import listed_in
from sluice.stack import read_store, read_weights

if TYPE_CHECKING:
    from sluice.loop.run_archive import RunArchive  # nobody else needs obstore


def is_finished(config: CommonRunConfig) -> bool:
    """Whether nothing is left to do of a run that is to be resumed; says so."""
    if (step := finished_step(config)) is None:
        return False
    Console(stderr=True).print(
        f"{config.run_dir}: the run is finished, at step {step}, and nothing is done again; with "
        "more steps, or another setting, it goes on",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return True


def refuse_other_run(config: CommonRunConfig) -> None:
    """Raises ConfigError where run_dir holds a run that this is not, as its start would.

    What is lost or damaged is told by the start alone: a bucket may have it.
    """
    with contextlib.suppress(RunDirectoryError, sqlite3.Error, OSError):
        checked_run_checkpoint(config)


async def run_training(
    config: RunConfig, training: Callable[[PolicyRun], Awaitable[None]] | None = None
) -> None:
    """One run, its report and its plot. `training` is called once everything has started, instead
    of the run's own. One that is finished is left as it is."""
    if is_finished(config):
        return
    if config.services is not None:
        config = config.model_copy(
            update={
                "trainer": config.trainer or by_name(config.services, "trainer"),
                "router": config.router
                if config.router or config.replay is not None
                else by_name(config.services, "router"),
                "store": config.store or read_store(config.services),
                "weights": config.weights or read_weights(config.services),
            }
        )
    config = config.model_copy(update={"teachers": _teachers(config)})
    critic = _critic(config)
    async with AsyncExitStack() as stack:
        stack.enter_context(owned(config.run_dir))
        await stack.enter_async_context(_own_port(config))
        archive = await stack.enter_async_context(_own_archive(config))
        critics = [] if critic is None else [critic.client.address]
        await stack.enter_async_context(_own_trainers(config, [config.trainer, *critics], archive))
        source: ReplayedRun | None = None
        if config.replay is not None:
            config, source = open_replay(config)
        report = stack.enter_context(RunReport(config.run_dir, config.steps))
        report.begin("train", config.model_dump(mode="json"))
        report.track(config.trackers, config.model_dump(mode="json"))
        for text in [] if archive is None else archive.notes:
            report.note(text)
        run: PolicyRun
        if config.replay is not None:
            run = ReplayRun(config, source, report, critic, archive)
        else:
            run = TrainingRun(config, report, critic, archive)
        try:
            await run.start()
            await (run.train() if training is None else training(run))
        finally:
            await run.close()
            if (plot := report.plot()) is not None:
                report.note(f"plot: {plot}", is_kept=False)


async def run_rows(config: RowsRunConfig) -> None:
    """One run on the rows of a file, and its report."""
    from sluice.loop.rows_run import LINES, RowsRun, load_rows, step_count

    if is_finished(config):
        return
    if config.services is not None:
        config = config.model_copy(
            update={
                "trainer": config.trainer or by_name(config.services, "trainer"),
                "store": config.store or read_store(config.services),
            }
        )
    rows = load_rows(config)
    steps = step_count(config, rows)
    async with AsyncExitStack() as stack:
        stack.enter_context(owned(config.run_dir))
        await stack.enter_async_context(_own_port(config))
        archive = await stack.enter_async_context(_own_archive(config))
        await stack.enter_async_context(_own_trainers(config, [config.trainer], archive))
        report = stack.enter_context(RunReport(config.run_dir, steps, line=LINES[config.kind]))
        report.begin(config.kind, config.model_dump(mode="json"))
        report.track(config.trackers, config.model_dump(mode="json"))
        for text in [] if archive is None else archive.notes:
            report.note(text)
        run = RowsRun(config, rows, report, archive)
        try:
            await run.start()
            await run.train()
        finally:
            await run.close()


@contextlib.asynccontextmanager
async def _own_archive(config: CommonRunConfig) -> AsyncIterator[RunArchive | None]:
    """The run in the bucket that is its store, for itself; None where that is a directory."""
    store = config.store_place
    if not is_bucket(store):
        if config.takeover_seconds is not None:
            raise ConfigError("takeover_seconds: has no effect, for the store is no bucket")
        yield None
        return
    # nobody else needs obstore
    from sluice.loop.run_archive import RunArchive, owned_archive

    seconds = config.takeover_seconds or TAKEOVER_SECONDS
    archive = RunArchive(str(store), config.run_dir, seconds)
    async with owned_archive(archive, resume=config.resume):
        yield archive


@contextlib.asynccontextmanager
async def _own_trainers(
    config: CommonRunConfig, addresses: Sequence[str], archive: RunArchive | None
) -> AsyncIterator[None]:
    """The trainers of a run, for itself among the runs of its store."""
    if archive is None:
        store = directory_of(config.store_place)
        assert store is not None, "runs in a bucket have an archive"
        with sole_driver(store, config.run_dir, addresses):
            yield
        return
    # nobody else needs obstore
    from sluice.loop.bucket_drivers import sole_bucket_driver

    seconds = archive.beat_seconds * BEATS
    bucket = str(config.store_place)
    async with sole_bucket_driver(bucket, archive.url, config.run_dir, addresses, seconds):
        yield


@contextlib.asynccontextmanager
async def _own_port(config: CommonRunConfig) -> AsyncIterator[None]:
    """The port of a loop: the calls that the block makes are listed there while they wait.

    Raises ConfigError where it cannot be opened.
    """
    if config.server is None:
        yield
        return
    file, security = config.run_dir / LOOP_ADDRESS, config.server.security
    if security == SecurityConfig():
        tls = config.security.tls
        has_own = tls is not None and tls.cert is not None  # or it is only a client's
        security = config.security.model_copy(update={"tls": tls if has_own else None})
    file = config.server.address_file or file
    update = {"address_file": file, "security": security}
    server = Server(config.server.model_copy(update=update))
    server.disks["run"] = [config.run_dir]
    await server.start()
    await server.set_serving()
    try:
        with listed_in(server.waits):
            yield
    finally:
        await server.stop()
        with contextlib.suppress(OSError):  # a disk nobody can write: what ended the run is told
            file.unlink()


def _critic(config: RunConfig) -> Critic | None:
    """Raises ConfigError if nothing says where it is."""
    if config.critic is None:
        return None
    address = config.critic.address or _named("critic", config.critic.service, config.services)
    return Critic(address, config.critic, config.security, config.service_timeout_seconds)


def _teachers(config: RunConfig) -> dict[str, TeacherConfig]:
    """Those that are services by their names. Raises ConfigError for one that is none."""
    return {
        name: TeacherConfig(address=_named(f"teachers.{name}", teacher.service, config.services))
        if teacher.service
        else teacher
        for name, teacher in config.teachers.items()
    }


def _named(key: str, service: str, services: Path | None) -> str:
    check_named(key, service, {} if services is None else read_services(services))
    assert services is not None, "or nothing is known"
    return by_name(services, service)


def check_named(key: str, service: str, known: Collection[str]) -> None:
    """Raises ConfigError where the setting `key` names a service that is not there."""
    if service not in known:
        told = ", ".join(sorted(known)) or "none"
        raise ConfigError(f"{key}: no service is called {service}; known: {told}")
