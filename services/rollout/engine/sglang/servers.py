"""One server process: started, watched and ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.requests import all_of
from services.rollout.engine.sglang.client import SglangClient, SGLangRefusedError
from services.rollout.engine.sglang.commands import (
    Launch,
    command,
    engine_arguments,
    environment,
    model_arguments,
)
from services.rollout.engine.sglang.staging import read_config
from services.rollout.engine.sglang.topology import encoder_arguments
from services.rollout.errors import EngineFailedError
from sluice import platform
from sluice.config import ConfigError

logger = logging.getLogger(__name__)

SHIM = Path(__file__).with_name("launch.py")
POLL_SECONDS = 0.25
PORTS = range(20000, 32000)


def free_port(host: str) -> int:
    """A port that nobody listens at now, of those that no kernel hands out by itself.

    SGLang takes it long after it was chosen. Raises EngineFailedError.
    """
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind((host, port))
            return port
    raise EngineFailedError(f"no free port at {host}")


class ServerProcess:
    """Owns a server and its children, which end with it; also when this process is killed.

    The server leads a process group of its own. Its output goes where this process's errors go.
    """

    def __init__(self, launch: Launch, stop_seconds: float) -> None:
        self.launch = launch
        self._stop_seconds = stop_seconds
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process is None or self._process.returncode is not None

    async def start(self, answers: Callable[[], Awaitable[bool]], seconds: float) -> None:
        """Start and wait until `answers`. Raises EngineFailedError; then nothing is left."""
        command = self.launch.command
        self._process = await asyncio.create_subprocess_exec(
            command[0],
            str(SHIM),
            str(os.getpid()),
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if _has_file(sys.stderr) else asyncio.subprocess.DEVNULL,
            env={**os.environ, **self.launch.environment},
            start_new_session=True,
        )
        logger.info("%s server starts at %s", self.launch.role, self.launch.url)
        deadline = time.monotonic() + seconds
        try:
            while not await answers():
                if self.has_ended:
                    raise EngineFailedError(
                        f"the {self.launch.role} server ended with {self._process.returncode} "
                        "before it answered"
                    )
                if time.monotonic() > deadline:
                    raise EngineFailedError(
                        f"the {self.launch.role} server gave no answer in {seconds:g} s"
                    )
                await asyncio.sleep(POLL_SECONDS)
        except BaseException:
            await self.stop()
            raise

    async def wait(self) -> int:
        """Its exit status, once it has ended."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL to the whole group; returns when the server is gone.

        A scheduler that got the first as well would look crashed, and be mourned for seconds.
        """
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._stop_seconds):
                    await process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # also what has lost its parent
        await process.wait()


def _has_file(stream: object) -> bool:
    """Captured streams of test runners have none."""
    try:
        stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False
    return True


REGISTER_SECONDS = 10.0


class Servers:
    """One server, and the encoders that it was given. `url` is where it listens now."""

    def __init__(self, config: EngineConfig) -> None:
        self._config, self._sglang = config, config.sglang
        self._device = platform.declared().device_type
        self._python = str(self._sglang.python or sys.executable)
        if not self._sglang.url and not os.access(self._python, os.X_OK):
            raise ConfigError(
                f"engine.sglang.python: {self._python} is no program; "
                "`make sglang-cpu` makes build/sglang/bin/python"
            )
        self._arguments = engine_arguments(config, self._device)
        self._server: ServerProcess | None = None
        self._encoders: list[ServerProcess] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._bootstrap_port = 0
        self.published_count = 0  # encoders made known anew
        self.url = ""

    async def start(self, model: Path, weight_version: str) -> None:
        """Bring up everything on fresh ports. Raises EngineFailedError; then nothing is left."""
        try:
            await all_of(self._add_encoder(model) for _ in range(self._sglang.encoders))
            await self._start_server(model, weight_version)
        except BaseException:
            await self.stop()
            raise
        self._keepers = [
            asyncio.create_task(self._keep(number, model), name=f"encoder {number}")
            for number in range(len(self._encoders))
        ]

    async def wait(self) -> int:
        """The exit status of the server."""
        assert self._server is not None
        return await self._server.wait()

    async def stop_server(self) -> None:
        """End the server alone; `wait` returns."""
        if self._server is not None:
            await self._server.stop()

    async def stop(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        processes = [*self._encoders, *([self._server] if self._server else [])]
        self._keepers, self._encoders, self._server = [], [], None
        await asyncio.gather(*(process.stop() for process in processes))

    @property
    def pids(self) -> list[int]:
        """Of the server, then of its encoders."""
        processes = [*([self._server] if self._server else []), *self._encoders]
        return [process.pid for process in processes]

    async def _start_server(self, model: Path, weight_version: str) -> None:
        host, port = self._sglang.host, free_port(self._sglang.host)
        arguments = {
            "model_path": model,
            "host": host,
            "port": port,
            "weight_version": weight_version,
            **model_arguments(self._config, read_config(model)),
            **self._arguments,
        }
        if self._encoders:
            self._bootstrap_port = free_port(host)
            arguments["encoder_urls"] = [encoder.launch.url for encoder in self._encoders]
            arguments["encoder_bootstrap_port"] = self._bootstrap_port
        ranks = int(arguments.get("dp_size") or 1) * int(arguments.get("tp_size") or 1)
        launch = Launch(
            role="regular",
            url=f"http://{host}:{port}",
            command=command(self._python, arguments),
            environment=environment(self._config, self._device, ranks),
        )
        client = SglangClient(launch.url, self._sglang.api_key)
        server = ServerProcess(launch, self._sglang.stop_seconds)
        try:
            await server.start(client.answers, self._sglang.start_seconds)
        finally:
            await client.close()
        self._server, self.url = server, launch.url

    async def _add_encoder(self, model: Path) -> None:
        """Known as soon as it runs, so that it is ended if another one never does."""
        self._encoders.append(await self._start_encoder(model))

    async def _start_encoder(self, model: Path) -> ServerProcess:
        host, port = self._sglang.host, free_port(self._sglang.host)
        arguments = encoder_arguments(
            {"model_path": model, **self._arguments},
            host,
            port,
            self._sglang.encoder_backend,
            self._sglang.encoder_args,
        )
        launch = Launch(
            role="encoder",
            url=f"http://{host}:{port}",
            command=command(self._python, arguments),
            environment=environment(self._config, self._device),
        )
        client = SglangClient(launch.url, self._sglang.api_key)
        encoder = ServerProcess(launch, self._sglang.stop_seconds)
        try:
            await encoder.start(client.is_healthy, self._sglang.start_seconds)
        finally:
            await client.close()
        return encoder

    async def _keep(self, number: int, model: Path) -> None:
        """Start an encoder that ended anew, and make its new URL known."""
        failures = 0
        while True:
            status = await self._encoders[number].wait()
            gone = self._encoders[number].launch.url
            logger.error("encoder %d at %s ended with %d", number, gone, status)
            if failures >= self._sglang.restarts:
                logger.error("encoder %d is given up", number)
                return
            await asyncio.sleep(self._sglang.backoff_seconds * 2**failures)
            try:
                self._encoders[number] = await self._start_encoder(model)
                await self._publish(gone, self._encoders[number].launch.url)
                failures = 0
                self.published_count += 1
            except (EngineFailedError, SGLangRefusedError) as error:
                failures += 1
                logger.error("encoder %d: %s", number, error)

    async def _publish(self, gone: str, fresh: str) -> None:
        """Tell the server, which reads prompts, of an encoder's new place."""
        client = SglangClient(f"http://{self._sglang.host}:{self._bootstrap_port}")
        try:
            await client.post("/register_encoder_url", {"url": fresh}, REGISTER_SECONDS)
            await client.delete("/unregister_encoder_url", {"url": gone}, REGISTER_SECONDS)
        finally:
            await client.close()
