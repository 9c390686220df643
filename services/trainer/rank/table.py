"""The rows that this rank owns, with the columns that were computed for them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from services.trainer.backend import Row
from services.trainer.rows import (
    OpenGroup,
    RowLimits,
    blob_errors,
    check_numbers,
    check_row,
    check_samples,
    read_columns,
)
from sluice.algo.advantages import AdvantageColumns, compute_advantages, score_rows
from sluice.algo.aggregation import Moments, merge_measured, relate_siblings
from sluice.algo.estimator import Sibling
from sluice.algo.losses import measure_loss, pack_rows
from sluice.algo.packed_rows import AdvantageRow, join_rows
from sluice.algo.spec import AdvantageSpec, LossSpec
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.runtime.errors import InvalidFieldError
from sluice.runtime.wire import blob_from_proto
from sluice.samples.arrow import decode_group, encode_group
from sluice.samples.blobs import BlobReference, Blobs
from sluice.samples.columns import RowColumns
from sluice.samples.sample import MediaSpan, Sample

BYTES_TOGETHER = 1 << 22  # of blobs that are read at once


@dataclass(eq=False)
class OwnedRow:
    """A row by its position in the upload order; `columns` grow as passes add to them.

    token_ids: int64[length]. loss_mask: bool[response]. columns: float32[response] by name, wide
    ones [response, n], ids among them int32. scalars: per-sample columns.
    """

    sample_id: str
    group_id: str
    token_ids: torch.Tensor
    prompt_length: int
    loss_mask: torch.Tensor
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)
    routed_experts: torch.Tensor | None = None  # int16[length - 1, mixture layers, chosen]
    media: tuple[MediaSpan, ...] = ()
    images: Mapping[str, bytes] = field(default_factory=dict)  # PNG by digest, of the whole batch

    def to_row(self, loss_weight: float) -> Row:
        return Row(
            sample_id=self.sample_id,
            group_id=self.group_id,
            token_ids=self.token_ids,
            prompt_length=self.prompt_length,
            loss_mask=self.loss_mask,
            columns=self.columns,
            loss_weight=loss_weight * self.scalars.get("weight", 1.0),
            routed_experts=self.routed_experts,
            media=self.media,
            images=self.images,
        )


class RowTable:
    """Batches by id, rows by position."""

    def __init__(self, blobs: Blobs, limits: RowLimits) -> None:
        self._blobs, self._limits = blobs, limits
        self._batches: dict[str, dict[int, OwnedRow]] = {}
        self._images: dict[str, dict[str, bytes]] = {}

    def add(self, command: pb.AddRows) -> None:
        """Read and check this rank's rows of the blobs, and the images that they show.

        Raises the errors of `check_samples`.
        """
        batch = self._batches.setdefault(command.batch_id, {})
        images = self._images.setdefault(command.batch_id, {})
        for together in _together(command.blobs):
            with self._blobs.reads() as reads:
                groups = [
                    OpenGroup.open(reads, blob_from_proto(each.blob), each.indices)
                    for each in together
                ]
            for places in _alike(groups):
                own = [groups[place] for place in places]
                rows = itertools.chain.from_iterable(together[place].rows for place in places)
                if (columns := read_columns(own, self._limits)) is not None:
                    batch.update(zip(rows, _own_columns(columns, images), strict=True))
                    continue
                samples = [each for one in own for each in check_samples(one, self._limits)]
                for sample in samples:
                    self._read_images(sample, images)
                batch.update(zip(rows, _own(samples, images), strict=True))

    def _read_images(self, sample: Sample, images: dict[str, bytes]) -> None:
        for span in sample.media:
            reference = BlobReference(span.digest, span.size)
            if span.digest not in images:
                with blob_errors(reference):
                    images[span.digest] = bytes(self._blobs.get(reference))
            self._limits.check_image(images[span.digest], sample.sample_id, span)

    def set_columns(self, command: pb.SetColumns) -> None:
        """Raises InvalidFieldError where a new mask would train on an image's tokens.

        And for values of trained tokens that are no numbers, and likeliest tokens that are none.
        """
        batch = self._batches[command.batch_id]
        reference = blob_from_proto(command.rows.blob)
        with blob_errors(reference):
            samples = decode_group(self._blobs.get(reference), command.rows.indices)
        if command.columns:
            samples = [
                _renamed(batch[row], sample, command.columns)
                for row, sample in zip(command.rows.rows, samples, strict=True)
            ]
        for row, sample in zip(command.rows.rows, samples, strict=True):
            _check_mask(batch[row], sample)
            self._limits.check_named(sample)
            trained = sample.columns.get("loss_mask", batch[row].loss_mask.numpy())
            check_numbers(sample, np.asarray(trained))
        _set_columns([batch[row] for row in command.rows.rows], samples)

    def spool_columns(self, batch_id: str, names: Sequence[str]) -> bytes:
        """This rank's rows with the named columns they have, and no tokens."""
        batch = self._batches[batch_id]
        return encode_group([_bare_sample(batch[row], names) for row in sorted(batch)])

    def drop(self, batch_id: str) -> None:
        self._batches.pop(batch_id, None)
        self._images.pop(batch_id, None)

    def rows(self, batch_id: str) -> dict[int, OwnedRow]:
        return self._batches[batch_id]

    def micro_batches(self, batch_id: str, plan: Iterable[pb.MicroBatchRows]) -> list[list[Row]]:
        """Return the rows of each micro-batch, with their loss weights if the plan has them."""
        batch = self._batches[batch_id]
        return [
            [
                batch[row].to_row(weight)
                for row, weight in zip(
                    part.rows, part.loss_weights or [1.0] * len(part.rows), strict=True
                )
            ]
            for part in plan
        ]


def _together(blobs: Iterable[pb.BlobRows]) -> Iterator[list[pb.BlobRows]]:
    """Blobs that are read at once: the rows of short ones cost less so."""
    together, size = list[pb.BlobRows](), 0
    for stored in blobs:
        size += stored.blob.size_bytes
        if together and size > BYTES_TOGETHER:
            yield together
            together, size = [], stored.blob.size_bytes
        together.append(stored)
    if together:
        yield together


def _alike(groups: Sequence[OpenGroup]) -> Iterable[list[int]]:
    """Places of groups that have the same columns."""
    places: dict[tuple[str, ...], list[int]] = {}
    for place, group in enumerate(groups):
        places.setdefault(tuple(group.batch.schema.names), []).append(place)
    return places.values()


def _own_columns(columns: RowColumns, images: Mapping[str, bytes]) -> list[OwnedRow]:
    """Copy what the rows are, so that nothing of their blobs is held; rows share memory."""
    lengths, responses = columns.lengths.tolist(), columns.response_lengths.tolist()
    tokens = torch.from_numpy(columns.token_ids.astype(np.int64)).split(lengths)
    parts = {
        name: torch.from_numpy(values.copy()).split(responses)
        for name, values in columns.per_token.items()
    }
    masks = parts.pop("loss_mask", None) or [_all_trained(length) for length in responses]
    numbers = {name: values.tolist() for name, values in columns.per_sample.items()}
    fixed = zip(
        columns.sample_ids,
        columns.group_ids,
        tokens,
        columns.prompt_lengths.tolist(),
        masks,
        strict=True,
    )
    return [
        OwnedRow(
            *values,
            columns={name: part[index] for name, part in parts.items()},
            scalars={name: number[index] for name, number in numbers.items()},
            images=images,
        )
        for index, values in enumerate(fixed)
    ]


def _own(samples: Sequence[Sample], images: Mapping[str, bytes]) -> list[OwnedRow]:
    """Copy what the rows are, so that nothing of their blobs is held; rows share memory."""
    tokens = np.concatenate([np.empty(0, np.int64), *(sample.token_ids for sample in samples)])
    parts = torch.from_numpy(tokens).split([len(sample.token_ids) for sample in samples])
    rows = [
        OwnedRow(
            sample_id=sample.sample_id,
            group_id=sample.group_id,
            token_ids=token_ids,
            prompt_length=sample.prompt_length,
            loss_mask=_all_trained(sample.response_length),
            media=sample.media,
            images=images,
            routed_experts=None
            if sample.routed_experts is None
            else torch.from_numpy(sample.routed_experts.copy()),
        )
        for sample, token_ids in zip(samples, parts, strict=True)
    ]
    _set_columns(rows, samples)
    return rows


@functools.lru_cache(maxsize=4096)
def _all_trained(length: int) -> torch.Tensor:
    """Masks are replaced, never written to, so rows may share one."""
    return torch.ones(length, dtype=torch.bool)


def _check_mask(row: OwnedRow, sample: Sample) -> None:
    mask = sample.columns.get("loss_mask")
    for span in row.media:
        first, last = (max(0, i - row.prompt_length) for i in (span.first_token, span.end))
        if isinstance(mask, np.ndarray) and mask[first:last].any():
            raise InvalidFieldError(
                "columns[loss_mask]",
                f"of sample {row.sample_id!r} leaves in the tokens of image {span.digest}",
                sample_id=row.sample_id,
                digest=span.digest,
            )


def _set_columns(rows: Sequence[OwnedRow], samples: Sequence[Sample]) -> None:
    """Give rows copies of the columns that their samples have."""
    alike: dict[tuple[str, ...], list[tuple[OwnedRow, Sample]]] = {}
    for pair in zip(rows, samples, strict=True):
        alike.setdefault(tuple(pair[1].columns), []).append(pair)
    for names, pairs in alike.items():
        for name in names:
            values = [sample.columns[name] for _, sample in pairs]
            if not isinstance(values[0], np.ndarray):
                for (row, _), value in zip(pairs, values, strict=True):
                    row.scalars[name] = float(value)
                continue
            arrays = [np.asarray(value) for value in values]
            copies = torch.from_numpy(np.concatenate(arrays)).split([len(each) for each in arrays])
            for (row, _), copy in zip(pairs, copies, strict=True):
                if name == "loss_mask":
                    row.loss_mask = copy
                else:
                    row.columns[name] = copy


def _renamed(row: OwnedRow, sample: Sample, names: Mapping[str, str]) -> Sample:
    """Those of the sample's columns that are asked for, as columns of the row.

    Raises InvalidFieldError where they are of another row, or do not fit this one.
    """
    columns = {names[name]: values for name, values in sample.columns.items() if name in names}
    if sample.sample_id != row.sample_id or len(columns) < len(names):
        raise InvalidFieldError(
            "blobs", f"have no columns of sample {row.sample_id!r}", sample_id=row.sample_id
        )
    renamed = Sample(
        sample_id=row.sample_id,
        group_id=row.group_id,
        token_ids=row.token_ids.numpy().astype(np.int32),
        prompt_length=row.prompt_length,
        columns=columns,
    )
    check_row(renamed)
    return renamed


def _bare_sample(row: OwnedRow, names: Sequence[str]) -> Sample:
    columns: dict[str, np.ndarray | float] = {}
    for name in names:
        if name == "loss_mask":
            columns[name] = row.loss_mask.numpy()
        elif name in row.scalars:
            columns[name] = row.scalars[name]
        elif name in row.columns:
            columns[name] = row.columns[name].numpy()
    return Sample(
        sample_id=row.sample_id,
        group_id=row.group_id,
        token_ids=np.empty(0, dtype=np.int32),
        prompt_length=0,
        columns=columns,
    )


def add_advantages(
    rows: dict[int, OwnedRow],
    spec: AdvantageSpec,
    command: pb.AdvantagesCommand,
    result: pb.CommandResult,
    relative: Sequence[float] | None = None,
) -> None:
    """Add the columns, or answer with the moments that whitening needs of every rank.

    relative: the scores of these rows among their siblings on all ranks; without it the rows
    are whole groups.
    """
    order = sorted(rows)
    inputs = [_input(rows[position]) for position in order]
    given = command.moments
    whole = Moments(given.count, given.mean, given.m2) if command.HasField("moments") else None
    advantages = compute_advantages(
        inputs, spec, lambda own: own if whole is None else whole, relative
    )
    result.advantages.moments.count = advantages.moments.count
    result.advantages.moments.mean = advantages.moments.mean
    result.advantages.moments.m2 = advantages.moments.m2
    if command.moments_only:
        return
    for index, position in enumerate(order):
        rows[position].columns["advantages"] = advantages.advantages[index]
        if advantages.returns is not None:
            rows[position].columns["returns"] = advantages.returns[index]
    result.advantages.has_returns = advantages.returns is not None
    _report(rows, order, spec, advantages, result)


def report_scores(rows: dict[int, OwnedRow], spec: AdvantageSpec, result: pb.CommandResult) -> None:
    """Answer with what siblings on other ranks are compared with."""
    order = sorted(rows)
    inputs = [_input(rows[position]) for position in order]
    result.advantages.scores.extend(score_rows(inputs, spec))
    if any(row.episode is not None for row in inputs):
        result.advantages.episodes.extend(row.episode or 0 for row in inputs)


def relate_scores(
    parts: Sequence[pb.SiblingScores], spec: AdvantageSpec, result: pb.CommandResult
) -> None:
    """Answer with the relative score of every row of the batch, in the order that they came."""
    width, siblings, groups = spec.estimator.width, list[Sibling](), list[str]()
    for part in parts:
        groups += [str(group) for group in part.groups]
        for index, (episode, length) in enumerate(zip(part.episodes, part.lengths, strict=True)):
            own = tuple(part.scores[index * width : (index + 1) * width])
            siblings.append(Sibling(own, length, episode))
    related = relate_siblings(siblings, groups, spec.estimator)
    result.advantages.scores.extend(related.scores)
    for name, (total, weight) in related.metrics.items():
        result.sums.metrics[name].sum, result.sums.metrics[name].weight = total, weight


MEASURED_ROWS = 64  # at once: their columns are copied


def measure_rows(rows: Sequence[Row], loss: LossSpec, number: int) -> dict[str, float]:
    """Measure rows for a pass to come, which reads the old policy's log-probs as its own."""
    parts = []
    for first in range(0, len(rows), MEASURED_ROWS):
        some = rows[first : first + MEASURED_ROWS]
        column = loss.old_column or "rollout_logprobs"
        outputs_T = join_rows([row.columns[column] for row in some])
        parts.append(measure_loss(pack_rows(some, loss, outputs_T), loss, number))
    return merge_measured(parts)


def _input(row: OwnedRow) -> AdvantageRow:
    return AdvantageRow(
        sample_id=row.sample_id,
        group_id=row.group_id,
        loss_mask=row.loss_mask,
        rewards=row.scalars,
        columns=row.columns,
        episode=int(row.scalars["episode"]) if "episode" in row.scalars else None,
    )


def _report(
    rows: dict[int, OwnedRow],
    order: list[int],
    spec: AdvantageSpec,
    advantages: AdvantageColumns,
    result: pb.CommandResult,
) -> None:
    sums = result.sums
    for name, (total, weight) in advantages.metrics.items():
        sums.metrics[name].sum, sums.metrics[name].weight = total, weight
    column = spec.reward_column or "reward"
    rewards = [rows[row].scalars[column] for row in order if column in rows[row].scalars]
    sums.metrics["reward"].sum, sums.metrics["reward"].weight = math.fsum(rewards), len(rewards)
    if not order:
        return
    masks_T = torch.cat([rows[row].loss_mask for row in order])
    sizes_T = torch.where(masks_T, torch.cat(advantages.advantages).abs(), 0.0)
    absolute = sums.metrics["advantage_abs"]
    absolute.sum, absolute.weight = float(sizes_T.double().sum()), int(masks_T.sum())
    lengths = torch.tensor([rows[row].loss_mask.shape[0] for row in order])
    owner_T = torch.repeat_interleave(torch.arange(len(order)), lengths)
    speaks = torch.zeros(len(order), dtype=torch.bool)
    speaks[owner_T[sizes_T > 0]] = True
    # A NaN is no zero: `>` alone would call its row silent and hide it.
    speaks[owner_T[sizes_T.isnan()]] = True
    result.advantages.silent_rows.extend(
        row for row, loud in zip(order, speaks.tolist(), strict=True) if not loud
    )
