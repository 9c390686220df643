"""Runs every generate request once: repeats join it, and its end is remembered for a while."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence

import xxhash

from services.rollout import metrics
from services.rollout.engine import Delta, Engine, Generation, Scores
from services.rollout.wire import VersionBounds, check_spans, join_deltas
from sluice.api.rollout.v1 import engine_service_pb2 as pb
from sluice.runtime.errors import RequestIdReusedError

TOKEN_BYTES = 128  # about what a sampled token takes as Python numbers


def _weight(delta: Delta) -> int:
    """Sampled tokens; routed experts count as so many more."""
    experts = delta.routed_experts
    return len(delta.token_ids) + (0 if experts is None else experts.nbytes // TOKEN_BYTES)


async def complete(engine: Engine, generation: Generation, bounds: VersionBounds) -> list[Delta]:
    """One whole delta per sample, for callers in this process; cancelling aborts the request.

    Raises VersionUnavailableError, and what the engine raises.
    """
    bounds.check(engine.status().version)
    async with contextlib.aclosing(engine.generate(generation)) as stream:  # type: ignore[type-var]
        deltas = join_deltas([delta async for delta in stream])
    check_spans(deltas, bounds)
    metrics.count_generation(deltas)
    return deltas


async def stream(
    engine: Engine, generation: Generation, bounds: VersionBounds
) -> AsyncGenerator[Delta, None]:
    """The same as tokens come; closing it aborts the request."""
    bounds.check(engine.status().version)
    async with contextlib.aclosing(engine.generate(generation)) as deltas:  # type: ignore[type-var]
        async for delta in deltas:
            check_spans([delta], bounds)
            metrics.count_generation([delta])
            yield delta


async def score(
    engine: Engine, token_ids: Sequence[int], prompt_length: int, top_count: int
) -> Scores:
    """Raises NoTopTokensError, and what the engine raises."""
    if top_count:
        return await engine.score_top(token_ids, prompt_length, top_count)
    return Scores(logprobs=tuple(await engine.score(token_ids, prompt_length)))


class _Run:
    """One request in the engine and what it has answered so far."""

    def __init__(self, body: str, engine: Engine, generation: Generation) -> None:
        self.body = body
        self.deltas: list[Delta] = []
        self.token_count = 0
        self.caller_count = 0
        self._grown = asyncio.Event()
        self.task = asyncio.ensure_future(self._consume(engine, generation))
        self.task.add_done_callback(lambda _: self._grown.set())

    async def _consume(self, engine: Engine, generation: Generation) -> None:
        async with contextlib.aclosing(engine.generate(generation)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                self.deltas.append(delta)
                self.token_count += _weight(delta)
                if generation.stream:
                    self._grown.set()

    async def wait(self) -> list[Delta]:
        await asyncio.shield(self.task)
        return self.deltas

    async def follow(self) -> AsyncIterator[Delta]:
        """Deltas from the first one on."""
        sent = 0
        while True:
            while sent < len(self.deltas):
                sent += 1
                yield self.deltas[sent - 1]
            if self.task.done():
                self.task.result()
                return
            self._grown.clear()
            await self._grown.wait()


class Generations:
    """The requests of one engine, by request_id.

    A request whose callers have all gone away is aborted. Failures are not remembered. Answers
    are kept up to `remembered_tokens` sampled tokens in all.
    """

    def __init__(self, engine: Engine, remembered_tokens: int) -> None:
        self._engine = engine
        self._remembered_tokens = remembered_tokens
        self._runs: OrderedDict[str, _Run] = OrderedDict()
        self._token_count = 0  # of the ended runs

    async def generate(self, request: pb.GenerateRequest, generation: Generation) -> list[Delta]:
        """One whole delta per sample, by index.

        Raises RequestIdReusedError, and what the engine raises.
        """
        with self._call(request, generation) as run:
            return join_deltas(await run.wait())

    async def stream(
        self, request: pb.GenerateRequest, generation: Generation
    ) -> AsyncIterator[Delta]:
        """Deltas as they come; a repeat gets them again from the first."""
        with self._call(request, generation) as run:
            async for delta in run.follow():
                yield delta

    async def close(self) -> None:
        """Abort what still runs and wait for its end."""
        running = [run.task for run in self._runs.values() if not run.task.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    @contextlib.contextmanager
    def _call(self, request: pb.GenerateRequest, generation: Generation) -> Iterator[_Run]:
        run = self._find_or_start(request, generation)
        run.caller_count += 1
        try:
            yield run
        finally:
            run.caller_count -= 1
            if not run.caller_count and not run.task.done():
                self._runs.pop(request.request_id, None)
                run.task.cancel()

    def _find_or_start(self, request: pb.GenerateRequest, generation: Generation) -> _Run:
        name = request.request_id
        body = xxhash.xxh3_128_hexdigest(request.SerializeToString(deterministic=True))
        body += "/stream" if generation.stream else ""
        run = self._runs.get(name)
        if run is None:
            run = self._runs[name] = _Run(body, self._engine, generation)
            run.task.add_done_callback(lambda task: self._settle(name, task))
        elif run.body != body:
            raise RequestIdReusedError(
                f"request_id {name} was used for another request", request_id=name
            )
        return run

    def _settle(self, name: str, task: asyncio.Task[None]) -> None:
        run = self._runs.get(name)
        if run is None or run.task is not task:
            return
        if task.cancelled() or task.exception() is not None:
            del self._runs[name]
            return
        self._token_count += run.token_count
        if self._token_count <= self._remembered_tokens:
            return
        for old in [key for key, old in self._runs.items() if old.task.done()]:
            self._token_count -= self._runs.pop(old).token_count
            if self._token_count <= self._remembered_tokens // 2:
                return
