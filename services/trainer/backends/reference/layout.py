"""Packs rows into one sequence in which every distinct prompt of a group stands once.

Packed tokens: first the prompts, then the responses without their last tokens, which predict
nothing. Attention runs over padded buckets of like lengths, everything else over the pack.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from services.trainer.backend import Row


@dataclass(frozen=True)
class Bucket:
    """Sequences whose attention runs as one padded batch.

    queries: int64[N * R], keys: int64[N * K], positions in the pack (padding stands at 0 and
    is never seen). mask: bool[R, K] or [N, 1, R, K], None for plain causal attention.
    kept: int64, the real ones among the N * R outputs, in the order of the pack; None for all.
    """

    count: int
    query_length: int
    key_length: int
    queries: torch.Tensor
    keys: torch.Tensor
    mask: torch.Tensor | None
    kept: torch.Tensor | None


@dataclass(frozen=True)
class PackedLayout:
    """A micro-batch as one sequence of T tokens, and where its R response tokens stand.

    token_ids, position_ids: int64[T]. predictors: int64[R], the packed token that predicts each
    response token, rows in order. targets: int64[R]. lengths: response length of each row.
    The outputs of the buckets, kept ones only, one after another, are the pack.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    buckets: tuple[Bucket, ...]
    predictors: torch.Tensor
    targets: torch.Tensor
    lengths: tuple[int, ...]

    def to(self, device: torch.device) -> PackedLayout:
        if device.type == "cpu":
            return self

        def move(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        return PackedLayout(
            self.token_ids.to(device),
            self.position_ids.to(device),
            tuple(
                Bucket(
                    b.count,
                    b.query_length,
                    b.key_length,
                    b.queries.to(device),
                    b.keys.to(device),
                    move(b.mask),
                    move(b.kept),
                )
                for b in self.buckets
            ),
            self.predictors.to(device),
            self.targets.to(device),
            self.lengths,
        )


@dataclass(frozen=True)
class _Piece:
    """A prompt, or a response but for its last token: `length` tokens packed from `start` on.

    prompt: the piece that a response follows.
    """

    start: int
    length: int
    prompt: _Piece | None = None

    @property
    def size_class(self) -> tuple[int, int]:
        """Lengths up to the next power of two: padding at most doubles them."""
        before = 0 if self.prompt is None else self.prompt.length
        return before.bit_length(), self.length.bit_length()


def pack(rows: Sequence[Row]) -> PackedLayout:
    """The layout of at least one row; rows of one group with equal prompts share them."""
    prompt_of, prompts = _distinct_prompts(rows)
    texts: list[torch.Tensor] = []
    positions: list[torch.Tensor] = []
    pieces: list[_Piece] = []
    filled = 0
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]).bit_length())
    prompt_pieces: dict[int, _Piece] = {}
    for index in order:
        piece = prompt_pieces[index] = _Piece(filled, len(prompts[index]))
        pieces.append(piece)
        texts.append(prompts[index])
        positions.append(torch.arange(piece.length))
        filled += piece.length
    responses = [
        _Piece(0, row.response_length - 1, prompt_pieces[prompt])
        for row, prompt in zip(rows, prompt_of, strict=True)
    ]
    starts = [0] * len(rows)
    for index in sorted(range(len(rows)), key=lambda i: responses[i].size_class):
        length = responses[index].length
        starts[index] = filled
        if length < 1:
            continue
        row, prompt = rows[index], prompt_pieces[prompt_of[index]]
        pieces.append(_Piece(filled, length, prompt))
        texts.append(row.token_ids[row.prompt_length : -1])
        positions.append(torch.arange(prompt.length, prompt.length + length))
        filled += length
    return PackedLayout(
        token_ids=torch.cat(texts),
        position_ids=torch.cat(positions),
        buckets=tuple(_buckets(pieces)),
        predictors=_predictors(rows, [prompt_pieces[p] for p in prompt_of], starts),
        targets=torch.cat([row.token_ids[row.prompt_length :] for row in rows]),
        lengths=tuple(row.response_length for row in rows),
    )


def _distinct_prompts(rows: Sequence[Row]) -> tuple[list[int], list[torch.Tensor]]:
    """Which prompt each row has, and the prompts."""
    seen: dict[tuple[str, bytes], int] = {}
    prompts: list[torch.Tensor] = []
    prompt_of = []
    for row in rows:
        prompt = row.token_ids[: row.prompt_length]
        key = (row.group_id, prompt.numpy().tobytes())
        if key not in seen:
            seen[key] = len(prompts)
            prompts.append(prompt)
        prompt_of.append(seen[key])
    return prompt_of, prompts


def _predictors(
    rows: Sequence[Row], prompts: Sequence[_Piece], starts: Sequence[int]
) -> torch.Tensor:
    """A response's first token is predicted by the prompt's last, the others by their former."""
    lengths = torch.tensor([row.response_length for row in rows])
    first = torch.tensor([prompt.start + prompt.length - 1 for prompt in prompts])
    ends = lengths.cumsum(0)
    index = torch.arange(int(ends[-1])) - torch.repeat_interleave(ends - lengths, lengths)
    inside = torch.repeat_interleave(torch.tensor(starts), lengths) + index - 1
    return torch.where(index == 0, torch.repeat_interleave(first, lengths), inside)


def _buckets(pieces: Iterable[_Piece]) -> Iterable[Bucket]:
    """Pieces follow one another in the pack sorted by kind and size class."""
    together: list[_Piece] = []
    for piece in pieces:
        if together and (
            (piece.prompt is None) != (together[0].prompt is None)
            or piece.size_class != together[0].size_class
        ):
            yield _bucket(together)
            together = []
        together.append(piece)
    if together:
        yield _bucket(together)


def _bucket(pieces: Sequence[_Piece]) -> Bucket:
    starts = torch.tensor([piece.start for piece in pieces])
    lengths = torch.tensor([piece.length for piece in pieces])
    longest = int(lengths.max())
    own, own_real = _padded(starts, lengths, longest)
    queries, kept = own.flatten(), None
    if not bool(own_real.all()):
        kept = own_real.flatten().nonzero()[:, 0]
    if pieces[0].prompt is None:
        # Padding stands behind the real tokens, where causal attention does not look.
        return Bucket(len(pieces), longest, longest, queries, queries, None, kept)
    before = [piece.prompt for piece in pieces if piece.prompt is not None]
    prompt_starts = torch.tensor([prompt.start for prompt in before])
    prompt_lengths = torch.tensor([prompt.length for prompt in before])
    longest_prompt = int(prompt_lengths.max())
    prompt, prompt_real = _padded(prompt_starts, prompt_lengths, longest_prompt)
    keys = torch.cat([prompt, own], dim=1)
    causal = torch.ones(longest, longest, dtype=torch.bool).tril()
    if bool(prompt_real.all()):
        mask = torch.cat([torch.ones(longest, longest_prompt, dtype=torch.bool), causal], dim=1)
    else:
        count = len(pieces)
        seen = prompt_real[:, None, None].expand(count, 1, longest, longest_prompt)
        mask = torch.cat([seen, causal.expand(count, 1, longest, longest)], dim=3)
    return Bucket(
        len(pieces), longest, longest_prompt + longest, queries, keys.flatten(), mask, kept
    )


def _padded(
    starts: torch.Tensor, lengths: torch.Tensor, longest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions in the pack, whether real), both [N, longest]; padding stands at 0."""
    offsets = torch.arange(longest)
    real = offsets < lengths[:, None]
    return torch.where(real, starts[:, None] + offsets, 0), real
