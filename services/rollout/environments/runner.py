"""Runs environments: in the episode worker, or each in processes of its own."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from services.rollout.config import GraderPoolConfig
from services.rollout.environments.environment import (
    Environment,
    Generate,
    Placement,
    Response,
    Reward,
    Step,
    Task,
    TaskRequest,
    TextTokenizer,
    UnknownEnvironmentError,
    UserCode,
    checked,
)
from services.rollout.environments.isolation import FunctionThread, GraderPool
from services.rollout.environments.registry import (
    ENVIRONMENTS,
    NOTHING_ALLOWED,
    Allowed,
    load_environment,
    parse_settings,
)
from sluice.config import Config


class Runner(ABC):
    """Runs one environment with its settings."""

    needs_text: bool = True
    has_steps: bool = False
    generate: Generate | None = None

    @abstractmethod
    async def open(self) -> None:
        """Builds it. Raises SettingError for a setting that only the environment can judge."""

    @abstractmethod
    def check(self, request: TaskRequest) -> None:
        """Checks a request. Raises TaskError for one that no task can be made of."""

    @abstractmethod
    async def make_task(self, request: TaskRequest) -> Task:
        """Returns the task. Raises TaskError, and what ended the environment."""

    @abstractmethod
    async def step(self, task: Task, state: Mapping[str, Any], response: Response) -> Step:
        """Returns what follows an answer. Raises what ended the environment."""

    @abstractmethod
    async def reward(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        """Returns one reward per response. Raises what ended the environment."""


class InlineRunner(Runner):
    """Runs it in this process: for environments that answer in microseconds."""

    def __init__(self, name: str, environment: Environment, settings: Config) -> None:
        self._name, self._environment, self._settings = name, environment, settings
        self.needs_text = environment.needs_text
        self.has_steps = has_steps(type(environment))
        self.generate = environment.generator(settings)

    async def open(self) -> None:
        """Does nothing: it was built before."""

    def check(self, request: TaskRequest) -> None:
        with UserCode(self._name):
            self._environment.check(self._settings, request)

    async def make_task(self, request: TaskRequest) -> Task:
        task = await self._call(Task, lambda: self._environment.make_task(request))
        return checked(task, self._name)

    async def step(self, task: Task, state: Mapping[str, Any], response: Response) -> Step:
        step = await self._call(Step, lambda: self._environment.step(task, state, response))
        return checked(step, self._name)

    async def reward(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        return await self._call(Sequence, lambda: self._environment.reward(task, responses))

    async def _call(self, kind: Any, method: Callable[[], Any]) -> Any:
        """Returns what the environment answered, or its coroutine did."""
        with UserCode(self._name):
            found = method()
            if isinstance(found, Awaitable):
                found = await found
            if not isinstance(found, kind):
                raise TypeError(f"gave {type(found).__name__}, no {kind.__name__}")
            return found


class PooledRunner(Runner):
    """Runs it in processes of its own."""

    def __init__(self, kind: type[Environment], settings: Config, pool: GraderPool) -> None:
        self._kind, self._settings, self._pool = kind, settings, pool
        self._values = settings.model_dump(mode="json")
        self.has_steps, self.generate = has_steps(kind), kind.generator(settings)

    async def open(self) -> None:
        await self._pool.call("open", self._values)

    def check(self, request: TaskRequest) -> None:
        with UserCode(self._kind.__name__):
            self._kind.check(self._settings, request)

    async def make_task(self, request: TaskRequest) -> Task:
        values = await self._pool.call("make_task", self._values, request=asdict(request))
        return checked(Task(**values), self._kind.__name__)

    async def step(self, task: Task, state: Mapping[str, Any], response: Response) -> Step:
        answer = _without_ids(response)
        step = await self._pool.call(
            "step", self._values, task=asdict(task), state=state, response=answer
        )
        return checked(Step(**step), self._kind.__name__)

    async def reward(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        answers = [_without_ids(response) for response in responses]
        values = await self._pool.call("reward", self._values, task=asdict(task), responses=answers)
        return [Reward(**value) for value in values]


class Environments:
    """Creates runners for the episode worker; owns their processes and threads."""

    def __init__(
        self,
        extra: Mapping[str, str],
        config: GraderPoolConfig,
        tokenizer: TextTokenizer,
        allowed: Allowed = NOTHING_ALLOWED,
    ) -> None:
        """`extra` are paths by name. Raises ValueError for one that names no environment."""
        self._paths = {**ENVIRONMENTS, **extra}
        self._config, self._tokenizer, self._allowed = config, tokenizer, allowed
        for path in extra.values():
            load_environment(path)
        self._pools: dict[str, GraderPool] = {}
        self._threads: dict[str, FunctionThread] = {}  # of generate functions
        # Modules of users are imported there, for as long as that takes.
        self._creator = ThreadPoolExecutor(1, "create runners")

    @property
    def names(self) -> list[str]:
        """All there are."""
        return sorted(self._paths)

    async def settings_schemas(self) -> dict[str, str]:
        """JSON schema of the settings of each environment, whose modules are imported for it."""

        def create() -> dict[str, str]:
            types = {name: load_environment(path) for name, path in self._paths.items()}
            return {
                name: json.dumps(each.settings_type.model_json_schema())
                for name, each in types.items()
            }

        return await asyncio.get_running_loop().run_in_executor(self._creator, create)

    async def create_runner(self, name: str, values: Mapping[str, Any]) -> Runner:
        """Creates a runner. `name` is one of `names`, or the path of a class in a module of users.

        Raises UnknownEnvironmentError, SettingError for a wrong setting, and
        EnvironmentFailedError for what the code of users raises.
        """

        def create() -> Runner:
            with UserCode(name):
                return self._create_runner(name, values)

        return await asyncio.get_running_loop().run_in_executor(self._creator, create)

    def _create_runner(self, name: str, values: Mapping[str, Any]) -> Runner:
        environment_type = load_environment(self._path(name))
        settings = parse_settings(environment_type, values)
        self._allowed.check(environment_type, settings)
        runner: Runner
        if environment_type.place(settings) is Placement.INLINE:
            runner = InlineRunner(name, environment_type(settings, self._tokenizer), settings)
        else:
            pool = self._pools.get(name)
            if pool is None:
                pool = self._pools[name] = GraderPool(name, self._path(name), self._config)
            runner = PooledRunner(environment_type, settings, pool)
        if runner.generate is not None:
            function = environment_type.functions(settings).get("generate", name)
            runner.generate = self._threaded(function, runner.generate)
        return runner

    def _threaded(self, name: str, generate: Generate) -> Generate:
        """Returns the same function, run where it stalls the calls of no other one."""
        thread = self._threads.get(name)
        if thread is None:
            thread = self._threads[name] = FunctionThread(name)
        return lambda episode: thread.run(lambda: generate(episode))

    def _path(self, name: str) -> str:
        if ":" not in name:
            if name not in self._paths:
                known = ", ".join(self.names)
                raise UnknownEnvironmentError(f"{name!r} is unknown; known: {known}")
            return self._paths[name]
        try:
            self._allowed.check_module(name, "name")
            load_environment(name)
        except ValueError as error:  # SettingError too
            raise UnknownEnvironmentError(str(error)) from None
        return name

    async def close(self) -> None:
        """End all processes and threads, after an import that goes on."""
        await asyncio.to_thread(self._creator.shutdown, cancel_futures=True)
        for pool in self._pools.values():
            await pool.close()
        for thread in self._threads.values():
            await thread.close()


def has_steps(environment_type: type[Environment]) -> bool:
    """Says whether an environment takes its answers in turns."""
    return environment_type.step is not Environment.step


def _without_ids(response: Response) -> dict[str, Any]:
    """JSON values; a process of its own has no tokenizer and no use for ids."""
    return {
        "text": response.text,
        "finish_reason": response.finish_reason,
        "turns": [asdict(turn) for turn in response.turns],
        "state": response.state,
    }
