"""Which environment each group of a run is of, and which of its tasks.

Groups of a mixture are interleaved by position, as evenly as the weights allow, so that a run
which resumes goes on as one that was never stopped. The ledger keeps what was decided.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import xxhash

from sluice.config import ConfigError, named_function
from sluice.loop.config import LARGEST_WEIGHT, RunConfig
from sluice.loop.ledger import Ledger, LedgerGroup
from sluice.loop.prompts import PromptSource, load_prompts

Schedule = Callable[[int, Mapping[str, float]], Mapping[str, float]]


class ScheduleError(Exception):
    """A schedule answered something else than weights; the message says what."""


class Interleaving:
    """An endless sequence of names, each as often as its weight says, as evenly as can be.

    A name is owed its share of every place, and the one that is owed most comes next: of whole
    weights every round of their sum is exact (smooth weighted round-robin). What is owed outlives
    a change of weights, so that small shares come to their turn however often weights change.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        owed: Mapping[str, float],
        given: Mapping[str, int],
    ) -> None:
        """`owed` when these weights began, `given` since, by name; who is in neither has 0."""
        self.weights = dict(weights)
        self._sum = math.fsum(weights.values())
        self._began_with = {name: owed.get(name, 0.0) for name in weights}
        self._given = {name: given.get(name, 0) for name in weights}

    def owed(self, places: int = 0) -> dict[str, float]:
        """How many places each name is behind, once so many more are given."""
        count = sum(self._given.values()) + places
        return {
            name: self._began_with[name] + weight * count / self._sum - self._given[name]
            for name, weight in self.weights.items()
        }

    def next(self) -> str:
        """Returns the next name."""
        owed = self.owed(1)
        name = max((n for n, weight in self.weights.items() if weight), key=owed.__getitem__)
        self._given[name] += 1
        return name


def open_sources(config: RunConfig) -> dict[str, PromptSource]:
    """Opens the tasks of every environment, by name.

    Raises ConfigError for a missing, PromptFileError for a malformed file.
    """
    return {name: open_source(config, name) for name in config.shares}


def open_source(config: RunConfig, name: str) -> PromptSource:
    """Opens the tasks of an environment by name. Raises as `open_sources`."""
    share, where = config.shares[name], f"environments.{name}.prompts" if name else "prompts"
    return load_prompts(share.prompts, config.seed, share.environment, where)


def load_schedule(config: RunConfig) -> Schedule | None:
    """Imports the schedule of a run; None where weights stay.

    Raises ConfigError, also for one that cannot be asked with a step and its metrics.
    """
    path, key = config.environment_schedule, "environment_schedule"
    if not path:
        return None
    schedule = named_function(path, key)
    try:
        inspect.signature(schedule).bind(0, {})
    except TypeError as error:
        raise ConfigError(f"{key}: {path}: is asked with (step, metrics): {error}") from None
    return schedule


def digest_of(sources: Mapping[str, PromptSource]) -> str:
    """Returns a digest of all tasks and their orders; of a single source its own."""
    if sources.keys() == {""}:
        return sources[""].digest
    text = json.dumps({name: source.digest for name, source in sources.items()}, sort_keys=True)
    return xxhash.xxh3_64_hexdigest(text.encode())


class Mixture:
    """Hands out environments and their tasks to new groups, and records them in the ledger."""

    def __init__(
        self,
        weights: Mapping[str, float],
        ledger: Ledger,
        schedule: Schedule | None = None,
        scalars: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """Go on with what the ledger holds. `scalars` are the last step's, for the schedule."""
        self._weights, self._ledger = dict(weights), ledger
        self._schedule, self._scalars = schedule, scalars
        self._tasks = ledger.task_counts()
        self._step = -1
        last = ledger.last_shares()
        if last is None:
            self._interleaving = Interleaving({}, {}, {})
        else:
            first, record = last[0], json.loads(last[1])
            given = ledger.task_counts(first)
            self._interleaving = Interleaving(record["weights"], record["owed"], given)

    def assign(self, groups: Sequence[LedgerGroup]) -> list[LedgerGroup]:
        """Give new groups, by position, their environments and tasks; the ledger has them.

        Raises ScheduleError.
        """
        weights = self._weights_of(groups[0].issue_step)
        if weights != self._interleaving.weights:
            owed = self._interleaving.owed()
            record = json.dumps({"weights": weights, "owed": owed})
            self._ledger.record_shares(groups[0].position, record)
            self._interleaving = Interleaving(weights, owed, {})
        assigned, tasks = list[LedgerGroup](), list[tuple[int, str, int]]()
        for group in groups:
            name = self._interleaving.next()
            task = self._tasks.get(name, 0)
            self._tasks[name] = task + 1
            assigned.append(replace(group, environment=name, task=task))
            tasks.append((group.position, name, task))
        self._ledger.assign(tasks)
        return assigned

    def _weights_of(self, step: int) -> dict[str, float]:
        if self._schedule is None:
            return self._weights
        if step != self._step:
            self._weights, self._step = self._scheduled(self._schedule, step), step
        return self._weights

    def _scheduled(self, schedule: Schedule, step: int) -> dict[str, float]:
        where = f"environment_schedule, step {step}"
        answer = schedule(step, dict(self._scalars()))
        if not isinstance(answer, Mapping) or answer.keys() != self._weights.keys():
            names = ", ".join(self._weights)
            raise ScheduleError(f"{where}: answered {answer!r}, not a weight of each of {names}")
        for name, weight in answer.items():
            is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not is_number or not 0 <= weight <= LARGEST_WEIGHT:
                raise ScheduleError(
                    f"{where}: the weight of {name} is {weight!r}, not within 0..{LARGEST_WEIGHT:g}"
                )
        if not any(answer.values()):
            raise ScheduleError(f"{where}: all weights are 0")
        return {name: float(answer[name]) for name in self._weights}
