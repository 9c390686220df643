"""Conversations as tokens with a loss mask: what the assistant said is trained on, nothing else.

Where a turn begins is asked of the chat template itself: it is as far as the conversation before
the turn, opened for the assistant, and the conversation with the turn agree. A turn ends with
its end token; white space that a template puts behind it belongs to nobody.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sluice.samples.chat_template import ChatTemplate, ChatTemplateError
from sluice.samples.tokenizer import TextTokenizer

ASSISTANT = "assistant"


class ConversationError(ValueError):
    """A conversation that nothing can be learned from."""


@dataclass(frozen=True, kw_only=True)
class MaskedTokens:
    """token_ids int32[length] up to the last token trained on; loss_mask bool[length - prompt]."""

    token_ids: np.ndarray
    prompt_length: int
    loss_mask: np.ndarray


@dataclass(frozen=True)
class _Turn:
    """The conversation up to a turn, which begins at character `first` and ends before `end`."""

    text: str
    first: int
    end: int


def mask_answer(tokenizer: TextTokenizer, prompt: str, answer: str) -> MaskedTokens:
    """A plain text, encoded as rollouts encode prompts, and its answer with the end token.

    Raises ConversationError for an empty prompt.
    """
    before = tokenizer.encode(prompt, special=True)
    after = tokenizer.encode(answer, special=False)
    if not before:
        raise ConversationError("the prompt has no tokens")
    if tokenizer.end_token_id is not None:
        after.append(tokenizer.end_token_id)
    if not after:
        raise ConversationError("the answer has no tokens")
    return MaskedTokens(
        token_ids=np.array(before + after, np.int32),
        prompt_length=len(before),
        loss_mask=np.ones(len(after), np.bool_),
    )


def mask_conversation(
    tokenizer: TextTokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[MaskedTokens]:
    """One sequence with every turn of the assistant.

    A template that rewrites earlier turns once later ones follow (leaves out their reasoning)
    has no such sequence: then one for each turn, as it was when the assistant said it.
    Raises ConversationError, or ChatTemplateError for messages the template refuses.
    """
    template = tokenizer.chat_template
    turns = [
        _turn(template, messages[:index], message, tools)
        for index, message in enumerate(messages)
        if message["role"] == ASSISTANT
    ]
    if not turns:
        raise ConversationError("no message is the assistant's")
    whole = turns[-1].text
    if all(whole.startswith(turn.text) for turn in turns):
        return [_masked(tokenizer, whole, turns)]
    return [_masked(tokenizer, turn.text, [turn]) for turn in turns]


def _turn(
    template: ChatTemplate,
    before: Sequence[Mapping[str, Any]],
    message: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None,
) -> _Turn:
    if not before:
        raise ConversationError("the assistant's turn has nothing before it")
    asked = template.render(before, opening=True, tools=tools)
    closed = template.render(before, opening=False, tools=tools)
    answered = template.render([*before, message], opening=False, tools=tools)
    first = _agreement(asked, answered)
    if first < _agreement(asked, closed):
        raise ChatTemplateError("chat template: a turn changes what stands before it")
    return _Turn(answered, first, len(answered.rstrip()))


def _agreement(one: str, other: str) -> int:
    """Characters that both begin with."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in pairs)


def _masked(tokenizer: TextTokenizer, text: str, turns: Sequence[_Turn]) -> MaskedTokens:
    ids, begins = tokenizer.encode_with_offsets(text)
    begin = np.array(begins)
    mask = np.zeros(len(ids), np.bool_)
    for turn in turns:
        mask |= (begin >= turn.first) & (begin < turn.end)
    trained = np.flatnonzero(mask)
    if not len(trained):
        raise ConversationError("the assistant says nothing")
    prompt, end = int(trained[0]), int(trained[-1]) + 1
    if not prompt:
        raise ConversationError("no token stands before the assistant's turn")
    return MaskedTokens(
        token_ids=np.array(ids[:end], np.int32), prompt_length=prompt, loss_mask=mask[prompt:end]
    )
