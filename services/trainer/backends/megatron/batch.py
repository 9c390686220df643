"""A micro-batch as one rank feeds it to the model: rows packed, padded and cut over context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from services.trainer.backend import MicroBatch, Row
from services.trainer.backends.expert_load import followed
from services.trainer.backends.megatron.attention import PackRuns
from services.trainer.backends.megatron.config import MegatronConfig
from sluice.algo.collectives import Collectives
from sluice.algo.layout import SequenceLayout
from sluice.algo.losses import LossColumns, pack_columns, pack_named
from sluice.algo.spec import LossSpec
from sluice.side_copies import Uploads
from sluice.vision import TEXT, Features, rotary_positions


@dataclass(frozen=True, kw_only=True)
class Following:
    """What follows each of this rank's T tokens in its row, and the token after that: M of them.

    token_ids: int64[1, T]; 0 behind a row's last. predictors: int64[M], the tokens of this rank
    that are followed by two, of which the second is trained on; targets: int64[M], those second
    ones; weights: float[M], of their samples.
    """

    token_ids: torch.Tensor
    predictors: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """T tokens of this rank, out of context_size * T of the pack; R response tokens in row order.

    local_predictors: int64[L], the tokens of this rank that predict a response token, and
    targets: int64[L], what they predict. own_responses: int64[L], which of the pack's response
    tokens those are. places: int64[R], where the predictor of each response
    token stands among the tokens of all context ranks in rank order. context: those ranks.
    columns: what the loss reads of the pack's rows, and named: int64[L, K], the further tokens
    that it asks for at each place of this rank, where there is one.
    """

    rows: tuple[Row, ...]
    layout: SequenceLayout
    token_ids: torch.Tensor  # int64[1, T]
    position_ids: torch.Tensor  # int64[1, T], or [3, 1, T] of a model that sees
    local_predictors: torch.Tensor
    targets: torch.Tensor
    own_responses: torch.Tensor
    places: torch.Tensor
    followed: torch.Tensor  # int64[T]: 1 of this rank's tokens that another of their row follows
    runs: PackRuns
    context: Collectives
    following: Following | None = None  # where a layer of multi-token prediction is trained
    columns: LossColumns | None = None
    named: torch.Tensor | None = None

    def with_loss(self, spec: LossSpec, *, names: bool) -> PackedBatch:
        """Returns the batch with what the loss reads. names: where it has log-probs.

        Raises MissingColumnError.
        """
        named_RK = pack_named(self.rows, spec) if names else None
        named = None if named_RK is None else named_RK[self.own_responses]
        return replace(self, columns=pack_columns(self.rows, spec), named=named)

    @property
    def images(self) -> dict[str, bytes]:
        """The distinct images of the rows, PNG by digest."""
        return {span.digest: row.images[span.digest] for row in self.rows for span in row.media}

    def show(self, features: Features) -> torch.Tensor:
        """Returns int64[T]: which row of the features each of this rank's tokens shows, or TEXT."""
        indices = [
            torch.from_numpy(features.index(len(row.token_ids), row.media)) for row in self.rows
        ]
        return self.layout.split(indices, self.context.rank, fill=TEXT)


def pack_batch(
    rows: MicroBatch,
    config: MegatronConfig,
    *,
    context: Collectives,
    merge_size: int = 0,
    predicts: bool = False,
) -> PackedBatch:
    """Packs `rows` in order, on the host; an empty batch is all padding.

    Padding forms sequences of its own.
    merge_size: of the model's image rules; 0 where it takes one position a token. predicts: with
    what follows each token.
    """
    layout = SequenceLayout(
        kind=config.cp_layout if config.context > 1 else "none",
        lengths=tuple(len(row.token_ids) for row in rows),
        size=config.context,
        multiple=config.pack_multiple,
    )
    responses = layout.responses([row.prompt_length for row in rows])
    rank = context.rank
    own = responses.share(rank)
    parts = [torch.zeros(0, dtype=torch.int64)]
    parts += [row.token_ids[row.prompt_length :].long() for row in rows]
    position_ids = _positions(rows, layout, rank, merge_size)
    return PackedBatch(
        rows=tuple(rows),
        layout=layout,
        token_ids=_tokens(rows, layout, rank)[None],
        position_ids=position_ids,
        local_predictors=responses.slots(rank),
        targets=torch.cat(parts)[own],
        own_responses=own,
        places=responses.places,
        followed=_followed(rows, layout, rank),
        runs=PackRuns(
            qkv_format="sbhd",
            runs=layout.runs(rank),
            starts=layout.all_starts,
            order=layout.place_of_pack if config.context > 1 else None,
            context=context,
            positions=position_ids,
        ),
        context=context,
        following=_follow(rows, layout, rank) if predicts else None,
    )


COMPUTED = (
    *("token_ids", "position_ids", "local_predictors", "targets", "places", "followed"),
    *("runs", "following", "columns", "named"),
)


def upload(
    batches: Sequence[PackedBatch], uploads: Uploads, spec: LossSpec | None, *, names: bool
) -> Iterator[PackedBatch]:
    """Yields batches with what passes compute with on the device; the next one is under way.

    spec: with what the loss reads, if there is one. names: see `with_loss`.
    """

    def make(batch: PackedBatch) -> dict[str, Any]:
        ready = batch if spec is None else batch.with_loss(spec, names=names)
        return {name: getattr(ready, name) for name in COMPUTED}

    for batch, made in uploads.ahead(batches, make):
        yield replace(batch, **made)


def _follow(rows: MicroBatch, layout: SequenceLayout, rank: int) -> Following:
    next_ids = _shift([row.token_ids.long() for row in rows], 1)
    targets = _shift([row.token_ids.long() for row in rows], 2)
    weights = []
    for row in rows:
        own = torch.zeros(len(row.token_ids), dtype=torch.float64)
        own[row.prompt_length :] = row.loss_mask.double() * row.loss_weight
        weights.append(own)
    trained = [
        torch.cat((torch.zeros(row.prompt_length, dtype=torch.bool), row.loss_mask.bool()))
        for row in rows
    ]

    def split(values: list[torch.Tensor]) -> torch.Tensor:
        if not rows:
            return torch.zeros(layout.local_length, dtype=torch.int64)
        return layout.split(values, rank)

    predictors = split(_shift(trained, 2)).nonzero()[:, 0]
    return Following(
        token_ids=split(next_ids)[None],
        predictors=predictors,
        targets=split(targets)[predictors],
        weights=split(_shift(weights, 2))[predictors].float(),
    )


def _shift(rows: list[torch.Tensor], by: int) -> list[torch.Tensor]:
    """What is `by` places further in the same row; 0 behind its end."""
    return [torch.cat((values[by:], values.new_zeros(min(by, len(values))))) for values in rows]


def _tokens(rows: MicroBatch, layout: SequenceLayout, rank: int) -> torch.Tensor:
    if not rows:
        return torch.zeros(layout.local_length, dtype=torch.int64)
    return layout.split([row.token_ids.long() for row in rows], rank)


def _followed(rows: MicroBatch, layout: SequenceLayout, rank: int) -> torch.Tensor:
    if not rows:
        return torch.zeros(layout.local_length, dtype=torch.int64)
    return layout.split([followed(len(row.token_ids)) for row in rows], rank)


def _positions(
    rows: MicroBatch, layout: SequenceLayout, rank: int, merge_size: int
) -> torch.Tensor:
    pieces = layout.pieces(rank)
    plain = torch.cat([torch.arange(p.first - p.start, p.stop - p.start) for p in pieces])[None]
    if not merge_size:
        return plain
    if not rows:
        return plain.expand(3, 1, -1)
    shown = [rotary_positions(len(row.token_ids), row.media, merge_size) for row in rows]
    return layout.split([torch.from_numpy(each).T for each in shown], rank).T[:, None]
