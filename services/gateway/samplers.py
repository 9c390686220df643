"""Sampling: adapters brought to the engines, prompts sampled and scored through the router."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from services.gateway import schema
from services.gateway.config import GatewayConfig
from services.gateway.errors import GoneError, RefusedError, UnfitEnginesError
from services.gateway.journal import SamplerRecord
from services.gateway.requests import LARGEST_NUMBER, SampleTokens, SamplingParams
from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as pb
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.client import ClientCache, EngineClient, RouterClient, new_request_id
from sluice.runtime.errors import RemoteError, typed_errors
from sluice.runtime.recovery import Backoff, NotReadyError, is_passing
from sluice.samples.stops import LONGEST_STOP

logger = logging.getLogger(__name__)

T = TypeVar("T")
POOL = "policy"
BASE = "base"
NO_LOGPROB = -99999.0  # with token 0, of a place that has none
NOT_HELD = "VERSION_UNAVAILABLE"
GONE = "WEIGHT_VERSION_NOT_FOUND"
PAUSES = Backoff(first=0.05, longest=2.0)


@dataclass(frozen=True)
class DrawnSamples:
    """Tokens that were sampled, with their log-probs as they were drawn."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    stopped: bool


class Engines:
    """The engines of the policy that the router knows, and the adapters that they were given."""

    def __init__(self, config: GatewayConfig) -> None:
        security = config.server.security
        self._router = RouterClient(config.router, security)
        self.proxy = EngineClient(config.router, security)
        self._clients = ClientCache(EngineClient, security)
        self._bringing: dict[int, asyncio.Task[None]] = {}
        self.longest = 0  # prompt and response together; 0 while no engine has said

    async def close(self) -> None:
        for task in self._bringing.values():
            task.cancel()
        await asyncio.gather(*self._bringing.values(), return_exceptions=True)
        await self._clients.close()
        await self.proxy.close()
        await self._router.close()

    async def bring_up(self, sampler: SamplerRecord) -> None:
        """Have every engine hold the weights of a sampler; those that cannot are logged.

        Calls for one version share the work. Raises NotReadyError where no engine has it,
        UnfitEnginesError where none ever will, and GoneError where the store has not.
        """
        if not sampler.version:
            return
        task = self._bringing.get(sampler.version)
        if task is None:
            task = asyncio.create_task(self._bring(sampler), name=f"version {sampler.version}")
            self._bringing[sampler.version] = task
            task.add_done_callback(lambda _: self._bringing.pop(sampler.version, None))
        await asyncio.shield(task)

    async def _bring(self, sampler: SamplerRecord) -> None:
        weights = sample_pb2.WeightVersion(
            version=sampler.version, digest=sampler.digest, adapter=sampler.adapter
        )
        engines = await self._alive()
        failures = await asyncio.gather(*(self._give(each, weights) for each in engines))
        failed = [error for error in failures if error is not None]
        for error in failed:
            logger.warning("version %d: %s", sampler.version, error)
            if error.reason == GONE:
                raise GoneError(
                    f"the weights of {sampler.path or sampler.id} are gone: those with a name "
                    "stay, and the newest of a session that lives (tinker.kept_snapshots)"
                )
        if len(failed) == len(engines):
            causes = "; ".join(str(error) for error in failed)
            if failed and all(error.reason == UnfitEnginesError.reason for error in failed):
                raise UnfitEnginesError(f"no engine takes this adapter: {causes}")
            raise NotReadyError(causes or "the router knows no engine")

    async def _give(
        self, engine: router_pb.Engine, weights: sample_pb2.WeightVersion
    ) -> RemoteError | None:
        """Why an engine does not hold a version; None once it does."""
        client = self._clients[engine.address]
        try:
            found = await client.get()
            if found.max_model_length:
                self.longest = found.max_model_length
            if any(held == weights for held in found.adapters):
                return None
            await client.prepare_weights(weights)
            await client.commit_weights(weights)
        except RemoteError as error:
            return error
        return None

    async def _alive(self) -> list[router_pb.Engine]:
        engines = await self._router.list_engines(router_pb.ROLE_ENGINE)
        lost = router_pb.ENGINE_STATE_LOST
        return [e for e in engines if e.state != lost and (e.pool or POOL) == POOL]

    async def max_length(self) -> int:
        """Of prompt and response together. Raises NotReadyError."""
        if not self.longest:
            engines = await self._alive()
            if not engines:
                raise NotReadyError("the router knows no engine")
            found = await self._clients[engines[0].address].get()
            self.longest = found.max_model_length
        return self.longest


class Samplers:
    """Answers sampling requests."""

    def __init__(self, config: GatewayConfig, engines: Engines) -> None:
        self._config, self._engines = config, engines

    async def sample(self, sampler: SamplerRecord, asked: SampleTokens) -> bytes:
        """A SampleResponse. Raises ServiceError, RemoteError and NotReadyError."""
        check_supported(asked, self._config.tinker.max_samples)
        prompt = prompt_of(asked)
        response: Any = schema.SampleResponse()
        top = asked.topk_prompt_logprobs
        if asked.prompt_logprobs or top:
            await self._score_prompt(sampler, prompt, asked, response)
        sequences = await self._generate(sampler, prompt, asked)
        for each in sequences:
            added = response.sequences.add(
                stop_reason=schema.STOP if each.stopped else schema.LENGTH,
                tokens=each.token_ids.astype("<i4").tobytes(),
                logprobs=each.logprobs.astype("<f4").tobytes(),
            )
            if asked.topk_sample_logprobs and len(each.token_ids):
                whole = [*prompt, *each.token_ids.tolist()]
                count = asked.topk_sample_logprobs
                scored = await self._score(sampler, whole, len(prompt), count)
                added.topk_sampled_logprobs.CopyFrom(_top(scored.top, 0, count))
        data: bytes = response.SerializeToString()
        return data

    async def _score_prompt(
        self, sampler: SamplerRecord, prompt: list[int], asked: SampleTokens, response: Any
    ) -> None:
        last, top = asked.prompt_logprobs_last_n, asked.topk_prompt_logprobs
        if last is not None and not 1 <= last <= len(prompt) - 1:
            raise RefusedError(
                f"prompt_logprobs_last_n is {last}, of a prompt of {len(prompt)} tokens"
            )
        first = 1 if last is None else len(prompt) - last
        logprobs = np.full(len(prompt), np.nan, np.float32)
        rows: Sequence[pb.TopTokens] = ()
        if first < len(prompt):
            scored = await self._score(sampler, prompt, first, top)
            logprobs[first:] = scored.logprobs
            rows = scored.top
        if asked.prompt_logprobs:
            response.prompt_logprobs = logprobs.astype("<f4").tobytes()
        if top:
            response.topk_prompt_logprobs.CopyFrom(_top(rows, first, top))

    async def _score(
        self, sampler: SamplerRecord, tokens: Sequence[int], prompt_length: int, top: int
    ) -> pb.ScoreResponse:
        request = pb.ScoreRequest(
            token_ids=tokens, prompt_length=prompt_length, top_count=top, adapter=_adapter(sampler)
        )
        stub = self._engines.proxy.stub

        async def call() -> pb.ScoreResponse:
            with typed_errors():
                answer: pb.ScoreResponse = await stub.Score(request)
            return answer

        return await self._persist(sampler, call)

    async def _generate(
        self, sampler: SamplerRecord, prompt: Sequence[int], asked: SampleTokens
    ) -> list[DrawnSamples]:
        params, count = asked.sampling_params, asked.num_samples
        room = await self._persist(sampler, self._engines.max_length) - len(prompt)
        if room < 1:
            raise RefusedError(
                f"prompt: {len(prompt)} tokens leave no room for another: the model takes "
                f"{len(prompt) + room}"
            )
        request = self._request(sampler, prompt, params, room, count)
        return await self._persist(sampler, lambda: self._whole(request()))

    def _request(
        self,
        sampler: SamplerRecord,
        prompt: Sequence[int],
        params: SamplingParams,
        room: int,
        count: int,
    ) -> Callable[[], pb.GenerateRequest]:
        """Makes requests that differ in their id alone."""
        seeds = [] if params.seed is None else [_wrapped(params.seed + i) for i in range(count)]
        sampling = pb.SamplingParams(
            max_new_tokens=min(room, params.max_tokens or room),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(0, params.top_k),
            stop_token_ids=_stop_tokens(params),
            stop=_stop_strings(params),
            seeds=seeds,
        )

        def make() -> pb.GenerateRequest:
            return pb.GenerateRequest(
                request_id=new_request_id(),
                prompt_token_ids=prompt,
                sampling=sampling,
                sample_count=count,
                takes_columns=True,
                adapter=_adapter(sampler),
            )

        return make

    async def _whole(self, request: pb.GenerateRequest) -> list[DrawnSamples]:
        with typed_errors():
            answer = await self._engines.proxy.stub.Generate(request)
        return [_sequence(each) for each in sorted(answer.completions, key=lambda c: c.index)]

    async def _persist(self, sampler: SamplerRecord, call: Callable[[], Any]) -> Any:
        """Call again while engines come, go, or have given the adapter's place to another."""
        deadline = time.monotonic() + self._config.tinker.recovery_seconds
        failures = 0
        while True:
            try:
                return await call()
            except (RemoteError, NotReadyError) as error:
                reason = error.reason if isinstance(error, RemoteError) else ""
                if reason and reason != NOT_HELD and not is_passing(error):
                    raise
                if time.monotonic() > deadline:
                    raise
                failures += 1
                logger.info("sampler %s: %s; trying again", sampler.id, error)
                await asyncio.sleep(PAUSES.seconds(failures))
                if reason == NOT_HELD:
                    await self._bring_up(sampler, deadline)

    async def _bring_up(self, sampler: SamplerRecord, deadline: float) -> None:
        try:
            await self._engines.bring_up(sampler)
        except NotReadyError:
            if time.monotonic() > deadline:
                raise
        except RemoteError as error:
            if not is_passing(error):
                raise


def check_supported(asked: SampleTokens, max_samples: int) -> None:
    """Raises RefusedError for what engines do not do."""
    if asked.num_samples > max_samples:
        raise RefusedError(f"num_samples: {asked.num_samples} are more than {max_samples}")
    for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"):
        if getattr(asked, name):
            raise RefusedError(f"{name} is not served here")
    if asked.sampling_params.stop == []:
        raise RefusedError("stop: [] is not served here: the model's own end always ends a sample")
    if not all(0 < len(text) <= LONGEST_STOP for text in _stop_strings(asked.sampling_params)):
        raise RefusedError(f"stop: a text has 1 to {LONGEST_STOP:,} characters")
    _check_tokens("stop", _stop_tokens(asked.sampling_params))
    if asked.topk_sample_logprobs and asked.sampling_params.temperature != 1:
        raise RefusedError(
            "topk_sample_logprobs is served at temperature 1 alone: of that the scores are"
        )


def prompt_of(asked: SampleTokens) -> list[int]:
    """Raises RefusedError for anything but tokens."""
    tokens: list[int] = []
    for index, chunk in enumerate(asked.prompt.chunks):
        if chunk.type != "encoded_text" or chunk.tokens is None:
            raise RefusedError(
                f"prompt.chunks.{index}: {chunk.type!r} is not taken here: text alone is"
            )
        tokens += chunk.tokens
    if not tokens:
        raise RefusedError("prompt has no token")
    _check_tokens("prompt", tokens)
    return tokens


def _check_tokens(where: str, tokens: Sequence[int]) -> None:
    """Raises RefusedError."""
    if not all(0 <= token <= LARGEST_NUMBER for token in tokens):
        raise RefusedError(f"{where} has a number that is no token")


def _adapter(sampler: SamplerRecord) -> str:
    return f"{sampler.adapter}@{sampler.version}" if sampler.version else BASE


def _stop_strings(params: SamplingParams) -> list[str]:
    stop = params.stop
    return [stop] if isinstance(stop, str) else [s for s in stop or () if isinstance(s, str)]


def _stop_tokens(params: SamplingParams) -> list[int]:
    return [s for s in params.stop or () if isinstance(s, int)]


def _wrapped(seed: int) -> int:
    """Into the numbers of 64 bits."""
    return (seed + 2**63) % 2**64 - 2**63


def _sequence(completion: pb.Completion) -> DrawnSamples:
    columns = completion.columns
    if columns.token_ids or not completion.token_ids:
        tokens = np.frombuffer(columns.token_ids, "<i4")
        logprobs = np.frombuffer(columns.logprobs, "<f4")
    else:
        tokens = np.array(completion.token_ids, np.int32)
        logprobs = np.array(completion.logprobs, np.float32)
    if completion.finish_reason == sample_pb2.FINISH_REASON_ABORTED:
        raise NotReadyError("the engine ended the sample")
    return DrawnSamples(tokens, logprobs, completion.finish_reason == sample_pb2.FINISH_REASON_STOP)


def _top(rows: Sequence[pb.TopTokens], first: int, count: int) -> Any:
    """Matrices of the likeliest tokens, of `first` places that have none and of `rows`."""
    shape = (first + len(rows), count)
    tokens, logprobs = np.zeros(shape, "<i4"), np.full(shape, NO_LOGPROB, "<f4")
    for place, row in enumerate(rows, first):
        tokens[place, : len(row.token_ids)] = row.token_ids
        logprobs[place, : len(row.logprobs)] = row.logprobs
    return schema.TopkLogprobs(
        token_ids=tokens.tobytes(), logprobs=logprobs.tobytes(), k=count, length=shape[0]
    )
