"""A sample: one token sequence, its training signals and the weights that made it.

`RowFacts` are what plans and checks need of many: read in place of the tokens, and far smaller.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any

import numpy as np
import xxhash

from sluice.light import light_dataclass
from sluice.samples.blobs import DIGEST, BlobReference


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """Response tokens first_token..last_token (inclusive) were sampled by one weight version.

    base_digest: of what an adapter was put on; empty for whole weights.
    """

    version: int
    digest: str
    first_token: int
    last_token: int
    base_digest: str = ""

    def shifted(self, offset: int) -> VersionSpan:
        """Returns the span counted from a place `offset` tokens earlier."""
        if not offset:
            return self
        first, last = self.first_token + offset, self.last_token + offset
        return replace(self, first_token=first, last_token=last)


MEDIA_KINDS = frozenset({"image"})
LARGEST = 2**31 - 1  # of a span's numbers


@dataclass(frozen=True, kw_only=True)
class MediaSpan:
    """Equal tokens, `token_count` from `first_token` of the sequence on, stand for a medium.

    digest, size: of its blob, an image as `sluice.samples.images` prepares it. grid_thw: patches
    by time, height and width. turn: index of the observation that showed it; 0 is the prompt.
    """

    digest: str
    size: int
    kind: str
    first_token: int
    token_count: int
    grid_thw: tuple[int, ...]
    turn: int = 0

    @property
    def end(self) -> int:
        """Index of the token behind it."""
        return self.first_token + self.token_count

    def placed(self, offset: int, turn: int) -> MediaSpan:
        """Return a span of observation `turn`, which begins at token `offset` of the sequence."""
        return replace(self, first_token=self.first_token + offset, turn=turn)


@light_dataclass(frozen=True, kw_only=True)
class Sample:
    """A row of a batch. Per-token columns have the length of the response, wide ones a row a token.

    `columns` maps a known column name to an array (per token) or a float
    (per sample); an absent name is an absent value, never a zero. `routed_experts`, where a
    mixture of experts sampled: int16[length - 1, mixture layers, chosen], for every token but
    the last. `media`: what the model was shown besides text, by rising first token.
    """

    sample_id: str
    group_id: str
    token_ids: np.ndarray  # int32[length], prompt then response
    prompt_length: int
    finish_reason: str = ""
    columns: Mapping[str, np.ndarray | float] = field(default_factory=dict)
    spans: tuple[VersionSpan, ...] = ()
    routed_experts: np.ndarray | None = None
    media: tuple[MediaSpan, ...] = ()

    @property
    def response_length(self) -> int:
        return len(self.token_ids) - self.prompt_length


def media_of(samples: Iterable[Sample]) -> dict[str, BlobReference]:
    """Return the blobs of all that the samples were shown, each once, by digest."""
    spans = [span for sample in samples for span in sample.media]
    return {span.digest: BlobReference(span.digest, span.size) for span in spans}


class InvalidSampleError(ValueError):
    """A sample that no service may accept; `field` says where it is wrong."""

    def __init__(self, sample_id: str, field: str, detail: str) -> None:
        self.sample_id, self.field, self.detail = sample_id, field, detail
        super().__init__(f"sample {sample_id!r}: {field} {detail}")


class UnknownColumnError(InvalidSampleError):
    """A column name that is neither known nor a score."""

    def __init__(self, sample_id: str, name: str) -> None:
        self.name = name
        super().__init__(sample_id, f"columns[{name!r}]", f"is unknown; known: {KNOWN_COLUMNS}")


class ColumnLengthError(InvalidSampleError):
    """A per-token column whose length is not that of the response."""

    def __init__(self, sample_id: str, name: str, expected: int, actual: int) -> None:
        self.name, self.expected, self.actual = name, expected, actual
        super().__init__(
            sample_id, f"columns[{name!r}]", f"has {actual} values for {expected} response tokens"
        )


@dataclass(frozen=True)
class Column:
    """A known signal: one value a response token, or one a sample.

    width: numbers a response token in place of one value; 0 is one value.
    """

    name: str
    per_token: bool
    dtype: np.dtype
    doc: str
    width: int = 0


def _token(name: str, dtype: type, doc: str) -> Column:
    return Column(name, True, np.dtype(dtype), doc)


def _sample(name: str, doc: str) -> Column:
    return Column(name, False, np.dtype(np.float64), doc)


COLUMNS: Mapping[str, Column] = {
    column.name: column
    for column in (
        _token("loss_mask", np.bool_, "trained on; absent is all true; false on observations"),
        _token("rollout_logprobs", np.float32, "of the tempered distribution sampled from"),
        _token("rollout_logprobs_t1", np.float32, "of the engine at temperature 1"),
        _token("old_logprobs", np.float32, "of the policy before the step, by the trainer"),
        _token("reference_logprobs", np.float32, "of the reference model"),
        _token("teacher_logprobs", np.float32, "of a teacher, for distillation"),
        _token("values", np.float32, "of the critic"),
        _token("advantages", np.float32, "of the estimator"),
        _token("returns", np.float32, "targets of the critic"),
        _sample("reward", "what the estimator sees"),
        _sample("raw_reward", "what the environment gave, before shaping"),
        _sample("margin", "by which the chosen of two answers is to be ahead"),
        _sample("weight", "factor of the sample's loss"),
        _sample("episode", "index of its episode in the group; several samples may share one"),
        _sample("temperature", "of rollout_logprobs, and so of what trains on them; -1 is several"),
        _sample("top_p", "what sampling kept of the distribution; absent is all"),
        _sample("top_k", "tokens that sampling kept of the distribution; absent is all"),
    )
}
LARGEST_NUMBER = 1e30  # of one a sample: float32, which advantages are, holds sums over groups
LARGEST_EPISODE = float(1 << 53)  # numbers beyond are no longer all different
# Logits over these are float32 numbers, and SGLang draws greedily at less than the first.
LEAST_TEMPERATURE, MOST_TEMPERATURE = 2.0**-19, 2.0**20
SEVERAL = -1.0  # a sample's temperature where its answers were sampled at different ones
TEMPERATURES = f"must be from {LEAST_TEMPERATURE:.2g} to {MOST_TEMPERATURE:.2g}"
SCORE_PREFIX = "score/"
_SCORE = re.compile(r"score/[A-Za-z0-9_.-]{1,64}")
# The width is part of the name: who has a column of that name knows its shape.
TOP_IDS, TOP_LOGPROBS = "teacher_top_ids", "teacher_top_logprobs"
MOST_TOP = 1024  # tokens a place
_WIDE: Mapping[str, tuple[type, str]] = {
    TOP_IDS: (np.int32, "tokens that a teacher names at each place"),
    TOP_LOGPROBS: (np.float32, "of the teacher, of those tokens"),
}
_TOP = re.compile(rf"({TOP_IDS}|{TOP_LOGPROBS})/([1-9][0-9]{{0,3}})", re.ASCII)
KNOWN_COLUMNS = ", ".join([*COLUMNS, "score/*", f"{TOP_IDS}/<n>", f"{TOP_LOGPROBS}/<n>"])


@lru_cache(maxsize=256)  # every column of every sample is looked up
def find_column(name: str) -> Column | None:
    """Return a known column, or a score that an environment named; None for anything else."""
    if _SCORE.fullmatch(name):
        return _sample(name, "a number of the environment's own")
    if (top := _TOP.fullmatch(name)) and int(top[2]) <= MOST_TOP:
        dtype, doc = _WIDE[top[1]]
        return Column(name, True, np.dtype(dtype), doc, int(top[2]))
    return COLUMNS.get(name)


def top_columns(count: int) -> tuple[str, str]:
    """Return the names of a teacher's `count` tokens a place, and of their log-probs."""
    return f"{TOP_IDS}/{count}", f"{TOP_LOGPROBS}/{count}"


def validate_sample(sample: Sample) -> None:
    """Raise InvalidSampleError unless ids, columns, spans and media fit together."""
    tokens = sample.token_ids
    if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32 or tokens.ndim != 1:
        raise InvalidSampleError(
            sample.sample_id, "token_ids", "is not an int32 array of one dimension"
        )
    if not 1 <= sample.prompt_length <= len(tokens):
        raise InvalidSampleError(
            sample.sample_id,
            "prompt_length",
            f"is {sample.prompt_length}, not within 1..{len(tokens)}",
        )
    if tokens.min() < 0:
        raise InvalidSampleError(sample.sample_id, "token_ids", "has a negative id")
    for name, values in sample.columns.items():
        _validate_column(sample, name, values)
    _validate_spans(sample)
    _validate_experts(sample)
    _validate_media(sample)


def is_temperature(value: float) -> bool:
    """Whether logits can be divided by it. To draw, 0 does too, which is greedy."""
    return LEAST_TEMPERATURE <= value <= MOST_TEMPERATURE


def _validate_column(sample: Sample, name: str, values: np.ndarray | float) -> None:
    column = find_column(name)
    if column is None:
        raise UnknownColumnError(sample.sample_id, name)
    where = f"columns[{name!r}]"
    if not column.per_token:
        if not isinstance(values, (int, float, np.number)) or isinstance(values, bool):
            raise InvalidSampleError(sample.sample_id, where, "is not one number")
        if name == "temperature" and values != SEVERAL and not is_temperature(float(values)):
            raise InvalidSampleError(sample.sample_id, where, f"is {values}: {TEMPERATURES}")
        return
    if column.width:
        if not isinstance(values, np.ndarray) or values.shape[1:] != (column.width,):
            raise InvalidSampleError(
                sample.sample_id, where, f"is not an array of {column.width} numbers a token"
            )
    elif not isinstance(values, np.ndarray) or values.ndim != 1:
        raise InvalidSampleError(sample.sample_id, where, "is not an array of one dimension")
    if values.dtype != column.dtype:
        raise InvalidSampleError(sample.sample_id, where, f"is {values.dtype}, not {column.dtype}")
    if len(values) != sample.response_length:
        raise ColumnLengthError(sample.sample_id, name, sample.response_length, len(values))


def _validate_spans(sample: Sample) -> None:
    covered = -1
    for span in sample.spans:
        if not covered < span.first_token <= span.last_token < sample.response_length:
            raise InvalidSampleError(
                sample.sample_id,
                "spans",
                f"hold tokens {span.first_token}..{span.last_token} after {covered}, "
                f"of {sample.response_length}",
            )
        covered = span.last_token


def _validate_experts(sample: Sample) -> None:
    experts = sample.routed_experts
    if experts is None:
        return
    if experts.dtype != np.int16 or experts.ndim != 3:
        raise InvalidSampleError(
            sample.sample_id, "routed_experts", "is not an int16 array of three dimensions"
        )
    if len(experts) != len(sample.token_ids) - 1:
        raise InvalidSampleError(
            sample.sample_id,
            "routed_experts",
            f"are of {len(experts)} tokens, not of {len(sample.token_ids) - 1}",
        )
    ordered = np.sort(experts, axis=-1)
    twice = np.argwhere(ordered[..., 1:] == ordered[..., :-1])
    if len(twice):
        token, layer, _ = twice[0]
        raise InvalidSampleError(
            sample.sample_id,
            "routed_experts",
            f"name an expert twice for token {token}, in mixture layer {layer}",
        )


def _validate_media(sample: Sample) -> None:
    """Media lie one behind the other, each on equal tokens that are not trained on."""
    end = 0
    for index, span in enumerate(sample.media):
        where = f"media[{index}]"
        if span.kind not in MEDIA_KINDS:
            raise InvalidSampleError(sample.sample_id, f"{where}.kind", f"{span.kind!r} is unknown")
        if not DIGEST.fullmatch(span.digest):
            raise InvalidSampleError(sample.sample_id, f"{where}.blob", "has no digest")
        if len(span.grid_thw) != 3 or not 1 <= min(span.grid_thw) <= max(span.grid_thw) <= LARGEST:
            raise InvalidSampleError(
                sample.sample_id, f"{where}.grid_thw", f"is {list(span.grid_thw)}, no three counts"
            )
        if not 0 <= span.turn <= LARGEST or not 0 <= span.size <= LARGEST:
            raise InvalidSampleError(
                sample.sample_id, where, f"has no turn or size of 0..{LARGEST}"
            )
        if span.token_count < 1 or not end <= span.first_token <= span.end <= len(sample.token_ids):
            raise InvalidSampleError(
                sample.sample_id,
                where,
                f"is {span.token_count} tokens from {span.first_token} on, behind {end}, of "
                f"{len(sample.token_ids)}",
            )
        if span.first_token <= sample.prompt_length < span.end:
            raise InvalidSampleError(
                sample.sample_id, where, "covers the first response token, which is always text"
            )
        end = span.end
        tokens = sample.token_ids[span.first_token : end]
        if (tokens != tokens[0]).any():
            raise InvalidSampleError(sample.sample_id, where, "covers tokens that are not equal")
        first = max(0, span.first_token - sample.prompt_length)
        last = end - sample.prompt_length
        mask = sample.columns.get("loss_mask")
        if last > 0 and (not isinstance(mask, np.ndarray) or mask[first:last].any()):
            raise InvalidSampleError(
                sample.sample_id, where, "covers response tokens that loss_mask leaves in"
            )


def truncate_sample(sample: Sample, length: int) -> Sample:
    """Return the sample's first `length` tokens, at least one of them of the response.

    Per-token columns and version spans end with it; the reward stays that of the whole sample.
    A medium that would be cut is left out, with all behind it.
    """
    for span in sample.media:
        if sample.prompt_length < span.first_token < length < span.end:
            length = span.first_token
    if len(sample.token_ids) <= length:
        return sample
    kept = length - sample.prompt_length
    assert kept > 0, "a prompt that fills the cap is refused before"
    return replace(
        sample,
        token_ids=sample.token_ids[:length],
        columns={
            name: values[:kept] if isinstance(values, np.ndarray) else values
            for name, values in sample.columns.items()
        },
        spans=tuple(
            replace(span, last_token=min(span.last_token, kept - 1))
            for span in sample.spans
            if span.first_token < kept
        ),
        routed_experts=None
        if sample.routed_experts is None
        else sample.routed_experts[: length - 1],
        media=tuple(span for span in sample.media if span.end <= length),
    )


_NUMBERS = ("lengths", "prompt_lengths", "prompts", "mask_counts", "oldest_versions")


class InvalidFactsError(ValueError):
    """Text that is no facts, or facts that contradict each other."""


@dataclass(frozen=True, kw_only=True)
class RowFacts:
    """Facts about N rows, in order.

    lengths (tokens), prompt_lengths, mask_counts (trained tokens), prompts (digest of group and
    prompt: siblings that share a prompt have the same), oldest_versions (of the weights that
    sampled; -1 unknown): int64[N]. temperatures: float64[N], the column of that name, NaN where a
    row has none. episodes: float64[N], the column `episode`, of which siblings may share one; 0
    where a row has none, as `present` says. present: bool[N] by column name. patches: of every
    image, in order, of the rows that show any: those of the prompt, and those behind it.
    """

    sample_ids: Sequence[str]
    group_ids: Sequence[str]
    lengths: np.ndarray
    prompt_lengths: np.ndarray
    prompts: np.ndarray
    mask_counts: np.ndarray
    oldest_versions: np.ndarray
    temperatures: np.ndarray
    episodes: np.ndarray
    present: dict[str, np.ndarray]
    patches: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the facts as text; a column that all rows have is `true`, others list rows.

        Numbers are one block, 8 bytes each, little-endian, in base64: as text they would take
        most of the time that it takes to read facts.
        """
        numbers = [np.asarray(getattr(self, name), "<i8").tobytes() for name in _NUMBERS]
        block = b"".join((*numbers, np.asarray(self.temperatures, "<f8").tobytes()))
        groups = list(self.group_ids)
        document = {
            "numbers": base64.b64encode(block).decode(),
            "sample_ids": list(self.sample_ids),
            "group_ids": groups[0] if len(set(groups)) == 1 else groups,
            "present": {
                name: True if np.count_nonzero(rows) == len(rows) else np.flatnonzero(rows).tolist()
                for name, rows in sorted(self.present.items())
            },
        }
        if self.episodes.any():
            block = np.asarray(self.episodes, "<f8").tobytes()
            document["episodes"] = base64.b64encode(block).decode()
        if self.patches:
            document["patches"] = {str(row): parts for row, parts in self.patches.items()}
        return json.dumps(document, separators=(",", ":"))

    def part(self, rows: slice) -> RowFacts:
        """Return the facts of some neighbours, none of which shows an image."""
        assert not self.patches, "rows of patches are numbers of rows"
        return RowFacts(
            sample_ids=self.sample_ids[rows],
            group_ids=self.group_ids[rows],
            temperatures=self.temperatures[rows],
            episodes=self.episodes[rows],
            present={name: held[rows] for name, held in self.present.items()},
            **{name: getattr(self, name)[rows] for name in _NUMBERS},
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> RowFacts:
        """Read what `to_json` wrote, or an older version. Raises InvalidFactsError."""
        try:
            document = json.loads(text)
            sample_ids, groups = document["sample_ids"], document["group_ids"]
            count = len(sample_ids)
            group_ids = [groups] * count if isinstance(groups, str) else groups
            numbers = _read_numbers(document, count)
            present = {}
            for name, rows in document["present"].items():
                present[name] = np.full(count, rows is True)
                if rows is not True:
                    present[name][np.array(rows, dtype=np.int64)] = True
            patches = _read_patches(document.get("patches", {}), count)
            episodes = np.zeros(count)
            if "episodes" in document:
                episodes = np.frombuffer(base64.b64decode(document["episodes"]), dtype="<f8")
            if episodes.shape != (count,):
                raise ValueError("episodes")
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise InvalidFactsError(f"no facts about rows: {error}") from None
        if len(group_ids) != count:
            raise InvalidFactsError("facts about rows differ in their count")
        return cls(
            sample_ids=sample_ids,
            group_ids=group_ids,
            present=present,
            patches=patches,
            episodes=episodes,
            **numbers,
        )

    @classmethod
    def join(cls, parts: Sequence[RowFacts]) -> RowFacts:
        """Return the facts of all parts, one behind the other."""
        names = {name for part in parts for name in part.present}
        counts = [len(part.sample_ids) for part in parts]
        empty = [np.empty(0, dtype=np.int64)]
        firsts = accumulate(counts, initial=0)
        return cls(
            sample_ids=[sample for part in parts for sample in part.sample_ids],
            group_ids=[group for part in parts for group in part.group_ids],
            present={
                name: np.concatenate(
                    [
                        part.present[name] if name in part.present else np.zeros(count, np.bool_)
                        for part, count in zip(parts, counts, strict=True)
                    ]
                )
                for name in names
            },
            patches={
                first + row: parts
                for part, first in zip(parts, firsts, strict=False)
                for row, parts in part.patches.items()
            },
            **{
                name: np.concatenate([getattr(part, name) for part in parts] or empty)
                for name in (*_NUMBERS, "temperatures", "episodes")
            },
        )

    def difference(self, actual: RowFacts, rows: Sequence[int]) -> str:
        """Return what of the facts at `rows` is not so of the actual ones; empty if all is."""
        names = self.present.keys() | actual.present.keys()
        absent = np.zeros(len(actual.sample_ids), dtype=np.bool_)
        for what, expected, found in (
            ("sample_id", [self.sample_ids[row] for row in rows], actual.sample_ids),
            ("group_id", [self.group_ids[row] for row in rows], actual.group_ids),
            *((name, getattr(self, name)[rows], getattr(actual, name)) for name in _NUMBERS),
            *(
                (name[:-1], np.nan_to_num(getattr(self, name)[rows]), np.nan_to_num(held))
                for name in ("temperatures", "episodes")
                for held in [getattr(actual, name)]
            ),
            *(
                (name, self.present[name][rows] if name in self.present else absent, held)
                for name in sorted(names)
                for held in [actual.present.get(name, absent)]
            ),
        ):
            wrong = np.flatnonzero(np.asarray(expected) != np.asarray(found))
            if len(wrong):
                return f"{what} of sample {actual.sample_ids[wrong[0]]!r}"
        for index, row in enumerate(rows):
            if self.patches.get(row) != actual.patches.get(index):
                return f"patches of sample {actual.sample_ids[index]!r}"
        return ""


def _read_numbers(document: dict[str, Any], count: int) -> dict[str, np.ndarray]:
    """Raises what any other text leads to."""
    if "numbers" not in document:  # of an older version: lists, the oldest without temperatures
        temperatures = document.get("temperatures", [None] * count)
        numbers = np.array([document[name] for name in _NUMBERS], dtype=np.int64)
        numbers = np.vstack((numbers, np.array([temperatures], dtype=np.float64).view(np.int64)))
    else:
        numbers = np.frombuffer(base64.b64decode(document["numbers"]), dtype="<i8")
    table = numbers.reshape(len(_NUMBERS) + 1, count)
    return {**dict(zip(_NUMBERS, table, strict=False)), "temperatures": table[-1].view(np.float64)}


def _read_patches(
    document: Mapping[str, Any], count: int
) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Raises what any other text leads to."""
    patches = {}
    for key, (prompt, behind) in document.items():
        row, parts = int(key), (tuple(prompt), tuple(behind))
        numbers = [*parts[0], *parts[1]]
        if not 0 <= row < count or not all(
            type(number) is int and 0 < number <= LARGEST for number in numbers
        ):
            raise ValueError(f"patches of row {key!r}")
        patches[row] = parts
    return patches


def describe_rows(samples: Sequence[Sample]) -> RowFacts:
    """Gather the facts of valid samples."""
    columns = [sample.columns for sample in samples]
    group_ids = [sample.group_id for sample in samples]
    seeds = seed_prompts(group_ids)
    prompts = [_digest_prompt(sample, seeds[sample.group_id]) for sample in samples]
    temperatures = [each.get("temperature", math.nan) for each in columns]
    return RowFacts(
        sample_ids=[sample.sample_id for sample in samples],
        group_ids=group_ids,
        lengths=np.array([len(sample.token_ids) for sample in samples], dtype=np.int64),
        prompt_lengths=np.array([sample.prompt_length for sample in samples], dtype=np.int64),
        prompts=np.array(prompts, dtype=np.int64),
        mask_counts=np.array([count_trained(sample) for sample in samples], dtype=np.int64),
        oldest_versions=np.array([_oldest(sample) for sample in samples], dtype=np.int64),
        temperatures=np.array(temperatures, dtype=np.float64),
        episodes=np.array([each.get("episode", 0.0) for each in columns], dtype=np.float64),
        present={
            name: np.array([name in each for each in columns], dtype=np.bool_)
            for name in dict.fromkeys(chain.from_iterable(columns))
        },
        patches={row: _patches_of(sample) for row, sample in enumerate(samples) if sample.media},
    )


def _patches_of(sample: Sample) -> tuple[tuple[int, ...], tuple[int, ...]]:
    prompt, behind = list[int](), list[int]()
    for span in sample.media:
        part = prompt if span.end <= sample.prompt_length else behind
        part.append(math.prod(span.grid_thw))
    return tuple(prompt), tuple(behind)


def count_trained(sample: Sample) -> int:
    """Count the response tokens that the loss mask leaves in; all without a mask."""
    mask = sample.columns.get("loss_mask")
    return sample.response_length if mask is None else int(np.count_nonzero(mask))


def seed_prompts(group_ids: Iterable[str]) -> dict[str, int]:
    """Return what tells equal prompts of these groups apart, by group."""
    return {name: xxhash.xxh3_64_intdigest(name.encode()) for name in set(group_ids)}


def digest_prompt(token_ids: np.ndarray, seed: int, shown: str = "") -> int:
    """Return xxh3-64 of a prompt (int32), as a signed number; `seed` is that of its group.

    Placeholders are the same tokens whatever they show, so that digests of images count too.
    """
    prompt = np.ascontiguousarray(token_ids).data
    if shown:
        prompt = memoryview(prompt.tobytes() + shown.encode())
    return xxhash.xxh3_64_intdigest(prompt, seed=seed) - (1 << 63)


def _digest_prompt(sample: Sample, seed: int) -> int:
    length = sample.prompt_length
    shown = "".join(span.digest for span in sample.media if span.end <= length)
    return digest_prompt(sample.token_ids[:length], seed, shown)


def _oldest(sample: Sample) -> int:
    versions = [span.version for span in sample.spans]
    return min(versions) if versions else -1
