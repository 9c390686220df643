"""The SGLang engine: its servers, started here and on further nodes, or one that runs already."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.images import ImageReader
from services.rollout.engine.interface import (
    Delta,
    Engine,
    EngineProfile,
    EngineService,
    EngineStatus,
    Generation,
    IncomingWeights,
    PauseMode,
    ProfileOrder,
    TokenScores,
    check_generation,
    check_score,
    waiting_text,
)
from services.rollout.engine.sglang.adapters import DiskAdapter
from services.rollout.engine.sglang.jobs import Job, score
from services.rollout.engine.sglang.load import Load, SlotLimiter
from services.rollout.engine.sglang.nodes import NODE_SERVICE, NodeServicer
from services.rollout.engine.sglang.replica import Replica
from services.rollout.engine.sglang.samples import Routing, read_routing
from services.rollout.engine.sglang.servers import dp_size
from services.rollout.engine.sglang.weights import (
    DiskVersion,
    check_drafts,
    check_encoders,
    check_fit,
    read_model,
    read_version,
)
from services.rollout.engine.stops import StopStrings
from services.rollout.engine.versions import (
    PreparedVersions,
    check_base,
    check_processor,
    check_whole,
    checked_manifest,
    reading,
)
from services.rollout.errors import (
    DuplicateRequestError,
    EngineFailedError,
    MixedWeightsError,
    NoMinTokensError,
    NotQuietError,
    NoTransferError,
    NoWeightsError,
    UnfitWeightsError,
)
from sluice.api.rollout.v1 import engine_node_service_pb2_grpc as pb_grpc
from sluice.runtime.errors import QueueFullError, ServiceError
from sluice.runtime.idempotency import to_its_end
from sluice.weights.checkpoint import CheckedShards
from sluice.weights.manifest import Manifest, ShardFile
from sluice.weights.transfer.plan import HANDLES, Membership

logger = logging.getLogger(__name__)

T = TypeVar("T")

DRAIN_SECONDS = 3.0  # for what was aborted to end


class SglangEngine(Engine):
    """Hands requests to SGLang in slots of its own, so that limits and pauses are as elsewhere."""

    def __init__(self, config: EngineConfig, tokenizer: Path | None = None) -> None:
        self._config = config
        self._stops = StopStrings(tokenizer or (Path(config.model) if config.model else None))
        self._replica = Replica(config)
        self._folders = self._replica.adapters.folders
        self._disk = ThreadPoolExecutor(1, "engine-weights")
        self._prepared = PreparedVersions[DiskVersion | DiskAdapter]()
        self._checked = CheckedShards()
        self._restorable: DiskVersion | None = None  # the last one served from the disk
        self._gate, self._load = SlotLimiter(0, 0), Load(0)
        self._is_asleep = False
        self._has_released = False  # the server sleeps, and is not one that was never started
        self._is_reviving = False  # the server ended, and has not its weights again
        self._is_blank = False  # it has slept, and no weights since
        self._jobs: dict[str, Job] = {}
        self._serving: DiskVersion | None = None
        self._vocabulary, self._images = 0, ImageReader()
        self._routing: Routing | None = None
        self._changing = asyncio.Lock()  # weights, pauses and restarts, one at a time
        self._paused: PauseMode | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._failure = ""
        self._pause_seconds = self._prepare_seconds = 0.0

    async def start(self) -> None:
        config = self._config
        size = dp_size(config)
        if config.sglang.url:
            size = (await self._replica.attach()).dp_size
        self._gate, self._load = SlotLimiter(size, config.max_running), Load(size)
        self._replica.open(self._gate, self._load)
        if config.model:
            model = await self._on_disk(partial(read_model, Path(config.model)))
            self._check_model(model)  # or no server need be started
            if config.sglang.url:
                await self._replica.take_over(model)
            else:
                await self._replica.launch(model)
            self._serve(model)
        self._keeper = asyncio.create_task(self._keep(), name="sglang")

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        searches = await self._stops.searches(generation)
        self._check_serving()
        length = self._max_length
        size = len(self._load.by_rank(0))
        read = partial(
            self._images.read,
            generation.prompt_token_ids,
            generation.media,
            generation.processor,
        )
        shown = await asyncio.to_thread(read) if generation.media else read()
        prompt = shown.token_ids
        check_generation(
            replace(generation, prompt_token_ids=prompt, media=()),
            self._vocabulary,
            length,
            self._config,
            dp_size=size,
        )
        if generation.sampling.min_new_tokens:
            raise NoMinTokensError(
                "SGLang gives log-probs of the tokens alone that may be drawn, and without a "
                "tokenizer takes no min_new_tokens: use the reference engine, or leave it out"
            )
        name, count = generation.request_id, generation.sample_count
        if name in self._jobs:
            raise DuplicateRequestError(f"request {name!r} is here already", request_id=name)
        if self._load.waiting + count > self._config.waiting_limit:
            limit = self._config.waiting_limit
            raise QueueFullError(waiting_text(self._load.waiting, count, limit), limit=limit)
        held = self._replica.handle.serving(generation.version)
        room = length - len(prompt)
        budget = min(generation.sampling.max_new_tokens, room)
        job = self._jobs[name] = Job(
            generation,
            self._replica.handle,
            budget,
            self._routing,
            expanded=prompt,
            unsampled=self._images.unsampled,
            searches=searches,
        )
        pinned = generation.version is not None
        if pinned:
            self._replica.adapters.use(held)
        job.start()
        try:
            while count:
                outcome = await job.outcomes.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                count -= outcome.finish_reason is not None
                yield outcome
        finally:
            del self._jobs[name]
            await job.close()
            if pinned:
                self._replica.adapters.end_use(held)

    async def score(
        self, token_ids: Sequence[int], prompt_length: int, version: int | None = None
    ) -> list[float]:
        return list((await self.score_top(token_ids, prompt_length, 0, version)).logprobs)

    async def score_top(
        self,
        token_ids: Sequence[int],
        prompt_length: int,
        top_count: int,
        version: int | None = None,
    ) -> TokenScores:
        self._check_serving()
        check_score(token_ids, prompt_length, self._vocabulary, self._max_length)
        self._images.check_text(token_ids)
        return await score(self._replica.handle, token_ids, prompt_length, top_count, version)

    async def abort(self, request_ids: Sequence[str]) -> list[str]:
        running = [name for name in request_ids if name in self._jobs]
        for name in running:
            self._jobs[name].abort()
        return running

    async def pause(self, mode: PauseMode) -> None:
        async with self._changing:
            self._paused = mode
            self._gate.shut()
            await self._drain(mode)
            await to_its_end(self._replica.pause())

    async def resume(self) -> None:
        async with self._changing:
            await to_its_end(self._resume())

    async def _resume(self) -> None:
        self._paused = None
        await self._replica.resume()
        self._gate.open()

    async def prepare(self, version: int, digest: str, directory: Path) -> None:
        began = time.monotonic()
        if not self._prepared.has(version, digest):
            read = partial(self._read, version, digest, directory)
            try:
                self._prepared.add(await self._on_disk(read))
            finally:
                self.unstage()
            self._prepare_seconds = time.monotonic() - began

    async def stage(self, path: Path, shard: ShardFile) -> None:
        await asyncio.to_thread(self._check, path, shard)

    def unstage(self) -> None:
        self._checked.clear()

    def _check(self, path: Path, shard: ShardFile) -> None:
        with reading(0):
            self._checked.check(path, shard)

    def _read(self, version: int, digest: str, directory: Path) -> DiskVersion | DiskAdapter:
        """Checks a version against its manifest and the model that serves; blocks."""
        with reading(version):
            manifest = checked_manifest(directory, version, digest)
        replica = self._replica
        check_whole(manifest, [one.weights for one in replica.adapters.held.values()])
        if manifest.adapter is not None:
            shapes = {} if self._serving is None else self._serving.shapes
            return self._folders.read(
                version, digest, directory, replica.base, shapes, replica.capabilities
            )
        new = read_version(version, digest, directory, self._checked)
        self._check_model(new)
        if self._serving is not None:
            self._check_fits(self._serving, new)
        self._replica.expect(new)
        return new

    async def commit(self, version: int, mode: PauseMode) -> float:
        async with self._changing:
            with self._prepared.serving(version) as new:
                if self._is_asleep:
                    raise NotQuietError("the engine sleeps; wake it first")
                if isinstance(new, DiskAdapter):
                    return await self._commit_adapter(new, mode)
                if self._replica.adapters.held:  # since it was prepared
                    raise MixedWeightsError(f"version {version} would take adapters their base")
                if self._serving is not None:
                    self._check_fits(self._serving, new)
                if not self._replica.is_up:
                    self._pause_seconds = await self._timed(self._replica.launch(new))
                    self._serve(new)
                else:
                    await self._still(mode, partial(self._swap, new))
            return self._pause_seconds

    async def _commit_adapter(self, adapter: DiskAdapter, mode: PauseMode) -> float:
        """Serves an adapter; what was sent goes on under its own, or ends, as `mode` says."""
        check_base(adapter.spec, adapter.version, self._replica.base)
        if not self._replica.is_up:
            raise EngineFailedError("SGLang is being restarted")
        self._pause_seconds = 0.0
        if mode is PauseMode.ABORT and self._paused is None and not adapter.line:
            self._gate.shut()
            try:
                self._pause_seconds = await self._timed(self._abort_and_serve(adapter))
            finally:
                self._gate.open()
        else:
            await to_its_end(self._replica.serve_adapter(adapter))
        return self._pause_seconds

    async def _abort_and_serve(self, adapter: DiskAdapter) -> None:
        await self._drain(PauseMode.ABORT)
        await to_its_end(self._replica.serve_adapter(adapter))

    def check_incoming(self, manifest: Manifest) -> None:
        if manifest.adapter is not None:
            raise NoTransferError("SGLang reads adapters from the store only")
        if self._serving is None:
            raise UnfitWeightsError("the engine has no weights yet: it needs the store")
        check_processor(manifest, self._serving.images.processor)
        self._check_fits(self._serving, self._serving.renamed(manifest))

    def _check_fits(self, serving: DiskVersion, new: DiskVersion) -> None:
        check_fit(serving, new)
        if self._config.sglang.encoders:
            check_encoders(serving, new)

    async def leave_transfer(self) -> None:
        async with self._changing:
            await self._replica.leave()

    async def join_transfer(self, groups: Sequence[Membership], seconds: float) -> None:
        if any(member.backend == HANDLES for member in groups):
            raise NoTransferError(
                "SGLang takes no handles of this trainer's: set transfer.medium: collective, or "
                "have it read versions from memory of the host"
            )
        async with self._changing:
            await to_its_end(self._replica.join(groups, seconds))

    async def receive(self, incoming: IncomingWeights) -> None:
        end = time.monotonic() + incoming.seconds
        self.check_incoming(incoming.manifest)
        async with self._changing:
            await self._still(incoming.mode, partial(self._receive, incoming, end))

    async def _receive(self, incoming: IncomingWeights, end: float) -> None:
        assert self._serving is not None
        try:
            await self._replica.receive(incoming, end)
        except ServiceError:
            await self._go_back()
            raise
        self._serving = self._serving.renamed(incoming.manifest)
        self._replica.serving = (self._serving.version, self._serving.digest)

    def status(self) -> EngineStatus:
        serves = self._replica.is_up and not (self._is_blank or self._is_reviving)
        base = self._replica.base if serves and self._serving is not None else None
        adapters = self._replica.adapters
        current = adapters.current
        serving = base if current is None or base is None else current.weights
        capabilities = self._replica.capabilities
        cache_tokens = capabilities.cache_tokens if capabilities else self._config.cache_tokens
        transfers = capabilities is not None and capabilities.can_transfer
        return EngineStatus(
            version=serving.version if serving else None,
            digest=serving.digest if serving else "",
            prepared_versions=self._prepared.numbers,
            restorable_version=self._restorable.version if self._restorable else None,
            paused=self._paused is not None,
            rank_loads=tuple(self._load.by_rank(cache_tokens)),
            max_running=self._config.max_running,
            max_model_length=self._max_length,
            last_pause_seconds=self._pause_seconds,
            last_prepare_seconds=self._prepare_seconds,
            decode_tokens_total=self._load.drawn_tokens,
            prefill_tokens_total=self._load.prefill_tokens,
            prefix_hit_tokens_total=self._load.prefix_hit_tokens,
            restarts_total=self._replica.restart_count,
            failure=self._failure,
            transfer_ranks=capabilities.tp_size if capabilities and transfers else 0,
            deterministic=bool(capabilities and capabilities.is_seeded),
            base=base if capabilities and capabilities.lora_rank else None,
            adapters=tuple(one.weights for one in adapters.held.values()) if base else (),
            lines={v: one.line for v, one in adapters.held.items() if one.line},
            asleep=self._is_asleep,
            profile=self._replica.profiles.profile,
        )

    async def sleep(self) -> None:
        """A server that was not started yet has nothing to give up, and may be started once awake.

        Raises NoSleepError, or NotQuietError.
        """
        async with self._changing:
            if self._is_asleep:
                return
            if self._paused is None or self._load.inside:
                raise NotQuietError("pause the engine, by abort or after its requests, to sleep")
            self._replica.check_sleep()
            await to_its_end(self._sleep())

    async def _sleep(self) -> None:
        if self._replica.is_up:
            await self._replica.release_memory()
            self._has_released = True
        self._is_asleep = self._is_blank = True

    async def wake(self) -> None:
        async with self._changing:
            if self._is_asleep:
                await to_its_end(self._wake())

    async def _wake(self) -> None:
        if self._has_released:
            await self._replica.resume_memory()
        self._is_asleep = self._has_released = False

    async def profile(self, order: ProfileOrder) -> EngineProfile:
        """Each rank of SGLang writes its files, at the pass after the last one: an engine without
        requests waits with them. It stands still meanwhile.

        Raises NoProfileError, NoWeightsError before there is a server, or EngineFailedError.
        """
        self._check_serving()
        async with self._changing:
            return await to_its_end(self._replica.profile(order))

    def services(self) -> Sequence[EngineService]:
        if self._replica.nodes is None:
            return ()
        register = pb_grpc.add_EngineNodeServiceServicer_to_server
        return (EngineService(register, NodeServicer(self._replica.nodes), NODE_SERVICE),)

    @property
    def pids(self) -> list[int]:
        """Process ids of this engine; empty for a server that runs elsewhere."""
        return self._replica.pids

    async def close(self) -> None:
        self._failure = self._failure or "the engine was closed"
        jobs = list(self._jobs.values())
        self._fail_jobs()
        await asyncio.gather(*(job.close() for job in jobs))
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._replica.close()
        self._disk.shutdown(wait=False, cancel_futures=True)

    @property
    def _max_length(self) -> int:
        capabilities = self._replica.capabilities
        own = self._config.max_model_length
        return own if capabilities is None else min(own, capabilities.max_length)

    def _check_serving(self) -> None:
        if self._failure:
            raise EngineFailedError(self._failure)
        if self._serving is None or self._is_blank:
            raise NoWeightsError("the engine has no weights yet")
        if self._is_reviving or not self._replica.is_up:
            raise EngineFailedError("SGLang is being restarted")

    async def _still(self, mode: PauseMode, change: Callable[[], Awaitable[None]]) -> None:
        """Stops decoding for a change; the time counts as a pause. A paused engine stays so.

        Whoever asks may give up until decoding has stopped: the server makes a change that it was
        asked for whoever waits, and what it serves then must be known here.
        """
        self._gate.shut()
        try:
            if self._paused is None:
                await self._drain(mode)
            await to_its_end(self._change(change))
        finally:
            if self._paused is None and self._serving is not None:
                self._gate.open()

    async def _change(self, change: Callable[[], Awaitable[None]]) -> None:
        began = time.monotonic()
        await self._replica.pause()
        try:
            await change()
        finally:
            if self._paused is None and self._replica.is_up:
                await self._replica.resume()
            self._pause_seconds = time.monotonic() - began

    async def _drain(self, mode: PauseMode) -> None:
        """Waits for, or ends, what has a slot, as `mode` says; waits where nothing can be held."""
        known = self._replica.capabilities
        cannot_hold = known is not None and not known.can_hold
        if mode is PauseMode.WAIT or (mode is PauseMode.IN_PLACE and cannot_hold):
            await self._load.empty()
        if mode is PauseMode.ABORT:
            for job in self._jobs.values():
                job.interrupt()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_SECONDS):
                    await self._load.empty()

    async def _swap(self, version: DiskVersion) -> None:
        """Loads a version; if that fails, loads the one before again."""
        try:
            await self._replica.load(version)
        except ServiceError:
            await self._go_back()
            raise
        self._serve(version)

    def _serve(self, version: DiskVersion) -> None:
        self._settle(version)
        self._restorable = version

    async def _go_back(self) -> None:
        """Serves the last version that is on the disk of this host, or nothing."""
        self._replica.forget_weights()
        if self._restorable is None or not self._replica.is_up:
            return
        try:
            await self._replica.load(self._restorable)
            self._settle(self._restorable)
        except ServiceError as error:
            logger.error("SGLang does not take the weights it had: %s", error)
            await self._replica.kill()  # a new server reads them from the disk

    async def _keep(self) -> None:
        """Watches the server and starts one that ended again, with the weights it had."""
        while True:
            await self._replica.wait_until_ended()
            self._fail_jobs(EngineFailedError("SGLang ended; its requests are lost"))
            async with self._changing:
                if self._failure or self._replica.is_up:
                    continue
                self._is_reviving = True  # one that answers has not yet the weights it had
                try:
                    await self._replica.revive(self._restorable, still=self._paused is not None)
                    if self._restorable is not None:
                        self._settle(self._restorable)
                    self._is_asleep = self._has_released = False
                except ServiceError as error:
                    self._failure = str(error)
                    return
                finally:
                    self._is_reviving = False

    def _fail_jobs(self, error: EngineFailedError | None = None) -> None:
        for job in list(self._jobs.values()):
            job.fail(error or EngineFailedError(self._failure))

    def _settle(self, version: DiskVersion) -> None:
        self._serving = version
        self._is_blank = False
        self._replica.serving = (version.version, version.digest)
        config = version.config
        vocabulary = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
        if not isinstance(vocabulary, int):
            raise UnfitWeightsError("config.json has no vocab_size")
        self._vocabulary = vocabulary
        self._images = version.images
        self._routing = self._routing_of(config)

    def _check_model(self, version: DiskVersion) -> None:
        """Raises UnfitWeightsError unless a version has what the settings ask of a model."""
        self._routing_of(version.config)
        if self._config.sglang.speculative_steps:
            check_drafts(version)

    def _routing_of(self, config: Mapping[str, Any]) -> Routing | None:
        """Reads what routed experts need; None where they are off. Raises UnfitWeightsError."""
        return read_routing(config) if self._config.routed_experts else None

    async def _on_disk(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)

    @staticmethod
    async def _timed(work: Awaitable[None]) -> float:
        began = time.monotonic()
        await work
        return time.monotonic() - began
