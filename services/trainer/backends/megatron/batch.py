"""A micro-batch as one rank feeds it to the model: rows packed, padded and cut over context."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.trainer.backend import MicroBatch, Row
from services.trainer.backends.megatron.attention import KeyRange, PackRuns
from services.trainer.backends.megatron.config import MegatronConfig
from sluice.algo.collectives import Collectives
from sluice.algo.layout import ContextSlice, SequenceLayout


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """T tokens of this rank, out of context_size * T of the pack; R response tokens in row order.

    local_predictors: int64[L], the tokens of this rank that predict a response token, and
    targets: int64[L], what they predict. places: int64[R], where the predictor of each response
    token stands among the tokens of all context ranks in rank order. context: those ranks.
    """

    rows: tuple[Row, ...]
    layout: SequenceLayout
    token_ids: torch.Tensor  # int64[1, T]
    position_ids: torch.Tensor  # int64[1, T]
    local_predictors: torch.Tensor
    targets: torch.Tensor
    places: torch.Tensor
    runs: PackRuns
    context: Collectives


def pack_batch(
    rows: MicroBatch, config: MegatronConfig, *, context: Collectives, device: torch.device
) -> PackedBatch:
    """Packs `rows` in order; an empty batch is all padding. Padding forms sequences of its own."""
    layout = SequenceLayout(
        kind=config.cp_layout if config.context > 1 else "none",
        lengths=tuple(len(row.token_ids) for row in rows),
        size=config.context,
        multiple=config.tensor,
    )
    responses = layout.responses([row.prompt_length for row in rows])
    rank = context.rank
    pieces = layout.pieces(rank)
    parts = [torch.zeros(0, dtype=torch.int64)]
    parts += [row.token_ids[row.prompt_length :].long() for row in rows]
    return PackedBatch(
        rows=tuple(rows),
        layout=layout,
        token_ids=_tokens(rows, layout, rank)[None].to(device),
        position_ids=torch.cat([_positions(piece) for piece in pieces])[None].to(device),
        local_predictors=responses.slots(rank).to(device),
        targets=torch.cat(parts)[responses.share(rank)].to(device),
        places=responses.places.to(device),
        runs=PackRuns(
            qkv_format="sbhd",
            runs=_runs(pieces),
            order=layout.place_of_pack.to(device) if config.context > 1 else None,
            context=context,
        ),
        context=context,
    )


def _tokens(rows: MicroBatch, layout: SequenceLayout, rank: int) -> torch.Tensor:
    if not rows:
        return torch.zeros(layout.local_length, dtype=torch.int64)
    return layout.split([row.token_ids.long() for row in rows], rank)


def _positions(piece: ContextSlice) -> torch.Tensor:
    return torch.arange(piece.first - piece.start, piece.stop - piece.start)


def _runs(pieces: list[ContextSlice]) -> tuple[KeyRange, ...]:
    runs: list[KeyRange] = []
    end = 0
    for piece in pieces:
        runs.append(KeyRange(end, end + piece.stop - piece.first, piece.start, piece.stop))
        end = runs[-1].stop
    return tuple(runs)
