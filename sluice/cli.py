"""The command `sluice`; `USAGE` lists what it can do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import uvloop
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sluice import logs
from sluice.check_command import check_loss_command
from sluice.client import Client, RemoteError
from sluice.completion import COMPLETION_USAGE, completion_script
from sluice.config import ConfigError, ProcessConfig, hint, load_config, refuse_unknown_flags
from sluice.convert_command import CheckpointError, convert, verify
from sluice.doctor import DOCTOR_USAGE, DoctorConfig, UnfitError, doctor
from sluice.durable import DirectoryError
from sluice.imports import run_process
from sluice.init import INIT_USAGE, InitConfig, init
from sluice.logs_command import LOGS_USAGE
from sluice.logs_command import logs as show_logs
from sluice.loop.claims import BEATS, TAKEOVER_SECONDS
from sluice.loop.config import (
    CommonRunConfig,
    DpoConfig,
    RewardModelRunConfig,
    RowsRunConfig,
    RunConfig,
    SftConfig,
    TeacherConfig,
)
from sluice.loop.evaluation import EvaluationError
from sluice.loop.fleet import NoEngineError
from sluice.loop.mixture import ScheduleError
from sluice.loop.policy_run import PolicyRun
from sluice.loop.replay import ReplayedRun, ReplayRun, open_replay
from sluice.loop.report import RunReport
from sluice.loop.run import TrainingRun
from sluice.loop.run_directory import RunDirectoryError, owned, sole_driver
from sluice.loop.status import (
    ADDRESS,
    LOOP_ADDRESS,
    StatusConfig,
    is_directory,
    no_target_text,
    placed,
)
from sluice.loop.training import Critic, MismatchError, TrainerBrokenError, TrainerLostError
from sluice.loop.workers import NoWorkerError, RolloutFailedError
from sluice.place import directory_of, is_bucket
from sluice.platform import PlatformError
from sluice.profile_command import PROFILE_USAGE, profile
from sluice.protoset import PROTOSET_USAGE, write_protoset
from sluice.run_commands import (
    REPORT_USAGE,
    SAMPLES_USAGE,
    STATUS_USAGE,
    ReportConfig,
    SamplesConfig,
    UnansweredError,
    report,
    samples,
    status,
    take_value,
)
from sluice.runtime.addresses import by_name, read_services
from sluice.runtime.security import SecurityConfig
from sluice.runtime.server import Server
from sluice.runtime.waits import age_of, listed_in
from sluice.stack import STACK_FILE, UpConfig, read_store, read_weights
from sluice.supervise import LONGEST_PATH, ServiceDiedError, Supervisor, end_supervisor

if TYPE_CHECKING:
    from sluice.loop.run_archive import RunArchive  # nobody else needs obstore

USAGE = {
    "demo": "sluice demo [--run-dir DIR] [--steps N] ...",
    "doctor": DOCTOR_USAGE,
    "init": INIT_USAGE,
    "import-slime": "sluice import-slime SCRIPT.sh [-o DIR]",
    "import-verl": "sluice import-verl SCRIPT.sh [-o DIR]",
    "up": "sluice up SERVICES.yaml [--on local|ray] [--address HOST:PORT] [--key value ...]",
    "down": "sluice down RUN_DIR",
    "train": "sluice train RUN.yaml [--up SERVICES.yaml] [--key value ...]",
    "eval": "sluice eval RUN.yaml [--key value ...]",
    "sft": "sluice sft RUN.yaml [--up SERVICES.yaml] [--key value ...]",
    "dpo": "sluice dpo RUN.yaml [--up SERVICES.yaml] [--key value ...]",
    "reward-model": "sluice reward-model RUN.yaml [--up SERVICES.yaml] [--key value ...]",
    "convert": "sluice convert SRC DST [--to hf|torch_dist|peft] [--origin DIR] [--key value ...]",
    "verify": "sluice verify FIRST SECOND [--model DIR] [--key value ...]",
    "status": STATUS_USAGE,
    "logs": LOGS_USAGE,
    "profile": PROFILE_USAGE,
    "report": REPORT_USAGE,
    "samples": SAMPLES_USAGE,
    "trace": "sluice trace RUN_DIR [-o FILE.html] [--steps FIRST-LAST|all] [--otlp URL]",
    "completion": COMPLETION_USAGE,
    "protoset": PROTOSET_USAGE,
    "check-loss": "sluice check-loss NAME|PACKAGE.MODULE:NAME [--settings JSON]",
    "waits": "sluice waits ADDRESS|RUN_DIR [--security.token_file FILE] [--security.tls.ca X] ...",
}
SUMMARY = {
    "demo": "a tiny model learns by GRPO over all services, on this machine",
    "doctor": "what this machine lacks for a run, and the remedy",
    "init": "write a commented run.yaml and services.yaml for a model and a task",
    "import-slime": "write run.yaml and services.yaml from a run script of slime",
    "import-verl": "write run.yaml and services.yaml from a run script of verl",
    "up": "start services, keep them alive until Ctrl-C; on Ray until `sluice down`",
    "down": "end the services of a run directory, on this machine or on Ray",
    "train": "train; with --up on services that live as long as the run",
    "eval": "score the data sets of a run on the weights that are served now",
    "sft": "supervised training on the trainer of `sluice up`, or of --up",
    "dpo": "training on preferences, pairs of a chosen and a rejected answer, likewise",
    "reward-model": "training of a reward model on the same pairs, likewise",
    "convert": "a checkpoint from Hugging Face to torch_dist, back, or to another type",
    "verify": "are two checkpoints equal, tensor by tensor?",
    "status": "how a run and its services do: steps, rewards, health, who waits on whom",
    "logs": "what services logged, by time, and with --follow what they log next",
    "profile": "what the next steps of a trainer cost, operation by operation",
    "report": "one or more runs as an HTML page: curves, settings, events, samples",
    "samples": "list, filter and export the samples of a run",
    "trace": "where the time of a run went, as one HTML page or as spans of OpenTelemetry",
    "protoset": "the API as a FileDescriptorSet, for clients in other languages",
    "check-loss": "does a loss keep what training needs of it: split, gradient, mask?",
    "completion": "what a shell needs to complete commands and flags",
    "waits": "what a server, or the loop of a run, is waiting for, and on whom",
}
HELP = ("-h", "--help")
CHECK_LOSS = "check-loss"
ALONE = ("doctor",)  # needs no argument
# these have no keys to list
IMPORTS = ("import-slime", "import-verl")
UNCONFIGURED = ("down", "logs", "trace", "completion", *IMPORTS, "protoset", CHECK_LOSS)


class ScoredRunConfig(RunConfig):
    """The run whose `evaluation.datasets` are scored, on the weights that engines serve now.

    It is the file that `sluice train` takes. Read are services or router, security, evaluation,
    environment and sampling; nothing is trained, and run_dir is left as it is.
    """


class WaitsConfig(ProcessConfig):
    """How `sluice waits` proves itself."""

    security: SecurityConfig = SecurityConfig()


C = TypeVar("C", bound=ProcessConfig)

_EXPECTED = (
    CheckpointError,
    ConfigError,
    DirectoryError,
    EvaluationError,
    MismatchError,
    NoEngineError,
    NoWorkerError,
    PlatformError,
    RemoteError,
    RolloutFailedError,
    RunDirectoryError,
    ScheduleError,
    ServiceDiedError,
    TrainerBrokenError,
    TrainerLostError,
    UnansweredError,
    UnfitError,
)


async def import_slime(arguments: Sequence[str]) -> None:
    """Files from a script of slime. Raises ConfigError."""
    from sluice.importers import slime  # nobody else needs its flags

    await slime.import_slime(arguments)


async def import_verl(arguments: Sequence[str]) -> None:
    """Files from a script of verl. Raises ConfigError."""
    from sluice.importers import verl  # nobody else needs its keys

    await verl.import_verl(arguments)


async def up(arguments: Sequence[str]) -> None:
    """Run services until SIGINT or SIGTERM; on Ray leave them running."""
    rest, console = list(arguments), Console(stderr=True)
    on, address = take_value(rest, "--on") or "local", take_value(rest, "--address")
    if on not in ("local", "ray"):
        raise ConfigError(f"--on: {on[:100]!r} is neither local nor ray")
    if address is not None and on != "ray":
        raise ConfigError("--address: is that of a Ray cluster; give --on ray")
    config = _load(UpConfig, "up", rest)
    if on == "ray":
        from sluice.ray_stack import RayStack

        stack = RayStack(config, address or "auto")
        await stack.start()
        console.print(
            f"services are up; addresses in {stack.services_file}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        return
    supervisor = Supervisor(config)
    async with supervised(supervisor):
        console.print(
            f"services are up; addresses in {supervisor.services_file}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        await _until_signal()
        console.print("stopping", highlight=False)


async def down(arguments: Sequence[str]) -> None:
    """End the services of a run directory. Raises ConfigError where there are none."""
    if len(arguments) != 1:
        raise ConfigError(f"down takes one RUN_DIR: {USAGE['down']}")
    run_dir = Path(arguments[0])
    await asyncio.to_thread(_ender(run_dir), run_dir)
    Console(stderr=True).print("services are down", highlight=False)


def _ender(run_dir: Path) -> Callable[[Path], None]:
    """Of what runs there: on Ray, or below a process of this machine."""
    if "\0" in str(run_dir) or len(str(run_dir)) > LONGEST_PATH:
        return end_supervisor  # which refuses it
    if not (run_dir / STACK_FILE).exists():
        return end_supervisor
    from sluice.ray_stack import end_stack

    return end_stack


async def train(arguments: Sequence[str]) -> None:
    """Train; with `--up` over services that live as long as the run."""
    rest = list(arguments)
    services_yaml = take_value(rest, "--up")
    config = _load(RunConfig, "train", rest)
    async with _own_services(services_yaml):
        await run_training(config)


async def evaluate(arguments: Sequence[str]) -> None:
    """Score the data sets of a run; a JSON line each."""
    from sluice.loop.evaluation import score_now

    config = _load(ScoredRunConfig, "eval", arguments)
    router = config.router
    if not router and config.services is not None:
        router = by_name(config.services, "router")
    await score_now(config, router)


async def sft(arguments: Sequence[str]) -> None:
    """Supervised training; with `--up` over services that live as long as the run."""
    await _train_on_rows(SftConfig, arguments)


async def dpo(arguments: Sequence[str]) -> None:
    """Training on preferences; with `--up` over services that live as long as the run."""
    await _train_on_rows(DpoConfig, arguments)


async def reward_model(arguments: Sequence[str]) -> None:
    """Training of a reward model; with `--up` over services that live as long as the run."""
    await _train_on_rows(RewardModelRunConfig, arguments)


async def _train_on_rows(cls: type[RowsRunConfig], arguments: Sequence[str]) -> None:
    rest = list(arguments)
    services_yaml = take_value(rest, "--up")
    config = _load(cls, cls.kind, rest)
    async with _own_services(services_yaml):
        await run_rows(config)


@contextlib.asynccontextmanager
async def _own_services(services_yaml: str | None) -> AsyncIterator[None]:
    if services_yaml is None:
        yield
        return
    supervisor = Supervisor(_load(UpConfig, "up", [services_yaml]))
    async with supervised(supervisor):
        yield


async def run_rows(config: RowsRunConfig) -> None:
    """One run on the rows of a file, and its report."""
    from sluice.loop.rows_run import LINES, RowsRun, load_rows, step_count

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


async def run_training(
    config: RunConfig, training: Callable[[PolicyRun], Awaitable[None]] | None = None
) -> None:
    """One run, its report and its plot. `training` is called once everything has started, instead
    of the run's own."""
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
    known = {} if services is None else read_services(services)
    if services is None or service not in known:
        told = ", ".join(sorted(known)) or "none"
        raise ConfigError(f"{key}: no service is called {service}; known: {told}")
    return by_name(services, service)


async def waits(arguments: Sequence[str]) -> None:
    """Print what a server waits for, or the loop of a run directory."""
    if arguments[0].startswith("-") and arguments[0] not in HELP:
        raise ConfigError(f"ADDRESS comes first: {USAGE['waits']}")
    address, *flags = arguments if arguments[0] not in HELP else ("", "--help")
    config = load_config(WaitsConfig, flags, USAGE["waits"])
    address = _address_to_ask(address)
    async with Client(address, config.security) as client:
        waits = await client.list_waits()
        if not waits:
            Console().print("waits for nothing")
            return
        table = Table("what", "on", "for", "explanation")
        for wait in waits:
            age = f"{age_of(wait):.1f} s"
            told = (wait.what, ", ".join(wait.on), age, wait.explanation)
            table.add_row(*(Text(logs.printable(text)) for text in told))
    Console().print(table)


def _address_to_ask(given: str) -> str:
    """The address, or that of the loop of a run directory. Raises ConfigError if none is there."""
    if not is_directory(given):
        address = placed(given)
        if not ADDRESS.fullmatch(address):
            raise ConfigError(f"waits: {no_target_text(given)}")
        return address
    run_dir = Path(given)
    try:
        return str(json.loads((run_dir / LOOP_ADDRESS).read_text())["address"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"waits: no loop is at work in {run_dir}, or it has no port") from None


async def trace(arguments: Sequence[str]) -> None:
    """Write the timeline of a run and say in a line what took the time, or send its spans."""
    rest = list(arguments)
    output, steps, url = (take_value(rest, flag) for flag in ("-o", "--steps", "--otlp"))
    if len(rest) != 1:
        raise ConfigError(f"trace takes one RUN_DIR, not {' '.join(rest)!r}: {USAGE['trace']}")
    for line in _page_or_spans(Path(rest[0]), output, steps, url):
        Console().print(logs.printable_lines(line), highlight=False, markup=False, soft_wrap=True)


def _page_or_spans(
    run_dir: Path, output: str | None, steps: str | None, url: str | None
) -> list[str]:
    from sluice.loop.timeline.page import write_page

    if url is None:
        return write_page(run_dir, None if output is None else Path(output), steps)
    if output is not None:
        raise ConfigError("trace: --otlp writes no page; leave -o out")
    try:
        from sluice.loop.otel import NotTakenError, export_trace
    except ImportError:
        raise ConfigError("trace: --otlp needs pip install 'sluice[otel]'") from None
    try:
        return export_trace(run_dir, url, steps)
    except NotTakenError as error:
        raise UnansweredError(f"trace: {url[:200]}: {error}") from None


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


async def completion(arguments: Sequence[str]) -> None:
    """Print what a shell reads. Raises ConfigError."""
    if len(arguments) != 1:
        raise ConfigError(f"completion takes the name of a shell: {COMPLETION_USAGE}")
    configs: dict[str, type[ProcessConfig] | None] = {
        **dict.fromkeys(USAGE),
        "up": UpConfig,
        "train": RunConfig,
        "eval": ScoredRunConfig,
        "sft": SftConfig,
        "dpo": DpoConfig,
        "reward-model": RewardModelRunConfig,
        "waits": WaitsConfig,
        "status": StatusConfig,
        "report": ReportConfig,
        "samples": SamplesConfig,
        "doctor": DoctorConfig,
        "init": InitConfig,
    }
    more = {
        "up": ("--on", "--address"),
        "train": ("--up",),
        "sft": ("--up",),
        "dpo": ("--up",),
        "reward-model": ("--up",),
        "status": ("--json", "--once"),
        "logs": ("--follow", "--since", "--address"),
        "trace": ("--steps", "--otlp", "-o"),
        "demo": ("--run-dir", "--seed", "--algorithm", "--steps", "--target", "--max-staleness"),
        "convert": ("--to", "--origin"),
        "verify": ("--model",),
        **dict.fromkeys(("report", "samples", "init", *IMPORTS), ("-o",)),
    }
    print(completion_script(arguments[0], configs, more), end="")


def _load(cls: type[C], command: str, arguments: Sequence[str]) -> C:
    """The configuration of `FILE.yaml --key value ...`."""
    usage = USAGE[command]
    if any(argument in HELP for argument in arguments):
        return load_config(cls, ["--help"], usage)
    if arguments[0].startswith("--config"):
        return load_config(cls, arguments, usage)
    if arguments[0].startswith("-"):
        raise ConfigError(f"the file comes before flags: {usage}")
    return load_config(cls, ["--config", *arguments], usage)


def main() -> int:
    """Entry point; a refusal is one line on stderr and exit code 2, never a trace."""
    commands = {
        "doctor": doctor,
        "init": init,
        "import-slime": import_slime,
        "import-verl": import_verl,
        "completion": completion,
        "up": up,
        "down": down,
        "train": train,
        "eval": evaluate,
        "sft": sft,
        "dpo": dpo,
        "reward-model": reward_model,
        "convert": convert,
        "verify": verify,
        "status": status,
        "logs": show_logs,
        "profile": profile,
        "report": report,
        "samples": samples,
        "trace": trace,
        "protoset": write_protoset,
        "waits": waits,
    }
    name, *arguments = sys.argv[1:] or [""]
    if name in HELP:
        print(_overview())
        return 0
    if name == "--version":
        print(f"sluice {metadata.version('sluice')}")
        return 0
    if name == "demo":
        from sluice.demo import copy_digits

        return copy_digits.main(arguments)
    if name not in commands and name != CHECK_LOSS:
        wrong = f"sluice: no command {name!r}{hint(name, USAGE)}" if name else _overview()
        print(wrong, file=sys.stderr)
        return 2
    if name in UNCONFIGURED and any(argument in HELP for argument in arguments):
        print(f"usage: {USAGE[name]}\n\n{SUMMARY[name]}")
        return 0
    if not arguments and name not in ALONE:
        print(f"usage: {USAGE[name]}", file=sys.stderr)
        return 2
    logs.configure("WARNING")
    try:
        if name in UNCONFIGURED:
            refuse_unknown_flags(arguments, USAGE[name])
        if name == CHECK_LOSS:
            return check_loss_command(arguments)
    except ConfigError as error:
        _refuse(str(error))
        return 2
    return exit_code(commands[name](arguments))


def _refuse(text: str) -> None:
    """Say it on stderr, where what others sent does no harm."""
    print(logs.printable_lines(f"sluice: {text}"), file=sys.stderr)


def _overview() -> str:
    lines = [f"  {usage}\n      {SUMMARY[name]}" for name, usage in USAGE.items()]
    return "\n".join(["usage:", *lines, "`sluice COMMAND --help` lists the keys of its file."])


def exit_code(work: Coroutine[Any, Any, None]) -> int:
    """Run to the end: 0, or 2 with one line a refusal on stderr; 130 or 143 after a signal."""
    code, received = 0, list[int]()
    try:
        uvloop.run(_ended_by_signals(work, received))
    except* _EXPECTED as errors:
        for error in _flatten(errors):
            _refuse(f"{error}{_advice(error)}")
        code = 2
    except* KeyboardInterrupt:
        code = 130
    except* asyncio.CancelledError:
        code = 128 + (received[0] if received else signal.SIGTERM)
    return code


async def _ended_by_signals(work: Coroutine[Any, Any, None], received: list[int]) -> None:
    """Every Ctrl-C and SIGTERM cancels `work`, which ends what runs in the background in order."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def end(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, number)
    await work


def _advice(error: BaseException) -> str:
    """What to look at when nobody answered at all; a service's own refusals say it themselves."""
    if isinstance(error, RemoteError) and not error.reason:
        if error.code is grpc.StatusCode.UNAVAILABLE:
            return " (is the service up, at this address, and with TLS if this side has it?)"
        if error.code is grpc.StatusCode.UNIMPLEMENTED:
            return " (another service listens there, or one of another version)"
    return ""


def _flatten(group: BaseExceptionGroup) -> list[BaseException]:
    flat: list[BaseException] = []
    for error in group.exceptions:
        flat += _flatten(error) if isinstance(error, BaseExceptionGroup) else [error]
    return flat


if __name__ == "__main__":
    run_process(main)
