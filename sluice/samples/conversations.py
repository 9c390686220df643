"""Texts and chats as tokens, with a mask of those that an assistant said: what one learns from."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from sluice.samples.chat_template import ChatTemplateError
from sluice.samples.tokenizer import TextTokenizer

ASSISTANT = "assistant"
_ANSWER = uuid.uuid4().hex  # stands for a turn, so that what follows it is found


class ConversationError(ValueError):
    """A conversation that nothing can be learned from."""


@dataclass(frozen=True, kw_only=True)
class MaskedTokens:
    """token_ids int32[length] up to the last token trained on; loss_mask bool[length - prompt]."""

    token_ids: np.ndarray
    prompt_length: int
    loss_mask: np.ndarray


@dataclass(frozen=True)
class _Span:
    """A turn: it begins at character `first` of a conversation and ends before `end`."""

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
    options: Mapping[str, Any] | None = None,
    first: int = 0,
) -> list[MaskedTokens]:
    """One sequence with every turn of the assistant; `options` as of `ChatTemplate.render`.

    Turns of the `first` messages are what was said before, and are not learned.

    A template that rewrites earlier turns once later ones follow (leaves out their reasoning)
    has no such sequence: then one for each turn, as it was when the assistant said it.
    Raises ConversationError, or ChatTemplateError for messages the template refuses.
    """
    render = partial(tokenizer.chat_template.render, tools=tools, options=options)
    turn = partial(_turn, render, tokenizer.stop_tokens, messages)
    places = [n for n in range(first, len(messages)) if messages[n]["role"] == ASSISTANT]
    if not places:
        raise ConversationError("no message is the assistant's")
    whole, last = turn(places[-1])
    spans = list[_Span]()
    for place in places[:-1]:  # one text at a time: those of all are as many conversations
        text, span = turn(place)
        if not whole.startswith(text):
            break
        spans.append(span)
    else:
        return [_masked(tokenizer, whole, [*spans, last])]
    apart = (turn(place) for place in places)
    return [_masked(tokenizer, text, [span]) for text, span in apart]


def _turn(
    render: Callable[..., str],
    stops: tuple[str, ...],
    messages: Sequence[Mapping[str, Any]],
    place: int,
) -> tuple[str, _Span]:
    """The conversation up to a turn, and where in it that is, with the token that ends it."""
    before, message = messages[:place], messages[place]
    if not before:
        raise ConversationError("the assistant's turn has nothing before it")
    asked = render(before, opening=True)
    answered = render([*before, message], opening=False)
    first = agreement(asked, answered)
    if first < len(asked):  # as where the template opens a turn in another way than it writes one
        closed = render(before, opening=False)
        if first < agreement(asked, closed):
            raise ChatTemplateError("chat template: a turn changes what stands before it")
        if message.get("content"):  # which may begin as that opening goes on
            other = render([*before, {**message, "content": _ANSWER}], opening=False)
            first = min(first, agreement(asked, other))
    said = answered.rstrip()
    if stops and not said.endswith(stops):
        end = _end_in_next(render, stops, messages, place)
        said, answered = said + end, said + end if end else answered
    return answered, _Span(first, len(said))


def _end_in_next(
    render: Callable[..., str],
    stops: tuple[str, ...],
    messages: Sequence[Mapping[str, Any]],
    place: int,
) -> str:
    """The token at which engines end a turn where it is the first of the next one, as GLM's.

    Empty where the template has none.
    """
    answer, following = {"role": ASSISTANT, "content": _ANSWER}, messages[place + 1 : place + 2]
    turns = [*messages[:place], answer, *(following or [{"role": "user", "content": _ANSWER}])]
    try:
        text = render(turns, opening=False)
    except ChatTemplateError:  # it takes no such turn there
        return ""
    _, _, behind = text.partition(_ANSWER)
    return next((token for token in stops if behind.startswith(token)), "")


def agreement(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Characters, or messages, that both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # halves are compared at once, long conversations have many characters
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _masked(tokenizer: TextTokenizer, text: str, turns: Sequence[_Span]) -> MaskedTokens:
    ids, begins = tokenizer.encode_with_offsets(text)
    begin = np.array(begins)
    spans = sorted((turn.first, turn.end) for turn in turns)
    ends = np.maximum.accumulate([0, *(end for _, end in spans)])  # of all that begin so early
    mask = begin < ends[np.searchsorted([first for first, _ in spans], begin, side="right")]
    trained = np.flatnonzero(mask)
    if not len(trained):
        raise ConversationError("the assistant says nothing")
    prompt, end = int(trained[0]), int(trained[-1]) + 1
    if not prompt:
        raise ConversationError("no token stands before the assistant's turn")
    return MaskedTokens(
        token_ids=np.array(ids[:end], np.int32), prompt_length=prompt, loss_mask=mask[prompt:end]
    )
