"""Observations as tokens that go on after an answer, whose own tokens are never made again."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from services.rollout.environments.environment import Step, Task, TaskError
from sluice.samples.chat_template import ChatTemplateError
from sluice.samples.tokenizer import TextTokenizer

THREAD_CHARACTERS = 4000  # texts longer than this, a millisecond's work, go to a thread
_ANSWER = uuid.uuid4().hex  # stands where the answer is, so that what follows it is found


class Conversation:
    """The chat messages of one episode so far; none for a plain prompt."""

    def __init__(self, task: Task) -> None:
        self._is_chat = bool(task.messages)
        self._messages: list[Mapping[str, Any]] = list(task.messages)
        self._tools = task.tools

    def encode(
        self, tokenizer: TextTokenizer, answer: str, last_token: int | None, step: Step
    ) -> list[int]:
        """Tokens from the end of `answer`, which `last_token` ended, to where the next one begins.

        Raises TaskError for an observation of the wrong kind, or that the template refuses.
        """
        self.check(step)
        if not self._is_chat:
            return tokenizer.encode(step.text, special=False)
        ids = tokenizer.encode(self._suffix(tokenizer, step), special=False)
        self._messages += ({"role": "assistant", "content": answer}, *step.messages)
        # The template closes the answer, which the model mostly did itself.
        return ids[1:] if ids and ids[0] == last_token else ids

    def check(self, step: Step) -> None:
        """Raise TaskError for an observation of the wrong kind."""
        is_text = isinstance(step.text, str) and bool(step.text)
        is_messages = bool(step.messages) and all(isinstance(m, Mapping) for m in step.messages)
        if (is_messages, is_text) != (self._is_chat, not self._is_chat):
            wanted = "messages" if self._is_chat else "text"
            raise TaskError("step", f"this prompt takes observations as {wanted}, never empty")

    def length(self, step: Step) -> int:
        """Characters that `encode` has to read."""
        if not self._is_chat:
            return len(step.text)
        return sum(len(_content(message)) for message in (*self._messages, *step.messages))

    def _suffix(self, tokenizer: TextTokenizer, step: Step) -> str:
        """What the template writes after an answer. It may shorten former ones: never looked at."""
        turns = [*self._messages, {"role": "assistant", "content": _ANSWER}, *step.messages]
        try:
            text = tokenizer.chat_template.render(turns, tools=self._tools or None)
        except ChatTemplateError as error:
            raise TaskError("step.messages", str(error)) from None
        _, found, suffix = text.rpartition(_ANSWER)
        if not found:
            raise TaskError("step.messages", "the chat template leaves the answer out")
        return suffix


def observation_text(step: Step) -> str:
    """For the reward and for readers."""
    return step.text or "\n".join(_content(message) for message in step.messages)


def _content(message: Mapping[str, Any]) -> str:
    return str(message.get("content", ""))


def text_length(task: Task) -> int:
    """Characters of a prompt."""
    return len(task.prompt) + sum(len(_content(turn)) for turn in task.messages)
