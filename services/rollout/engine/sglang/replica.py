"""The server of an engine while it lives: reached, held, given weights, and revived."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.sglang.client import (
    Capabilities,
    MissingFeatureError,
    SglangClient,
    SGLangRefusedError,
    shake_hands,
)
from services.rollout.engine.sglang.jobs import ServerHandle
from services.rollout.engine.sglang.load import Load, SlotLimiter
from services.rollout.engine.sglang.samples import Version, tag
from services.rollout.engine.sglang.servers import Servers
from services.rollout.engine.sglang.weights import DiskVersion, ServerWeights
from services.rollout.errors import EngineFailedError, NoSleepError, NoWeightsError

if TYPE_CHECKING:
    from services.rollout.engine.interface import IncomingWeights
    from sluice.weights.transfer.plan import Membership

logger = logging.getLogger(__name__)

WATCH_SECONDS = 2.0
CONTROL_SECONDS = 60.0


class Replica:
    """One server, of this process or attached. Changes are made by one caller at a time."""

    def __init__(self, config: EngineConfig) -> None:
        self._config, self._sglang = config, config.sglang
        self._servers = Servers(config)
        self._client: SglangClient | None = None
        self._weights: ServerWeights | None = None
        self._gate, self._load = SlotLimiter(0, 0), Load(0)
        self._line: ServerHandle | None = None
        self._started = asyncio.Event()
        self._expected: dict[str, dict[str, str]] = {}  # checksums by version tag
        self._is_held = False
        self.capabilities: Capabilities | None = None
        self.serving: Version | None = None
        self.restart_count = 0

    @property
    def is_up(self) -> bool:
        return self._weights is not None

    @property
    def line(self) -> ServerHandle:
        if self._line is None:
            raise EngineFailedError("SGLang is not up")
        return self._line

    @property
    def pids(self) -> list[int]:
        return self._servers.pids

    def open_line(self, gate: SlotLimiter, load: Load) -> None:
        """Requests go through `gate` and are counted in `load`."""
        self._gate, self._load = gate, load
        self._connect_line()

    async def attach(self) -> Capabilities:
        """Reach the configured server. Raises MissingFeatureError or EngineFailedError."""
        await self._connect(self._sglang.url)
        assert self.capabilities is not None
        return self.capabilities

    async def take_over(self, staged: DiskVersion) -> None:
        """Give an attached server these weights, and let it go on if somebody had stopped it."""
        if not self.is_up:
            await self.attach()
        await self.hold()
        await self.load(staged)
        await self.go_on()

    async def launch(self, staged: DiskVersion) -> None:
        """Start a server with these weights. Raises what `attach` does, DigestMismatchError."""
        if self._sglang.url:
            raise EngineFailedError(f"SGLang at {self._sglang.url} does not answer")
        await self._servers.stop()  # what an earlier one left behind
        await self._servers.start(staged.directory, tag(staged.version, staged.digest))
        try:
            await self._connect(self._servers.url)
            assert self._weights is not None
            await self._weights.check(staged)
        except BaseException:
            await self._disconnect()
            await self._servers.stop()
            raise
        self._started.set()

    async def revive(self, staged: DiskVersion | None, *, still: bool) -> None:
        """Start the server that ended anew, or wait for an attached one to come back.

        `staged` is None for an attached one that was given no weights yet.

        Raises EngineFailedError when that has failed too often.
        """
        await self._disconnect()
        for attempt in range(1, self._sglang.restarts + 1):
            await asyncio.sleep(self._sglang.backoff.seconds(attempt))
            try:
                if staged is None:
                    await self.attach()
                elif self._sglang.url:
                    await self.take_over(staged)
                else:
                    await self.launch(staged)
                if still:
                    await self.hold()
                self.restart_count += 1
                return
            except (EngineFailedError, MissingFeatureError) as error:
                logger.error("restart %d of SGLang: %s", attempt, error)
        raise EngineFailedError(f"SGLang did not come back in {self._sglang.restarts} attempts")

    async def gone(self) -> None:
        """Return once a server that was up has ended or answers no more."""
        await self._started.wait()
        if self._sglang.url:
            misses = 0
            while misses < 3 and self._client is not None:
                await asyncio.sleep(WATCH_SECONDS)
                misses = 0 if await self._client.answers() else misses + 1
        else:
            status = await self._servers.wait()
            logger.error("SGLang ended with %d", status)
        self._started.clear()
        await self._disconnect()

    async def hold(self) -> None:
        """Stop decoding at once; returns when nothing that was drawn is still on its way."""
        if self._is_held or not self.is_up:
            return
        await self._post("/pause_generation", {"mode": "in_place"})
        self._is_held = True
        client, drawn = self._reached, -1
        while self._load.inside and drawn != self._load.drawn_tokens:
            drawn = self._load.drawn_tokens
            await client.get("/server_info")

    async def go_on(self) -> None:
        if self._is_held and self.is_up:
            await self._post("/continue_generation", {"torch_empty_cache": False})
        self._is_held = False

    def expect(self, staged: DiskVersion) -> None:
        """Compute what must be found after `load`; blocks."""
        if self._weights is not None and self._weights.parameters:
            name = tag(staged.version, staged.digest)
            self._expected[name] = self._weights.expected(staged)

    async def load(self, staged: DiskVersion) -> None:
        """Swap in a version of the disk. Raises UnfitWeightsError or DigestMismatchError."""
        if self._weights is None:
            raise EngineFailedError("SGLang is not up")
        name = tag(staged.version, staged.digest)
        await self._weights.load(staged, self._expected.get(name))
        self._expected = {name: self._expected[name]} if name in self._expected else {}

    def forget_weights(self) -> None:
        """Nothing is known of what the server holds."""
        if self._weights is not None:
            self._weights.forget()

    async def join(self, groups: Sequence[Membership], seconds: float) -> None:
        if self._weights is None:
            raise EngineFailedError("SGLang is not up")
        await self._weights.join(groups, seconds)

    async def receive(self, incoming: IncomingWeights, end: float) -> None:
        """Raises EngineFailedError; the server is ended then, for it may wait for ever."""
        if self._weights is None:
            raise EngineFailedError("SGLang is not up")
        try:
            await self._weights.receive(incoming, end)
        except EngineFailedError:
            await self.kill()
            raise

    async def occupy(self, verb: str) -> None:
        """`release` or `resume` the memory of weights and cache."""
        if self.capabilities is None or not self.capabilities.can_sleep:
            raise NoSleepError(
                "SGLang keeps its memory unless it was started with enable_memory_saver"
            )
        await self._post(f"/{verb}_memory_occupation", {"tags": ["weights", "kv_cache"]})

    async def kill(self) -> None:
        """End the server; `gone` returns, and a new one may be started."""
        await self._disconnect()
        await self._servers.stop_server()

    async def close(self) -> None:
        await self._disconnect()
        await self._servers.stop()

    @property
    def _reached(self) -> SglangClient:
        if self._client is None:
            raise EngineFailedError("SGLang is not up")
        return self._client

    async def _post(self, path: str, body: dict[str, object]) -> None:
        try:
            await self._reached.post(path, body, CONTROL_SECONDS)
        except SGLangRefusedError as error:
            raise EngineFailedError(str(error)) from error

    async def _connect(self, url: str) -> None:
        client = SglangClient(url, self._sglang.api_key)
        verifies = self._sglang.verify == "checksum"
        try:
            self.capabilities = await shake_hands(
                client, checksums=verifies, experts=self._config.routed_experts
            )
        except BaseException:
            await client.close()
            raise
        self._client, self._is_held = client, False
        self._weights = ServerWeights(
            client, self.capabilities, verifies=verifies, seconds=self._sglang.update_seconds
        )
        self._connect_line()
        if self._sglang.url:
            self._started.set()

    def _connect_line(self) -> None:
        if self._client is not None and self.capabilities is not None:
            self._line = ServerHandle(
                self._client, self.capabilities, self._gate, self._load, self._version
            )

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        self._weights = self._line = None
        self._is_held = False
        if client is not None:
            with contextlib.suppress(EngineFailedError):
                await client.close()

    def _version(self) -> Version:
        if self.serving is None:
            raise NoWeightsError("the engine has no weights yet")
        return self.serving
