"""Variables of a chat template reach the prompt that engines are given, from any environment."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sluice.samples.tokenizer import TextTokenizer
from tests.service.rollout.harness import (
    Episodes,
    Models,
    Store,
    rollout_request,
    running_episodes,
)

HERE = "tests.service.rollout.test_templates"
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}={% if budget is defined %}{{ budget }}{% endif %}{% endif %}"
)


def add(a: int) -> int:
    return a


@pytest.fixture(scope="module")
def chatty(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chatty") / "model"
    shutil.copytree(models.first, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture
async def episodes(store: Store, chatty: Path) -> AsyncIterator[Episodes]:
    async with running_episodes(store, chatty, user_modules=[HERE]) as running:
        yield running


@pytest.mark.parametrize(
    ("environment", "more"), [("prompts", {}), ("tools", {"tools": {"add": f"{HERE}:add"}})]
)
async def test_a_prompt_has_what_the_settings_say(
    episodes: Episodes, chatty: Path, environment: str, more: dict[str, Any]
) -> None:
    """A number stays whole on its way: 12.0 is other tokens."""
    tokenizer, row = TextTokenizer(chatty), {"prompt": "34", "answer": "34"}
    for template, expected in (({"budget": 12}, "34=12"), ({}, "34=")):
        settings = {"chat": True, "template": template, **more}
        request = rollout_request([row], environment=environment, settings=settings)
        finished = await episodes.finished(request)
        for sample in episodes.store.samples(finished["g0"]):
            ids = sample.token_ids[: sample.prompt_length].tolist()
            assert ids == tokenizer.encode(expected, special=False)


async def test_a_variable_that_the_template_has_not_is_told(episodes: Episodes) -> None:
    settings = {"chat": True, "template": {"buget": 1}}
    request = rollout_request([{"prompt": "1", "answer": "1"}], settings=settings)
    failed = await episodes.failed(request)
    assert "has no variable 'buget'; its own: budget" in failed["g0"].error.message
