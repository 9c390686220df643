"""Requests, their prompts and running samples, what these drew, and the cache of prefixes."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import pad

from services.rollout.engine.interface import Delta, FinishReason, Generation, Sampling, Timing
from services.rollout.engine.reference.drawing import Drawn
from sluice.samples.sample import VersionSpan


@dataclass(frozen=True)
class Written:
    """Tokens and log-probabilities of one sample, and the experts of all it drew but the last."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    logprobs_t1: tuple[float, ...]
    experts: torch.Tensor | None = None  # int16[drawn - 1, mixture layers, chosen], if watched


class Outputs:
    """Keeps what running samples drew, one slot each, in tables that grow by doubling."""

    def __init__(self, device: torch.device) -> None:
        self._free: list[int] = []
        self._tokens = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(0, 0, device=device)
        self._logprobs_t1 = torch.zeros(0, 0, device=device)
        self._experts: torch.Tensor | None = None  # int16[slots, width, mixture layers, chosen]

    def reserve(self, count: int, width: int) -> list[int]:
        """Reserves slots for `count` samples of up to `width` tokens."""
        slots, columns = self._tokens.shape
        more_slots = max(slots, count - len(self._free)) if len(self._free) < count else 0
        more_columns = max(columns, width - columns) if columns < width else 0
        if more_slots or more_columns:
            grow = (0, more_columns, 0, more_slots)
            self._tokens = pad(self._tokens, grow)
            self._logprobs = pad(self._logprobs, grow)
            self._logprobs_t1 = pad(self._logprobs_t1, grow)
            if self._experts is not None:
                self._experts = pad(self._experts, (0, 0, 0, 0, *grow))
            self._free += range(slots, slots + more_slots)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def release(self, slots: Sequence[int]) -> None:
        self._free += slots

    def write(self, slots: torch.Tensor, counts: torch.Tensor, drawn: Drawn) -> None:
        """Writes token number counts[i] (from 0) of slots[i]; both int64[B]."""
        place = (slots, counts)
        self._tokens[place] = drawn.tokens
        self._logprobs[place] = drawn.logprobs
        if drawn.logprobs_t1 is not drawn.logprobs:
            self._logprobs_t1[place] = drawn.logprobs_t1

    def write_experts(
        self, slots: torch.Tensor, counts: torch.Tensor, experts: torch.Tensor
    ) -> None:
        """Writes the experts of token number counts[i] (from 0) of slots[i], int16[B, L, k]."""
        if self._experts is None:
            self._experts = experts.new_zeros(*self._tokens.shape, *experts.shape[1:])
        self._experts[slots, counts] = experts

    def _experts_of(self, slot: int, end: int) -> torch.Tensor | None:
        return None if self._experts is None else self._experts[slot, : max(end - 1, 0)]

    def read(
        self, slots: Sequence[int], extents: Sequence[tuple[int, int]], tempered: Sequence[bool]
    ) -> list[Written]:
        """Returns tokens extents[i] = (first, end) of each slot.

        Without temperature both log-probabilities are one; `write` may have left the second.
        """
        if not slots:
            return []
        device, limit = self._tokens.device, self._tokens.shape[1] - 1
        longest = max(end - first for first, end in extents)
        firsts = torch.tensor([first for first, _ in extents], device=device)
        columns = (firsts[:, None] + torch.arange(longest, device=device)).clamp_(max=limit)
        place = (torch.tensor(slots, device=device)[:, None], columns)
        tokens, logprobs = self._tokens[place].tolist(), self._logprobs[place].tolist()
        plain = self._logprobs_t1[place].tolist() if any(tempered) else logprobs
        written = []
        for row, (first, end) in enumerate(extents):
            drawn = tuple(logprobs[row][: end - first])
            both = tuple(plain[row][: end - first]) if tempered[row] else drawn
            experts = self._experts_of(slots[row], end)
            written.append(Written(tuple(tokens[row][: end - first]), drawn, both, experts))
        return written


Version = tuple[int, str]  # number and digest
TopTokens = tuple[tuple[int, float], ...]  # likeliest first, with log-probabilities


@dataclass(eq=False)
class PrefillPrompt:
    """A prompt on its way through prefill; the cache and logits serve all samples of it."""

    token_ids: torch.Tensor  # int64[length] on the host
    length: int
    chain: tuple[int, ...] = ()  # hashes of its blocks, for the prefix cache
    done: int = 0  # tokens whose keys and values are in `kv`
    kv: torch.Tensor | None = None  # [layers, 2, kv_heads, length, head_dim]
    logits: torch.Tensor | None = None  # float32[V] after the last token
    experts: torch.Tensor | None = None  # int16[done, mixture layers, chosen], if watched

    @staticmethod
    def of(token_ids: Sequence[int]) -> PrefillPrompt:
        return PrefillPrompt(torch.tensor(token_ids, dtype=torch.int64), len(token_ids))

    def restart(self) -> None:
        """Forgets what was made of it."""
        self.done, self.kv, self.logits, self.experts = 0, None, None, None

    def add_experts(self, chosen: torch.Tensor) -> None:
        """Adds the experts of a chunk, never in place: samples keep what they began with."""
        self.experts = chosen if self.experts is None else torch.cat([self.experts, chosen])


@dataclass(eq=False)
class Request:
    """A generation: samples 0..started-1 have begun, `ended` of them have finished."""

    key: int
    generation: Generation
    prompt: PrefillPrompt
    seeds: tuple[int, ...]
    stops: tuple[int, ...]
    budget: int  # tokens each sample may have
    arrived: float = field(default_factory=time.monotonic)
    admitted: float = 0.0
    started: int = 0
    ended: int = 0

    @property
    def request_id(self) -> str:
        return self.generation.request_id

    @property
    def sampling(self) -> Sampling:
        return self.generation.sampling

    @property
    def unstarted(self) -> int:
        return self.generation.sample_count - self.started

    @property
    def samples_to_start(self) -> int:
        """Samples that will take a slot."""
        return self.unstarted

    @property
    def reserved(self) -> int:
        """Cache tokens one sample may come to use."""
        return self.prompt.length + self.budget


@dataclass(eq=False)
class Scoring:
    """Log-probabilities wanted of the prompt's tokens from `first` on, gathered by chunk."""

    key: int
    prompt: PrefillPrompt
    first: int
    top_count: int = 0
    logprobs: list[float] = field(default_factory=list)
    top: list[TopTokens] = field(default_factory=list)
    unstarted: int = 1  # it counts like a sample while it waits,
    samples_to_start: int = 0  # but takes no slot
    reserved: int = 0


@dataclass(eq=False)
class Lane:
    """A running sample. `versions` says from which of its tokens on each version drew."""

    request: Request
    index: int
    slot: int = 0  # in the outputs
    sent: int = 0  # tokens already handed out
    began: float = 0.0  # when its first token was drawn; 0: never
    prompt_experts: torch.Tensor | None = None  # int16[prompt, mixture layers, chosen]
    versions: list[tuple[int, Version]] = field(default_factory=list)

    @property
    def tempered(self) -> bool:
        return self.request.sampling.temperature not in (0, 1)

    def mark(self, count: int, version: Version) -> None:
        """Notes that tokens from number `count` on come from `version`."""
        if self.versions and self.versions[-1][0] == count:
            self.versions.pop()
        self.versions.append((count, version))

    def delta(self, written: Written, finish_reason: FinishReason | None) -> Delta:
        """Returns the tokens that follow those already sent."""
        first, self.sent = self.sent, self.sent + len(written.token_ids)
        return Delta(
            index=self.index,
            token_ids=written.token_ids,
            logprobs=written.logprobs,
            logprobs_t1=written.logprobs_t1,
            spans=self._spans(first, self.sent),
            finish_reason=finish_reason,
            timing=self._timing() if finish_reason else None,
            routed_experts=self._experts(written) if finish_reason else None,
        )

    def _experts(self, written: Written) -> np.ndarray | None:
        """Returns the experts of the prompt and of all drawn tokens but the last."""
        if self.prompt_experts is None:
            return None
        parts = [self.prompt_experts]
        if written.experts is not None:  # None: nothing has been decoded yet
            parts.append(written.experts)
        return torch.cat(parts).cpu().numpy()

    def _timing(self) -> Timing:
        """Returns the timing of a sample that ends now."""
        now, request = time.monotonic(), self.request
        admitted = request.admitted or now
        began = self.began or now
        return Timing(
            queue=admitted - request.arrived, prefill=began - admitted, decode=now - began
        )

    def _spans(self, first: int, end: int) -> tuple[VersionSpan, ...]:
        if first == end:
            return ()
        untils = [*(begin for begin, _ in self.versions[1:]), end]
        return tuple(
            VersionSpan(
                version=version,
                digest=digest,
                first_token=max(begin, first),
                last_token=min(until, end) - 1,
            )
            for (begin, (version, digest)), until in zip(self.versions, untils, strict=True)
            if max(begin, first) < min(until, end)
        )


BLOCK = 16  # tokens; prefixes are shared in whole blocks


def block_chain(token_ids: torch.Tensor) -> tuple[int, ...]:
    """Returns one hash per whole block of int64[length], each of all tokens up to its end."""
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

    def chain(self, token_ids: torch.Tensor) -> tuple[int, ...]:
        """Returns the hashes of a prompt's blocks, none when nothing is kept."""
        return block_chain(token_ids) if self._limit else ()

    def adopt(self, prompt: PrefillPrompt) -> bool:
        """Begins `prompt` with the longest cached prefix that leaves a token to encode."""
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
        """Keeps what a prompt that is encoded whole has beyond those already here."""
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
        """Forgets all: other weights make other keys and values."""
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
