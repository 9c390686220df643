"""What a service would be by its settings, as its own package tells it; nothing is started."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.loop.config import EnvironmentConfig
from sluice.loop.prompts import Task
from sluice.weights.adapter import AdapterSpec


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of a model as its files say it, and of what a trainer writes of it."""

    parameters: int
    checkpoint_bytes: int
    version_bytes: int
    kept_versions: int  # 0 is all


@dataclass(frozen=True, kw_only=True)
class TaskFaults:
    """What an environment makes of tasks: `wrong` by position, and the lengths of prompts."""

    wrong: Mapping[int, str] = field(default_factory=dict)
    lengths: Mapping[int, int] = field(default_factory=dict)  # in tokens, by position


class Episodes(Protocol):
    """An episode worker by its settings, which opens environments as one that runs does."""

    async def try_environment(
        self, key: str, environment: EnvironmentConfig, tasks: Sequence[Task]
    ) -> TaskFaults:
        """Raises ConfigError where it cannot be opened, naming the `key` of its setting."""

    async def close(self) -> None:
        """Ends the processes of environments."""


@dataclass
class LookedAt:
    """A service by its settings. `faults` would end it, `notes` may be meant otherwise here.

    `trainer`, `engine`: what it would say of itself. `local_ranks`: processes with a device each.
    """

    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    trainer: trainer_pb.Trainer | None = None
    engine: engine_pb.GetEngineResponse | None = None
    pool: str = ""  # of an engine
    size: Size | None = None
    local_ranks: int = 0
    limits: dict[str, int] = field(default_factory=dict)  # by setting, of what is asked at once
    vocabulary: str = ""  # digest of what an episode worker encodes prompts with
    adapter: AdapterSpec | None = None  # that a trainer publishes in place of a model
    adapter_fault: Callable[[AdapterSpec], str] | None = None  # what of one an engine does not take
    described: str = ""  # in a few words
    held: str = ""  # what a process of it has in memory, as far as that is known ahead
    open_episodes: Callable[[], Episodes] | None = None  # raises ConfigError

    @contextmanager
    def noting(self, *kinds: type[Exception]) -> Iterator[None]:
        """Takes errors of these kinds in the block for faults."""
        try:
            yield
        except kinds as error:
            self.faults.append(str(error))


Look = Callable[..., LookedAt]  # of the service's configuration
