"""Coroutine functions of users on an event loop of their own, so that they stall nobody else."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

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
)
from services.rollout.environments.pool import GraderPool
from services.rollout.environments.registry import (
    ENVIRONMENTS,
    check_module,
    check_url,
    load_environment,
    parse_settings,
)
from sluice.config import Config

logger = logging.getLogger(__name__)

T = TypeVar("T")

BLOCKED_SECONDS = 1.0  # a loop that does not turn for so long is told of
STOP_SECONDS = 1.0


class FunctionThread:
    """Runs the calls of one function in a thread, from the first one to `close`.

    A function that blocks holds up its own calls; where it does is logged.
    """

    def __init__(self, name: str, blocked_seconds: float = BLOCKED_SECONDS) -> None:
        self._name, self._blocked_seconds = name, blocked_seconds
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        # A daemon: one that blocks for ever must not keep the process.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()
        self._open_count = 0
        self._watching: asyncio.Task[None] | None = None

    async def run(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the coroutine returns. Cancelling returns at once, whatever the coroutine does.

        Raises EnvironmentFailedError for what it raises, unless that is typed.
        """
        self._open_count += 1
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch(), name=f"watch {self._name}")
        try:
            return await on_loop(self._loop, self._guarded(function))
        finally:
            self._open_count -= 1

    async def close(self) -> None:
        """Cancel what runs and end the thread."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        self._loop.call_soon_threadsafe(self._stopped.set)
        await asyncio.to_thread(self._thread.join, STOP_SECONDS)
        if self._thread.is_alive():
            logger.warning("%s blocks still: %s; left behind", self._name, self._where())

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        await self._stopped.wait()

    async def _guarded(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        with UserCode(self._name):
            return await function()

    async def _watch(self) -> None:
        """While calls are open: tell, once each time, where the function blocks."""
        is_told = False
        while self._open_count:
            turn = asyncio.ensure_future(on_loop(self._loop, asyncio.sleep(0)))
            _, pending = await asyncio.wait([turn], timeout=self._blocked_seconds)
            if pending:
                turn.cancel()
                if not is_told:
                    logger.warning(
                        "%s blocks, so that its other episodes wait: %s", self._name, self._where()
                    )
            else:
                await asyncio.sleep(self._blocked_seconds)
            is_told = bool(pending)

    def _where(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return "ended"
        last = traceback.extract_stack(frame)[-1]
        return f"{last.filename}:{last.lineno} in {last.name}"


async def on_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, run on the loop of another thread or on this one."""
    if asyncio.get_running_loop() is loop:
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


class Runner(ABC):
    """One environment with its settings."""

    needs_text: bool = True
    has_steps: bool = False
    generate: Generate | None = None

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
    async def step(self, task: Task, state: Mapping[str, Any], response: Response) -> Step:
        """What follows an answer. Raises what ended the environment."""

    @abstractmethod
    async def reward(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        """One per response. Raises what ended the environment."""


class InlineRunner(Runner):
    """In this process: for environments that answer in microseconds."""

    def __init__(self, name: str, environment: Environment, settings: Config) -> None:
        self._name, self._environment, self._settings = name, environment, settings
        self.needs_text = environment.needs_text
        self.has_steps = has_steps(type(environment))
        self.generate = environment.generator(settings)

    async def open(self) -> None:
        """It was opened when it was built."""

    def check(self, request: TaskRequest) -> None:
        with UserCode(self._name):
            self._environment.check(self._settings, request)

    async def make_task(self, request: TaskRequest) -> Task:
        return await self._call(Task, lambda: self._environment.make_task(request))

    async def step(self, task: Task, state: Mapping[str, Any], response: Response) -> Step:
        return await self._call(Step, lambda: self._environment.step(task, state, response))

    async def reward(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        return await self._call(Sequence, lambda: self._environment.reward(task, responses))

    async def _call(self, kind: Any, method: Callable[[], Any]) -> Any:
        """What the environment answered, or its coroutine did."""
        with UserCode(self._name):
            found = method()
            if isinstance(found, Awaitable):
                found = await found
            if not isinstance(found, kind):
                raise TypeError(f"gave {type(found).__name__}, no {kind.__name__}")
            return found


class PooledRunner(Runner):
    """In processes of its own."""

    def __init__(self, found: type[Environment], settings: Config, pool: GraderPool) -> None:
        self._found, self._settings, self._pool = found, settings, pool
        self._values = settings.model_dump(mode="json")
        self.has_steps, self.generate = has_steps(found), found.generator(settings)

    async def open(self) -> None:
        await self._pool.call("open", self._values)

    def check(self, request: TaskRequest) -> None:
        with UserCode(self._found.__name__):
            self._found.check(self._settings, request)

    async def make_task(self, request: TaskRequest) -> Task:
        values = await self._pool.call("make_task", self._values, request=asdict(request))
        return Task(**values)

    async def step(self, task: Task, state: Mapping[str, Any], response: Response) -> Step:
        answer = _without_ids(response)
        step = await self._pool.call(
            "step", self._values, task=asdict(task), state=state, response=answer
        )
        return Step(**step)

    async def reward(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        answers = [_without_ids(response) for response in responses]
        values = await self._pool.call("reward", self._values, task=asdict(task), responses=answers)
        return [Reward(**value) for value in values]


@dataclass(frozen=True)
class Allowed:
    """What requests may name: modules of users, and addresses of reward services."""

    modules: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()

    def check(self, found: type[Environment], settings: Config) -> None:
        """Raises SettingError."""
        for key, path in found.functions(settings).items():
            check_module(path, self.modules, key)
        for key, url in found.urls(settings).items():
            check_url(url, self.urls, key)


class Environments:
    """The environments of an episode worker; owns their processes and threads."""

    def __init__(
        self,
        extra: Mapping[str, str],
        config: GraderPoolConfig,
        tokenizer: TextTokenizer,
        allowed: Allowed = Allowed(),
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

    def settings_schema(self, name: str) -> dict[str, Any]:
        """JSON schema of the settings of an environment."""
        return load_environment(self._paths[name]).settings_type.model_json_schema()

    async def create_runner(self, name: str, values: Mapping[str, Any]) -> Runner:
        """`name` is one of `names`, or the path of a class in a module of users.

        Raises UnknownEnvironmentError, SettingError for a wrong setting, and
        EnvironmentFailedError for what the code of users raises.
        """

        def create() -> Runner:
            with UserCode(name):
                return self._create_runner(name, values)

        return await asyncio.get_running_loop().run_in_executor(self._creator, create)

    def _create_runner(self, name: str, values: Mapping[str, Any]) -> Runner:
        found = load_environment(self._path(name))
        settings = parse_settings(found, values)
        self._allowed.check(found, settings)
        runner: Runner
        if found.place(settings) is Placement.INLINE:
            runner = InlineRunner(name, found(settings, self._tokenizer), settings)
        else:
            pool = self._pools.get(name)
            if pool is None:
                pool = self._pools[name] = GraderPool(name, self._path(name), self._config)
            runner = PooledRunner(found, settings, pool)
        if runner.generate is not None:
            function = found.functions(settings).get("generate", name)
            runner.generate = self._threaded(function, runner.generate)
        return runner

    def _threaded(self, name: str, generate: Generate) -> Generate:
        """The same, run where it stalls the calls of no other function."""
        thread = self._threads.get(name)
        if thread is None:
            thread = self._threads[name] = FunctionThread(name)

        async def run(episode: Any) -> Sequence[Any]:
            async def call() -> Sequence[Any]:
                return await generate(episode)

            return await thread.run(call)

        return run

    def _path(self, name: str) -> str:
        if ":" not in name:
            if name not in self._paths:
                known = ", ".join(self.names)
                raise UnknownEnvironmentError(f"{name!r} is unknown; known: {known}")
            return self._paths[name]
        try:
            check_module(name, self._allowed.modules, "name")
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


def has_steps(found: type[Environment]) -> bool:
    """Whether an environment takes its answers in turns."""
    return found.step is not Environment.step


def _without_ids(response: Response) -> dict[str, Any]:
    """JSON values; a process of its own has no tokenizer and no use for ids."""
    return {
        "text": response.text,
        "finish_reason": response.finish_reason,
        "turns": [asdict(turn) for turn in response.turns],
        "state": response.state,
    }
