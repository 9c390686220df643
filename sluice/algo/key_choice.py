"""Which keys a query of sparse attention sees: the lightning indexer of DeepSeek-V3.2 and GLM-5.

A small attention of its own scores the keys that a query may see, and the best of them are seen
(arXiv 2512.02556, 2.1). The choice is hard: no gradient reaches what makes it.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

MOST_SCORES = 1 << 26  # of heads that are made at once


def rotate_pairs(
    heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, size: int
) -> torch.Tensor:
    """Turn the first `size` elements of each head, neighbour with neighbour; the rest is as it was.

    What is turned has all first elements of the pairs, then all second ones. cosine and sine:
    [..., at least size / 2], of the angle of each pair.
    """
    turned, rest = heads[..., :size], heads[..., size:]
    first, second = turned[..., 0::2], turned[..., 1::2]
    cosine, sine = cosine[..., : size // 2], sine[..., : size // 2]
    parts = first * cosine - second * sine, second * cosine + first * sine, rest
    return torch.cat(parts, dim=-1)


def weigh_heads(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return float32[..., heads] of hidden states, of narrower ones and in autocast too.

    As SGLang does on CUDA; transformers rounds it where the model is bfloat16.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        return linear(hidden.float(), weight.float())


@torch.no_grad()
def choose_keys(
    query_NRHD: torch.Tensor,
    key_NKD: torch.Tensor,
    weight_NRH: torch.Tensor,
    count: int,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return int32[N, R, count], count < K: which keys are seen, of those that may be.

    A key's score is the sum over heads of weight x relu(query . key). mask: bool[R, K] or
    [N, R, K], which keys may be seen; without one the queries are the last R of the keys, and see
    those up to their own. Where a query may see fewer than `count`, others that it may not stand
    among them: see `seen_keys`. Of equal scores the first keys are taken, so that the choice is
    the same whatever a row is packed with.
    """
    total = key_NKD.shape[1]
    block = max(1, MOST_SCORES // (query_NRHD.shape[0] * query_NRHD.shape[2] * total))
    keys = key_NKD.float().transpose(1, 2)[:, None]
    # what is greater stands further behind, so that no two keys are equal
    places = torch.arange(total - 1, -1, -1, device=key_NKD.device)
    chosen = []
    for start in range(0, query_NRHD.shape[1], block):
        part = slice(start, start + block)
        with torch.autocast(key_NKD.device.type, enabled=False):
            scores = (query_NRHD[:, part].float() @ keys).relu_()
            summed = (weight_NRH[:, part, None].float() @ scores)[:, :, 0]
        may = _may_see(part, query_NRHD.shape[1], total, mask, summed.device)
        summed = summed.masked_fill(~may, -torch.inf)
        ranked = (_ordered(summed) << 32) | places
        chosen.append(ranked.topk(count, dim=-1, sorted=False).indices.int())
    return torch.cat(chosen, dim=1)


def seen_keys(
    chosen_NRC: torch.Tensor, rows: slice, total: int, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return bool[N, rows, K]: what some of the queries see, of what `choose_keys` has returned.

    total: keys, K. mask: as there.
    """
    part = chosen_NRC[:, rows].long()
    seen = torch.zeros(*part.shape[:2], total, dtype=torch.bool, device=part.device)
    seen.scatter_(-1, part, value=True)
    return seen & _may_see(rows, chosen_NRC.shape[1], total, mask, part.device)


def _may_see(
    rows: slice, length: int, total: int, mask: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """bool[rows, K] or [N, rows, K]."""
    if mask is not None:
        return mask[..., rows, :]
    last = torch.arange(total - length, total, device=device)[rows]
    return torch.arange(total, device=device) <= last[:, None]


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """Whole numbers in the order of float32 ones."""
    bits = values.contiguous().view(torch.int32).long()
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
