"""Keys and values of recent prompts, for new prompts that begin alike.

Prompts of one task share their instructions and examples, and the next turn of an episode
begins with the last one: what they share is encoded once.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch

from services.rollout.engine.reference.lanes import PrefillPrompt

BLOCK = 16  # tokens; prefixes are shared in whole blocks


def block_chain(token_ids: torch.Tensor) -> tuple[int, ...]:
    """One hash per whole block of int64[length], each of all tokens up to its end."""
    data, chain, so_far = token_ids.numpy().tobytes(), [], 0
    for end in range(BLOCK, len(token_ids) + 1, BLOCK):
        so_far = hash((so_far, data[(end - BLOCK) * 8 : end * 8]))
        chain.append(so_far)
    return tuple(chain)


@dataclass(frozen=True, eq=False)
class Entry:
    """kv: [layers, 2, kv_heads, length, head_dim] of token_ids int64[length]; experts too."""

    token_ids: torch.Tensor
    chain: tuple[int, ...]
    kv: torch.Tensor
    experts: torch.Tensor | None


class PrefixCache:
    """At most `limit` tokens, least recently used first out; 0 keeps nothing."""

    def __init__(self, limit: int) -> None:
        self.hit_tokens = 0  # that were not encoded again, ever
        self._limit, self._used = limit, 0
        self._entries: OrderedDict[int, Entry] = OrderedDict()  # by last hash of the chain
        # Hash of any block -> the entry with it that was used last.
        self._owner: dict[int, int] = {}

    def chain(self, token_ids: torch.Tensor) -> tuple[int, ...]:
        """Hashes of the blocks of a prompt; none when nothing is kept."""
        return block_chain(token_ids) if self._limit else ()

    def adopt(self, prompt: PrefillPrompt) -> bool:
        """Begin `prompt` with the longest cached prefix that leaves a token to encode."""
        for count in range(min(len(prompt.chain), (prompt.length - 1) // BLOCK), 0, -1):
            owner = self._owner.get(prompt.chain[count - 1])
            if owner is None:
                continue
            entry, length = self._entries[owner], count * BLOCK
            if not torch.equal(entry.token_ids[:length], prompt.token_ids[:length]):
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
        """Keep what a prompt that is encoded whole has beyond those already here."""
        assert prompt.kv is not None
        chain = prompt.chain
        if not chain or prompt.length > self._limit or chain[-1] in self._owner:
            return
        # A view of prompts encoded together would keep all of them.
        kv = prompt.kv if prompt.kv.is_contiguous() else prompt.kv.clone()
        self._entries[chain[-1]] = Entry(prompt.token_ids, chain, kv, prompt.experts)
        self._touch(chain[-1])
        self._used += prompt.length
        while self._used > self._limit:
            self._evict()

    def clear(self) -> None:
        """Forget all: other weights make other keys and values."""
        self._entries.clear()
        self._owner.clear()
        self._used = 0

    def _touch(self, name: int) -> None:
        self._entries.move_to_end(name)
        self._owner.update(dict.fromkeys(self._entries[name].chain, name))

    def _evict(self) -> None:
        name, entry = self._entries.popitem(last=False)
        self._used -= len(entry.token_ids)
        for block in entry.chain:
            if self._owner.get(block) == name:
                del self._owner[block]
