"""Keys and values of running samples, in rows of a few sizes, and attention over them.

A running sample owns one row of the smallest size that holds it and moves to the next size
when it outgrows it. Rows in use are kept dense, so that attention reads a slice without a
gather and pays for at most twice the sample's own length, whatever its neighbours' lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

SMALLEST = 16


@dataclass(frozen=True)
class CacheShape:
    """Shape and dtype of one token's keys and values."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def allocate(self, rows: int, capacity: int) -> torch.Tensor:
        """Returns zeros[layers, 2 (key, value), rows, kv_heads, capacity, head_dim].

        Zeroed since unwritten entries are read under a mask, where NaN would survive.
        """
        size = (self.layers, 2, rows, self.kv_heads, capacity, self.head_dim)
        return torch.zeros(size, dtype=self.dtype, device=self.device)


def capacity_for(length: int, limit: int) -> int:
    """Returns the least row size for `length` tokens: a power of two, the last cut to `limit`."""
    capacity = SMALLEST
    while capacity < length:
        capacity *= 2
    return max(length, min(capacity, limit))


class RowStore:
    """Rows of one capacity; rows 0..count-1 are in use."""

    def __init__(self, shape: CacheShape, capacity: int) -> None:
        self.capacity = capacity
        self.count = 0
        self._shape = shape
        self.kv = shape.allocate(0, capacity)

    def extend(self, prompt: torch.Tensor, copies: int) -> None:
        """Appends `copies` rows that begin as `prompt`, [layers, 2, kv_heads, length, head_dim]."""
        first, last = self.count, self.count + copies
        self._reserve(last)
        self.kv[:, :, first:last, :, : prompt.shape[3]] = prompt.unsqueeze(2)
        self.count = last

    def adopt(self, source: RowStore, rows: Sequence[int]) -> None:
        """Appends copies of `rows` of a smaller store."""
        first, last = self.count, self.count + len(rows)
        self._reserve(last)
        index = torch.tensor(rows, device=self.kv.device)
        self.kv[:, :, first:last, :, : source.capacity] = source.kv.index_select(2, index)
        self.count = last

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Frees all rows but `rows` (ascending); returns the kept ones in their new order.

        Entry i of the result is the old row that now is row i. Only rows beyond the new count
        move, into the holes below it.
        """
        count = len(rows)
        stay = [row for row in rows if row < count]
        movers = list(rows[len(stay) :])
        order = list(range(count))
        if movers:
            taken = set(stay)
            holes = [row for row in range(count) if row not in taken]
            for hole, mover in zip(holes, movers, strict=True):
                order[hole] = mover
            device = self.kv.device
            source = self.kv.index_select(2, torch.tensor(movers, device=device))
            self.kv.index_copy_(2, torch.tensor(holes, device=device), source)
        self.count = count
        return order

    def _reserve(self, rows: int) -> None:
        if rows <= self.kv.shape[2]:
            return
        grown = self._shape.allocate(max(rows, 2 * self.kv.shape[2]), self.capacity)
        grown[:, :, : self.count] = self.kv[:, :, : self.count]
        self.kv = grown


IMPLEMENTATION = "sluice_ragged"


@dataclass
class DecodeBlock:
    """One token each of samples whose keys and values lie in rows 0, 1 ... of `kv`.

    kv: [layers, 2, rows, kv_heads, capacity, head_dim]; slots: int64[count * kv_heads], where
    the new token goes in kv's flattened (rows, kv_heads, capacity); positions: int64[count],
    of the new token; length: the largest position + 1; attended: entries of a row that are
    read, 0 for `length`; uniform: all positions are equal.
    """

    kv: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    length: int
    attended: int
    uniform: bool
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.positions)

    @property
    def capacity(self) -> int:
        return self.kv.shape[4]

    def advance(self) -> None:
        """Makes every sample one token longer."""
        self.positions += 1
        self.slots += 1
        self.length += 1
        self.masks.clear()

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive [count, 1, 1, keys]; the same for every layer of one window."""
        if self.uniform and (window is None or window >= self.length):
            return None
        if window not in self.masks:
            keys = torch.arange(self.attended or self.length, device=self.positions.device)
            hidden = keys > self.positions[:, None]
            if window is not None:
                hidden |= keys <= self.positions[:, None] - window
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self.masks[window] = zeros.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self.masks[window]

    def attend(self, layer: int, q: Heads, scale: float, window: int | None) -> torch.Tensor:
        """q.query [heads, count, head_dim] -> [count, heads, head_dim]."""
        keys, values = self.kv[layer, 0], self.kv[layer, 1]
        kv_heads, dim, reach = keys.shape[1], keys.shape[3], self.attended or self.length
        for rows, new in ((keys, q.key), (values, q.value)):
            if self.uniform:
                rows[: self.count, :, self.length - 1] = new.transpose(0, 1)
            else:
                rows.view(-1, dim).index_copy_(0, self.slots, new.transpose(0, 1).reshape(-1, dim))
        # Query heads of one key head see the same keys: they pass as a query axis, not as copies.
        query = q.query.transpose(0, 1).reshape(self.count, kv_heads, -1, dim)
        out = scaled_dot_product_attention(
            query,
            keys[: self.count, :, :reach],
            values[: self.count, :, :reach],
            attn_mask=self.mask(window, query.dtype),
            scale=scale,
        )
        return out.reshape(self.count, -1, dim)


@dataclass
class PromptBlock:
    """A chunk of `chunk` tokens from `start` on, of `count` prompts that stand alike.

    kv: [layers, 2, count, kv_heads, prompt, head_dim].
    """

    count: int
    chunk: int
    start: int
    kv: torch.Tensor

    def mask(self, window: int | None, device: torch.device) -> torch.Tensor | None:
        """Boolean [chunk, start + chunk], True where visible; None for plain causal."""
        end = self.start + self.chunk
        if self.start == 0 and (window is None or window >= end):
            return None
        rows = torch.arange(self.start, end, device=device)[:, None]
        keys = torch.arange(end, device=device)
        visible = keys <= rows
        if window is not None:
            visible &= keys > rows - window
        return visible

    def attend(self, layer: int, q: Heads, scale: float, window: int | None) -> torch.Tensor:
        """q.query [heads, count * chunk, head_dim] -> [count * chunk, heads, head_dim]."""
        end = self.start + self.chunk
        query, key, value = (
            x.unflatten(1, (self.count, self.chunk)).transpose(0, 1)
            for x in (q.query, q.key, q.value)
        )
        self.kv[layer, 0, :, :, self.start : end] = key
        self.kv[layer, 1, :, :, self.start : end] = value
        if self.start:
            key, value = self.kv[layer, 0, :, :, :end], self.kv[layer, 1, :, :, :end]
        mask = self.mask(window, query.device)
        out = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None and self.chunk > 1,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2).flatten(0, 1)


@dataclass
class PaddingBlock:
    """Rows that keep the packed axis at a fixed length; nothing reads what they give."""

    count: int

    def attend(self, layer: int, q: Heads, scale: float, window: int | None) -> torch.Tensor:
        return torch.zeros_like(q.query.transpose(0, 1))


@dataclass(frozen=True)
class Heads:
    """Query [heads, tokens, head_dim], key and value [kv_heads, tokens, head_dim] of a block."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


Block = DecodeBlock | PromptBlock | PaddingBlock


@dataclass(frozen=True)
class ForwardPlan:
    """The blocks of a pass in packed order."""

    blocks: tuple[Block, ...]


def attend_packed(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    plan: ForwardPlan,
    scaling: float,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers attention function: query [1, heads, T, dim] -> [1, T, heads, dim]."""
    pieces, first, layer = [], 0, cast(int, module.layer_idx)
    for block in plan.blocks:
        width = block.count * block.chunk if isinstance(block, PromptBlock) else block.count
        span = slice(first, first + width)
        heads = Heads(query[0, :, span], key[0, :, span], value[0, :, span])
        pieces.append(block.attend(layer, heads, scaling, sliding_window))
        first += width
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, attend_packed)
