"""Requests from their arrival until all their samples have begun, in order of arrival."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable

from services.rollout.backends.reference.lanes import Prompt, Request, Scoring
from services.rollout.backends.reference.passes import PromptWork
from services.rollout.backends.reference.prefix_cache import PrefixCache
from services.rollout.engine_config import EngineConfig
from sluice.runtime.errors import QueueFullError

Item = Request | Scoring


class Intake:
    """`waiting` items are untouched; `active` ones have prompts in work or samples to start."""

    def __init__(self, config: EngineConfig) -> None:
        self.waiting: deque[Item] = deque()
        self.active: list[Item] = []
        self.unstarted = 0  # samples, and scorings that have not ended
        self._config = config
        # A prompt that continues a cached one is cut in other chunks than it would be alone.
        self.prefixes = PrefixCache(0 if config.deterministic else config.prefix_cache_tokens)

    def push(self, item: Item) -> None:
        """Raises QueueFullError."""
        limit = self._config.waiting_limit
        if self.unstarted + item.unstarted > limit:
            raise QueueFullError(f"{self.unstarted} samples wait already", limit=limit)
        if isinstance(item, Request):
            item.prompt.chain = self.prefixes.chain(item.prompt.token_ids)
        self.unstarted += item.unstarted
        self.waiting.append(item)

    def admit(self, slots: int, tokens: int) -> None:
        """Take up what waits, as long as free slots and cache tokens let a sample begin."""
        for item in self.active:
            slots -= item.samples_to_start
            tokens -= item.samples_to_start * item.reserved
        while self.waiting:
            item = self.waiting[0]
            if item.samples_to_start:
                if slots < 1 or tokens < item.reserved:
                    return
                slots -= item.samples_to_start
                tokens -= item.samples_to_start * item.reserved
            self.active.append(self.waiting.popleft())
            if isinstance(item, Request):
                item.admitted = time.monotonic()

    def next_chunks(self) -> list[PromptWork]:
        """Prompt work of one pass: prefill_chunk_tokens together at most."""
        limit = self._config.prefill_chunk_tokens
        budget, works, openings = limit, [], set[int]()
        for item in self.active:
            prompt = item.prompt
            if not budget:
                break
            if prompt.done == prompt.length or not self._open(prompt, openings):
                continue
            openings.update(prompt.chain[:1])
            # Where a sample must not depend on others, chunks end where they would alone.
            room = limit if self._config.deterministic else budget
            chunk = min(prompt.length - prompt.done, room)
            if chunk > budget:
                break
            if isinstance(item, Scoring):
                works.append(PromptWork(prompt, chunk, item.first, item.top_count))
            else:
                works.append(PromptWork(prompt, chunk))
            budget -= chunk
        return works

    def take(self, works: Iterable[PromptWork]) -> list[Scoring]:
        """Note what a pass did; returns the scorings that are complete."""
        by_prompt = {id(work.prompt): work for work in works}
        for work in by_prompt.values():
            if work.prompt.logits is not None:
                self.prefixes.insert(work.prompt)
        scorings = [item for item in self.active if isinstance(item, Scoring)]
        for scoring in scorings:
            if done := by_prompt.get(id(scoring.prompt)):
                scoring.logprobs += done.logprobs
                scoring.top += done.top
        complete = [s for s in scorings if s.prompt.done == s.prompt.length]
        self.drop([scoring.key for scoring in complete])
        return complete

    def startable(self, slots: int, tokens: int) -> list[tuple[Request, int]]:
        """How many samples of which requests may begin: their prompt is encoded."""
        found = []
        for item in self.active:
            if not isinstance(item, Request) or item.prompt.logits is None:
                continue
            count = min(item.unstarted, slots, tokens // item.reserved)
            if count < 1:
                break
            found.append((item, count))
            slots -= count
            tokens -= count * item.reserved
        return found

    def start(self, request: Request, count: int) -> None:
        """`count` more samples of a request have begun."""
        request.started += count
        self.unstarted -= count
        if not request.unstarted:
            self.active.remove(request)
            request.prompt.restart()

    def drop(self, keys: Collection[int]) -> None:
        """Forget items."""
        for item in (*self.waiting, *self.active):
            if item.key in keys:
                self.unstarted -= item.unstarted
        self.waiting = deque(item for item in self.waiting if item.key not in keys)
        self.active = [item for item in self.active if item.key not in keys]

    def restart(self) -> None:
        """Begin all prompts anew, for other weights."""
        self.prefixes.clear()
        for item in self.active:
            item.prompt.restart()
            if isinstance(item, Scoring):
                item.logprobs.clear()
                item.top.clear()

    def _open(self, prompt: Prompt, openings: Collection[int]) -> bool:
        """Whether to encode now; False when one in work begins alike and will be cached."""
        if prompt.kv is not None or self.prefixes.adopt(prompt):
            return True
        return not any(block in openings for block in prompt.chain[:1])
