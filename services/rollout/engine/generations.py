"""Runs every generate request once: repeats join it, and its answer is kept for a while."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence

from services.rollout import metrics
from services.rollout.engine.interface import Delta, Engine, Generation, TokenScores
from services.rollout.engine.wire import VersionBounds, check_spans, join_deltas
from sluice.api.rollout.v1 import engine_service_pb2 as pb
from sluice.runtime.idempotency import RequestTable, cancel_all, has_failed, request_digest

TOKEN_BYTES = 128  # about what a sampled token takes as Python numbers


def _weight(delta: Delta) -> int:
    """Returns sampled tokens; routed experts count as so many more."""
    experts = delta.routed_experts
    return len(delta.token_ids) + (0 if experts is None else experts.nbytes // TOKEN_BYTES)


def count_generation(deltas: Sequence[Delta]) -> None:
    """Counts the samples that ended with these deltas."""
    for delta in deltas:
        if delta.finish_reason is not None:
            metrics.SAMPLES.labels(delta.finish_reason.value).inc()
            metrics.SAMPLE_TOKENS.observe(len(delta.token_ids))


async def complete(engine: Engine, generation: Generation, bounds: VersionBounds) -> list[Delta]:
    """Returns one whole delta per sample, for this process; cancelling aborts the request.

    Raises VersionUnavailableError, and what the engine raises.
    """
    bounds.check(engine.status().version)
    async with contextlib.aclosing(engine.generate(generation)) as stream:  # type: ignore[type-var]
        deltas = join_deltas([delta async for delta in stream])
    check_spans(deltas, bounds)
    count_generation(deltas)
    return deltas


async def stream(
    engine: Engine, generation: Generation, bounds: VersionBounds
) -> AsyncGenerator[Delta, None]:
    """Yields deltas as tokens come; closing it aborts the request."""
    bounds.check(engine.status().version)
    async with contextlib.aclosing(engine.generate(generation)) as deltas:  # type: ignore[type-var]
        async for delta in deltas:
            check_spans([delta], bounds)
            count_generation([delta])
            yield delta


async def score(
    engine: Engine, token_ids: Sequence[int], prompt_length: int, top_count: int
) -> TokenScores:
    """Scores tokens[prompt_length:]. Raises NoTopTokensError, and what the engine raises."""
    if top_count:
        return await engine.score_top(token_ids, prompt_length, top_count)
    return TokenScores(logprobs=tuple(await engine.score(token_ids, prompt_length)))


class _Run:
    """One request in the engine and what it has answered so far."""

    def __init__(self, engine: Engine, generation: Generation) -> None:
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
        """Yields deltas from the first one on."""
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
    """Keeps the requests of one engine by request_id.

    A request whose callers have all gone away is aborted. Failures are not remembered. Answers
    are kept up to `remembered_tokens` sampled tokens in all.
    """

    def __init__(self, engine: Engine, remembered_tokens: int) -> None:
        self._engine = engine
        self._runs: RequestTable[_Run] = RequestTable(
            remembered_tokens, weigh=lambda run: run.token_count
        )

    async def generate(self, request: pb.GenerateRequest, generation: Generation) -> list[Delta]:
        """Returns one whole delta per sample, by index.

        Raises RequestIdReusedError, and what the engine raises.
        """
        with self._call(request, generation) as run:
            return join_deltas(await run.wait())

    async def stream(
        self, request: pb.GenerateRequest, generation: Generation
    ) -> AsyncIterator[Delta]:
        """Yields deltas as they come; a repeat gets them again from the first."""
        with self._call(request, generation) as run:
            async for delta in run.follow():
                yield delta

    async def close(self) -> None:
        """Aborts what still runs and waits for its end."""
        await cancel_all([run.task for run in self._runs])

    @contextlib.contextmanager
    def _call(self, request: pb.GenerateRequest, generation: Generation) -> Iterator[_Run]:
        run = self._find_or_start(request, generation)
        run.caller_count += 1
        try:
            yield run
        finally:
            run.caller_count -= 1
            if not run.caller_count and not run.task.done():
                self._runs.discard(request.request_id, run)
                run.task.cancel()

    def _find_or_start(self, request: pb.GenerateRequest, generation: Generation) -> _Run:
        name = request.request_id
        digest = request_digest(request) + ("/stream" if generation.stream else "")
        earlier = self._runs.find(name, digest)
        if earlier is not None:
            return earlier
        run = self._runs.add(name, digest, _Run(self._engine, generation))
        run.task.add_done_callback(lambda _: self._settle(name, run))
        return run

    def _settle(self, name: str, run: _Run) -> None:
        if has_failed(run.task):
            self._runs.discard(name, run)
        else:
            self._runs.done(name, run)
