"""Rows of a file that a run learns from as they are, tokenised a step at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from xxhash import xxh3_128_hexdigest

from sluice.config import ConfigError
from sluice.loop.config import RowsConfig
from sluice.loop.prompts import epoch_order
from sluice.loop.row_files import PromptFileError, digest_of_rows, read_rows
from sluice.loop.run_directory import digest_of
from sluice.samples.arrow import encode_group
from sluice.samples.chat_template import ChatTemplateError
from sluice.samples.conversations import (
    ASSISTANT,
    ConversationError,
    MaskedTokens,
    mask_answer,
    mask_conversation,
)
from sluice.samples.sample import Sample
from sluice.samples.tokenizer import TextTokenizer

LONGEST = 1 << 24  # characters of a row: a tokenizer may take 200 bytes for each
LEARNED = ("messages", "prompt", "answer", "chosen", "rejected", "tools")  # columns of text
MEDIA = ("image", "images", "video", "videos")  # columns: the text alone is not what was asked


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
        return xxh3_128_hexdigest(self.data)


class TrainingRows(ABC):
    """All rows of a file. Step i of a run always has the same ones.

    Every epoch has each row once, so that its last step may be a short one. What is learned of a
    row is a group of samples.
    """

    def __init__(
        self,
        config: RowsConfig,
        tokenizer: TextTokenizer,
        rows_per_step: int,
        seed: int,
        template: Mapping[str, Any] | None = None,
        key: str = "rows",
    ) -> None:
        """Raises ConfigError for a missing, PromptFileError for a malformed file.

        template: variables of the chat template; ConfigError for those that it has not. key: the
        setting that names the file.
        """
        self._rows = read_rows(config.file, f"{key}.file")
        self._tokenizer, self._rows_per_step = tokenizer, rows_per_step
        for where, row in self._rows:
            if (characters := sum(_characters(row.get(key)) for key in LEARNED)) > LONGEST:
                raise PromptFileError(
                    f"{where}: holds {characters:,} characters, more than the {LONGEST:,} of a row "
                    "that is tokenised; cut it into several"
                )
            for name in MEDIA:
                if row.get(name):
                    raise PromptFileError(f"{where}: {name}: training on rows is of text alone")
            self._check(where, row)
        self._options = dict(template or {})
        self._check_options()
        self.digest = digest_of([digest_of_rows(config.file), config.shuffle])
        order = partial(epoch_order, len(self._rows), config.shuffle, seed)
        self._order = lru_cache(maxsize=1)(order)

    @abstractmethod
    def _check(self, where: str, row: Mapping[str, Any]) -> None:
        """Raises PromptFileError for what can be told of a row without tokenising it."""

    @abstractmethod
    def _is_chat(self, row: Mapping[str, Any]) -> bool:
        """Whether a row has messages, which the chat template renders."""

    @abstractmethod
    def _learned(self, row: Mapping[str, Any]) -> Iterable[tuple[MaskedTokens, dict[str, float]]]:
        """The sequences of a row, each with its columns.

        Raises ConversationError and ChatTemplateError.
        """

    def _check_options(self) -> None:
        if not self._options:
            return
        if not any(self._is_chat(row) for _, row in self._rows):
            raise ConfigError("template: has no effect on rows without messages; leave it out")
        try:
            self._tokenizer.chat_template.check_options(self._options)
        except ChatTemplateError as error:
            raise ConfigError(f"template: {error}") from None

    @property
    def count(self) -> int:
        """Rows of the file."""
        return len(self._rows)

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self._rows) // self._rows_per_step)

    def epochs(self, steps: int) -> float:
        """How often so many steps have gone over the file."""
        whole, parts = divmod(steps, self.steps_per_epoch)
        return whole + parts * self._rows_per_step / len(self._rows)

    def step(self, step: int) -> StepRows:
        """Tokenises the rows of a step, from 0. Raises PromptFileError."""
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

    def lengths(self, count: int) -> Iterator[tuple[str, int | str]]:
        """Tokenises the first rows: where each stands, and the tokens of its longest sequence, or
        why nothing can be learned of it."""
        for index in range(min(count, len(self._rows))):
            try:
                samples = self._samples(0, index)
            except PromptFileError as error:
                yield self._rows[index][0], str(error)
                continue
            yield self._rows[index][0], max((len(each.token_ids) for each in samples), default=0)

    def place(self, sample_id: str) -> str:
        """Where in the file the row of a sample stands."""
        return self._rows[int(sample_id.partition("/")[0].rpartition("-")[2])][0]

    def _samples(self, epoch: int, index: int) -> list[Sample]:
        where, row = self._rows[index]
        try:
            learned = list(self._learned(row))
        except (ConversationError, ChatTemplateError) as error:
            raise PromptFileError(f"{where}: {error}") from None
        group_id = f"{epoch}-{index}"
        return [
            Sample(
                sample_id=f"{group_id}/{number}",
                group_id=group_id,
                token_ids=sequence.token_ids,
                prompt_length=sequence.prompt_length,
                columns={"loss_mask": sequence.loss_mask, **columns},
            )
            for number, (sequence, columns) in enumerate(learned)
        ]

    def _turns(
        self, row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], first: int = 0
    ) -> list[MaskedTokens]:
        """What the assistant says in the messages of a row from `first` on."""
        tools = row.get("tools") or None  # as rollouts show them
        return mask_conversation(self._tokenizer, messages, tools, self._options, first)


def _characters(value: Any) -> int:
    """Of all that a template may write out of a value of a row, keys and numbers too."""
    total, waiting = 0, [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            waiting += [*each, *each.values()]
        elif isinstance(each, list):
            waiting += each
        elif each is not None:
            total += len(each) if isinstance(each, str) else len(str(each))
    return total


class ConversationRows(TrainingRows):
    """Rows of `messages`, or of `prompt` and `answer`: what the assistant says is learned."""

    def _check(self, where: str, row: Mapping[str, Any]) -> None:
        if self._is_chat(row):
            check_messages(where, "messages", row["messages"])
            check_tools(where, row)
            roles = [message["role"] for message in row["messages"]]
            if ASSISTANT not in roles:
                raise PromptFileError(f"{where}: no message is the assistant's")
            if roles[0] == ASSISTANT:
                raise PromptFileError(f"{where}: the assistant's turn has nothing before it")
            return
        for key in ("prompt", "answer"):
            if not isinstance(row.get(key), str):
                raise PromptFileError(f"{where}: give `messages`, or `prompt` and `answer` texts")
        if not row["prompt"] and not self._tokenizer.encode("", special=True):
            raise PromptFileError(f"{where}: the prompt has no tokens")

    def _is_chat(self, row: Mapping[str, Any]) -> bool:
        return bool(row.get("messages"))

    def _learned(self, row: Mapping[str, Any]) -> Iterable[tuple[MaskedTokens, dict[str, float]]]:
        if self._is_chat(row):
            sequences = self._turns(row, row["messages"])
        else:
            sequences = [mask_answer(self._tokenizer, row["prompt"], row["answer"])]
        return ((sequence, {}) for sequence in sequences)


def check_messages(where: str, key: str, messages: Any) -> None:
    """Raises PromptFileError for what is no list of messages of text."""
    if not isinstance(messages, list):
        raise PromptFileError(f"{where}: {key} must be a list")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise PromptFileError(f"{where}: {key}[{number}] needs a role")
        if isinstance(message.get("content"), list):
            raise PromptFileError(f"{where}: {key}[{number}]: content must be one text")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise PromptFileError(f"{where}: {key}[{number}] needs a content")


def check_tools(where: str, row: Mapping[str, Any]) -> None:
    """Raises PromptFileError for `tools` that are no list of objects."""
    tools = row.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise PromptFileError(f"{where}: tools must be a list of objects, not a text of one")
