"""`verifiers`: environments of the `verifiers` package, unmodified, over the OpenAI port.

They are played in a Python of their own, which has the package and the environment. Its calls of
the port are recorded; the very tokens that were sampled become the samples of the group.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

import aiohttp
from pydantic import Field

from services.rollout.environments.environment import (
    Environment,
    EnvironmentFailedError,
    Generate,
    InvalidRewardError,
    Placement,
    Reward,
    SettingError,
    Task,
    TaskError,
    TaskRequest,
    TextTokenizer,
    rewards_from,
)
from services.rollout.environments.isolation import on_loop
from services.rollout.episodes.episode import Episode
from services.rollout.episodes.trajectory import Trajectory
from services.rollout.openai.recorder import GroupRecord
from sluice.client import new_request_id
from sluice.config import Config

PYTHON = "VERIFIERS_PYTHON"  # set where the worker runs: no request chooses a program
KEY = "VERIFIERS_OPENAI_KEY"
SCRIPT = Path(__file__).with_name("player.py")
START_SECONDS = 300.0
LINE_BYTES = 64 * 1024 * 1024
FAULTS_OF_MODELS = frozenset({"EmptyModelResponseError", "OverlongPromptError"})


class VerifiersSettings(Config):
    """`environment` is what `verifiers.load_environment` takes, `arguments` its arguments."""

    environment: str = Field(pattern=r"^([A-Za-z0-9_-]+/)?[A-Za-z0-9_][A-Za-z0-9_.-]*$")
    arguments: Mapping[str, Any] = Field(default_factory=dict)
    openai_url: str = Field(pattern=r"^https?://")  # of the port, `/v1` included
    model: str = "policy"
    client: Literal["chat_completions", "completions"] = "chat_completions"
    split: Literal["train", "eval"] = "train"
    seconds: float = Field(600.0, gt=0)  # for one call of the port
    retries: int = Field(3, ge=0)  # of one call


class VerifiersEnvironment(Environment):
    """Tasks are rows of the environment's data set, by index."""

    name = "verifiers"
    settings_type: ClassVar[type[Config]] = VerifiersSettings
    placement = Placement.INLINE
    needs_text = False

    def __init__(self, settings: VerifiersSettings, tokenizer: TextTokenizer | None = None) -> None:
        """Raises SettingError where this worker has no Python for it."""
        self._settings = settings
        if not os.environ.get(PYTHON):
            raise SettingError(
                "environment",
                f"this worker plays none: {PYTHON} names no Python that has verifiers",
            )

    @classmethod
    def check(cls, settings: VerifiersSettings, request: TaskRequest) -> None:
        if request.index is None or request.index < 0:
            raise TaskError("index", "this environment has its tasks by index")

    @classmethod
    def functions(cls, settings: VerifiersSettings) -> Mapping[str, str]:
        module = settings.environment.replace("-", "_").rsplit("/", 1)[-1]
        return {"environment": f"{module}:load_environment"}

    @classmethod
    def urls(cls, settings: VerifiersSettings) -> Mapping[str, str]:
        return {"openai_url": settings.openai_url}

    @classmethod
    def generator(cls, settings: VerifiersSettings) -> Generate | None:
        groups: dict[str, _PlayedGroup] = {}

        async def play(episode: Episode) -> list[Trajectory]:
            if episode.group_id not in groups:  # its siblings come at the same moment
                groups[episode.group_id] = _PlayedGroup(settings, episode)
            group = groups[episode.group_id]
            try:
                return await group.play(episode)
            finally:
                group.missing -= 1
                if not group.missing and groups.get(episode.group_id) is group:
                    del groups[episode.group_id]
                    await group.close()

        return play

    async def make_task(self, request: TaskRequest) -> Task:
        """Raises TaskError for an index beyond the data set, SettingError for what cannot start."""
        assert request.index is not None
        player = await PLAYERS.get(self._settings)
        if request.index >= player.tasks:
            raise TaskError("index", f"{request.index} is not within 0..{player.tasks - 1}")
        row = await player.call(task=request.index)
        # The prompt is the environment's: what is sampled from comes with each of its calls.
        return Task(prompt="", answer=row["answer"], state={"index": request.index})

    def reward(self, task: Task, responses: Any) -> list[Reward]:
        raise AssertionError("every trajectory has its reward")


class _PlayedGroup:
    """One attempt at a group. It is recorded under a name of its own."""

    def __init__(self, settings: VerifiersSettings, first: Episode) -> None:
        self._settings, self.missing = settings, first.sample_count
        self._name = f"verifiers-{new_request_id()}"
        self._episodes: dict[int, Episode] = {}
        self._played: asyncio.Task[dict[int, list[Trajectory]]] | None = None
        self._complete = asyncio.Event()

    async def play(self, episode: Episode) -> list[Trajectory]:
        """Waits for the siblings; returns the episode's own samples."""
        self._episodes[episode.index] = episode
        if len(self._episodes) == episode.sample_count:
            self._played = asyncio.create_task(self._play(), name=self._name)
            self._complete.set()
        await self._complete.wait()
        assert self._played is not None
        return (await asyncio.shield(self._played))[episode.index]

    async def close(self) -> None:
        """Ends what is still played."""
        if self._played is not None:
            self._played.cancel()
            await asyncio.gather(self._played, return_exceptions=True)

    async def _play(self) -> dict[int, list[Trajectory]]:
        episodes = [self._episodes[index] for index in sorted(self._episodes)]
        first = episodes[0]
        index = first.task.state["index"]
        records = [
            {"group": self._name, "session": str(episode.index)}
            | {name: bound for name, bound in vars(first.bounds).items() if bound is not None}
            for episode in episodes
        ]
        call = {
            "index": index,
            "sampling": [_sampling_of(episode) for episode in episodes],
            "records": records,
        }
        player = await on_loop(first.home, PLAYERS.get(self._settings))
        found = await on_loop(first.home, player.call(play=call))
        try:
            record = await self._record()
            return {
                episode.index: self._samples(episode, record, result)
                for episode, result in zip(episodes, found["episodes"], strict=True)
            }
        finally:
            await self._forget()

    def _samples(
        self, episode: Episode, record: GroupRecord, result: Mapping[str, Any]
    ) -> list[Trajectory]:
        name = self._settings.environment
        if result["error"] and result["error"] not in FAULTS_OF_MODELS:
            raise EnvironmentFailedError(f"{name}: {result['error']}: {result['message']}")
        reward = {"reward": result["reward"], "raw_reward": result["reward"]}
        try:
            (checked,) = rewards_from([reward | {"scores": result["metrics"]}], 1)
        except InvalidRewardError as error:
            raise EnvironmentFailedError(f"{name}: {error}") from None
        trajectories = record.trajectories(str(episode.index))
        for trajectory in trajectories:
            trajectory.reward = checked
        return trajectories

    async def _record(self) -> GroupRecord:
        record = GroupRecord(self._name)
        async with self._session() as session, session.get(self._url("/lines")) as answer:
            if answer.status == 404:
                return record  # nothing was sampled
            await _raise_for(answer)
            for line in (await answer.json())["lines"]:
                record.apply(line)
        return record

    async def _forget(self) -> None:
        async with self._session() as session, session.delete(self._url()) as answer:
            if answer.status != 404:
                await _raise_for(answer)

    def _session(self) -> aiohttp.ClientSession:
        key = os.environ.get(KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=self._settings.seconds)
        return aiohttp.ClientSession(headers=headers, timeout=timeout)

    def _url(self, rest: str = "") -> str:
        parts = urlsplit(self._settings.openai_url)
        return f"{parts.scheme}://{parts.netloc}/sluice/v1/groups/{self._name}{rest}"


async def _raise_for(answer: aiohttp.ClientResponse) -> None:
    if answer.status != 200:
        text = (await answer.text(errors="replace"))[:200]
        raise EnvironmentFailedError(f"{answer.url}: HTTP {answer.status}: {text}")


def _sampling_of(episode: Episode) -> dict[str, Any]:
    """Arguments of OpenAI's calls; every call of an episode draws by the same seed."""
    sampling = episode.sampling
    arguments: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_new_tokens,
    }
    if episode.seed is not None:
        arguments["seed"] = episode.seed >> 3  # within what the port takes
    extra: dict[str, Any] = {}
    if sampling.top_k:
        extra["top_k"] = sampling.top_k
    if sampling.stop_token_ids:
        extra["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.min_new_tokens:
        extra["min_tokens"] = sampling.min_new_tokens
    if sampling.ignore_eos:
        extra["ignore_eos"] = True
    if sampling.stop:
        arguments["stop"] = list(sampling.stop)
        extra["include_stop_str_in_output"] = True  # as environments here see it
    if extra:
        arguments["extra_body"] = extra
    return arguments


class PlayerProcess:
    """Owns one process; it ends with this one, which holds its input."""

    def __init__(self, settings: VerifiersSettings) -> None:
        self._settings, self.tasks = settings, 0
        self._process: asyncio.subprocess.Process | None = None
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._listener: asyncio.Task[None] | None = None

    @property
    def is_alive(self) -> bool:
        return self._listener is not None and not self._listener.done()

    async def start(self) -> None:
        """Raises SettingError for an environment that cannot be loaded."""
        values = self._settings.model_dump(mode="json")
        values["url"] = values.pop("openai_url")
        self._process = await asyncio.create_subprocess_exec(
            *(os.environ[PYTHON], str(SCRIPT), json.dumps(values)),
            env={KEY: "none", **os.environ},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(START_SECONDS):
                line = await self._process.stdout.readline()
        except TimeoutError:
            line = b'{"failed": "it takes too long to load"}'
        told: dict[str, Any] = json.loads(line) if line else {"failed": "its process died"}
        if "failed" in told:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            name = self._settings.environment
            raise SettingError("environment", f"{name} cannot be loaded: {told['failed']}")
        self.tasks = told["tasks"]
        self._listener = asyncio.create_task(self._listen(), name="hear verifiers")

    async def close(self) -> None:
        """Ends it; what it was at fails."""
        assert self._process is not None and self._listener is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._listener

    async def call(self, **call: Any) -> dict[str, Any]:
        """Returns the answer. Raises EnvironmentFailedError; cancelling ends what is played."""
        assert self._process is not None and self._process.stdin is not None
        number = next(self._numbers)
        self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"id": number, **call})
            reply = await self._calls[number]
        except asyncio.CancelledError:
            self._send({"leave": number})
            raise
        finally:
            del self._calls[number]
        if "error" in reply:
            raise EnvironmentFailedError(f"{self._settings.environment}: {reply['error']}")
        return reply

    def _send(self, call: Mapping[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        if not self.is_alive:
            raise EnvironmentFailedError(f"{self._settings.environment}: its process died")
        self._process.stdin.write(json.dumps(call).encode() + b"\n")

    async def _listen(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                reply = json.loads(line)
                waiting = self._calls.get(reply["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
        finally:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            for waiting in self._calls.values():
                if not waiting.done():
                    waiting.set_result({"error": "its process died"})


class Players:
    """Keeps a process per settings, each started when it is first needed or has died."""

    MOST = 8

    def __init__(self) -> None:
        self._starting: dict[str, asyncio.Task[PlayerProcess]] = {}

    async def get(self, settings: VerifiersSettings) -> PlayerProcess:
        """Returns a process that runs. Raises SettingError."""
        key = settings.model_dump_json()
        found = self._starting.get(key)
        if found is not None and _has_ended(found):
            found = None
        if found is None:
            if len(self._starting) >= self.MOST and key not in self._starting:
                raise SettingError("environment", f"this worker plays {self.MOST} others already")
            found = self._starting[key] = asyncio.create_task(self._start(settings))
        return await asyncio.shield(found)

    async def close(self) -> None:
        """Ends all processes."""
        found = await asyncio.gather(*self._starting.values(), return_exceptions=True)
        self._starting.clear()
        for player in found:
            if isinstance(player, PlayerProcess):
                await player.close()

    async def _start(self, settings: VerifiersSettings) -> PlayerProcess:
        player = PlayerProcess(settings)
        await player.start()
        return player


def _has_ended(starting: asyncio.Task[PlayerProcess]) -> bool:
    if not starting.done():
        return False
    return starting.exception() is not None or not starting.result().is_alive


PLAYERS = Players()
