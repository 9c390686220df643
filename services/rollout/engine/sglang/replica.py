"""Starts or reaches the server of an engine, gives it weights, and starts it again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import EngineProfile, ProfileOrder, ServedWeights
from services.rollout.engine.sglang.adapters import AdapterFolders, DiskAdapter, ServerAdapters
from services.rollout.engine.sglang.client import (
    PROBE_SECONDS,
    Capabilities,
    MissingFeatureError,
    SglangClient,
    SGLangRefusedError,
    shake_hands,
)
from services.rollout.engine.sglang.group import ServerGroup
from services.rollout.engine.sglang.jobs import ServerHandle
from services.rollout.engine.sglang.load import Load, SlotLimiter
from services.rollout.engine.sglang.nodes import EngineNodes
from services.rollout.engine.sglang.profiling import ServerProfiles
from services.rollout.engine.sglang.weights import DiskVersion, ServerWeights
from services.rollout.engine.versions import Version
from services.rollout.errors import EngineFailedError, NoSleepError, NoWeightsError
from sluice.runtime.idempotency import cancel_all

if TYPE_CHECKING:
    from services.rollout.engine.interface import IncomingWeights
    from sluice.weights.transfer.plan import Membership

logger = logging.getLogger(__name__)

WATCH_SECONDS = 2.0
MISSES = 3  # in a row, of an attached server
CONTROL_SECONDS = 60.0
IDLE_SECONDS = 50.0  # for requests that were given up here to end in the server
OCCUPIED = ["weights", "kv_cache"]


class Replica:
    """Owns one server, started here or attached. Changes are made by one caller at a time."""

    def __init__(self, config: EngineConfig) -> None:
        self._config, self._sglang = config, config.sglang
        self._servers = ServerGroup(config)
        self._client: SglangClient | None = None
        self._weights: ServerWeights | None = None
        self._gate, self._load = SlotLimiter(0, 0), Load(0)
        self._handle: ServerHandle | None = None
        self._started = asyncio.Event()
        self._expected: dict[str, dict[str, str]] = {}  # checksums by version tag
        self._is_paused = False
        self.adapters = ServerAdapters(config.max_adapters, AdapterFolders())
        self.profiles = ServerProfiles()
        self.capabilities: Capabilities | None = None
        self.serving: Version | None = None
        self.restart_count = 0

    @property
    def is_up(self) -> bool:
        return self._weights is not None

    @property
    def handle(self) -> ServerHandle:
        if self._handle is None:
            raise EngineFailedError("SGLang is not up")
        return self._handle

    @property
    def pids(self) -> list[int]:
        return self._servers.pids

    @property
    def nodes(self) -> EngineNodes | None:
        """Further nodes of the engine, where it has any."""
        return self._servers.nodes

    def open(self, gate: SlotLimiter, load: Load) -> None:
        """Sends requests through `gate` and counts them in `load`."""
        self._gate, self._load = gate, load
        self._make_handle()

    async def attach(self) -> Capabilities:
        """Reaches the configured server. Raises MissingFeatureError or EngineFailedError."""
        await self._connect(SglangClient(self._sglang.url, self._sglang.api_key))
        assert self.capabilities is not None
        return self.capabilities

    async def take_over(self, version: DiskVersion) -> None:
        """Gives an attached server these weights, and resumes it if somebody had stopped it."""
        if not self.is_up:
            await self.attach()
        await self.pause()
        await self.load(version)
        await self.resume()

    async def launch(self, version: DiskVersion) -> None:
        """Starts a server with these weights. Raises what `attach` does, DigestMismatchError."""
        if self._sglang.url:
            raise EngineFailedError(f"SGLang at {self._sglang.url} does not answer")
        await self._servers.stop()  # what an earlier one left behind
        await self._servers.start(version.directory, version.tag)
        try:
            await self._connect(self._servers.client())
            assert self._weights is not None
            await self._weights.check(version)
        except BaseException:
            await self._disconnect()
            await self._servers.stop()
            raise
        self._started.set()

    async def revive(self, version: DiskVersion | None, *, still: bool) -> None:
        """Starts the server that ended anew, or waits for an attached one to come back.

        `version` is None for an attached one that was given no weights yet.

        Raises EngineFailedError when that has failed too often.
        """
        await self._disconnect()
        for attempt in range(1, self._sglang.restarts + 1):
            await asyncio.sleep(self._sglang.backoff.seconds(attempt))
            try:
                if version is None:
                    await self.attach()
                elif self._sglang.url:
                    await self.take_over(version)
                else:
                    await self.launch(version)
                await self.restore_adapters()
                if still:
                    await self.pause()
                self.restart_count += 1
                return
            except (EngineFailedError, MissingFeatureError) as error:
                logger.error("restart %d of SGLang: %s", attempt, error)
        raise EngineFailedError(f"SGLang did not come back in {self._sglang.restarts} attempts")

    async def wait_until_ended(self) -> None:
        """Returns once a server that was up has ended, answers no more or hangs; all that belongs
        to it has been ended then."""
        await self._started.wait()
        watching = [asyncio.create_task(self._until_silent(), name="watch SGLang")]
        if not self._sglang.url:
            watching.append(asyncio.create_task(self._servers.wait(), name="end of SGLang"))
        try:
            await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
            why = next(task.result() for task in reversed(watching) if task.done())
        finally:
            await cancel_all(watching)
        logger.error("%s", why)
        self._started.clear()
        await self._servers.kill()  # first, so that calls under way end
        await self._disconnect()
        await self.profiles.lose(why)

    async def _until_silent(self) -> str:
        """Returns once a server has given no answer, or no token, for too long; says which.

        Seconds count while this process looks: it may have been stopped itself.
        """
        misses, silent, stuck, moves = 0, 0.0, 0.0, -1
        while self._client is not None:
            began = time.monotonic()
            await asyncio.sleep(WATCH_SECONDS)
            client = self._client
            answers = client is not None and await client.answers()
            looked = min(time.monotonic() - began, WATCH_SECONDS + PROBE_SECONDS)
            misses, silent = (0, 0.0) if answers else (misses + 1, silent + looked)
            moved = self._load.moves != moves or self._is_paused or not self._load.inside
            moves, stuck = self._load.moves, 0.0 if moved else stuck + looked
            if self._sglang.url:
                if misses >= MISSES:
                    break
                continue
            if silent > self._sglang.silent_seconds:
                return f"SGLang gave no answer for {silent:.0f} s"
            if stuck > self._config.stuck_seconds:
                return f"SGLang has requests, and gave no token for {stuck:.0f} s"
        return "SGLang does not answer"

    async def pause(self) -> None:
        """Stops decoding at once; returns when nothing that was drawn is still on its way."""
        if self._is_paused or not self.is_up:
            return
        await self._post("/pause_generation", {"mode": "in_place"})
        self._is_paused = True
        client, drawn = self._reached, -1
        while self._load.inside and drawn != self._load.drawn_tokens:
            drawn = self._load.drawn_tokens
            await client.get("/server_info")
        if self._load.inside and self.capabilities is not None and self.capabilities.overlaps:
            # The device may still be at a step, which weights must not change under; SGLang waits
            # for it before checksums, of which none is asked for.
            await self._post("/weights_checker", {"action": "checksum", "skip_tensor_list": [""]})

    async def resume(self) -> None:
        """Lets a paused server decode again."""
        if self._is_paused and self.is_up:
            await self._post("/continue_generation", {"torch_empty_cache": False})
        self._is_paused = False

    def expect(self, version: DiskVersion) -> None:
        """Computes the checksums that `load` must bring; blocks."""
        if self._weights is not None and self._weights.parameters:
            self._expected[version.tag] = self._weights.expected(version)

    async def load(self, version: DiskVersion) -> None:
        """Swaps in a version of the disk. Raises UnfitWeightsError or DigestMismatchError."""
        name = version.tag
        await self._server_weights.load(version, self._expected.get(name))
        self._expected = {name: self._expected[name]} if name in self._expected else {}

    async def serve_adapter(self, adapter: DiskAdapter) -> None:
        """Loads an adapter beside the weights, for requests from now on."""
        await self.adapters.serve(self._reached, adapter, self._sglang.update_seconds)

    async def restore_adapters(self) -> None:
        """Gives a server that was started anew the newest adapter. Raises EngineFailedError."""
        await self.adapters.restore(self._reached, self._sglang.update_seconds)

    def forget_weights(self) -> None:
        """Forgets what the server holds."""
        if self._weights is not None:
            self._weights.forget()

    async def join(self, groups: Sequence[Membership], seconds: float) -> None:
        await self._server_weights.join(groups, seconds)

    async def leave(self) -> None:
        """Leaves the groups, where there still is a server that is in any."""
        if self.is_up:
            await self._server_weights.leave()

    async def receive(self, incoming: IncomingWeights, end: float) -> None:
        """Takes a version over the groups. After EngineFailedError, which it raises, the server is
        ended, for it may wait for ever."""
        weights = self._server_weights
        try:
            await weights.receive(incoming, end)
        except EngineFailedError:
            await self.kill()
            raise

    def check_sleep(self) -> None:
        """Raises NoSleepError for a server that cannot, or is not started so that it could."""
        known = self.capabilities
        if known is None:
            can_sleep = bool(self._sglang.server_args.get("enable_memory_saver"))
            adapts = self._sglang.lora is not None
        else:
            can_sleep, adapts = known.can_sleep, bool(known.lora_rank)
        if not can_sleep:
            raise NoSleepError(
                "SGLang keeps its memory unless it was started with enable_memory_saver"
            )
        if adapts:
            raise NoSleepError("SGLang keeps the base of its adapters, so it does not sleep")

    async def release_memory(self) -> None:
        """Has a paused server without requests give up the memory of weights and cache.

        It ends itself where it is asked to with a request, and may still have some that were given
        up here, or a step: these end first.
        """
        await self.resume()
        try:
            await self._post(f"/flush_cache?timeout={IDLE_SECONDS:g}", {})
        finally:
            await self.pause()
        await self._post("/release_memory_occupation", {"tags": OCCUPIED})

    async def resume_memory(self) -> None:
        """Has the server take the memory again that it gave up."""
        await self._post("/resume_memory_occupation", {"tags": OCCUPIED})

    async def profile(self, order: ProfileOrder) -> EngineProfile:
        """Has the servers record. Raises NoProfileError or EngineFailedError."""
        client, known = self._reached, self.capabilities
        assert known is not None
        return await self.profiles.begin(client, known, order)

    async def kill(self) -> None:
        """Ends the server; `wait_until_ended` returns, and a new one may be started."""
        await self._disconnect()
        await self._servers.kill_server()

    async def close(self) -> None:
        await self.profiles.close()
        await self._disconnect()
        await self._servers.stop()
        self.adapters.close()

    @property
    def _server_weights(self) -> ServerWeights:
        if self._weights is None:
            raise EngineFailedError("SGLang is not up")
        return self._weights

    @property
    def _reached(self) -> SglangClient:
        if self._client is None:
            raise EngineFailedError("SGLang is not up")
        return self._client

    async def _post(self, path: str, body: Mapping[str, object]) -> None:
        try:
            await self._reached.post(path, body, CONTROL_SECONDS)
        except SGLangRefusedError as error:
            raise EngineFailedError(str(error)) from error

    async def _connect(self, client: SglangClient) -> None:
        verifies = self._sglang.verify == "checksum"
        try:
            self.capabilities = await shake_hands(
                client, checksums=verifies, experts=self._config.routed_experts
            )
        except BaseException:
            await client.close()
            raise
        if self._sglang.prefill is not None:  # a group would have to take in both servers
            self.capabilities = replace(self.capabilities, can_transfer=False)
        self._client, self._is_paused = client, False
        self._weights = ServerWeights(
            client, self.capabilities, verifies=verifies, seconds=self._sglang.update_seconds
        )
        self._make_handle()
        if self._sglang.url:
            self._started.set()

    def _make_handle(self) -> None:
        if self._client is not None and self.capabilities is not None:
            self._handle = ServerHandle(
                self._client,
                self.capabilities,
                self._gate,
                self._load,
                self._weights_of,
                self.adapters,
            )

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        self._weights = self._handle = None
        self._is_paused = False
        if client is not None:
            with contextlib.suppress(EngineFailedError):
                await client.close()

    @property
    def base(self) -> ServedWeights | None:
        """The model that serves, without adapters."""
        return None if self.serving is None else ServedWeights(*self.serving)

    def _weights_of(self, version: int | None) -> ServedWeights:
        """The weights of a version, of those that are held; None: those that serve."""
        base = self.base
        if base is None:
            raise NoWeightsError("the engine has no weights yet")
        if version is not None:
            return self.adapters.find(version, base)
        return base if self.adapters.current is None else self.adapters.current.weights
