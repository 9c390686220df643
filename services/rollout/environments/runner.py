"""Runs an environment where it belongs: in this process, or in its pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from services.rollout.config import GraderPoolConfig
from services.rollout.environments.environment import (
    Environment,
    Placement,
    Response,
    Reward,
    Task,
    TaskRequest,
    TextTokenizer,
)
from services.rollout.environments.pool import EnvironmentFailedError, GraderPool
from services.rollout.environments.registry import (
    ENVIRONMENTS,
    load_environment,
    parse_settings,
)
from sluice.config import Config


class Runner(ABC):
    """One environment with its settings."""

    needs_text: bool = True

    @abstractmethod
    async def open(self) -> None:
        """Raises SettingError for a setting that only the environment itself can judge."""

    @abstractmethod
    def check(self, request: TaskRequest) -> None:
        """Raises TaskError for a request that no task can be made of."""

    @abstractmethod
    async def make_task(self, request: TaskRequest) -> Task:
        """Raises TaskError, and what ended the environment."""

    @abstractmethod
    async def reward(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        """One per response. Raises what ended the environment."""


class InlineRunner(Runner):
    """In this process: for environments that answer in microseconds."""

    def __init__(self, environment: Environment, settings: Config) -> None:
        self._environment, self._settings = environment, settings
        self.needs_text = environment.needs_text

    async def open(self) -> None:
        """It was opened when it was built."""

    def check(self, request: TaskRequest) -> None:
        self._environment.check(self._settings, request)

    async def make_task(self, request: TaskRequest) -> Task:
        return self._environment.make_task(request)

    async def reward(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        return self._environment.reward(task, responses)


class PooledRunner(Runner):
    """In processes of its own."""

    def __init__(self, found: type[Environment], settings: Config, pool: GraderPool) -> None:
        self._found, self._settings, self._pool = found, settings, pool
        self._values = settings.model_dump(mode="json")

    async def open(self) -> None:
        await self._pool.call("open", self._values)

    def check(self, request: TaskRequest) -> None:
        self._found.check(self._settings, request)

    async def make_task(self, request: TaskRequest) -> Task:
        values = await self._pool.call("make_task", self._values, request=asdict(request))
        return Task(**values)

    async def reward(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        answers = [{"text": r.text, "finish_reason": r.finish_reason} for r in responses]
        values = await self._pool.call("reward", self._values, task=asdict(task), responses=answers)
        if len(values) != len(responses):
            raise EnvironmentFailedError(
                f"{self._found.name} gave {len(values)} rewards for {len(responses)} responses"
            )
        return [Reward(reward=reward, raw_reward=raw) for reward, raw in values]


class Environments:
    """The environments of an episode worker; owns their pools."""

    def __init__(
        self, extra: Mapping[str, str], config: GraderPoolConfig, tokenizer: TextTokenizer
    ) -> None:
        """`extra` are paths by name. Raises ValueError for one that names no environment."""
        self._paths = {**ENVIRONMENTS, **extra}
        self._config, self._tokenizer = config, tokenizer
        for path in extra.values():
            load_environment(path)
        self._pools: dict[str, GraderPool] = {}

    @property
    def names(self) -> list[str]:
        """All there are."""
        return sorted(self._paths)

    def settings_schema(self, name: str) -> dict[str, Any]:
        """JSON schema of the settings of an environment."""
        return load_environment(self._paths[name]).settings_type.model_json_schema()

    def create_runner(self, name: str, values: Mapping[str, Any]) -> Runner:
        """Raises SettingError for a wrong setting; `name` is one of `names`."""
        found = load_environment(self._paths[name])
        settings = parse_settings(found, values)
        if found.placement is Placement.INLINE:
            return InlineRunner(found(settings, self._tokenizer), settings)
        pool = self._pools.get(name)
        if pool is None:
            pool = self._pools[name] = GraderPool(name, self._paths[name], self._config)
        return PooledRunner(found, settings, pool)

    async def close(self) -> None:
        """End all processes."""
        for pool in self._pools.values():
            await pool.close()
