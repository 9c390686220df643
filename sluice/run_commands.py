"""`sluice status`, `report` and `samples`: look at runs, and change nothing in them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sluice.config import ConfigError, ProcessConfig, load_config
from sluice.loop.screen import number_text, plain_text, status_screen
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
    asked = [(each["name"], each["health"]) for each in found["services"]]
    dead = asked == [(target, NO_ANSWER)]  # an address, and not what a directory lists
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


REPORT_USAGE = "sluice report RUN_DIR [RUN_DIR ...] [-o FILE.html] [--key value ...]"


class ReportConfig(ProcessConfig):
    """What `sluice report` shows."""

    foreign_keys = ("security",)  # it calls nobody

    tokenizer: Path | None = Field(
        None, description="Model directory; None is that of the run's rollout services."
    )
    samples: int = Field(2_000, ge=0, le=100_000, description="Of all runs together, the latest.")


async def report(arguments: Sequence[str]) -> None:
    """Write runs beside each other as one HTML page. Raises ConfigError."""
    from sluice.loop.run_page.page import write_run_page

    rest = list(arguments)
    output = take_value(rest, "-o")
    runs, flags = leading(rest)
    if not runs:
        load_config(ReportConfig, flags, REPORT_USAGE)
        raise ConfigError(f"RUN_DIR comes first: {REPORT_USAGE}")
    config = load_config(ReportConfig, flags, REPORT_USAGE)
    path = Path(output) if output is not None else Path(runs[0]) / "report.html"
    told = write_run_page(
        [Path(run) for run in runs], path, tokenizer=config.tokenizer, samples=config.samples
    )
    Console().print(plain_lines(told), highlight=False, soft_wrap=True, markup=False)


def plain_lines(text: str) -> str:
    """Lines that do no harm on a terminal."""
    return "\n".join(plain_text(line, 1000) for line in text.split("\n"))


LISTED = 20  # samples, unless `limit` says otherwise
SAMPLES_USAGE = "sluice samples RUN_DIR [-o FILE.parquet|FILE.jsonl] [--key value ...]"


class SamplesConfig(ProcessConfig):
    """Which samples `sluice samples` lists or exports.

    First those kept with what the trainer computed, then all of the store; each with the latest
    steps first.
    """

    foreign_keys = ("security",)  # it calls nobody

    steps: str = Field("", description="FIRST-LAST, or one step.")
    group: str = Field("", description="Id of a group.")
    contains: str = Field("", description="Text of the prompt or response.")
    finish_reason: Literal["", "stop", "length", "aborted"] = ""
    min_reward: float | None = None
    max_reward: float | None = None
    limit: int | None = Field(
        None, ge=1, lt=1 << 63, description="None is 20 that are listed, and all with -o."
    )
    tokenizer: Path | None = Field(
        None, description="Model directory; None is that of the run's rollout services."
    )

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> SamplesConfig:
        low, high = self.min_reward, self.max_reward
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_reward: {low:g} is more than max_reward, {high:g}")
        return self


async def samples(arguments: Sequence[str]) -> None:
    """List samples of a run, or write them to a file. Raises ConfigError."""
    from sluice.loop.run_page.page import read_run, tokenizer_of
    from sluice.loop.run_samples import (
        SampleFilter,
        SeenSample,
        export,
        export_row,
        load_samples,
        pieces_of,
    )

    rest = list(arguments)
    output = take_value(rest, "-o")
    runs, flags = leading(rest)
    config = load_config(SamplesConfig, flags, SAMPLES_USAGE)
    if len(runs) != 1:
        raise ConfigError(f"samples takes one RUN_DIR: {SAMPLES_USAGE}")
    run = read_run(Path(runs[0]))
    tokenizer = tokenizer_of(run, config.tokenizer)
    wanted = SampleFilter(
        group=config.group,
        contains=config.contains,
        finish_reason=config.finish_reason,
        min_reward=config.min_reward,
        max_reward=config.max_reward,
    )

    def texts(seen: SeenSample) -> tuple[str, str]:
        tokens, start = seen.sample.token_ids.tolist(), seen.sample.prompt_length
        halves = tokens[:start], tokens[start:]
        prompt, response = ("".join(pieces_of(tokenizer, half)) for half in halves)
        return prompt, response

    steps = _step_range(config.steps)

    def chosen() -> Iterator[tuple[SeenSample, str, str]]:
        for seen in load_samples(run.run_dir, run.store, steps, run.warnings.append):
            if wanted.takes(seen, lambda seen=seen: "\0".join(texts(seen))):  # type: ignore[misc]
                yield seen, *texts(seen)

    limit = LISTED if config.limit is None and output is None else config.limit
    found = islice(chosen(), limit)
    console = Console()
    if output is None:
        table, count = Table("step", "sample", "reward", "adv", "prompt", "response", box=None), 0
        for count, (seen, prompt, response) in enumerate(found, 1):  # noqa: B007
            table.add_row(
                number_text(seen.step),
                Text(plain_text(seen.sample.sample_id, 40)),
                number_text(seen.number("reward")),
                number_text(seen.advantage, 2),
                Text(plain_text(prompt[-60:], 60)),
                Text(plain_text(response, 80)),
            )
        if count:
            console.print(table)
        told = f"{count} samples" + (", the first; --limit shows more" if count == limit else "")
    else:
        try:
            count = export((export_row(*each) for each in found), Path(output))
        except OSError as error:  # pyarrow's own says more than `strerror`
            why = os.strerror(error.errno) if error.errno else error
            raise ConfigError(f"-o: {output[:200]}: {why}") from None
        except ValueError as error:
            raise ConfigError(f"-o: {error}") from None
        told = f"{output}: {count} samples"
    if not count:
        last = run.rows[-1]["step"] if run.rows else 0
        reach = f"has {last} steps" if last else "has made no step"
        told = f"no sample fits; the run {reach}\n{told}"
    told = "\n".join([*run.warnings, told])
    console.print(plain_lines(told), highlight=False, soft_wrap=True, markup=False)


def _step_range(steps: str) -> range | None:
    if not steps:
        return None
    first, dash, last = steps.partition("-")
    try:
        found = range(int(first), int(last if dash else first) + 1)
    except ValueError:
        raise ConfigError(f"--steps: {steps[:100]!r} is not FIRST-LAST") from None
    if not found:
        raise ConfigError(f"--steps: {steps[:100]!r} ends before it begins")
    return found


def leading(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before the first flag, and the rest."""
    count = next((i for i, each in enumerate(arguments) if each.startswith("-")), len(arguments))
    return list(arguments[:count]), list(arguments[count:])


def take_value(arguments: list[str], flag: str) -> str | None:
    """Remove `flag value` or `--flag=value`; the value. Raises ConfigError."""
    for index, argument in enumerate(arguments):
        if argument == flag:
            if index + 1 == len(arguments):
                raise ConfigError(f"{flag} needs a value")
            value = arguments[index + 1]
            del arguments[index : index + 2]
            return value
        if flag.startswith("--") and argument.startswith(f"{flag}="):
            del arguments[index]
            return argument.removeprefix(f"{flag}=")
    return None


def take_switch(arguments: list[str], flag: str) -> bool:
    """Remove `flag`; whether it was there."""
    found = flag in arguments
    if found:
        arguments.remove(flag)
    return found
