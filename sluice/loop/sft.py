"""Supervised training: rows of a file, by the trainer's loss `sft`; no engine takes part."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from xxhash import xxh3_128_hexdigest

from sluice import faults
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.client import RemoteError
from sluice.config import ConfigError
from sluice.loop.config import AlgorithmConfig, RowsConfig, SftConfig
from sluice.loop.ledger import LedgerGroup
from sluice.loop.prompts import epoch_order
from sluice.loop.report import RunReport
from sluice.loop.row_files import PromptFileError, digest_of_rows, read_rows
from sluice.loop.run_directory import RunCheckpoint, checked_run_checkpoint, digest_of
from sluice.loop.trainer_run import TrainerRun
from sluice.loop.training import StepReport, train_step
from sluice.samples.arrow import encode_group
from sluice.samples.blobs import open_blobs
from sluice.samples.chat_template import ChatTemplateError
from sluice.samples.sample import Sample
from sluice.samples.tokenizer import TextTokenizer
from sluice.samples.vocabulary import check_same, vocabulary_digest

if TYPE_CHECKING:
    from sluice.loop.run_archive import RunArchive  # nobody else needs obstore

MEDIA = ("image", "images", "video", "videos")  # columns: the text alone is not what was asked
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
) -> list[MaskedTokens]:
    """One sequence with every turn of the assistant; `options` as of `ChatTemplate.render`.

    A template that rewrites earlier turns once later ones follow (leaves out their reasoning)
    has no such sequence: then one for each turn, as it was when the assistant said it.
    Raises ConversationError, or ChatTemplateError for messages the template refuses.
    """
    render = partial(tokenizer.chat_template.render, tools=tools, options=options)
    turn = partial(_turn, render, tokenizer.stop_tokens, messages)
    places = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
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
    first = _agreement(asked, answered)
    if first < len(asked):  # as where the template opens a turn in another way than it writes one
        closed = render(before, opening=False)
        if first < _agreement(asked, closed):
            raise ChatTemplateError("chat template: a turn changes what stands before it")
        if message.get("content"):  # which may begin as that opening goes on
            other = render([*before, {**message, "content": _ANSWER}], opening=False)
            first = min(first, _agreement(asked, other))
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


def _agreement(one: str, other: str) -> int:
    """Characters that both begin with."""
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


class ConversationRows:
    """All rows of a file. Step i of a run always has the same ones.

    Every epoch has each row once, so that its last step may be a short one.
    """

    def __init__(
        self,
        config: RowsConfig,
        tokenizer: TextTokenizer,
        rows_per_step: int,
        seed: int,
        template: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises ConfigError for a missing, PromptFileError for a malformed file.

        template: variables of the chat template; ConfigError for those that it has not.
        """
        self._rows = read_rows(config.file, "rows.file")
        for where, row in self._rows:
            _check(where, row)
        self._tokenizer, self._rows_per_step = tokenizer, rows_per_step
        self._options = dict(template or {})
        self._check_options()
        self.digest = digest_of([digest_of_rows(config.file), config.shuffle])
        order = partial(epoch_order, len(self._rows), config.shuffle, seed)
        self._order = lru_cache(maxsize=1)(order)

    def _check_options(self) -> None:
        if not self._options:
            return
        if not any(row.get("messages") for _, row in self._rows):
            raise ConfigError("template: has no effect on rows without messages; leave it out")
        try:
            self._tokenizer.chat_template.check_options(self._options)
        except ChatTemplateError as error:
            raise ConfigError(f"template: {error}") from None

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

    def place(self, sample_id: str) -> str:
        """Where in the file the row of a sample stands."""
        return self._rows[int(sample_id.partition("/")[0].rpartition("-")[2])][0]

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
            tools = row.get("tools") or None  # as rollouts show them
            return mask_conversation(self._tokenizer, row["messages"], tools, self._options)
        return [mask_answer(self._tokenizer, row["prompt"], row["answer"])]


def _check(where: str, row: Mapping[str, Any]) -> None:
    """What can be told of a row without tokenising it."""
    for key in MEDIA:
        if row.get(key):
            raise PromptFileError(f"{where}: {key}: supervised training is of text alone")
    messages = row.get("messages")
    if not messages:
        for key in ("prompt", "answer"):
            if not isinstance(row.get(key), str):
                raise PromptFileError(f"{where}: give `messages`, or `prompt` and `answer` texts")
        return
    if not isinstance(messages, list):
        raise PromptFileError(f"{where}: messages must be a list")
    tools = row.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise PromptFileError(f"{where}: tools must be a list of objects, not a text of one")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise PromptFileError(f"{where}: messages[{number}] needs a role")
        if isinstance(message.get("content"), list):
            raise PromptFileError(f"{where}: messages[{number}]: content must be one text")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise PromptFileError(f"{where}: messages[{number}] needs a content")
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise PromptFileError(f"{where}: no message is the assistant's")
    if roles[0] == "assistant":
        raise PromptFileError(f"{where}: the assistant's turn has nothing before it")


logger = logging.getLogger(__name__)

LINE = "loss {loss:.4f}  tokens {tokens:.0f}  lr {learning_rate:.1e}"


class SftRun(TrainerRun[SftConfig]):
    """One supervised run over a running trainer. `start`, `train`, then `close`.

    A step's rows are one blob and one entry of the ledger, at the step's number.
    """

    def __init__(
        self,
        config: SftConfig,
        rows: ConversationRows,
        report: RunReport,
        archive: RunArchive | None = None,
    ) -> None:
        """Raises ConfigError and RunDirectoryError for a run_dir that does not fit."""
        settings = checked_settings(config, rows)
        super().__init__(config, report, archive=archive)
        self._rows, self._settings = rows, settings
        self.steps = step_count(config, rows)
        self._blobs = open_blobs(config.store_place, config.store_cache)
        self._algorithm = AlgorithmConfig(loss=config.loss)
        self._published = False

    async def _check_services(self, trainer: trainer_pb.Trainer) -> None:
        check_same(
            f"tokenizer: {self.config.tokenizer}",
            vocabulary_digest(self.config.tokenizer),
            trainer.vocabulary,
        )

    async def train(self) -> None:
        """All steps that are left, a last run checkpoint, and the weights published."""
        while not self._published:
            if self.step < self.steps:
                await self._recovery.run(self._one_step)
            else:
                await self._recovery.run(self._publish)

    async def _begin_anew(self) -> None:
        await self._save()
        await self._settle_saving()  # a step that no run checkpoint precedes could not be repeated

    async def _restore(self, run_checkpoint: RunCheckpoint) -> None:
        """Goes back; rows trained on since are trained on again, from there."""
        await self._load(run_checkpoint)
        await self._check_rows()
        self.report.truncate(self.step)
        logger.info("restored step %d", self.step)

    async def _check_rows(self) -> None:
        """Other rows in a step would be trained on twice, or never."""
        for group in self.ledger.groups("consumed")[-1:]:
            rows = await asyncio.to_thread(self._rows.step, group.position)
            if group.blob is not None and group.blob.digest != rows.digest:
                raise ConfigError(
                    f"resume: {self.config.run_dir} was run with another rows.file, "
                    "rows_per_step, seed, tokenizer or template"
                )

    async def _one_step(self) -> None:
        start = time.monotonic()
        await self._note_saved()
        rows = await asyncio.to_thread(self._rows.step, self.step)
        group = await self._spool(rows)
        spooled = time.monotonic()
        try:
            trained = await train_step(
                self.trainer,
                self._algorithm,
                [group],
                optimizer_step=self.optimizer_step,
                name=f"step-{self.step}",
            )
        except RemoteError as error:
            if error.reason != "OVERSIZE_SAMPLE":
                raise
            where = self._rows.place(error.metadata["sample_id"])
            raise PromptFileError(f"{where}: {error}") from None
        self.ledger.consume([group.group_id], self.step + 1)
        faults.point("consumed")
        self.step, self.optimizer_step = self.step + 1, trained.optimizer_step
        self._recovery.note_step()
        self._report_step(trained, len(rows.row_indices), spooled - start, start)
        every = self.config.checkpoint_every
        if every and (self.step % every == 0 or self.step == self.steps):
            await self._save()

    async def _spool(self, rows: StepRows) -> LedgerGroup:
        """Put the rows of this step into the store, as one blob, and into the ledger."""
        if self.ledger.next_position() <= self.step:
            self.ledger.issue([(self.step, f"sft-{self.step:08}")], self.step)
        blob = await asyncio.to_thread(self._blobs.put, rows.data)
        self._retention.hold(blob.digest)
        group = LedgerGroup(
            position=self.step,
            group_id=f"sft-{self.step:08}",
            state="generated",
            issue_step=self.step,
            blob=blob,
            sample_count=rows.sample_count,
            response_tokens=rows.trained_tokens,
        )
        self.ledger.generated(group)  # false where the run was here before
        return group

    async def _publish(self) -> None:
        await self._settle_saving()
        weights = (await self._publish_weights()).weights
        await self._retention.release_weights(weights.version)
        self._published = True
        self.report.note(f"published weight version {weights.version} ({weights.digest})")

    def _report_step(
        self, trained: StepReport, row_count: int, spool_seconds: float, start: float
    ) -> None:
        self.report.step(
            {
                "step": self.step,
                "optimizer_step": self.optimizer_step,
                "epoch": self._rows.epochs(self.step),
                "rows": row_count,
                **trained.metrics,
                "skipped": list(trained.skipped_reasons),
                "spool_seconds": spool_seconds,
                "step_seconds": time.monotonic() - start,
            }
        )


def load_rows(config: SftConfig) -> ConversationRows:
    """The rows a run is to learn. Raises ConfigError."""
    return ConversationRows(
        config.rows,
        TextTokenizer(config.tokenizer),
        config.rows_per_step,
        config.seed,
        config.template,
    )


def checked_settings(config: SftConfig, rows: ConversationRows) -> dict[str, str]:
    """Digests of what shapes a run, by setting, as its run checkpoints keep them.

    Raises ConfigError where the run to resume had another, and RunDirectoryError.
    """
    run_checkpoint = checked_run_checkpoint(config.run_dir, resume=config.resume, seed=config.seed)
    settings = {
        "rows": rows.digest,
        "rows_per_step": digest_of(config.rows_per_step),
        "template": digest_of(config.template),
        "loss": digest_of(config.loss.model_dump(mode="json", exclude_defaults=True)),
    }
    for name, before in run_checkpoint.settings.items() if run_checkpoint is not None else ():
        if settings.get(name) != before:
            raise ConfigError(
                f"{name}: not as in the run to resume; begin another run_dir from its checkpoint "
                "(initial_checkpoint)"
            )
    return settings


def step_count(config: SftConfig, rows: ConversationRows) -> int:
    """Steps of the whole run."""
    steps = config.epochs * rows.steps_per_epoch
    return steps if config.steps is None else min(steps, config.steps)
