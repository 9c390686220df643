"""The gated delta rule over packs of sequences (arXiv 2412.06464), and the convolution before it.

A head's state S [K, V] is zero before the first token of a sequence. Token t decays it and writes
what its value lacks of what the state already says for its key, a unit vector:
S_t = exp(g_t) S_{t-1} + k_t u_t', where u_t = b_t (v_t - exp(g_t) S_{t-1}' k_t). It reads S_t' q_t.

Inside a chunk of tokens all u are the solution of one triangular system. So only chunks are taken
one after another, and those of all sequences at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

MOST_CHUNK_TOKENS, LEAST_CHUNK_TOKENS = 64, 8
NORM_EPSILON = 1e-6  # of queries and keys


@dataclass(frozen=True)
class PackChunks:
    """Sequences of T tokens in all as N chunks of C tokens, the last of each filled up.

    Sequences stand by length, the longest first, and chunks by their number in the sequence:
    `counts` are the sequences that have a first chunk, a second one, and so on. tokens:
    int64[N * C], where in the pack each is, and T for those that fill up. places: int64[T], where
    in the chunks each token of the pack is. positions: int64[T], counted from its sequence's start.
    """

    size: int
    counts: tuple[int, ...]
    tokens: torch.Tensor
    places: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def lay_out(
        cls, lengths: Sequence[int], device: torch.device, *, size: int | None = None
    ) -> PackChunks:
        """`lengths` of the sequences in their order; `size` is C, else by the longest of them."""
        total, longest = sum(lengths), max(lengths)
        size = size or _chunk_tokens(longest)
        sizes = torch.tensor(lengths)
        starts = sizes.cumsum(0) - sizes
        order = sizes.argsort(descending=True, stable=True)
        inside = torch.arange(size)
        counts, parts = [], []
        for first in range(0, longest, size):
            own = order[sizes[order] > first, None]
            at = first + inside
            parts.append(torch.where(at < sizes[own], starts[own] + at, total).flatten())
            counts.append(len(own))
        tokens = torch.cat(parts)
        places = torch.empty(total + 1, dtype=torch.int64)
        places[tokens] = torch.arange(len(tokens))
        positions = torch.arange(total) - starts.repeat_interleave(sizes)
        return cls(
            size=size,
            counts=tuple(counts),
            tokens=tokens.to(device),
            places=places[:total].to(device),
            positions=positions.to(device),
        )

    def cut(self, values: torch.Tensor) -> torch.Tensor:
        """[T, H, ...] -> [N, H, C, ...], zero where chunks are filled up."""
        nothing = values.new_zeros((1, *values.shape[1:]))
        chosen = torch.cat((values, nothing)).index_select(0, self.tokens)
        return chosen.unflatten(0, (-1, self.size)).transpose(1, 2)

    def join(self, chunks: torch.Tensor) -> torch.Tensor:
        """[N, H, C, ...] -> [T, H, ...]."""
        return chunks.transpose(1, 2).flatten(0, 1).index_select(0, self.places)


def _chunk_tokens(longest: int) -> int:
    """A power of two that is not much longer than what is to be cut."""
    power: int = 1 << max(longest - 1, 0).bit_length()
    return min(max(power, LEAST_CHUNK_TOKENS), MOST_CHUNK_TOKENS)


def causal_convolution(
    values_TD: torch.Tensor, weight_DW: torch.Tensor, positions_T: torch.Tensor
) -> torch.Tensor:
    """Weigh every token and the W - 1 before it in its sequence; the last weight is its own."""
    width = weight_DW.shape[1]
    total_TD = values_TD * weight_DW[:, -1]
    for back in range(1, min(width, len(values_TD))):
        former_TD = torch.nn.functional.pad(values_TD[:-back], (0, 0, back, 0))
        former_TD = former_TD.masked_fill((positions_T < back)[:, None], 0)
        total_TD = total_TD + former_TD * weight_DW[:, -1 - back]
    return total_TD


def gated_delta_rule(
    query_THK: torch.Tensor,
    key_THK: torch.Tensor,
    value_THV: torch.Tensor,
    decay_TH: torch.Tensor,
    strength_TH: torch.Tensor,
    chunks: PackChunks,
) -> torch.Tensor:
    """What queries read, [T, H, V], in float32 or wider.

    decay: g, not above 0. strength: b, of writing. Queries and keys are made unit vectors, queries
    then divided by the root of their size.
    """
    wide = torch.promote_types(value_THV.dtype, torch.float32)
    query, key = (_unit(part.to(wide)) for part in (query_THK, key_THK))
    query = chunks.cut(query * query.shape[-1] ** -0.5)
    key, value = chunks.cut(key), chunks.cut(value_THV.to(wide))
    strength = chunks.cut(strength_TH.to(wide))[..., None]
    decay = chunks.cut(decay_TH.to(wide)).cumsum(-1)[..., None]  # since before the chunk
    # [t, s]: from behind token s up to t; masked before exp, where it would overflow
    ratio = (decay - decay.mT).masked_fill(_later(chunks.size, decay.device), -torch.inf).exp()
    grown = decay.exp()
    system = (key @ key.mT * ratio * strength).tril(-1)
    wanted = torch.cat((value, key * grown), dim=-1) * strength
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    writes, reads = solved.split((value.shape[-1], key.shape[-1]), dim=-1)
    mixed = query @ key.mT * ratio
    query = query * grown
    key = (key * (decay[..., -1:, :] - decay).exp()).mT
    grown = grown[..., -1:, :]

    outputs, first = [], 0
    state = value.new_zeros((chunks.counts[0], *key.shape[1:3], value.shape[-1]))
    for count in chunks.counts:
        own = slice(first, first + count)
        state = state[:count]
        written = writes[own] - reads[own] @ state
        outputs.append(query[own] @ state + mixed[own] @ written)
        state = state * grown[own] + key[own] @ written
        first += count
    return chunks.join(torch.cat(outputs))


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    return vectors * (vectors.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt()


def _later(size: int, device: torch.device) -> torch.Tensor:
    return torch.ones((size, size), dtype=torch.bool, device=device).triu(1)
