"""What a row must keep to be trained on, checked wherever its tokens are at hand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa

from services.trainer.backends.families import learned_positions
from services.trainer.config import TrainerConfig
from services.trainer.errors import OversizeSampleError
from sluice.balance.planner import OversizePolicy, TransformerShape, shape_from_config
from sluice.config import ConfigError
from sluice.runtime.errors import DataLossError, InvalidFieldError, NotFoundError
from sluice.samples.arrow import InvalidGroupError, decode_rows, open_group
from sluice.samples.blobs import (
    BlobDigestError,
    BlobNotFoundError,
    BlobReads,
    BlobReference,
    Blobs,
)
from sluice.samples.columns import RowColumns
from sluice.samples.images import FILE, ImageRules, InvalidImageError, processor_digest
from sluice.samples.sample import (
    LARGEST_EPISODE,
    LARGEST_NUMBER,
    TOP_IDS,
    ColumnLengthError,
    InvalidSampleError,
    MediaSpan,
    RowFacts,
    Sample,
    describe_rows,
    truncate_sample,
    validate_sample,
)
from sluice.weights.manifest import read_manifest

OLD_LOGPROBS = "old_logprobs"  # the column of what the policy says before a step
MASS_ROUNDING = 1e-2  # of probabilities in bfloat16, added up


@dataclass(frozen=True)
class RowLimits:
    """Limits of the rows that this model and these ranks train on.

    max_tokens: of a row, unless the policy runs longer ones alone. positions: that the model has
    learned; 0 where it takes any. images: how the model is shown them, if it is. placeholder: the
    token that stands for them.
    """

    vocabulary_size: int
    max_tokens: int
    oversize: OversizePolicy = OversizePolicy.ERROR
    positions: int = 0
    images: ImageRules | None = None
    placeholder: int = -1

    @classmethod
    def from_config(cls, config: TrainerConfig, context_size: int = 1) -> RowLimits:
        """Return the limits of the configured model on ranks of this context parallelism.

        Raises ConfigError for a model that sees whose images are prepared by no rules known here,
        or by others than it was trained with, or than those of its reference.
        """
        directory = Path(config.model)
        model = json.loads((directory / "config.json").read_bytes())
        sees = "vision_config" in model
        return cls(
            shape_from_config(model).vocabulary_size,
            config.max_tokens_per_micro_batch * context_size,
            OversizePolicy(config.oversize_policy),
            learned_positions(model),
            _read_images(config) if sees else None,
            model["image_token_id"] if sees else -1,
        )

    def admit(self, sample: Sample, row: int = 0) -> Sample:
        """Return the sample as the ranks hold it. Raises OversizeSampleError."""
        length, cap = len(sample.token_ids), self.longest
        if cap is None or length <= cap:
            return sample
        if self.oversize is not OversizePolicy.TRUNCATE or sample.prompt_length >= cap:
            learned = cap == self.positions
            raise OversizeSampleError(sample.sample_id, row, length, cap, learned=learned)
        return truncate_sample(sample, cap)

    @property
    def longest(self) -> int | None:
        """Tokens of a row as ranks hold it; None where any number fits."""
        alone = self.oversize is OversizePolicy.ALONE
        bounds = [self.positions, 0 if alone else self.max_tokens]
        return min(filter(None, bounds), default=None)

    def keep(self, facts: RowFacts) -> bool:
        """Tell from their facts whether all rows stay as they came."""
        fits = self.longest is None or bool((facts.lengths <= self.longest).all())
        prompts = facts.prompt_lengths
        return fits and bool(((prompts >= 1) & (prompts <= facts.lengths)).all())

    def check(self, samples: Sequence[Sample]) -> None:
        """Raise InvalidFieldError for the first sample that this model cannot be shown."""
        tokens = [np.empty(0, np.int32), *(sample.token_ids for sample in samples)]
        names = {tuple(sample.columns) for sample in samples}
        if (
            self.holds(np.concatenate(tokens))
            and not any(sample.media for sample in samples)
            and not any(name.startswith(TOP_IDS) for each in names for name in each)
        ):
            return
        for sample in samples:
            for index, span in enumerate(sample.media):
                self._check_media(sample, index, span)
            self._check_ids(sample, "token_ids", sample.token_ids)
            self.check_named(sample)

    def check_image(self, png: bytes, sample_id: str, span: MediaSpan) -> None:
        """Raise InvalidFieldError for an image that is not the one its span speaks of."""
        assert self.images is not None
        try:
            grid = self.images.grid_of(png)
        except InvalidImageError as error:
            raise _invalid_media(sample_id, span, str(error), error.reason) from None
        if grid != span.grid_thw:
            detail = f"has a grid of {[*grid]}, not {[*span.grid_thw]}"
            raise _invalid_media(sample_id, span, detail)

    def check_named(self, sample: Sample) -> None:
        """Raise InvalidFieldError where a teacher named tokens that this model has not."""
        for name, values in sample.columns.items():
            if name.startswith(TOP_IDS) and isinstance(values, np.ndarray):
                self._check_ids(sample, f"columns[{name}]", values)

    def holds(self, tokens: np.ndarray) -> bool:
        """Tell whether all tokens are of the vocabulary."""
        return not tokens.size or bool(tokens.min() >= 0 and tokens.max() < self.vocabulary_size)

    def _check_ids(self, sample: Sample, field: str, tokens: np.ndarray) -> None:
        if not self.holds(tokens):
            raise InvalidFieldError(
                field,
                f"of sample {sample.sample_id!r} are not all within 0..{self.vocabulary_size - 1}",
                sample_id=sample.sample_id,
            )

    def _check_media(self, sample: Sample, index: int, span: MediaSpan) -> None:
        if self.images is None:
            detail = "would not be seen: the model reads text only"
            raise _invalid_media(sample.sample_id, span, detail)
        if (count := self.images.count_tokens(span.grid_thw)) != span.token_count:
            detail = f"of {[*span.grid_thw]} patches is {count} tokens, not {span.token_count}"
            raise _invalid_media(sample.sample_id, span, detail)
        if (token := sample.token_ids[span.first_token]) != self.placeholder:
            detail = f"stands on tokens {token}, not on {self.placeholder}"
            raise _invalid_media(sample.sample_id, span, detail)


def _read_images(config: TrainerConfig) -> ImageRules:
    """Raises ConfigError."""
    directory = Path(config.model)
    rules = ImageRules.from_directory(directory)
    with suppress(FileNotFoundError):  # a model that is no version of a store
        processor = read_manifest(directory).processor
        if processor not in (None, rules.digest):
            raise ConfigError(
                f"model: {directory / FILE} prepares images otherwise than those this version was "
                f"trained on: its digest is {rules.digest}, not {processor}"
            )
    reference = config.reference_model and processor_digest(Path(config.reference_model))
    if reference and reference != rules.digest:
        raise ConfigError(
            f"reference_model: prepares images by other rules than the model: their digest is "
            f"{reference}, not {rules.digest}"
        )
    return rules


def _invalid_media(
    sample_id: str, span: MediaSpan, detail: str, reason: str = ""
) -> InvalidFieldError:
    where = f"image {span.digest} of sample {sample_id!r}"
    return InvalidFieldError(
        "media", f"{where} {detail}", sample_id=sample_id, digest=span.digest, image=reason
    )


def read_shape(model: str) -> TransformerShape:
    """Read the shape of the model in a directory. Raises ConfigError."""
    path = Path(model) / "config.json"
    try:
        return shape_from_config(json.loads(path.read_bytes()))
    except KeyError as error:
        raise ConfigError(f"model: {path} has no {error.args[0]}, which a model needs") from None


def check_row(sample: Sample) -> None:
    """Raise InvalidFieldError naming what of a sample does not fit together, or is no number."""
    try:
        validate_sample(sample)
        for name, value in sample.columns.items():
            if not isinstance(value, np.ndarray):
                _check_number(sample, name, value)
    except ColumnLengthError as error:
        raise InvalidFieldError(
            f"columns[{error.name}]", str(error), sample_id=error.sample_id, column=error.name
        ) from None
    except InvalidSampleError as error:
        raise InvalidFieldError(error.field, str(error), sample_id=error.sample_id) from None


def _check_number(sample: Sample, name: str, value: float) -> None:
    """Raises InvalidSampleError."""
    where = f"columns[{name!r}]"
    if not abs(value) <= LARGEST_NUMBER:  # NaN neither
        detail = f"is {value}, not a finite number up to {LARGEST_NUMBER:g}"
        raise InvalidSampleError(sample.sample_id, where, detail)
    if name == "episode" and not (0 <= value <= LARGEST_EPISODE and value == int(value)):
        raise InvalidSampleError(sample.sample_id, where, f"is {value}, no index")


def check_numbers(sample: Sample, trained: np.ndarray | None = None) -> None:
    """Raise InvalidFieldError where a token that is trained on has a value that is no number.

    Or likeliest tokens that are none, as `check_top` says. trained: bool[n], in place of the mask.
    """
    if trained is None:
        trained = np.broadcast_to(sample.columns.get("loss_mask", True), sample.response_length)
    for name, values in sample.columns.items():
        if isinstance(values, np.ndarray) and values.ndim == 1:
            _refuse_where(~np.isfinite(values) & trained, "is no number", sample, name)
    check_top(sample, trained)


def check_top(sample: Sample, trained: np.ndarray) -> None:
    """Raise InvalidFieldError for likeliest tokens that are none, of those `trained` on (bool[n]).

    A log-prob that is no number, a token named twice, probabilities of more than 1 together.
    """
    for name, values in sample.columns.items():
        if not isinstance(values, np.ndarray) or values.ndim != 2:
            continue
        if name.startswith(TOP_IDS):
            twice = (np.diff(np.sort(values, 1)) == 0).any(1)
            _refuse_where(twice & trained, "names a token twice", sample, name)
            continue
        _refuse_where(~np.isfinite(values).all(1) & trained, "is no number", sample, name)
        with np.errstate(over="ignore"):
            total = np.exp(values.astype(np.float64)).sum(1)
        _refuse_where((total > 1 + MASS_ROUNDING) & trained, "is more than all", sample, name)


def _refuse_where(wrong: np.ndarray, problem: str, sample: Sample, name: str) -> None:
    if wrong.any():
        raise InvalidFieldError(
            f"columns[{name}]",
            f"of sample {sample.sample_id!r} {problem} at response token {wrong.argmax()}",
            sample_id=sample.sample_id,
            column=name,
        )


@dataclass(frozen=True)
class OpenGroup:
    """A group that was read and verified, and which of its rows are meant (None: all).

    facts: what its file says of all rows; None for one of an older version.
    """

    reference: BlobReference
    batch: pa.RecordBatch
    indices: Sequence[int] | None
    facts: RowFacts | None

    @classmethod
    def open(
        cls,
        blobs: Blobs | BlobReads,
        reference: BlobReference,
        indices: Sequence[int] | None = None,
    ) -> OpenGroup:
        """Raises NotFoundError, DataLossError and InvalidFieldError."""
        with blob_errors(reference):
            facts, batch = open_group(blobs.get(reference))
        return cls(reference, batch, indices, facts)

    @property
    def rows(self) -> Sequence[int]:
        return range(self.batch.num_rows) if self.indices is None else self.indices


def read_rows(
    blobs: Blobs, reference: BlobReference, limits: RowLimits, rows: Sequence[int] | None = None
) -> list[Sample]:
    """Read and check rows (default: all) of a blob, as the ranks hold them.

    Plans were made of the facts in the blob: a row of which they are not true is refused.
    Raises NotFoundError, DataLossError, OversizeSampleError and InvalidFieldError.
    """
    return check_samples(OpenGroup.open(blobs, reference, rows), limits)


def check_samples(stored: OpenGroup, limits: RowLimits) -> list[Sample]:
    """Read and check rows as `read_rows` does, of a group that is open."""
    with blob_errors(stored.reference):
        samples = decode_rows(stored.batch, stored.indices)
    for sample in samples:
        check_row(sample)
        check_numbers(sample)
    if stored.facts is not None and (
        difference := stored.facts.difference(describe_rows(samples), stored.rows)
    ):
        raise InvalidFieldError(
            "blob",
            f"has facts that are not those of its rows: {difference}",
            blob=stored.reference.digest,
        )
    admitted = [limits.admit(sample, row) for row, sample in enumerate(samples)]
    limits.check(admitted)
    return admitted


def read_columns(groups: Sequence[OpenGroup], limits: RowLimits) -> RowColumns | None:
    """Return the rows of groups of one schema, one behind the other.

    None where a row may be wrong, or is not held as it came: `check_samples` then says why.
    """
    try:
        columns = RowColumns.read([(stored.batch, stored.indices) for stored in groups])
    except pa.ArrowInvalid:
        return None
    if columns is None or not columns.are_right():
        return None
    facts = columns.facts()
    if not limits.keep(facts) or not limits.holds(columns.token_ids):
        return None
    said = [stored.facts for stored in groups if stored.facts is not None]
    if not said:
        return columns
    if len(said) < len(groups):  # facts are of all rows or none
        return None
    counts = [stored.batch.num_rows for stored in groups]
    rows = [
        first + row
        for first, stored in zip(accumulate(counts, initial=0), groups, strict=False)
        for row in stored.rows
    ]
    return None if RowFacts.join(said).difference(facts, rows) else columns


@contextmanager
def blob_errors(reference: BlobReference) -> Iterator[None]:
    """Turn what can be wrong with a blob into typed errors."""
    try:
        yield
    except BlobNotFoundError as error:
        raise NotFoundError("blob", error.digest) from None
    except BlobDigestError as error:
        raise DataLossError(str(error), blob=reference.digest, actual=error.actual) from None
    except InvalidGroupError as error:
        raise InvalidFieldError("blob", str(error), blob=reference.digest) from None
