"""Rows of a conversation file as samples, in an order that depends on the seed alone."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash

from sluice.loop.prompts import PromptFileError, read_rows
from sluice.loop.sft_config import RowsConfig
from sluice.samples.arrow import encode_group
from sluice.samples.chat_template import ChatTemplateError
from sluice.samples.conversations import (
    ConversationError,
    MaskedTokens,
    mask_answer,
    mask_conversation,
)
from sluice.samples.sample import Sample
from sluice.samples.tokenizer import TextTokenizer


@dataclass(frozen=True)
class StepRows:
    """What one step trains on, as it is spooled; `row_indices` count from 0 in the file."""

    data: bytes
    row_indices: tuple[int, ...]
    sample_count: int
    trained_tokens: int

    @property
    def digest(self) -> str:
        """That of their blob."""
        return xxhash.xxh3_128_hexdigest(self.data)


class ConversationRows:
    """All rows of a file. Step i of a run always has the same ones.

    Every epoch has each row once, so that its last step may be a short one.
    """

    def __init__(
        self, config: RowsConfig, tokenizer: TextTokenizer, rows_per_step: int, seed: int
    ) -> None:
        """Raises ConfigError for a missing, PromptFileError for a malformed file."""
        self._rows = read_rows(config.file, "rows.file")
        for where, row in self._rows:
            _check(where, row)
        self._tokenizer, self._rows_per_step = tokenizer, rows_per_step
        self._shuffle, self._seed = config.shuffle, seed
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self._rows) // self._rows_per_step)

    def step(self, step: int) -> StepRows:
        """Tokenised rows of a step, from 0. Raises PromptFileError for a row without a lesson."""
        epoch, part = divmod(step, self.steps_per_epoch)
        first = part * self._rows_per_step
        indices = self._order(epoch)[first : first + self._rows_per_step]
        samples = [sample for index in indices for sample in self._samples(epoch, index)]
        return StepRows(
            data=encode_group(samples),
            row_indices=tuple(indices),
            sample_count=len(samples),
            trained_tokens=sum(int(np.sum(sample.columns["loss_mask"])) for sample in samples),
        )

    def _samples(self, epoch: int, index: int) -> list[Sample]:
        where, row = self._rows[index]
        try:
            sequences = self._tokenise(row)
        except (ConversationError, ChatTemplateError) as error:
            raise PromptFileError(f"{where}: {error}") from None
        group_id = f"{epoch}-{index}"
        return [
            Sample(
                sample_id=f"{group_id}/{number}",
                group_id=group_id,
                token_ids=sequence.token_ids,
                prompt_length=sequence.prompt_length,
                columns={"loss_mask": sequence.loss_mask},
            )
            for number, sequence in enumerate(sequences)
        ]

    def _tokenise(self, row: Mapping[str, Any]) -> list[MaskedTokens]:
        if row.get("messages"):
            return mask_conversation(self._tokenizer, row["messages"], row.get("tools"))
        return [mask_answer(self._tokenizer, row["prompt"], row["answer"])]

    def _epoch_order(self, epoch: int) -> list[int]:
        order = list(range(len(self._rows)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def _check(where: str, row: Mapping[str, Any]) -> None:
    """What can be told of a row without tokenising it."""
    messages = row.get("messages")
    if not messages:
        for key in ("prompt", "answer"):
            if not isinstance(row.get(key), str):
                raise PromptFileError(f"{where}: give `messages`, or `prompt` and `answer` texts")
        return
    if not isinstance(messages, list):
        raise PromptFileError(f"{where}: messages must be a list")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise PromptFileError(f"{where}: messages[{number}] needs a role")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise PromptFileError(f"{where}: messages[{number}] needs a content")
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise PromptFileError(f"{where}: no message is the assistant's")
    if roles[0] == "assistant":
        raise PromptFileError(f"{where}: the assistant's turn has nothing before it")
