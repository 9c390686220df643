"""Runs requests in SGLang: their samples, and scorings.

With images it turns token ids into text, replaces the placeholders and tokenises anew (0.5.23,
`load_mm_data`): ids that do not survive this would be other ids than those trained on, and a
placeholder that it does not find in the text drops the image without a word.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from services.rollout.engine.interface import (
    Delta,
    FinishReason,
    Generation,
    ServedWeights,
    TokenScores,
)
from services.rollout.engine.sglang.adapters import ServerAdapters
from services.rollout.engine.sglang.client import (
    Capabilities,
    SglangClient,
    SGLangRefusedError,
    batch,
    refusal,
)
from services.rollout.engine.sglang.load import Load, SlotLimiter
from services.rollout.engine.sglang.samples import (
    PendingSample,
    Routing,
    sampling_parameters,
    stop_tokens,
)
from services.rollout.engine.versions import adapter_name, tag
from services.rollout.errors import EngineFailedError
from sluice.runtime.errors import ServiceError
from sluice.samples.stops import StopSearch


class PromptAlteredError(ServiceError):
    """The engine read another prompt than the request's; metadata has both lengths."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "PROMPT_ALTERED"


def check_prompt(expected: Sequence[int], read: Sequence[int], media_count: int) -> None:
    """Raises PromptAlteredError unless what SGLang read is what was to be read."""
    if list(read) != list(expected):
        raise PromptAlteredError(
            f"a prompt of {len(expected)} tokens with {media_count} images was read as "
            f"{len(read)} others: the tokenizer does not give back the text's tokens, or a "
            "placeholder stands where the model expects none",
            given=len(expected),
            read=len(read),
        )


ABORT_SECONDS = 0.7  # for SGLang to hand over what it has drawn; then what came is all
CALL_SECONDS = 10.0
WARM_TOKENS = 64  # of a prompt that several samples share: it is read once, ahead of them


@dataclass(frozen=True, eq=False)
class ServerHandle:
    """Names what jobs share: the server, its slots and its load."""

    client: SglangClient
    capabilities: Capabilities
    gate: SlotLimiter
    load: Load
    serving: Callable[[int | None], ServedWeights]  # of a version, or None
    adapters: ServerAdapters

    def request(self, rank: int, weights: ServedWeights) -> dict[str, Any]:
        """Returns what every request says: where it runs, and whose prefixes it may share.

        The cache of one version's prompts is of no use to another.
        """
        name = tag(weights.version, weights.digest)
        body: dict[str, Any] = {"extra_key": name, "return_logprob": True}
        if weights.base_digest:
            body["lora_path"] = adapter_name(weights.version)
        if self.capabilities.dp_size > 1:
            body["routed_dp_rank"] = rank
        return body


class Job:
    """Runs one request. `outcomes` gets deltas of every sample, or an error, and then nothing.

    An error is also what no caller can mend: whoever waits for a delta must not wait for ever.
    """

    def __init__(
        self,
        generation: Generation,
        server: ServerHandle,
        budget: int,
        routing: Routing | None,
        *,
        expanded: Sequence[int],
        unsampled: Sequence[int],
        searches: Sequence[StopSearch] = (),
    ) -> None:
        """`expanded`: the prompt as the model reads it; `unsampled` tokens end a sample.

        `searches`: one per sample, where it has stop strings.
        """
        self.generation, self._server, self._budget = generation, server, budget
        self._routing, self._unsampled = routing, unsampled
        self._expanded = expanded
        self.outcomes: asyncio.Queue[Delta | BaseException] = asyncio.Queue()
        self._rank, nonce, now = generation.dp_rank, uuid.uuid4().hex, time.monotonic()
        sampling = generation.sampling
        stops = frozenset(stop_tokens(sampling, unsampled) if sampling.ignore_eos else ())
        self._samples = [
            PendingSample(
                index=index,
                rid=f"{nonce}-{index:06d}",  # SGLang aborts by prefix
                follows=generation.stream,
                temperature=sampling.temperature,
                arrived=now,
                routing=routing,
                search=searches[index] if searches else None,
                stops=stops,
            )
            for index in range(generation.sample_count)
        ]
        self._images = [base64.b64encode(one.data).decode() for one in generation.media]
        self._is_aborted = self._is_warm = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._released = asyncio.Event()  # a slot was given back
        self._cut: list[str] = []  # ended here while SGLang went on
        self._reserved = len(self._expanded) + budget
        self._server.load.arrive(self._rank, len(self._samples))

    def start(self) -> None:
        self._spawn(self._enter(self._samples))

    def abort(self) -> None:
        """Ends every sample with what it has: what waits at once, the rest within a second."""
        self._is_aborted = True
        for sample in self._samples:
            if not sample.sent:
                self._finish(sample)
        self.interrupt()

    def interrupt(self) -> None:
        """Ends what has drawn tokens; what was sent and has not goes back to the gate."""
        if wanted := [sample for sample in self._running() if sample.sent]:
            self._spawn(self._interrupt(wanted))

    def fail(self, error: ServiceError) -> None:
        """Ends with an error."""
        self._cancel()
        self.outcomes.put_nowait(error)

    async def close(self) -> None:
        """Ends all that runs, here and in SGLang."""
        rids = [*self._cut, *(sample.rid for sample in self._running() if sample.sent)]
        self._cut.clear()
        await self._cancel_and_wait()
        for sample in self._running():
            self._finish(sample, report=False)
        with contextlib.suppress(EngineFailedError, SGLangRefusedError):
            for rid in rids:
                await self._server.client.post("/abort_request", {"rid": rid}, CALL_SECONDS)

    def _running(self) -> list[PendingSample]:
        return [sample for sample in self._samples if sample.finish is None]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._retire)

    def _retire(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.outcomes.put_nowait(error)

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _cancel_and_wait(self) -> None:
        self._cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _enter(self, samples: Sequence[PendingSample]) -> None:
        """Waits for slots; whoever gets in runs, the others wait on."""
        waiting = [sample for sample in samples if sample.finish is None]
        while waiting:
            count = await self._server.gate.enter(self._rank, len(waiting))
            waiting = [sample for sample in waiting if sample.finish is None]
            chosen, waiting = waiting[:count], waiting[count:]
            self._server.gate.leave(self._rank, count - len(chosen))
            for sample in chosen:
                sample.sent = time.monotonic()
                self._server.load.enter(self._rank, self._reserved)
            # Servers with encoders take the images of one sample at a time (0.5.23).
            size = 1 if self._images else max(1, len(chosen))
            for first in range(0, len(chosen), size):
                self._spawn(self._run(chosen[first : first + size]))

    async def _run(self, samples: Sequence[PendingSample]) -> None:
        """Runs a batch in SGLang, from first to last token."""
        weights = self._server.serving(self.generation.version)
        self._server.adapters.use(weights)
        for sample in samples:
            sample.weights = weights
        try:
            await self._warm(len(samples), weights)
            answers = self._server.client.stream(self._body(samples, weights))
            async with contextlib.aclosing(answers) as stream:
                async for message in stream:
                    self._take(samples[message.get("index", 0)], message)
        except SGLangRefusedError as error:
            raise refusal(error, "request") from error
        finally:
            self._server.adapters.end_use(weights)
            for sample in samples:
                if sample.finish is None and sample.sent:
                    self._release(sample)
        again = [sample for sample in samples if sample.finish is None]
        for sample in again:
            sample.restart()
        if again:
            await self._enter(again)

    def _body(self, samples: Sequence[PendingSample], weights: ServedWeights) -> dict[str, Any]:
        prompt, seeded = list(self.generation.prompt_token_ids), self._server.capabilities.is_seeded
        body = self._request(weights)
        if self._routing is not None:
            body["return_routed_experts"] = True
        return body | {
            "input_ids": batch([prompt] * len(samples)),
            "rid": batch([sample.rid for sample in samples]),
            "sampling_params": batch(
                [
                    sampling_parameters(
                        self.generation,
                        sample.index,
                        self._budget,
                        is_seeded=seeded,
                        unsampled=self._unsampled,
                    )
                    for sample in samples
                ]
            ),
            "stream": True,
        }

    def _request(self, weights: ServedWeights) -> dict[str, Any]:
        """Returns what requests of this job share; images are in the order of the prompt."""
        body = self._server.request(self._rank, weights)
        if self._images:
            body["return_prompt_token_ids"] = True
            body["image_data"] = self._images
        return body

    async def _warm(self, count: int, weights: ServedWeights) -> None:
        """Has a long prompt read once before several samples of it start."""
        prompt = self.generation.prompt_token_ids
        useful = count > 1 and len(prompt) >= WARM_TOKENS
        if self._is_warm or not (useful and self._server.capabilities.has_radix_cache):
            return
        self._is_warm = True
        body = self._request(weights) | {
            "input_ids": list(prompt),
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": False,
            "stream": True,
        }
        async with contextlib.aclosing(self._server.client.stream(body)) as stream:
            async for _ in stream:
                pass

    def _take(self, sample: PendingSample, message: dict[str, Any]) -> None:
        if sample.finish is not None:  # it was cut off here before SGLang said so
            return
        server, is_new, had_stop = self._server, not sample.began, sample.has_stop
        if self._images and is_new and "prompt_token_ids" in message:
            given, read = list(self.generation.prompt_token_ids), message["prompt_token_ids"]
            # With encoders the placeholders grow later, and out of sight.
            if not (server.capabilities.is_language_only and read == given):
                check_prompt(self._expanded, read, len(self._images))
        count = sample.take(
            message, server.serving(None), is_delta=server.capabilities.is_incremental
        )
        if is_new and sample.began:
            meta = message["meta_info"]
            cached = meta.get("cached_tokens") or 0
            server.load.begin(self._rank, max(0, meta["prompt_tokens"] - cached), cached)
        server.load.draw(count)
        if sample.finish is FinishReason.ABORTED and not sample.token_ids and not self._is_aborted:
            sample.finish = None  # a pause came before its first token
            return
        if sample.finish is not None:
            self._release(sample)
        elif sample.has_stop and not had_stop:  # what it came from is known once SGLang ends it
            self._spawn(self._interrupt([sample]))
        self._report(sample)

    def _report(self, sample: PendingSample) -> None:
        delta = sample.delta()
        if delta is not None:
            self.outcomes.put_nowait(delta)

    def _finish(self, sample: PendingSample, *, report: bool = True) -> None:
        """Ends a sample here, with what has come."""
        if sample.sent:
            self._release(sample)
        else:
            self._server.load.depart(self._rank)
        sample.finish = FinishReason.STOP if sample.has_stop else FinishReason.ABORTED
        if report:
            self._report(sample)

    def _release(self, sample: PendingSample) -> None:
        """Takes a sample out of its slot; without an end it waits again."""
        self._server.load.leave(
            self._rank, self._reserved, has_begun=bool(sample.began), ends=sample.finish is not None
        )
        self._server.gate.leave(self._rank)
        self._released.set()
        if sample.finish is None:
            sample.sent = sample.began = 0.0

    async def _interrupt(self, wanted: Sequence[PendingSample]) -> None:
        """Asks SGLang to end what was sent, and does without its answer if it has none in time."""
        deadline = time.monotonic() + ABORT_SECONDS
        with contextlib.suppress(SGLangRefusedError):
            for sample in wanted:
                await self._server.client.post("/abort_request", {"rid": sample.rid}, ABORT_SECONDS)
        while _left(wanted) and (seconds := deadline - time.monotonic()) > 0:
            self._released.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._released.wait()
        for sample in _left(wanted):
            if sample.token_ids or self._is_aborted:
                self._cut.append(sample.rid)
                self._finish(sample)


def _left(samples: Sequence[PendingSample]) -> list[PendingSample]:
    """Returns those that SGLang has not ended."""
    return [sample for sample in samples if sample.finish is None and sample.sent]


RANK = 0


async def score(
    server: ServerHandle,
    token_ids: Sequence[int],
    prompt_length: int,
    top_count: int,
    version: int | None = None,
) -> TokenScores:
    """Scores token_ids[prompt_length:] at temperature 1. Takes a slot, as a sample does."""
    await server.gate.enter(RANK, 1)
    weights = server.serving(version)
    server.adapters.use(weights)
    try:
        meta = await _read(server, weights, token_ids, prompt_length, top_count)
    except SGLangRefusedError as error:
        raise refusal(error, "token_ids") from error
    finally:
        server.adapters.end_use(weights)
        server.gate.leave(RANK)
    rows = meta["input_token_logprobs"][1:]  # the first is the last of the context
    if len(rows) != len(token_ids) - prompt_length:
        raise EngineFailedError(
            f"SGLang scored {len(rows)} of {len(token_ids) - prompt_length} tokens"
        )
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    if top_count:
        places = meta["input_top_logprobs"][1:]
        top = tuple(tuple((token, value) for value, token, _ in place) for place in places)
    return TokenScores(logprobs=tuple(row[0] for row in rows), top=top)


async def _read(
    server: ServerHandle,
    weights: ServedWeights,
    token_ids: Sequence[int],
    prompt_length: int,
    top_count: int,
) -> Mapping[str, Any]:
    body = server.request(RANK, weights) | {
        "input_ids": list(token_ids),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "logprob_start_len": prompt_length - 1,
        "top_logprobs_num": top_count,
        "stream": True,
    }
    meta: Mapping[str, Any] = {}
    async with contextlib.aclosing(server.client.stream(body)) as stream:
        async for message in stream:
            meta = message["meta_info"]
    if "input_token_logprobs" not in meta:
        raise EngineFailedError("SGLang scored nothing")
    return meta
