"""The connector for verifiers, up to the process that plays: what it sends, records and refuses."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from services.rollout.engine.interface import Sampling
from services.rollout.engine.wire import VersionBounds
from services.rollout.environments.environment import (
    EnvironmentFailedError,
    SettingError,
    Task,
    TaskError,
    TaskRequest,
)
from services.rollout.environments.registry import ENVIRONMENTS, NOTHING_ALLOWED, Allowed
from services.rollout.episodes.episode import Episode
from services.rollout.episodes.sampler import SamplingPrompt
from services.rollout.openai.verifiers import environment as connector
from services.rollout.openai.verifiers.environment import (
    SCRIPT,
    VerifiersEnvironment,
    VerifiersSettings,
)
from services.rollout.process import RolloutProcess
from sluice.demo.tiny_qwen3 import DIGITS

NONE: Mapping[str, Any] = {}
PLAYER = """
import json, os, sys, urllib.request
settings = json.loads(sys.argv[1])
if settings["environment"] == "broken":
    print(json.dumps({"failed": "ImportError: broken"}), flush=True); sys.exit()
print(json.dumps({"tasks": 3}), flush=True)
for line in sys.stdin:
    call = json.loads(line)
    if "task" in call:
        reply = {"prompt": "1", "answer": "1"}
    elif settings["environment"] == "dies":
        sys.exit()
    else:
        play, episodes = call["play"], []
        for sampling, record in zip(play["sampling"], play["records"]):
            extra = sampling.pop("extra_body", {})
            body = {"model": settings["model"], "messages": [{"role": "user", "content": "12"}],
                    "sluice_record": record, **sampling, **extra}
            for turn in range(2):
                request = urllib.request.Request(settings["url"] + "/chat/completions",
                    json.dumps(body).encode(), {"Content-Type": "application/json"})
                answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
                body["messages"] += [answer, {"role": "user", "content": "3"}]
            error = settings["arguments"].get("error", "")
            reward = settings["arguments"].get("reward", 0.5)
            episodes.append({"reward": reward, "metrics": {"turns": 2}, "stop": "",
                             "error": error, "message": ""})
        reply = {"episodes": episodes}
    print(json.dumps({"id": call["id"], **reply}), flush=True)
"""


@pytest.fixture(autouse=True)
async def player(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """A program in the place of the player, which needs the package: it plays two turns."""
    script = tmp_path / "player.py"
    script.write_text(PLAYER)
    monkeypatch.setattr(connector, "SCRIPT", script)
    monkeypatch.setattr(connector, "PLAYERS", connector.Players())
    monkeypatch.setenv(connector.PYTHON, sys.executable)
    yield
    await connector.PLAYERS.close()


def _settings(process: RolloutProcess | None, **values: Any) -> VerifiersSettings:
    url = "http://127.0.0.1:1/v1" if process is None or not process.openai else process.openai.url
    return VerifiersSettings(**{"environment": "mine", "openai_url": url, **values})


def _episodes(task: Task, count: int, stops: Mapping[str, Any], **bounds: int) -> list[Episode]:
    prompt = SamplingPrompt(
        group_id="g",
        token_ids=(),
        sample_count=count,
        sampling=Sampling(max_new_tokens=3, seeds=tuple(range(8, 8 + count)), **stops),
        bounds=VersionBounds(**bounds),
        pool="policy",
    )
    nothing: Any = None
    return [Episode(index, task, prompt, nothing, nothing) for index in range(count)]


async def _play(
    settings: VerifiersSettings, count: int = 2, stops: Mapping[str, Any] = NONE, **bounds: int
) -> list[Any]:
    task = await VerifiersEnvironment(settings).make_task(TaskRequest(index=1))
    generate = VerifiersEnvironment.generator(settings)
    assert generate is not None
    return await connector.asyncio.gather(
        *(generate(episode) for episode in _episodes(task, count, stops, **bounds))
    )


async def test_a_group_becomes_the_tokens_that_the_port_sampled(process: RolloutProcess) -> None:
    parts = await _play(_settings(process))
    assert len(parts) == 2
    for (first, *_), index in zip(parts, range(2), strict=True):
        assert first.prompt_token_ids == (1, 2, 10), index
        assert first.reward.reward == 0.5 and first.reward.scores == {"turns": 2.0}
        assert 1 <= len(first.answers[0].token_ids) <= 3
        spans = [span.version for answer in first.answers for span in answer.spans]
        assert set(spans) == {process.engine.status().version}
    assert process.openai is not None
    assert await process.openai.responder.recorder.names() == {"open": [], "closed": []}


async def test_stop_strings_and_stop_tokens_of_the_run_end_answers(process: RolloutProcess) -> None:
    """One of each token of the model: an answer has one token, and without them more."""
    stops = {"stop": tuple(DIGITS), "stop_token_ids": (10, 11, 12)}
    lengths = []
    for each in (NONE, stops):
        parts = await _play(_settings(process), stops=each)
        answers = [answer for (first, *_) in parts for answer in first.answers]
        lengths.append([len(answer.token_ids) for answer in answers])
    assert max(lengths[0]) == 3
    assert set(lengths[1]) == {1}


async def test_weights_out_of_bounds_do_not_answer(process: RolloutProcess) -> None:
    served = process.engine.status().version
    assert await _play(_settings(process), min_version=served)
    with pytest.raises(EnvironmentFailedError):
        await _play(_settings(process), min_version=served + 1)


async def test_faults_of_models_keep_their_reward_and_others_fail_the_group(
    process: RolloutProcess,
) -> None:
    fault = {"error": "EmptyModelResponseError", "reward": 0.0}
    parts = await _play(_settings(process, arguments=fault))
    assert all(part[0].reward.reward == 0.0 for part in parts)
    with pytest.raises(EnvironmentFailedError, match="SandboxError"):
        await _play(_settings(process, arguments={"error": "SandboxError"}))
    with pytest.raises(EnvironmentFailedError, match="reward"):
        await _play(_settings(process, arguments={"reward": "much"}))


async def test_a_process_that_dies_is_named_and_started_again(process: RolloutProcess) -> None:
    settings = _settings(process, environment="dies")
    for _ in range(2):
        with pytest.raises(EnvironmentFailedError, match="died"):
            await _play(settings)


PACKAGE = """
from dataclasses import dataclass
import sys, types

@dataclass
class ClientConfig:
    client_type: str; api_base_url: str; api_key_var: str; timeout: float; max_retries: int

class Rubric:
    async def score_group(self, states): pass
    async def cleanup(self, state): pass

class Environment:
    rubric = Rubric()
    def get_dataset(self): return [{"prompt": "1", "answer": "1"}] * 2
    async def rollout(self, row, client, model, sampling):
        metrics = {"max_retries": client.max_retries, "timeout": client.timeout}
        return {"reward": 1.0, "metrics": metrics}

def load_environment(name): return Environment()

sys.modules["verifiers.types"] = types = types.ModuleType("verifiers.types")
types.ClientConfig = ClientConfig
sys.modules["verifiers.clients"] = clients = type(types)("verifiers.clients")
clients.resolve_client = lambda config: config
"""


async def test_the_environment_calls_the_port_as_often_and_as_long_as_is_said(
    process: RolloutProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "verifiers.py").write_text(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(connector, "SCRIPT", SCRIPT)
    settings = _settings(process, retries=7, seconds=5.0)
    player = await connector.PLAYERS.get(settings)
    play = {"index": 0, "sampling": [{}], "records": [{}]}
    (episode,) = (await player.call(play=play))["episodes"]
    assert episode["metrics"] == {"max_retries": 7, "timeout": 5.0}


async def test_what_cannot_be_played_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _settings(None)
    for index in (None, -1):
        with pytest.raises(TaskError):
            VerifiersEnvironment.check(settings, TaskRequest(index=index))
    environment = VerifiersEnvironment(settings)
    with pytest.raises(TaskError, match=r"0\.\.2"):
        await environment.make_task(TaskRequest(index=3))
    with pytest.raises(SettingError, match="ImportError: broken"):
        broken = VerifiersEnvironment(_settings(None, environment="broken"))
        await broken.make_task(TaskRequest(index=0))
    monkeypatch.delenv(connector.PYTHON)
    with pytest.raises(SettingError, match=connector.PYTHON):
        VerifiersEnvironment(settings)


def test_a_request_names_no_module_and_no_port_that_the_worker_does_not_allow() -> None:
    with pytest.raises(SettingError, match="user_modules"):
        NOTHING_ALLOWED.check(VerifiersEnvironment, _settings(None))
    with pytest.raises(SettingError, match="reward_urls"):
        Allowed(modules=("mine",)).check(VerifiersEnvironment, _settings(None))
    allowed = Allowed(modules=("mine",), urls=("http://127.0.0.1",))
    allowed.check(VerifiersEnvironment, _settings(None))
    assert "verifiers" in ENVIRONMENTS
    for name in ("../up", "a\0b", "", "a b"):
        with pytest.raises(ValueError):
            _settings(None, environment=name)
