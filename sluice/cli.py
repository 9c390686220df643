"""The command `sluice`; `USAGE` lists what it can do."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from sluice import logs
from sluice.check_command import check_loss_command
from sluice.completion import COMPLETION_USAGE, completion_script
from sluice.config import ConfigError, ProcessConfig, hint, load_config, refuse_unknown_flags
from sluice.convert_command import convert, verify
from sluice.doctor import DOCTOR_USAGE, DoctorConfig, doctor
from sluice.driver import is_finished, refuse_other_run, run_rows, run_training
from sluice.exit_code import exit_code, refuse
from sluice.imports import run_process
from sluice.init import INIT_USAGE, InitConfig, init
from sluice.logs_command import LOGS_USAGE
from sluice.logs_command import logs as show_logs
from sluice.loop.config import (
    CommonRunConfig,
    DpoConfig,
    RewardModelRunConfig,
    RowsRunConfig,
    RunConfig,
    SftConfig,
)
from sluice.loop.status import (
    StatusConfig,
)
from sluice.output import OutputError, guard_output
from sluice.preflight.command import CHECK_USAGE, check
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
from sluice.runtime.addresses import by_name
from sluice.runtime.processes import ending_signals
from sluice.stack import STACK_FILE, UpConfig
from sluice.supervise import LONGEST_PATH, Supervisor, end_supervisor, supervised
from sluice.waits_command import WAITS_USAGE, WaitsConfig, waits

USAGE = {
    "demo": "sluice demo [--run-dir DIR] [--steps N] ...",
    "doctor": DOCTOR_USAGE,
    "init": INIT_USAGE,
    "check": CHECK_USAGE,
    "import-slime": "sluice import-slime SCRIPT.sh [-o DIR]",
    "import-verl": "sluice import-verl SCRIPT.sh [-o DIR]",
    "import-prime-rl": "sluice import-prime-rl CONFIG.toml [MORE.toml ...] [-o DIR]",
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
    "trace": "sluice trace RUN_DIR [-o FILE] [--steps FIRST-LAST|all] [--spans N] [--otlp URL]",
    "completion": COMPLETION_USAGE,
    "protoset": PROTOSET_USAGE,
    "check-loss": "sluice check-loss NAME|PACKAGE.MODULE:NAME [--settings JSON]",
    "waits": WAITS_USAGE,
}
SUMMARY = {
    "demo": "a tiny model learns by GRPO over all services, on this machine",
    "doctor": "what this machine lacks for a run, and the remedy",
    "init": "write a commented run.yaml and services.yaml for a model and a task",
    "check": "what would make a run fail or do something else, before anything is started",
    "import-slime": "write run.yaml and services.yaml from a run script of slime",
    "import-verl": "write run.yaml and services.yaml from a run script of verl",
    "import-prime-rl": "write run.yaml and services.yaml from settings of prime-rl",
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
IMPORTS = ("import-slime", "import-verl", "import-prime-rl")
UNCONFIGURED = ("down", "logs", "trace", "completion", *IMPORTS, "protoset", CHECK_LOSS)


class ScoredRunConfig(RunConfig):
    """The run whose `evaluation.datasets` are scored, on the weights that engines serve now.

    It is the file that `sluice train` takes. Read are services or router, security, evaluation,
    environment and sampling; nothing is trained, and run_dir is left as it is.
    """


C = TypeVar("C", bound=ProcessConfig)


async def import_slime(arguments: Sequence[str]) -> None:
    """Files from a script of slime. Raises ConfigError."""
    from sluice.importers import slime  # nobody else needs its flags

    await slime.import_slime(arguments)


async def import_verl(arguments: Sequence[str]) -> None:
    """Files from a script of verl. Raises ConfigError."""
    from sluice.importers import verl  # nobody else needs its keys

    await verl.import_verl(arguments)


async def import_prime_rl(arguments: Sequence[str]) -> None:
    """Files from settings of prime-rl. Raises ConfigError."""
    from sluice.importers import prime_rl  # nobody else needs its keys

    await prime_rl.import_prime_rl(arguments)


async def up(arguments: Sequence[str]) -> None:
    """Run services until a signal; on Ray leave them running."""
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
    if not is_finished(config):
        async with _own_services(services_yaml, config):
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
    if not is_finished(config):
        async with _own_services(services_yaml, config):
            await run_rows(config)


@contextlib.asynccontextmanager
async def _own_services(services_yaml: str | None, config: CommonRunConfig) -> AsyncIterator[None]:
    """Services as long as the block runs, whose start is told in the run's directory too.

    None is started for a run that would be refused.
    """
    if services_yaml is None:
        yield
        return
    refuse_other_run(config)
    supervisor = Supervisor(_load(UpConfig, "up", [services_yaml]), asked_in=config.run_dir)
    async with supervised(supervisor):
        yield


async def trace(arguments: Sequence[str]) -> None:
    """Write the timeline of a run and say in a line what took the time, or send its spans."""
    rest = list(arguments)
    output, steps, most = (take_value(rest, flag) for flag in ("-o", "--steps", "--spans"))
    url = take_value(rest, "--otlp")
    if len(rest) != 1:
        raise ConfigError(f"trace takes one RUN_DIR, not {' '.join(rest)!r}: {USAGE['trace']}")
    for line in _page_or_spans(Path(rest[0]), output, steps, most, url):
        Console().print(logs.printable_lines(line), highlight=False, markup=False, soft_wrap=True)


def _page_or_spans(
    run_dir: Path, output: str | None, steps: str | None, most: str | None, url: str | None
) -> list[str]:
    from sluice.loop.timeline.page import write_page

    if url is None:
        return write_page(run_dir, None if output is None else Path(output), steps, most)
    if output is not None or most is not None:
        flag = "-o" if output is not None else "--spans"
        raise ConfigError(f"trace: --otlp writes no page; leave {flag} out")
    try:
        from sluice.loop.otel import NotTakenError, export_trace
    except ImportError:
        raise ConfigError("trace: --otlp needs pip install 'sluice[otel]'") from None
    try:
        return export_trace(run_dir, url, steps)
    except NotTakenError as error:
        raise UnansweredError(f"trace: {url[:200]}: {error}") from None


async def _until_signal() -> None:
    """Wait for a signal that ends this process."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in ending_signals():
        loop.add_signal_handler(number, stop.set)
    await stop.wait()


async def completion(arguments: Sequence[str]) -> None:
    """Print what a shell reads. Raises ConfigError."""
    if len(arguments) != 1:
        raise ConfigError(f"completion takes the name of a shell: {COMPLETION_USAGE}")
    configs: dict[str, type[ProcessConfig] | None] = {
        **dict.fromkeys(USAGE),
        "up": UpConfig,
        "check": RunConfig,
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
        "check": ("--up", "--as", "--rows"),
        "train": ("--up",),
        "sft": ("--up",),
        "dpo": ("--up",),
        "reward-model": ("--up",),
        "status": ("--json", "--once"),
        "logs": ("--follow", "--since", "--address"),
        "trace": ("--steps", "--spans", "--otlp", "-o"),
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
    guard_output()
    try:
        code = _run_command()
        sys.stdout.flush()
        return code
    except OutputError as error:
        refuse(str(error))
        return 2


def _run_command() -> int:
    commands = {
        "doctor": doctor,
        "init": init,
        "check": check,
        "import-slime": import_slime,
        "import-verl": import_verl,
        "import-prime-rl": import_prime_rl,
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
        from sluice.demo.command import main as demo  # nobody else makes a model

        return demo(arguments)
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
        refuse(str(error))
        return 2
    return exit_code(commands[name](arguments))


def _overview() -> str:
    lines = [f"  {usage}\n      {SUMMARY[name]}" for name, usage in USAGE.items()]
    return "\n".join(["usage:", *lines, "`sluice COMMAND --help` lists the keys of its file."])


if __name__ == "__main__":
    run_process(main)
