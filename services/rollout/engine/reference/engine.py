"""The reference engine: any plain transformers decoder on any torch device."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import (
    Delta,
    Engine,
    EngineStatus,
    Generation,
    IncomingWeights,
    PauseMode,
    RankLoad,
    TokenScores,
)
from services.rollout.engine.reference.core import EngineCore, Outcome
from services.rollout.engine.reference.device_thread import DeviceThread, Outbox
from services.rollout.engine.reference.model import (
    PreparedWeights,
    ServingModel,
    fit_received,
    load_version,
    open_model,
    yield_to_others,
)
from services.rollout.errors import (
    DuplicateRequestError,
    EngineFailedError,
    UnfitWeightsError,
    VersionNotPreparedError,
)
from sluice import platform
from sluice.runtime.errors import ServiceError
from sluice.weights.transfer.group import Receiver
from sluice.weights.transfer.plan import Membership

T = TypeVar("T")
PREPARED_LIMIT = 2  # versions that lie ready at once; the oldest gives way
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ReferenceEngine(Engine):
    """The face towards asyncio; the model and all that runs belong to one device thread."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._dtype, self._device = DTYPES[config.dtype], platform.current().device()
        self._core = EngineCore(config)
        self._thread = DeviceThread(self._core, self._deliver, self._ended)
        self._loader = ThreadPoolExecutor(1, "engine-weights", initializer=yield_to_others)
        self._model: ServingModel | None = None
        self._prepared: dict[int, PreparedWeights] = {}
        self._receiver: Receiver | None = None
        self._keys = itertools.count(1)
        self._streams: dict[int, asyncio.Queue[Outcome]] = {}
        self._names: set[str] = set()
        self._failure = ""
        self._pause_seconds = self._prepare_seconds = 0.0

    async def start(self) -> None:
        threads = self._config.threads or torch.get_num_threads()
        if self._config.deterministic:
            threads = 1
        await self._load(lambda: None)  # its thread sets thread counts before the device thread
        self._thread.start(asyncio.get_running_loop(), threads)
        if self._config.model:
            path = Path(self._config.model)
            model, weights = await self._load(partial(open_model, path, self._dtype, self._device))
            self._model = self._watched(model)
            await self._thread.call(partial(self._core.serve, model, weights))

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        left = max(1, generation.sample_count)  # the core refuses 0: wait to hear it
        with self._stream(generation.request_id) as (key, outcomes):
            self._thread.post(partial(self._core.submit, key, generation), key)
            while left:
                outcome = await outcomes.get()
                if isinstance(outcome, ServiceError):
                    raise outcome
                assert isinstance(outcome, Delta)
                left -= outcome.finish_reason is not None
                yield outcome

    async def score(self, token_ids: Sequence[int], prompt_length: int) -> list[float]:
        return list((await self.score_top(token_ids, prompt_length, 0)).logprobs)

    async def score_top(
        self, token_ids: Sequence[int], prompt_length: int, top_count: int
    ) -> TokenScores:
        with self._stream("") as (key, outcomes):
            submit = partial(self._core.submit_score, key, token_ids, prompt_length, top_count)
            self._thread.post(submit, key)
            outcome = await outcomes.get()
            if isinstance(outcome, ServiceError):
                raise outcome
            assert isinstance(outcome, TokenScores)
            return outcome

    async def abort(self, request_ids: Sequence[str]) -> list[str]:
        return await self._thread.call(partial(self._core.abort, list(request_ids)))

    async def pause(self, mode: PauseMode) -> None:
        await self._thread.call(partial(self._core.pause, mode))
        await self._thread.call(lambda: None, when_quiet=True)

    async def resume(self) -> None:
        await self._thread.call(self._core.resume)

    async def prepare(self, version: int, digest: str, directory: Path) -> None:
        began = time.monotonic()
        if version in self._prepared and self._prepared[version].digest == digest:
            return
        read = partial(load_version, self._model, self._dtype, self._device)
        model, weights = await self._load(partial(read, version, digest, directory))
        self._model = self._model or self._watched(model)
        self._keep_prepared(weights, began)

    def _watched(self, model: ServingModel) -> ServingModel:
        if self._config.routed_experts:
            model.watch_routers()
        return model

    def _keep_prepared(self, weights: PreparedWeights, began: float) -> None:
        self._prepared.pop(weights.version, None)
        self._prepared[weights.version] = weights
        for oldest in list(self._prepared)[:-PREPARED_LIMIT]:
            del self._prepared[oldest]
        self._prepare_seconds = time.monotonic() - began

    async def join_transfer(self, groups: Sequence[Membership], seconds: float) -> None:
        self._leave_transfer()
        receiver = self._receiver = Receiver(yield_to_others)
        await receiver.join(groups, seconds)

    async def receive(self, incoming: IncomingWeights) -> None:
        began = time.monotonic()
        receiver, model = self._receiver, self._model
        assert receiver is not None, "no group was joined"
        try:
            if model is None:
                raise UnfitWeightsError("the engine has no model yet: it needs the store")
            fit = partial(fit_received, model, incoming.manifest)
            weights = await receiver.receive(incoming.buckets, incoming.seconds, fit)
        except BaseException:
            if self._receiver is receiver:
                self._leave_transfer()
            raise
        self._keep_prepared(weights, began)

    def _leave_transfer(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    async def commit(self, version: int, mode: PauseMode) -> float:
        if version not in self._prepared:
            raise VersionNotPreparedError(
                f"version {version} is not prepared", version=version, prepared=[*self._prepared]
            )
        assert self._model is not None
        swap = partial(self._swap, self._model, self._prepared[version], mode)
        wait = mode is PauseMode.WAIT
        self._pause_seconds, retired = await self._thread.call(swap, when_quiet=wait)
        self._loader.submit(retired.clear)
        for older in [number for number in self._prepared if number <= version]:
            del self._prepared[older]
        return self._pause_seconds

    def status(self) -> EngineStatus:
        core = self._core
        version, digest = core.version or (None, "")
        load = RankLoad(
            running_count=core.running_count,
            waiting_count=core.waiting_count,
            used_tokens=core.reserved_tokens,
            max_tokens=self._config.cache_tokens,
        )
        return EngineStatus(
            version=version,
            digest=digest,
            prepared_versions=tuple(sorted(self._prepared)),
            paused=core.paused is not None,
            rank_loads=(load,),
            max_running=self._config.max_running,
            max_model_length=core.max_length,
            last_pause_seconds=self._pause_seconds,
            last_prepare_seconds=self._prepare_seconds,
            decode_tokens_total=core.drawn_tokens,
            prefill_tokens_total=core.prefill_tokens,
            failure=self._failure,
            extra={"prefix_hit_tokens_total": core.prefix_hit_tokens},
            deterministic=self._config.deterministic,
            transfer_ranks=1,
        )

    async def close(self) -> None:
        self._leave_transfer()
        await self._thread.close()
        self._loader.shutdown(wait=False, cancel_futures=True)

    def _swap(
        self, model: ServingModel, weights: PreparedWeights, mode: PauseMode
    ) -> tuple[float, list[torch.nn.Parameter | None]]:
        """On the device thread: the whole pause, and what served before."""
        began = time.monotonic()
        if mode is PauseMode.ABORT:
            self._core.abort_running()
        retired = self._core.serve(model, weights)
        return time.monotonic() - began, retired

    async def _load(self, read: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._loader, read)

    @contextmanager
    def _stream(self, name: str) -> Iterator[tuple[int, asyncio.Queue[Outcome]]]:
        """A queue of outcomes under a fresh key; what has not ended on exit is aborted."""
        if name in self._names:
            raise DuplicateRequestError(f"request {name!r} is here already", request_id=name)
        key, outcomes = next(self._keys), asyncio.Queue[Outcome]()
        self._streams[key] = outcomes
        if name:
            self._names.add(name)
        try:
            yield key, outcomes
        finally:
            del self._streams[key]
            self._names.discard(name)
            if not self._failure:
                self._thread.post(partial(self._core.discard, key), key)

    def _deliver(self, outbox: Outbox) -> None:
        for key, outcome in outbox:
            if key in self._streams:
                self._streams[key].put_nowait(outcome)

    def _ended(self, failure: EngineFailedError) -> None:
        self._failure = str(failure)
        for outcomes in self._streams.values():
            outcomes.put_nowait(failure)
