"""Texts of many requests become batches of about one length, one after another."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from services.rollout.reward_model import metrics
from services.rollout.reward_model.config import BatchConfig
from sluice.runtime.http import ApiError
from sluice.runtime.stacks import standing

T = TypeVar("T")
Tokens = Sequence[int]
Score = Callable[[Sequence[Tokens]], list[float]]

SEEN = 8  # batches' worth of the oldest texts, among which neighbours in length are looked for


class BusyError(ApiError):
    """There is no room for more; asking again helps."""

    def __init__(self, message: str) -> None:
        super().__init__(503, "busy", message)


class ModelThread:
    """Runs one call after another. A daemon: one that hangs does not hold up the process's end."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._since: float | None = None  # when the call that runs began; any thread may look
        self._thread = threading.Thread(target=self._run, name="reward-model", daemon=True)
        self._thread.start()

    @property
    def busy_seconds(self) -> float:
        """For how long it has been at one call."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def where(self) -> str:
        """Where it stands now."""
        return standing(self._thread.ident)

    async def call(self, function: Callable[[], T]) -> T:
        """Returns what `function` does. Cancelling the wait ends nothing that has begun."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                with _Failing(future):
                    future.set_result(function())

        self._calls.put(run)
        return await asyncio.wrap_future(future)

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            self._since = time.monotonic()
            call()
            self._since = None


class _Failing(AbstractContextManager["_Failing"]):
    """Has a future raise what the block does."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            self._future.set_exception(error)
        return True


def choose(lengths: Sequence[int], *, texts: int, tokens: int) -> list[int]:
    """Indices of a batch: the first, which has waited for longest, and its neighbours in length.

    At most `texts`, which padded to the longest of them are at most `tokens`.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    low = high = order.index(0)

    def fits(longest: int) -> bool:
        return (high - low + 2) * longest <= tokens

    while high - low + 1 < texts:
        longest = lengths[order[high]]
        steps = []
        if low > 0 and fits(longest):
            steps.append((lengths[0] - lengths[order[low - 1]], -1))
        if high + 1 < len(order) and fits(lengths[order[high + 1]]):
            steps.append((lengths[order[high + 1]] - lengths[0], 1))
        if not steps:
            break
        _, step = min(steps)
        low, high = (low - 1, high) if step < 0 else (low, high + 1)
    return order[low : high + 1]


@dataclass(eq=False)
class _Text:
    tokens: Tokens
    score: asyncio.Future[float]


class Batches:
    """Scores what waits, the oldest first; its methods belong to the event loop."""

    def __init__(self, score: Score, config: BatchConfig, thread: ModelThread) -> None:
        self._score, self._config, self._thread = score, config, thread
        self._waiting: deque[_Text] = deque()
        self._changed = asyncio.Event()

    async def score(self, texts: Sequence[Tokens]) -> list[float]:
        """Returns a score for each; whoever stops waiting has no more of them scored.

        Raises BusyError.
        """
        self._forget()
        limit = self._config.max_waiting_texts
        if len(self._waiting) + len(texts) > limit:
            raise BusyError(
                f"{len(self._waiting)} texts wait, and {len(texts)} more are beyond {limit} "
                "(batch.max_waiting_texts)"
            )
        loop = asyncio.get_running_loop()
        added = [_Text(tokens, loop.create_future()) for tokens in texts]
        self._waiting += added
        metrics.WAITING.set(len(self._waiting))
        self._changed.set()
        try:
            return await asyncio.gather(*(text.score for text in added))
        finally:
            self._forget()

    async def run(self) -> None:
        """Until cancelled. Raises what the model does; then nothing more is scored."""
        while True:
            await self._changed.wait()
            batch = self._take()
            if not batch:
                self._changed.clear()
                continue
            began = time.monotonic()
            tokens = [text.tokens for text in batch]
            scores = await self._thread.call(partial(self._score, tokens))
            lengths = [len(each) for each in tokens]
            metrics.BATCH_SECONDS.observe(time.monotonic() - began)
            metrics.BATCH_TEXTS.observe(len(batch))
            metrics.TOKENS.inc(sum(lengths))
            metrics.PADDING.inc(len(batch) * max(lengths) - sum(lengths))
            for text, score in zip(batch, scores, strict=True):
                if not text.score.done():
                    text.score.set_result(score)

    def _take(self) -> list[_Text]:
        self._forget()
        config = self._config
        oldest = [*itertools.islice(self._waiting, SEEN * config.max_texts)]
        if not oldest:
            return []
        lengths = [len(text.tokens) for text in oldest]
        chosen = choose(lengths, texts=config.max_texts, tokens=config.max_tokens)
        batch = [oldest[index] for index in chosen]
        taken = set(batch)
        self._waiting = deque(text for text in self._waiting if text not in taken)
        metrics.WAITING.set(len(self._waiting))
        return batch

    def _forget(self) -> None:
        """Lets go of texts that nobody waits for."""
        left = sum(text.score.done() for text in self._waiting)
        if left:
            self._waiting = deque(text for text in self._waiting if not text.score.done())
            metrics.ABANDONED.inc(left)
            metrics.WAITING.set(len(self._waiting))
