"""Rows of two answers to a prompt, of which one is preferred."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from sluice.loop.row_files import PromptFileError, check_carried
from sluice.loop.rows import TrainingRows, check_messages, check_tools
from sluice.samples.conversations import (
    ASSISTANT,
    ConversationError,
    MaskedTokens,
    agreement,
    mask_answer,
)
from sluice.samples.sample import LARGEST_NUMBER

PAIR = ("chosen", "rejected")
SAME = "chosen and rejected are the same tokens: none is preferred"


class PairRows(TrainingRows):
    """Rows of `chosen` and `rejected`, both texts or both messages, to a `prompt` of the same kind.

    Without a prompt it is what both begin with. A prompt that messages begin with is that beginning
    itself; a text beside messages is one of the user's. A pair is a group of two episodes, which
    have the rewards 1 and 0.
    """

    def _check(self, where: str, row: Mapping[str, Any]) -> None:
        check_carried(where, {key: row.get(key) for key in ("prompt", *PAIR)})
        is_chat, prompt = self._is_chat(row), row.get("prompt")
        for key in PAIR:
            if not isinstance(row.get(key), list if is_chat else str):
                raise PromptFileError(
                    f"{where}: give `chosen` and `rejected`, both as texts or both as messages"
                )
            if not row[key] or (not is_chat and not row[key].strip()):
                raise PromptFileError(f"{where}: {key} is empty")
            if is_chat:
                check_messages(where, key, row[key])
        if is_chat and isinstance(prompt, list):
            check_messages(where, "prompt", prompt)
        elif prompt is not None and not isinstance(prompt, str):
            kind = "a text or a list of messages" if is_chat else "a text, as chosen and rejected"
            raise PromptFileError(f"{where}: prompt must be {kind}")
        if prompt is not None and not prompt:
            raise PromptFileError(f"{where}: prompt is empty; left out, it is what both begin with")
        check_tools(where, row)
        if row["chosen"] == row["rejected"]:
            raise PromptFileError(f"{where}: chosen and rejected are the same: none is preferred")
        try:
            self._split_chat(row) if is_chat else _split_text(row)
        except ConversationError as error:
            raise PromptFileError(f"{where}: {error}") from None

    def _is_chat(self, row: Mapping[str, Any]) -> bool:
        return isinstance(row.get("chosen"), list)

    def _learned(self, row: Mapping[str, Any]) -> Iterable[tuple[MaskedTokens, dict[str, float]]]:
        if self._is_chat(row):
            first, *conversations = self._split_chat(row)
            answers = [self._turns(row, messages, first) for messages in conversations]
        else:
            prompt, *texts = _split_text(row)
            answers = [[mask_answer(self._tokenizer, prompt, text)] for text in texts]
        chosen, rejected = answers
        if len(chosen) == len(rejected) and all(map(_are_equal, chosen, rejected)):
            raise ConversationError(SAME)
        for episode, sequences in enumerate(answers):
            for sequence in sequences:
                yield sequence, {"reward": 1.0 - episode, "episode": float(episode)}

    def _split_chat(
        self, row: Mapping[str, Any]
    ) -> tuple[int, list[Mapping[str, Any]], list[Mapping[str, Any]]]:
        """(messages of the prompt, the whole conversation of chosen, that of rejected)."""
        chosen, rejected, prompt = row["chosen"], row["rejected"], row.get("prompt") or []
        common = agreement(chosen, rejected)
        if isinstance(prompt, str):
            said = any(message.get("content") == prompt for message in chosen[:common])
            prompt = [] if said else [{"role": "user", "content": prompt}]
        if prompt:
            common = len(prompt)
        if not common:
            raise ConversationError("chosen and rejected begin differently; give their `prompt`")
        whole = [
            each if each[: len(prompt)] == prompt else [*prompt, *each]
            for each in (chosen, rejected)
        ]
        for key, messages in zip(PAIR, whole, strict=True):
            answers = [each for each in messages[common:] if each["role"] == ASSISTANT]
            if not answers:
                raise ConversationError(f"no message of {key} is an answer of the assistant's")
            if any(not (each.get("content") or each.get("tool_calls")) for each in answers):
                raise ConversationError(f"an answer of {key} is empty")
        return common, whole[0], whole[1]


class ScoredPairRows(PairRows):
    """The same rows as a reward model reads them: each answer is one text with what it answers.

    What is trained is a token behind the text, since the value in front of that is of the text's
    last token. Which one it is does not matter. A row may have a `margin`.
    """

    def _check(self, where: str, row: Mapping[str, Any]) -> None:
        super()._check(where, row)
        margin = row.get("margin")
        is_number = isinstance(margin, int | float) and not isinstance(margin, bool)
        if margin is not None and not (is_number and abs(margin) <= LARGEST_NUMBER):
            raise PromptFileError(f"{where}: margin must be a number, up to {LARGEST_NUMBER:g}")

    def _learned(self, row: Mapping[str, Any]) -> Iterable[tuple[MaskedTokens, dict[str, float]]]:
        chosen, rejected = (self._tokenizer.encode(t, special=True) for t in self._texts(row))
        if not chosen or not rejected:
            raise ConversationError("a text has no tokens")
        if chosen == rejected:
            raise ConversationError(SAME)
        margin = row.get("margin") or 0.0
        for episode, ids in enumerate((chosen, rejected)):
            sequence = MaskedTokens(
                token_ids=np.array([*ids, ids[-1]], np.int32),
                prompt_length=len(ids),
                loss_mask=np.ones(1, np.bool_),
            )
            columns = {"reward": 1.0 - episode, "episode": float(episode), "margin": float(margin)}
            yield sequence, columns

    def _texts(self, row: Mapping[str, Any]) -> Iterator[str]:
        """Those of chosen and rejected, as the reward `reward_model` of a run writes them."""
        if not self._is_chat(row):
            prompt, *answers = _split_text(row)
            yield from (prompt + answer for answer in answers)
            return
        _, *conversations = self._split_chat(row)
        render, tools = self._tokenizer.chat_template.render, row.get("tools") or None
        for messages in conversations:
            text = render(messages, opening=False, tools=tools, options=self._options)
            yield self._tokenizer.without_first(text)


def _split_text(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """(prompt, chosen, rejected). What both begin with ends before a word, with its blanks."""
    chosen, rejected = row["chosen"], row["rejected"]
    if row.get("prompt"):
        return row["prompt"], chosen, rejected
    common = agreement(chosen, rejected)
    while common and not chosen[common - 1 : common].isspace():
        common -= 1
    prompt = chosen[:common].rstrip()
    if not prompt:
        raise ConversationError("chosen and rejected begin differently; give their `prompt`")
    answers = chosen[len(prompt) :], rejected[len(prompt) :]
    for key, answer in zip(PAIR, answers, strict=True):
        if not answer.strip():
            raise ConversationError(f"{key} has nothing behind what both begin with")
    return prompt, *answers


def _are_equal(one: MaskedTokens, other: MaskedTokens) -> bool:
    return np.array_equal(one.token_ids, other.token_ids) and np.array_equal(
        one.loss_mask, other.loss_mask
    )
