"""The reference engine: any plain transformers decoder on any torch device."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import (
    Delta,
    Engine,
    EngineProfile,
    EngineStatus,
    Generation,
    IncomingWeights,
    PauseMode,
    ProfileOrder,
    RankLoad,
    ServedWeights,
    TokenScores,
)
from services.rollout.engine.reference.adapters import ServingAdapter
from services.rollout.engine.reference.core import EngineCore, Outcome
from services.rollout.engine.reference.graphs import obstacle
from services.rollout.engine.reference.loading import (
    PreparedWeights,
    VersionLoader,
    check_plain,
    fit_received,
    open_model,
)
from services.rollout.engine.reference.model import ServingModel, yield_to_others
from services.rollout.engine.reference.profiling import PassProfiler
from services.rollout.engine.stops import StopStrings
from services.rollout.engine.versions import PreparedVersions, check_adapter, check_whole
from services.rollout.errors import (
    AdapterBaseError,
    DuplicateRequestError,
    EngineFailedError,
    MixedWeightsError,
    NotQuietError,
    UnfitWeightsError,
    UnsupportedModelError,
)
from sluice import platform
from sluice.priority import lower_priority, threads_beside
from sluice.runtime.errors import ServiceError
from sluice.runtime.idempotency import to_its_end
from sluice.runtime.stacks import standing
from sluice.weights.manifest import Manifest, ShardFile
from sluice.weights.transfer.group import Receiver
from sluice.weights.transfer.plan import Membership

logger = logging.getLogger(__name__)

T = TypeVar("T")
IDLE_SECONDS = 1.0  # longest wait for commands in one go
CLOSE_SECONDS = 60.0  # longest step that close waits for
LONG_SECONDS = 0.1  # after which it is asked where a step stands

Outbox = list[tuple[int, Outcome]]


@dataclass(frozen=True, eq=False)
class Command:
    """`run` on the device thread. A ServiceError goes to `future`, or to the outbox as `key`."""

    run: Callable[[], Any]
    future: Future[Any] | None = None
    key: int = 0
    when_quiet: bool = False


class _Reporting:
    """Hands the error that ends the block, or None, to `report`, so that none is lost."""

    def __init__(self, report: Callable[[BaseException | None], object]) -> None:
        self._report = report

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self._report(error)
        return True


class DeviceThread:
    """Owns the device: takes commands between steps, and steps while there is work.

    Its methods belong to the event loop; `deliver` and `ended` are called there too.
    """

    def __init__(
        self,
        core: EngineCore,
        deliver: Callable[[Outbox], None],
        ended: Callable[[EngineFailedError], None],
    ) -> None:
        self._core, self._deliver, self._ended = core, deliver, ended
        self.profiler = PassProfiler(core)
        self._inbox: queue.SimpleQueue[list[Command]] = queue.SimpleQueue()
        self._unsent: list[Command] = []  # of this turn of the event loop
        self._open: set[Future[Any]] = set()
        self._quiet: list[Command] = []  # device thread only
        self._closing = False
        self._failure: EngineFailedError | None = EngineFailedError("the engine is not started")
        self._finished = asyncio.Event()
        self._doing: tuple[str, float] | None = None  # what, and since when; any thread may look
        self._thread: threading.Thread | None = None

    @property
    def doing(self) -> tuple[str, float, str]:
        """What it does now, empty for nothing, for how many seconds, and where if that is long."""
        doing = self._doing
        if doing is None or self._thread is None:
            return "", 0.0, ""
        seconds = time.monotonic() - doing[1]
        return doing[0], seconds, standing(self._thread.ident) if seconds > LONG_SECONDS else ""

    def start(self, loop: asyncio.AbstractEventLoop, threads: int) -> None:
        self._loop, self._failure = loop, None
        # `close` ends it; as a daemon it does not hold up a process that ends without.
        self._thread = threading.Thread(
            target=self._main, args=(threads,), name="engine-device", daemon=True
        )
        self._thread.start()

    def post(self, run: Callable[[], None], key: int) -> None:
        """Runs before the next step; a ServiceError is delivered under `key`."""
        self._send(Command(run, key=key))

    async def call(self, run: Callable[[], T], *, when_quiet: bool = False) -> T:
        """Runs before the next step, or when nothing decodes; until then nothing is admitted.

        Cancelling the wait withdraws the command if it has not run.
        """
        future: Future[T] = Future()
        self._send(Command(run, future=future, when_quiet=when_quiet))
        self._open.add(future)
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._open.discard(future)

    async def close(self) -> None:
        """Ends after the current step; raises TimeoutError when that takes CLOSE_SECONDS."""
        if self._failure is None:
            self._send(Command(self._set_closing))
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._finished.wait()

    def _send(self, command: Command) -> None:
        """Sends the commands of one turn of the event loop together, so that requests that come
        together are prefilled together."""
        if self._failure is not None:
            raise self._failure
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(command)

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        self._inbox.put(unsent)

    def _end(self, error: BaseException | None) -> None:
        if error is not None:
            logger.error("a step of the engine raised", exc_info=error)
        why = "the engine is closed" if error is None else f"a step raised {error!r}"
        if error is not None and platform.is_out_of_memory(error):
            full = platform.current().memory()
            why = f"out of memory: {platform.explain_memory(error, full)}; {self._core.most_cached}"
        self._failure = EngineFailedError(why)
        for future in self._open:
            if not future.done():
                future.set_exception(self._failure)
        self._ended(self._failure)
        self._finished.set()

    # Below: on the device thread.

    def _main(self, threads: int) -> None:
        with _Reporting(lambda error: self._loop.call_soon_threadsafe(self._end, error)):
            torch.set_num_threads(threads)
            try:
                self._run()
            finally:
                self.profiler.drop("the engine was closed")

    def _run(self) -> None:
        while not self._closing:
            for command in self._take():
                if command.when_quiet:
                    self._quiet.append(command)
                else:
                    self._execute(command)
            self._core.draining = bool(self._quiet)
            if self._core.has_work:
                self._step()
            self._serve_quiet()
            if outbox := self._core.take_outbox():
                self._loop.call_soon_threadsafe(self._deliver, outbox)
            if self.profiler.is_complete:
                self._write_profile()

    def _write_profile(self) -> None:
        self._doing = "the writing of a profile", time.monotonic()
        self.profiler.write()
        self._doing = None

    def _step(self) -> None:
        self._doing = "a step", time.monotonic()
        self._core.step()
        self._doing = None

    def _take(self) -> list[Command]:
        try:
            if self._core.has_work:
                batches = [self._inbox.get_nowait()]
            else:
                batches = [self._inbox.get(timeout=IDLE_SECONDS)]
            while not self._inbox.empty():
                batches.append(self._inbox.get_nowait())
        except queue.Empty:
            return []
        return list(itertools.chain.from_iterable(batches))

    def _serve_quiet(self) -> None:
        self._quiet = [c for c in self._quiet if c.future is None or not c.future.cancelled()]
        if self._core.quiet:
            for command in self._quiet:
                self._execute(command)
            self._quiet = []
        self._core.draining = bool(self._quiet)

    def _execute(self, command: Command) -> None:
        future = command.future
        if future is not None and not future.set_running_or_notify_cancel():
            return
        run = getattr(command.run, "func", command.run)  # of a partial
        self._doing = f"{getattr(run, '__name__', 'a command')}", time.monotonic()
        try:
            result = command.run()
        except ServiceError as error:
            if future is not None:
                future.set_exception(error)
            else:
                self._core.outbox.append((command.key, error))
        else:
            if future is not None:
                future.set_result(result)
        self._doing = None

    def _set_closing(self) -> None:
        self._closing = True


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ReferenceEngine(Engine):
    """Serves asyncio callers; the model and all that runs belong to one device thread."""

    def __init__(self, config: EngineConfig, tokenizer: Path | None = None) -> None:
        self._config = config
        self._stops = StopStrings(tokenizer or (Path(config.model) if config.model else None))
        self._dtype, self._device = DTYPES[config.dtype], platform.current().device()
        platform.current().keep_memory()
        self._core = EngineCore(config)
        self._thread = DeviceThread(self._core, self._deliver, self._ended)
        self._loader = ThreadPoolExecutor(1, "engine-weights", initializer=yield_to_others)
        self._stagers = ThreadPoolExecutor(
            threads_beside(), "engine-stage", initializer=lower_priority
        )
        # where a tensor lies may round a product otherwise
        shares = not config.deterministic
        self._versions = VersionLoader(
            self._dtype,
            self._device,
            shares=shares,
            asked=config.operations,
            ready=self._watched,
        )
        self._serving: PreparedWeights | None = None
        self._base_asleep: ServedWeights | None = None  # the model's own that served, meanwhile
        self._prepared = PreparedVersions[PreparedWeights | ServingAdapter]()
        self._receiver: Receiver | None = None
        self._keys = itertools.count(1)
        self._streams: dict[int, asyncio.Queue[list[Outcome]]] = {}
        self._names: set[str] = set()
        self._failure = ""
        self._pause_seconds = self._prepare_seconds = 0.0

    async def start(self) -> None:
        self._check_graphs(None)
        threads = self._config.threads or torch.get_num_threads()
        if self._config.deterministic:
            threads = 1
        await self._load(lambda: None)  # its thread sets thread counts before the device thread
        self._thread.start(asyncio.get_running_loop(), threads)
        if self._config.model:
            path = Path(self._config.model)
            model, weights = await self._load(self._opening(path))
            self._versions.model = self._watched(model)
            self._serving = weights
            await self._thread.call(partial(self._core.serve, model, weights))

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        searches = await self._stops.searches(generation)
        left = max(1, generation.sample_count)  # the core refuses 0: wait for that
        with self._stream(generation.request_id) as (key, outcomes):
            self._thread.post(partial(self._core.submit, key, generation, searches), key)
            while left:
                for outcome in await outcomes.get():
                    if isinstance(outcome, ServiceError):
                        raise outcome
                    assert isinstance(outcome, Delta)
                    left -= outcome.finish_reason is not None
                    yield outcome

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
        with self._stream("") as (key, outcomes):
            submit = partial(
                self._core.submit_score, key, token_ids, prompt_length, top_count, version
            )
            self._thread.post(submit, key)
            (outcome,) = await outcomes.get()
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
        self._check_awake()
        if self._prepared.has(version, digest):
            return
        core = self._core
        weights = await self._load(
            partial(self._versions.load, version, digest, directory, core.base, core.adapters)
        )
        self._prepared.add(weights)
        self._prepare_seconds = time.monotonic() - began

    def _opening(self, path: Path) -> Callable[[], tuple[ServingModel, PreparedWeights]]:
        """What reads a model directory."""
        return partial(open_model, path, self._dtype, self._device, self._config.operations)

    def _check_graphs(self, model: ServingModel | None) -> None:
        """Raises UnsupportedModelError where graphs are asked for and there can be none."""
        if self._config.decode_graphs == "on" and (reason := obstacle(model)):
            raise UnsupportedModelError(
                f"decode_graphs: on cannot be: {reason}", key="decode_graphs"
            )

    def _watched(self, model: ServingModel) -> ServingModel:
        self._check_graphs(model)
        if self._config.routed_experts:
            model.watch_routers()
        return model

    async def stage(self, path: Path, shard: ShardFile) -> None:
        if not self._versions.serves_as_it_lies(path, shard):
            self._check_awake()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._stagers, self._versions.stage, path, shard)

    def unstage(self) -> None:
        self._versions.forget()

    def _known_model(self) -> ServingModel:
        if self._versions.model is None:
            raise UnfitWeightsError("the engine has no model yet: it needs the store")
        return self._versions.model

    def check_incoming(self, manifest: Manifest) -> None:
        self._check_awake()
        check_whole(manifest, self._core.adapters)
        model = self._known_model()
        check_plain(manifest)
        if manifest.adapter is None:
            model.check_incoming(manifest)
            return
        check_adapter(manifest, self._core.base)
        model.adapters.check(manifest.version, manifest.tensors)

    async def leave_transfer(self) -> None:
        self._leave_transfer()

    async def join_transfer(self, groups: Sequence[Membership], seconds: float) -> None:
        self._leave_transfer()
        receiver = self._receiver = Receiver(yield_to_others)
        await receiver.join(groups, seconds)

    async def receive(self, incoming: IncomingWeights) -> None:
        began = time.monotonic()
        receiver = self._receiver
        assert receiver is not None, "no group was joined"
        try:
            model, base = self._known_model(), self._core.base
            fit = partial(fit_received, model, base, incoming.manifest)
            weights = await receiver.receive(incoming.buckets, incoming.seconds, fit)
        except BaseException:
            if self._receiver is receiver:
                self._leave_transfer()
            raise
        self._prepared.add(weights)
        self._prepare_seconds = time.monotonic() - began

    def _leave_transfer(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    async def commit(self, version: int, mode: PauseMode) -> float:
        with self._prepared.serving(version) as weights:
            if isinstance(weights, ServingAdapter):
                return await self._commit_adapter(weights, mode)
            if self._core.adapters:  # committed since it was prepared
                raise MixedWeightsError(f"version {version} would take adapters their base")
            swap = partial(self._swap, self._known_model(), weights, mode)
            wait = mode is PauseMode.WAIT
            self._pause_seconds, retired = await self._thread.call(swap, when_quiet=wait)
        before, self._serving = self._serving, weights
        self._loader.submit(self._retire, before, retired)
        return self._pause_seconds

    async def _commit_adapter(self, adapter: ServingAdapter, mode: PauseMode) -> float:
        """Nothing waits: what has begun may go on under the adapter that it began with."""
        swap = partial(self._swap_adapter, adapter, mode)
        self._pause_seconds, gone = await self._thread.call(swap)
        self._loader.submit(gone.clear)
        return self._pause_seconds

    def _swap_adapter(
        self, adapter: ServingAdapter, mode: PauseMode
    ) -> tuple[float, list[ServingAdapter]]:
        began = time.monotonic()
        base = self._core.base
        if base is None or base.digest != adapter.spec.base_digest:
            raise AdapterBaseError(
                f"the base of version {adapter.version} serves no more", version=adapter.version
            )
        if mode is PauseMode.ABORT and not adapter.line:
            self._core.abort_running()
        gone = self._core.serve_adapter(adapter, drain=mode is PauseMode.WAIT)
        return time.monotonic() - began, gone

    async def sleep(self) -> None:
        if not self._core.asleep:
            await to_its_end(self._sleep())

    async def _sleep(self) -> None:
        base = self._core.base
        freed = await self._thread.call(self._core.sleep)
        await self._load(lambda: None)  # what was being prepared is by now
        self._prepared.clear()
        self._serving = None
        self._base_asleep = base if base is not None and base.version == 0 else None
        self._leave_transfer()
        await self._load(partial(self._free, freed))

    async def wake(self) -> None:
        if self._core.asleep:
            await to_its_end(self._wake())

    async def _wake(self) -> None:
        """Weights of `config.model`, which adapters are put on, are read again if they served."""
        if (base := self._base_asleep) is not None:
            path = Path(self._config.model or "")
            read = self._opening(path)
            weights = (await self._load(read))[1]
            if weights.digest != base.digest:
                raise UnfitWeightsError(f"{path.name!r} is not the base that served before")
            swap = partial(self._core.serve, self._known_model(), weights)
            await self._thread.call(swap)
            self._serving = weights
        self._core.asleep = False

    def _free(self, freed: list[object]) -> None:
        freed.clear()
        self._versions.release()
        platform.current().release_memory()

    def _check_awake(self) -> None:
        if self._core.asleep:
            raise NotQuietError("the engine sleeps; wake it first")

    async def profile(self, order: ProfileOrder) -> EngineProfile:
        """Files are written by the thread of the device, which does nothing else meanwhile.

        Other threads of this process stand still for parts of that, as torch keeps Python's lock.
        """
        return await self._thread.call(partial(self._thread.profiler.begin, order))

    def status(self) -> EngineStatus:
        core = self._core
        version, digest, _ = core.version or (None, "", "")
        busy, busy_seconds, busy_at = self._thread.doing
        load = RankLoad(
            running_count=core.running_count,
            waiting_count=core.waiting_count,
            used_tokens=core.reserved_tokens,
            max_tokens=self._config.cache_tokens,
        )
        return EngineStatus(
            version=version,
            digest=digest,
            prepared_versions=self._prepared.numbers,
            paused=core.paused is not None,
            rank_loads=(load,),
            max_running=self._config.max_running,
            max_model_length=core.max_length,
            last_pause_seconds=self._pause_seconds,
            last_prepare_seconds=self._prepare_seconds,
            decode_tokens_total=core.drawn_tokens,
            prefill_tokens_total=core.prefill_tokens,
            prefix_hit_tokens_total=core.prefix_hit_tokens,
            failure=self._failure,
            busy=busy,
            busy_seconds=busy_seconds,
            busy_at=busy_at,
            deterministic=self._config.deterministic,
            takes_min_new_tokens=True,
            transfer_ranks=1,
            base=core.base,
            adapters=tuple(core.adapters),
            lines=core.lines,
            asleep=core.asleep,
            profile=self._thread.profiler.profile,
        )

    async def close(self) -> None:
        self._leave_transfer()
        await self._thread.close()
        self._loader.shutdown(wait=False, cancel_futures=True)
        self._stagers.shutdown(wait=False, cancel_futures=True)
        self._versions.close()

    def _swap(
        self, model: ServingModel, weights: PreparedWeights, mode: PauseMode
    ) -> tuple[float, list[torch.nn.Parameter | None]]:
        """Swaps weights on the device thread; returns the seconds and what served before."""
        began = time.monotonic()
        if mode is PauseMode.ABORT:
            self._core.abort_running()
        retired = self._core.serve(model, weights)
        return time.monotonic() - began, retired

    def _retire(
        self, before: PreparedWeights | None, retired: list[torch.nn.Parameter | None]
    ) -> None:
        retired.clear()
        if before is not None:
            self._versions.retire(before)

    async def _load(self, read: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._loader, read)

    @contextmanager
    def _stream(self, name: str) -> Iterator[tuple[int, asyncio.Queue[list[Outcome]]]]:
        """Yields a queue of outcomes under a fresh key; what has not ended on exit is aborted."""
        if name in self._names:
            raise DuplicateRequestError(f"request {name!r} is here already", request_id=name)
        key, outcomes = next(self._keys), asyncio.Queue[list[Outcome]]()
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
        together: dict[int, list[Outcome]] = {}
        for key, outcome in outbox:
            together.setdefault(key, []).append(outcome)
        for key, outcomes in together.items():
            if key in self._streams:
                self._streams[key].put_nowait(outcomes)

    def _ended(self, failure: EngineFailedError) -> None:
        self._failure = str(failure)
        for outcomes in self._streams.values():
            outcomes.put_nowait([failure])
