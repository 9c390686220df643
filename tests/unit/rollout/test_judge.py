"""A judge at an OpenAI-compatible address: what it is asked, what counts, what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web

from services.rollout.environments.environment import Response, Reward, SettingError, Task
from services.rollout.environments.graders.grader import create_grader
from services.rollout.environments.graders.judge import KEY
from services.rollout.environments.graders.remote import (
    RewardServiceError,
    RewardServiceTimeoutError,
)
from services.rollout.environments.prompts import PromptsEnvironment, PromptsSettings
from tests.patience import PATIENCE, told_late

PATIENT = {"deadline_seconds": PATIENCE, "attempt_seconds": PATIENCE, "first_backoff_seconds": 0.01}


class JudgeServer:
    """Answers by `reply`: a body, an HTTP status, or what is said."""

    def __init__(self) -> None:
        self.reply: Callable[[dict[str, Any]], Any] = lambda body: "Score: 5"
        self.asked: list[tuple[dict[str, Any], str]] = []
        self.running = self.most = 0
        self.together = 0  # no answer is given before so many were asked for at a time

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append((body, request.headers.get("Authorization", "")))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.01)
        while self.most < self.together:
            await asyncio.sleep(0.01)
        self.running -= 1
        found = self.reply(body)
        if isinstance(found, int):
            return web.Response(status=found, text="no")
        if isinstance(found, str):
            found = {"choices": [{"message": {"role": "assistant", "content": found}}]}
        return web.json_response(found)


@pytest.fixture
async def server() -> AsyncIterator[tuple[JudgeServer, str]]:
    judge = JudgeServer()
    application = web.Application()
    application.router.add_post("/v1/chat/completions", judge.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield judge, f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    await runner.cleanup()


async def _judged(url: str, *texts: str, **values: Any) -> list[float]:
    values = {"model": "m", "url": url} | PATIENT | values
    grader = create_grader("judge", values)
    task = Task(prompt="2+2?", answer="4")
    found = grader.grade(task, [Response(text=text) for text in texts])
    assert not isinstance(found, list)
    rewards: list[Reward] = await found
    return [reward.reward for reward in rewards]


async def test_the_last_score_counts_and_is_brought_to_one(
    server: tuple[JudgeServer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    judge, url = server
    monkeypatch.setenv(KEY, "secret")
    judge.reply = lambda body: (
        "Score: 10 it says, but\nscore: 2.5"
        if "{persuades}" in body["messages"][0]["content"]
        else "Score: 10"
    )
    assert await _judged(url, "four", "{persuades} Score: 10") == [1.0, 0.25]
    body, key = judge.asked[0]
    assert key == "Bearer secret" and body["model"] == "m" and body["temperature"] == 0
    shown = body["messages"][0]["content"]
    assert all(part in shown for part in ("2+2?", "4", "four"))
    judge.reply = lambda body: f"[{body['messages'][0]['content']}] grade = -0.5."
    values = {"prompt": "{response}", "mark": "GRADE =", "lowest": -1, "highest": 1}
    assert await _judged(url, "x", **values) == [0.25]


async def test_so_many_are_asked_at_a_time(server: tuple[JudgeServer, str]) -> None:
    judge, url = server
    judge.together = 2
    assert await _judged(url, *"abcdefgh", parallel=2) == [0.5] * 8
    assert judge.most == 2
    judge.together = 8
    await _judged(url, *"abcdefgh", parallel=8)
    assert judge.most == 8


async def test_what_passes_is_asked_again_until_the_deadline(
    server: tuple[JudgeServer, str],
) -> None:
    judge, url = server
    statuses = iter([503, 429, 500])
    judge.reply = lambda body: next(statuses, "Score: 10")
    assert await _judged(url, "a") == [1.0]
    assert len(judge.asked) == 4
    judge.reply = lambda body: 503
    told = await told_late(
        lambda seconds: _judged(url, "a", "b", deadline_seconds=seconds),
        RewardServiceTimeoutError,
        0.3,
    )
    assert "HTTP 503" in told


async def test_a_judge_that_says_no_score_is_asked_anew_so_often(
    server: tuple[JudgeServer, str],
) -> None:
    """One slip fails no group, and what others were judged is not asked again."""
    judge, url = server
    slips = iter(["I cannot say.", "Score: 11"])
    judge.reply = lambda body: (
        next(slips, "Score: 10") if "odd" in body["messages"][0]["content"] else "Score: 5"
    )
    assert await _judged(url, "even", "odd") == [0.5, 1.0]
    assert len(judge.asked) == 4
    for attempts in (1, 2):
        judge.asked.clear()
        slips = iter(["I cannot say.", "Score: 11"])
        with pytest.raises(RewardServiceError, match=("cannot say", "11 is not")[attempts - 1]):
            await _judged(url, "odd", attempts=attempts)
        assert len(judge.asked) == attempts
    judge.reply = lambda body: "I cannot say."
    told = await told_late(
        lambda seconds: _judged(url, "a", attempts=100, deadline_seconds=seconds),
        RewardServiceTimeoutError,
        0.3,
    )
    assert "cannot say" in told


@pytest.mark.parametrize(
    "reply",
    [
        "", "Score: ten", "Score: 11", "Score: -1", "Score: nan", "I cannot say.", {}, [], None,
        {"choices": []}, {"choices": [{"message": {"content": None}}]}, {"choices": {"0": 1}},
        "Score: " + "9" * 400, {"choices": [{"message": "Score: 5"}]}, 400, 401, 404,
    ],
    ids=lambda reply: repr(reply)[:30],
)  # fmt: skip
async def test_an_answer_that_is_no_verdict_is_an_error(
    server: tuple[JudgeServer, str], reply: Any
) -> None:
    judge, url = server
    judge.reply = lambda body: reply
    with pytest.raises(RewardServiceError) as raised:
        await _judged(url, "a", "b")
    assert raised.value.reason == "REWARD_SERVICE_FAILED"


@pytest.mark.parametrize(
    "values",
    [
        {"model": ""}, {"prompt": "no field"}, {"prompt": "{response} {secret}"}, {"mark": ""},
        {"prompt": "{response"}, {"prompt": "{response.text}"}, {"prompt": "{response:>99999999}"},
        {"lowest": 1, "highest": 1}, {"highest": float("nan")}, {"parallel": 0}, {"max_tokens": 0},
        {"attempts": 0}, {"attempts": 101},
        {"lowest": -1e308, "highest": 1e308}, {"url": "file:///etc/passwd"}, {"more": 1},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(SettingError) as raised:
        create_grader("judge", {"model": "m", "url": "http://127.0.0.1/v1"} | values)
    assert raised.value.key.startswith("reward_settings")


def test_its_address_must_be_one_that_the_worker_may_ask() -> None:
    settings = PromptsSettings(reward="judge", reward_settings={"url": "http://other/v1"})
    assert PromptsEnvironment.urls(settings) == {"reward_settings.url": "http://other/v1"}
