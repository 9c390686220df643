"""Keys and values of running samples and of prompts, and attention over them.

A running sample owns one row of the smallest size that holds it and moves to the next size
when it outgrows it. Rows in use are kept dense, so that attention reads a slice without a
gather and pays for at most twice the sample's own length, whatever its neighbours' lengths.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.nn.functional import scaled_dot_product_attention

from services.rollout.engine.interface import ServedWeights
from sluice.fused_operations import Attention, PackRows
from sluice.imports import uncompiled
from sluice.samples.sample import MediaSpan

with uncompiled():
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

    @property
    def token_bytes(self) -> int:
        """Of the keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

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
        self.reserve(last)
        self.kv[:, :, first:last, :, : prompt.shape[3]] = prompt.unsqueeze(2)
        self.count = last

    def adopt(self, source: RowStore, rows: Sequence[int]) -> None:
        """Appends copies of `rows` of a smaller store."""
        first, last = self.count, self.count + len(rows)
        self.reserve(last)
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

    def reserve(self, rows: int) -> None:
        """Has memory for at least so many rows."""
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
    _rows: PackRows | None = None

    def rows(self, device: torch.device) -> PackRows:
        """Its prompts as a kernel takes them; the same for every layer."""
        if self._rows is None:
            keys = [self.start + self.chunk] * self.count
            self._rows = PackRows([self.chunk] * self.count, keys, device)
        return self._rows

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

    def attend(
        self,
        layer: int,
        q: Heads,
        scale: float,
        window: int | None,
        kernel: Attention | None = None,
    ) -> torch.Tensor:
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
        if kernel is not None:
            packed = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
            rows = self.rows(query.device)
            return kernel(packed[0], packed[1], packed[2], rows, scale, window)
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
    kernel: Attention | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers attention function: query [1, heads, T, dim] -> [1, T, heads, dim].

    kernel: of prompts; what decodes is torch's.
    """
    pieces, first, layer = [], 0, cast(int, module.layer_idx)
    for block in plan.blocks:
        width = block.count * block.chunk if isinstance(block, PromptBlock) else block.count
        span = slice(first, first + width)
        heads = Heads(query[0, :, span], key[0, :, span], value[0, :, span])
        if isinstance(block, PromptBlock):
            pieces.append(block.attend(layer, heads, scaling, sliding_window, kernel))
        else:
            pieces.append(block.attend(layer, heads, scaling, sliding_window))
        first += width
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, attend_packed)


@dataclass(frozen=True, eq=False)
class Sight:
    """What a prompt shows besides text. positions: int64[3, length]; images: PNG by digest."""

    media: tuple[MediaSpan, ...]
    positions: torch.Tensor
    images: Mapping[str, bytes]

    @property
    def shift(self) -> int:
        return int(self.positions.max()) + 1 - self.positions.shape[1]

    def within(self, first: int, end: int) -> list[MediaSpan]:
        """Spans of which tokens lie in a stretch."""
        return [span for span in self.media if span.first_token < end and span.end > first]

    def mark(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Tokens of an image become numbers of its own, which no token has."""
        marked = token_ids.clone()
        for span in self.media:
            marked[span.first_token : span.end] = -1 - (int(span.digest, 16) >> 65)
        return marked


@dataclass(frozen=True)
class Shown:
    """What images show at tokens `rows` of a pass: float[rows, hidden] of every layer."""

    rows: torch.Tensor
    layers: Sequence[torch.Tensor]


@dataclass(eq=False)
class PrefillPrompt:
    """A prompt on its way through prefill; the cache and logits serve all samples of it."""

    token_ids: torch.Tensor  # int64[length] on the host
    length: int
    sight: Sight | None = None  # of a prompt with images
    weights: ServedWeights | None = None  # that encode it, and sample from it
    chain: tuple[int, ...] = ()  # hashes of its blocks, for the prefix cache
    done: int = 0  # tokens whose keys and values are in `kv`
    kv: torch.Tensor | None = None  # [layers, 2, kv_heads, length, head_dim]
    logits: torch.Tensor | None = None  # float32[V] after the last token
    experts: torch.Tensor | None = None  # int16[done, mixture layers, chosen], if watched

    @staticmethod
    def of(token_ids: Sequence[int], sight: Sight | None = None) -> PrefillPrompt:
        tokens = torch.tensor(token_ids, dtype=torch.int64)
        return PrefillPrompt(tokens, len(token_ids), sight)

    @property
    def served(self) -> ServedWeights:
        """The weights of a prompt that was submitted."""
        assert self.weights is not None
        return self.weights

    @property
    def identity(self) -> torch.Tensor:
        """int64[length]: equal where prompts show the same."""
        return self.token_ids if self.sight is None else self.sight.mark(self.token_ids)

    @property
    def shift(self) -> int:
        """How far positions are from places behind the prompt."""
        return 0 if self.sight is None else self.sight.shift

    def positions(self, first: int, end: int) -> torch.Tensor:
        """Positions of a stretch of tokens, int64[3, tokens]."""
        if self.sight is None:
            return torch.arange(first, end).expand(3, -1)
        return self.sight.positions[:, first:end]

    def restart(self) -> None:
        """Forgets what was made of it."""
        self.done, self.kv, self.logits, self.experts = 0, None, None, None

    def add_experts(self, chosen: torch.Tensor) -> None:
        """Adds the experts of a chunk, never in place: samples keep what they began with."""
        self.experts = chosen if self.experts is None else torch.cat([self.experts, chosen])


BLOCK = 16  # tokens; prefixes are shared in whole blocks


def block_chain(token_ids: torch.Tensor, weights: ServedWeights | None = None) -> tuple[int, ...]:
    """Returns one hash per whole block of int64[length], each of all up to its end.

    Those of other weights are others.
    """
    data, chain, so_far = token_ids.numpy().tobytes(), [], hash(weights)
    for end in range(BLOCK, len(token_ids) + 1, BLOCK):
        so_far = hash((so_far, data[(end - BLOCK) * 8 : end * 8]))
        chain.append(so_far)
    return tuple(chain)


@dataclass(frozen=True, eq=False)
class Entry:
    """kv: [layers, 2, kv_heads, length, head_dim] of what `identity` names; experts too."""

    identity: torch.Tensor
    weights: ServedWeights | None
    chain: tuple[int, ...]
    kv: torch.Tensor
    experts: torch.Tensor | None


class PrefixCache:
    """Keeps keys and values of recent prompts, for new prompts that begin alike.

    Prompts of one task share their instructions, and the next turn of an episode begins with the
    last one. At most `limit` tokens, least recently used first out; 0 keeps nothing.
    """

    def __init__(self, limit: int) -> None:
        self.hit_tokens = 0  # that were not encoded again, ever
        self._limit, self._used = limit, 0
        self._entries: OrderedDict[int, Entry] = OrderedDict()  # by last hash of the chain
        # Hash of any block -> the entry with it that was used last.
        self._owner: dict[int, int] = {}

    def chain(self, prompt: PrefillPrompt) -> tuple[int, ...]:
        """Returns the hashes of a prompt's blocks, none when nothing is kept."""
        return block_chain(prompt.identity, prompt.weights) if self._limit else ()

    def adopt(self, prompt: PrefillPrompt) -> bool:
        """Begins `prompt` with the longest cached prefix that leaves a token to encode."""
        for count in range(min(len(prompt.chain), (prompt.length - 1) // BLOCK), 0, -1):
            owner = self._owner.get(prompt.chain[count - 1])
            if owner is None:
                continue
            entry, length = self._entries[owner], count * BLOCK
            same = torch.equal(entry.identity[:length], prompt.identity[:length])
            if not same or entry.weights != prompt.weights:
                continue  # hashes met by chance
            self._touch(owner)
            layers, parts, heads, _, dim = entry.kv.shape
            prompt.kv = entry.kv.new_empty(layers, parts, heads, prompt.length, dim)
            prompt.kv[:, :, :, :length] = entry.kv[:, :, :, :length]
            prompt.done = length
            prompt.experts = None if entry.experts is None else entry.experts[:length]
            self.hit_tokens += length
            return True
        return False

    def insert(self, prompt: PrefillPrompt) -> None:
        """Keeps what a prompt that is encoded whole has beyond those already here."""
        assert prompt.kv is not None
        chain = prompt.chain
        if not chain or prompt.length > self._limit or chain[-1] in self._owner:
            return
        # A view of prompts encoded together would keep all of them.
        kv = prompt.kv if prompt.kv.is_contiguous() else prompt.kv.clone()
        self._entries[chain[-1]] = Entry(prompt.identity, prompt.weights, chain, kv, prompt.experts)
        self._touch(chain[-1])
        self._used += prompt.length
        while self._used > self._limit:
            self._evict()

    def clear(self) -> None:
        """Forgets all: other weights make other keys and values."""
        self._entries.clear()
        self._owner.clear()
        self._used = 0

    def _touch(self, name: int) -> None:
        self._entries.move_to_end(name)
        self._owner.update(dict.fromkeys(self._entries[name].chain, name))

    def _evict(self) -> None:
        name, entry = self._entries.popitem(last=False)
        self._used -= len(entry.identity)
        for block in entry.chain:
            if self._owner.get(block) == name:
                del self._owner[block]


class CacheRows:
    """Keeps stores by row size. A lane has a packed index: by row size, then by row.

    `place`, `free` and `promote` break that order; `order` says how to restore it.
    """

    def __init__(
        self, shape: CacheShape, max_length: int, pad: Callable[[int], int] | None = None
    ) -> None:
        """`pad`: blocks have memory for so many rows as it makes of theirs."""
        self._shape, self._max_length, self._pad = shape, max_length, pad
        self._stores: dict[int, RowStore] = {}
        self._members: dict[int, list[int]] = {}  # capacity -> packed index of each row

    def place(self, prompt: torch.Tensor, members: Sequence[int]) -> None:
        """Adds rows that begin with `prompt` [layers, 2, kv_heads, length, head_dim]."""
        capacity = self._store(prompt.shape[3] + 1)
        self._stores[capacity].extend(prompt, len(members))
        self._members[capacity].extend(members)

    def free(self, gone: Collection[int]) -> None:
        """Frees the rows of some packed indices."""
        for capacity, members in self._members.items():
            kept = [row for row, member in enumerate(members) if member not in gone]
            if len(kept) < len(members):
                self._keep(capacity, kept)

    def promote(self, places: Sequence[int]) -> None:
        """Moves lanes whose next token, at places[packed index], is beyond their row."""
        for capacity in sorted(self._members):
            members = self._members[capacity]
            leaving = [row for row, member in enumerate(members) if places[member] >= capacity]
            if leaving:
                larger = self._store(capacity + 1)
                self._stores[larger].adopt(self._stores[capacity], leaving)
                self._members[larger].extend(members[row] for row in leaving)
                gone = set(leaving)
                self._keep(capacity, [row for row in range(len(members)) if row not in gone])

    def order(self) -> list[int]:
        """Returns packed indices in the order they should have; they count as renumbered so."""
        order: list[int] = []
        for capacity in sorted(self._members):
            members = self._members[capacity]
            self._members[capacity] = list(range(len(order), len(order) + len(members)))
            order += members
        return order

    def blocks(self, places: Sequence[int], *, whole_rows: bool) -> list[DecodeBlock]:
        """Makes attention blocks in packed order; the next token of lane i goes to places[i].

        With `whole_rows` a lane attends to all of its row, masked, whatever others need.
        """
        device, blocks = self._shape.device, []
        for capacity in sorted(self._members):
            if not (members := self._members[capacity]):
                continue
            if self._pad is not None:
                self._stores[capacity].reserve(self._pad(len(members)))
            mine = places[members[0] : members[-1] + 1]
            positions = torch.tensor(mine, device=device)
            heads = torch.arange(len(mine) * self._shape.kv_heads, device=device)
            each = positions.repeat_interleave(self._shape.kv_heads)
            blocks.append(
                DecodeBlock(
                    kv=self._stores[capacity].kv,
                    slots=heads * capacity + each,
                    positions=positions,
                    length=max(mine) + 1,
                    attended=capacity if whole_rows else 0,
                    uniform=not whole_rows and min(mine) == max(mine),
                )
            )
        return blocks

    def _keep(self, capacity: int, rows: list[int]) -> None:
        members = self._members[capacity]
        self._members[capacity] = [members[row] for row in self._stores[capacity].keep(rows)]

    def _store(self, length: int) -> int:
        capacity = capacity_for(length, self._max_length)
        if capacity not in self._stores:
            self._stores[capacity] = RowStore(self._shape, capacity)
            self._members[capacity] = []
        return capacity
