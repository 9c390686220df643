"""A micro-batch as one rank feeds it to the model: rows packed, padded and cut over context."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.trainer.backend import MicroBatch, Row
from services.trainer.backends.megatron.attention import PackRuns, Run
from services.trainer.backends.megatron.config import MegatronConfig


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """T tokens of this rank, out of context_size * T of the pack.

    places: int64[pack], where each token of the pack stands among the tokens of all context
    ranks in rank order. responses: int64[R], for every response token in row order the place of
    the token that predicts it. local_predictors: int64[L], those of them that this rank holds,
    as indices of its tokens; targets: int64[L], the response tokens that they predict.
    """

    rows: tuple[Row, ...]
    token_ids: torch.Tensor  # int64[1, T]
    position_ids: torch.Tensor  # int64[1, T]
    local_predictors: torch.Tensor
    targets: torch.Tensor
    responses: torch.Tensor
    places: torch.Tensor
    starts: tuple[int, ...]  # of each row in the pack
    runs: PackRuns


def pack_batch(
    rows: MicroBatch, config: MegatronConfig, *, context_rank: int, device: torch.device
) -> PackedBatch:
    """Pack `rows` in order, each followed by its padding; an empty batch is all padding."""
    segments = _segments([len(row.token_ids) for row in rows], config)
    total = segments[-1][1]
    tokens, targets, positions = (torch.zeros(total, dtype=torch.int64) for _ in range(3))
    predicts = torch.zeros(total, dtype=torch.bool)
    for start, stop in segments:
        positions[start:stop] = torch.arange(stop - start)
    for row, (start, _) in zip(rows, segments, strict=False):
        stop = start + len(row.token_ids)
        tokens[start:stop] = row.token_ids
        targets[start : stop - 1] = row.token_ids[1:]
    pieces = [_pieces(segments, config, rank) for rank in range(config.context)]
    shares = [torch.cat([torch.arange(a, b) for a, b, _ in share]) for share in pieces]
    local = shares[context_rank]
    places = torch.argsort(torch.cat(shares))
    starts = tuple(start for start, _ in segments[: len(rows)])
    predictors = _predictors(rows, starts)
    predicts[predictors] = True
    local_predictors = predicts[local].nonzero()[:, 0]
    return PackedBatch(
        rows=tuple(rows),
        token_ids=tokens[local][None].to(device),
        position_ids=positions[local][None].to(device),
        local_predictors=local_predictors.to(device),
        targets=targets[local][local_predictors].to(device),
        responses=places[predictors].to(device),
        places=places,
        starts=starts,
        runs=PackRuns(
            qkv_format="sbhd",
            runs=_runs(pieces[context_rank]),
            order=places.to(device) if config.context > 1 else None,
        ),
    )


def _segments(lengths: Sequence[int], config: MegatronConfig) -> list[tuple[int, int]]:
    """Start and stop of every sequence with its padding, and of the padding at the end.

    Zig-zag wants every sequence to divide into 2 * context chunks; sequence parallelism wants
    the tokens of each context rank to divide over the tensor ranks.
    """
    zigzag = config.context > 1 and config.cp_layout == "zigzag"
    each = 2 * config.context if zigzag else 1
    whole = math.lcm(each, config.context * config.tensor)
    segments, end = [], 0
    for length in lengths:
        segments.append((end, end + math.ceil(length / each) * each))
        end = segments[-1][1]
    total = max(math.ceil(end / whole), 1) * whole
    if total > end:
        segments.append((end, total))
    return segments


def _pieces(
    segments: Sequence[tuple[int, int]], config: MegatronConfig, rank: int
) -> list[tuple[int, int, int]]:
    """Consecutive tokens of one sequence that context rank `rank` holds, in its order.

    Each is (first place in the pack, end, start of its sequence).
    """
    size, total = config.context, segments[-1][1]
    if size == 1 or config.cp_layout == "contiguous":
        low, high = rank * total // size, (rank + 1) * total // size
        cut = [(max(start, low), min(stop, high), start) for start, stop in segments]
        return [piece for piece in cut if piece[0] < piece[1]]
    pieces = []
    for start, stop in segments:
        chunk = (stop - start) // (2 * size)
        for index in (rank, 2 * size - 1 - rank):
            first = start + index * chunk
            pieces.append((first, first + chunk, start))
    return pieces


def _runs(pieces: Sequence[tuple[int, int, int]]) -> tuple[Run, ...]:
    runs, end = [], 0
    for first, stop, start in pieces:
        runs.append(Run(end, end + stop - first, start, stop))
        end = runs[-1].stop
    return tuple(runs)


def _predictors(rows: Sequence[Row], starts: Sequence[int]) -> torch.Tensor:
    """Places in the pack of the tokens whose next token is a response token."""
    parts = [torch.empty(0, dtype=torch.int64)]
    for row, start in zip(rows, starts, strict=True):
        first = start + row.prompt_length - 1
        parts.append(torch.arange(first, first + row.response_length))
    return torch.cat(parts)
