"""The tasks of a run and of its data sets: files, rows, environments, and lengths of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sluice.config import ConfigError
from sluice.loop.config import EnvironmentConfig, RunConfig, SamplingConfig
from sluice.loop.evaluation import open_dataset
from sluice.loop.mixture import open_source
from sluice.loop.prompts import PromptSource
from sluice.loop.workers import check_teachers
from sluice.preflight.findings import Findings
from sluice.preflight.service import Episodes, LookedAt, TaskFaults

TOLD = 3  # rows of a file that are named


@dataclass(frozen=True, kw_only=True)
class OpenTasks:
    """Tasks of a share of the run, or of a data set; `key` is the setting that gives them."""

    key: str
    environment_key: str
    environment: EnvironmentConfig
    sampling: SamplingConfig
    source: PromptSource


def open_tasks(config: RunConfig, findings: Findings) -> list[OpenTasks]:
    """Opens what a run opens before its first step, and the data sets that it scores."""
    found = []
    for name, share in config.shares.items():
        key = f"environments.{name}.prompts" if name else "prompts"
        with findings.expecting(key):
            source = open_source(config, name)
            _tell(findings, key, source)
            check_teachers(config, share, source)
            found.append(
                OpenTasks(
                    key=key,
                    environment_key=f"environments.{name}.environment" if name else "environment",
                    environment=share.environment,
                    sampling=config.training_sampling(share),
                    source=source,
                )
            )
    for name, data in config.evaluation.datasets.items() if config.evaluation else ():
        key = f"evaluation.datasets.{name}.prompts"
        with findings.expecting(key):
            source = open_dataset(config, name)
            _tell(findings, key, source)
            found.append(
                OpenTasks(
                    key=key,
                    environment_key=f"evaluation.datasets.{name}.environment",
                    environment=config.environment_of(data),
                    sampling=config.sampling_of(data),
                    source=source,
                )
            )
    return found


def _tell(findings: Findings, key: str, source: PromptSource) -> None:
    findings.ok(key, f"{source.count:,} tasks")


async def try_tasks(
    tasks: list[OpenTasks], workers: Mapping[str, LookedAt], limit: int, rows: int, told: Findings
) -> None:
    """Opens every environment on every kind of episode worker, with the first `rows` tasks.

    limit: tokens of a prompt and its answer that engines take; 0 where nobody says.
    """
    for name, worker in workers.items():
        if worker.open_episodes is None:
            continue
        try:
            episodes = worker.open_episodes()
        except ConfigError as error:
            told.wrong(name, str(error))
            continue
        try:
            for each in tasks:
                await _try(each, episodes, limit, rows, told)
        finally:
            await episodes.close()


async def _try(tasks: OpenTasks, episodes: Episodes, limit: int, rows: int, told: Findings) -> None:
    count = min(rows, tasks.source.count) if rows else tasks.source.count
    with told.expecting(tasks.environment_key):
        first = [tasks.source.tasks[place] for place in range(count)]
        found = await episodes.try_environment(tasks.environment_key, tasks.environment, first)
        _tell_wrong(tasks, found, count, told)
        if limit and found.lengths:
            _tell_lengths(tasks, found, limit, told)


def _tell_wrong(tasks: OpenTasks, found: TaskFaults, count: int, told: Findings) -> None:
    """A group whose task cannot be made is dropped; too many in a row end the run."""
    named = [f"{tasks.source.name(place)}: {why}" for place, why in sorted(found.wrong.items())]
    if not named:
        return
    text = f"{len(named)} of the {count} tasks looked at cannot be made: " + "; ".join(
        [*named[:TOLD], *(["..."] if len(named) > TOLD else [])]
    )
    _tell_dropped(tasks, len(named), count, text, "mend or leave out such rows", told)


def _tell_dropped(
    tasks: OpenTasks, count: int, seen: int, text: str, remedy: str, told: Findings
) -> None:
    """A run goes on without some of its groups, and ends where too many are dropped in a row."""
    if 2 * count < seen:
        told.warn(tasks.key, text, f"{remedy}: their groups are dropped")
    else:
        told.wrong(tasks.key, text, f"{remedy}: too many groups dropped in a row end the run")


def _tell_lengths(tasks: OpenTasks, found: TaskFaults, limit: int, told: Findings) -> None:
    longest = max(found.lengths, key=lambda place: found.lengths[place])
    prompt, response = found.lengths[longest], tasks.sampling.max_new_tokens
    where = f"{tasks.source.name(longest)}: a prompt of {prompt} tokens"
    seen = len(found.lengths)
    too_long = sum(length > limit - 1 for length in found.lengths.values())
    cut = sum(length + response > limit for length in found.lengths.values())
    if too_long:
        text = (
            f"{where}, and engines take {limit} with the answer (engine.max_model_length): "
            f"{too_long} of the {seen} looked at have no room for one"
        )
        remedy = "raise engine.max_model_length, or leave such rows out"
        _tell_dropped(tasks, too_long, seen, text, remedy, told)
    elif cut:
        told.warn(
            tasks.key,
            f"{where}, and answers have up to {response} (max_new_tokens): engines end at {limit}"
            f" (engine.max_model_length), which may cut those to {cut} of the {seen} looked at",
            f"set engine.max_model_length to {prompt + response} at least",
        )
    else:
        told.ok(tasks.key, f"the longest prompt of {seen} looked at has {prompt} tokens")
