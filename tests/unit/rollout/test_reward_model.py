"""A reward model at `/classify`: what it is sent, what counts as a score, what is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from examples.models.tiny_qwen3 import build_tiny_qwen3
from services.rollout.environments.environment import (
    Response,
    Reward,
    SettingError,
    Task,
    TaskError,
    Turn,
)
from services.rollout.environments.graders.grader import check_task, create_grader
from services.rollout.environments.graders.remote import (
    RewardServiceError,
    RewardServiceTimeoutError,
)
from services.rollout.environments.graders.reward_model import KEY
from services.rollout.environments.prompts import PromptsEnvironment, PromptsSettings
from sluice.config import ConfigError
from sluice.loop.config import RowsConfig
from sluice.loop.pairs import ScoredPairRows
from sluice.samples.arrow import decode_group
from sluice.samples.tokenizer import TextTokenizer
from tests.patience import PATIENCE, told_late

PATIENT = {"deadline_seconds": PATIENCE, "attempt_seconds": PATIENCE, "first_backoff_seconds": 0.01}

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role[0] + '=' + m.content + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}a={% endif %}"
)
URL = "http://127.0.0.1:1/classify"


class ScoreServer:
    """Answers by `reply`: a body or an HTTP status. At first a score is the length of its text."""

    def __init__(self) -> None:
        self.reply: Callable[[list[str]], Any] = lambda texts: [
            {"embedding": [float(len(text))], "meta_info": {}} for text in texts
        ]
        self.asked: list[tuple[dict[str, Any], str]] = []

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append((body, request.headers.get("Authorization", "")))
        found = self.reply(body["text"])
        if isinstance(found, int):
            return web.Response(status=found, text="no")
        return web.Response(
            text=found if isinstance(found, str) else json.dumps(found),
            content_type="application/json",
        )

    @property
    def texts(self) -> list[list[str]]:
        return [body["text"] for body, _ in self.asked]


@pytest.fixture
async def server() -> AsyncIterator[tuple[ScoreServer, str]]:
    scores = ScoreServer()
    application = web.Application()
    application.router.add_post("/classify", scores.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield scores, f"http://127.0.0.1:{runner.addresses[0][1]}/classify"
    await runner.cleanup()


def _save_tokenizer(directory: Path, *, adds_first: bool) -> PreTrainedTokenizerFast:
    plain = AutoTokenizer.from_pretrained(build_tiny_qwen3(directory / "plain", 0))
    backend = plain.backend_tokenizer
    if adds_first:
        first = plain.convert_tokens_to_ids("<pad>")
        backend.post_processor = TemplateProcessing(
            single="<pad> $A", special_tokens=[("<pad>", first)]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<pad>", bos_token="<pad>"
    )
    made.chat_template = TEMPLATE
    made.save_pretrained(directory / "made")
    return made


async def _scored(url: str, task: Task, *responses: str | Response, **values: Any) -> list[float]:
    grader = create_grader("reward_model", {"model": "m", "url": url} | PATIENT | values)
    group = [Response(text=one) if isinstance(one, str) else one for one in responses]
    found = grader.grade(task, group)
    assert not isinstance(found, list)
    rewards: list[Reward] = await found
    assert [reward.raw_reward for reward in rewards] == [reward.reward for reward in rewards]
    return [reward.reward for reward in rewards]


async def test_a_plain_prompt_is_sent_with_its_answer_once_a_group(
    server: tuple[ScoreServer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scores, url = server
    monkeypatch.setenv(KEY, "secret")
    two_turns = Response(text="d", turns=(Turn(text="b", observation="c"),))
    assert await _scored(url, Task(prompt="a="), "12", "", "\0é" * 2500, two_turns) == [
        4, 2, 5002, 5,
    ]  # fmt: skip
    ((body, key),) = scores.asked
    assert key == "Bearer secret" and set(body) == {"model", "text"} and body["model"] == "m"
    assert body["text"] == ["a=12", "a=", "a=" + "\0é" * 2500, "a=bcd"]


@pytest.mark.parametrize(("size", "sizes"), [(1, [1] * 5), (2, [2, 2, 1]), (5, [5]), (64, [5])])
async def test_a_question_has_at_most_batch_size_texts(
    server: tuple[ScoreServer, str], size: int, sizes: list[int]
) -> None:
    scores, url = server
    texts = ["x" * length for length in (3, 1, 5, 0, 2)]
    assert await _scored(url, Task(prompt="p"), *texts, batch_size=size) == [4, 2, 6, 1, 3]
    assert [len(batch) for batch in scores.texts] == sizes


@pytest.mark.parametrize("adds_first", [False, True])
async def test_a_chat_reaches_the_model_as_its_own_tokenizer_writes_it(
    server: tuple[ScoreServer, str], tmp_path: Path, adds_first: bool
) -> None:
    scores, url = server
    plain = _save_tokenizer(tmp_path, adds_first=adds_first)
    task = Task(messages=({"role": "user", "content": [{"type": "text", "text": "1 2"}]},))
    response = Response(text="5", turns=(Turn(text="3", observation="4"),))
    await _scored(url, task, response, tokenizer=str(tmp_path / "made"))
    said = [("user", "1 2"), ("assistant", "3"), ("user", "4"), ("assistant", "5")]
    chat = [{"role": role, "content": content} for role, content in said]
    ids = plain.apply_chat_template(chat, tokenize=True, return_dict=False)
    ((text,),) = scores.texts
    assert plain(text).input_ids == ids  # as the server, which adds its special tokens
    assert text.startswith("<pad>") is not adds_first


@pytest.mark.parametrize("adds_first", [False, True])
async def test_a_text_is_sent_as_a_reward_model_was_trained_on_it(
    server: tuple[ScoreServer, str], tmp_path: Path, adds_first: bool
) -> None:
    """Token by token, of chats and of plain prompts."""
    scores, url = server
    plain = _save_tokenizer(tmp_path, adds_first=adds_first)
    roles = ("user", "assistant", "user")
    chat = [{"role": role, "content": text} for role, text in zip(roles, "123", strict=True)]
    answer = {"role": "assistant", "content": "5"}
    rows = [
        {"prompt": chat, "chosen": [answer], "rejected": [{**answer, "content": "6"}]},
        {"prompt": "7=", "chosen": "5", "rejected": "6"},
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = RowsConfig(file=tmp_path / "pairs.jsonl", shuffle=False)
    pairs = ScoredPairRows(config, TextTokenizer(tmp_path / "made"), 2, 0)
    samples = decode_group(pairs.step(0).data)
    for task, first in ((Task(messages=tuple(chat)), 0), (Task(prompt="7="), 2)):
        await _scored(url, task, "5", "6", tokenizer=str(tmp_path / "made"))
        for text, sample in zip(scores.texts[-1], samples[first : first + 2], strict=True):
            assert plain(text).input_ids == sample.token_ids[: sample.prompt_length].tolist()


async def test_what_passes_is_asked_again_until_the_deadline(
    server: tuple[ScoreServer, str],
) -> None:
    scores, url = server
    rewarded = scores.reply
    statuses = iter([503, 429, 500])
    scores.reply = lambda texts: next(statuses, None) or rewarded(texts)
    assert await _scored(url, Task(prompt="p"), "a") == [2]
    assert len(scores.asked) == 4
    scores.reply = lambda texts: 503
    told = await told_late(
        lambda seconds: _scored(url, Task(prompt="p"), "a", deadline_seconds=seconds),
        RewardServiceTimeoutError,
        0.3,
    )
    assert "HTTP 503" in told


@pytest.mark.parametrize(
    "reply",
    [
        [], {}, None, "[", '"[]"', "[" * 100_000, [{"embedding": [1.0]}],
        [{"embedding": [1.0]}] * 3, [{"embedding": [1.0]}, {"embedding": [1.0, 2.0]}],
        [{"embedding": [1.0]}, {"embedding": []}],
        [{"embedding": [1.0]}, {"embedding": 1.0}], [{"embedding": [1.0]}, {}], [1.0, 2.0],
        '[{"embedding": [1]}, {"embedding": [NaN]}]',
        '[{"embedding": [-Infinity]}, {"embedding": [1]}]',
        [{"embedding": [True]}] * 2, [{"embedding": ["1"]}] * 2, [{"embedding": [None]}] * 2,
        [{"embedding": [10**400]}] * 2, [{"embedding": [1e31]}] * 2, 400, 401, 404,
    ],
    ids=lambda reply: repr(reply)[:40],
)  # fmt: skip
async def test_an_answer_that_is_no_score_is_an_error(
    server: tuple[ScoreServer, str], reply: Any
) -> None:
    scores, url = server
    scores.reply = lambda texts: reply
    with pytest.raises(RewardServiceError) as raised:
        await _scored(url, Task(prompt="p"), "a", "b")
    assert raised.value.reason == "REWARD_SERVICE_FAILED"


async def test_scores_may_be_negative_and_whole(server: tuple[ScoreServer, str]) -> None:
    scores, url = server
    scores.reply = lambda texts: [{"embedding": [value]} for value in (-3, 0, 1e-9)]
    assert await _scored(url, Task(prompt="p"), *"abc") == [-3.0, 0.0, 1e-9]


@pytest.mark.parametrize(
    "values",
    [
        {"model": ""}, {"model": "m" * 5000}, {"batch_size": 0}, {"batch_size": -1}, {"more": 1},
        {"batch_size": 2**40}, {"url": "file:///etc/passwd"}, {"tokenizer": "../nowhere"},
        {"tokenizer": "x" * 5000}, {"tokenizer": "a\0b"}, {"deadline_seconds": float("nan")},
    ],
    ids=lambda values: repr(values)[:40],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(SettingError) as raised:
        create_grader("reward_model", {"model": "m", "url": URL} | values)
    assert raised.value.key == f"reward_settings.{next(iter(values))}"


@pytest.mark.parametrize("template", [None, "{% for %}"])
def test_a_tokenizer_without_a_chat_template_is_refused(
    tmp_path: Path, template: str | None
) -> None:
    directory = build_tiny_qwen3(tmp_path, 0)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    with pytest.raises(SettingError, match=r"template|[Ee]xpected") as raised:
        create_grader("reward_model", {"model": "m", "url": URL, "tokenizer": str(directory)})
    assert raised.value.key == "reward_settings.tokenizer"


@pytest.mark.parametrize("template", ["{% for %}", "{{ 1 +* }}", "{{ " * 3000 + " }}" * 3000, "{%"])
def test_a_broken_chat_template_is_an_error_of_the_tokenizer(tmp_path: Path, template: str) -> None:
    directory = build_tiny_qwen3(tmp_path, 0)
    (directory / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match=r"^tokenizer: .*chat template"):
        TextTokenizer(directory)


async def test_tasks_that_the_model_cannot_read_are_named(tmp_path: Path) -> None:
    chat = Task(messages=({"role": "user", "content": "1"},))
    check_task("reward_model", chat)
    with pytest.raises(TaskError, match=r"reward_settings\.tokenizer"):
        await _scored(URL, chat, "a")
    image = {"type": "image_url", "image_url": {"url": "data:;base64,"}}
    shown = Task(messages=({"role": "user", "content": [image]},))
    with pytest.raises(TaskError, match="text alone"):
        check_task("reward_model", shown)


def test_its_address_must_be_one_that_the_worker_may_ask() -> None:
    settings = PromptsSettings(reward="reward_model", reward_settings={"url": URL})
    assert PromptsEnvironment.urls(settings) == {"reward_settings.url": URL}
