"""Starts, watches and ends the processes of SGLang."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.images import reads_media
from services.rollout.engine.sglang.client import CONTEXT_MARGIN, SglangClient, SGLangRefusedError
from services.rollout.engine.sglang.weights import read_config
from services.rollout.errors import EngineFailedError
from sluice import platform
from sluice.config import ConfigError
from sluice.runtime.idempotency import all_of
from sluice.runtime.recovery import NotReadyError, wait_until_ready

MODULE = "sglang.launch_server"
CPU_VARIABLE = "SGLANG_USE_CPU_ENGINE"  # what SGLang itself asks for, and our stand-ins too
CPU_TOKENS = 65536  # of the cache, where nobody says otherwise: host memory is shared with others

Arguments = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One server process: its role, where it listens, its command line and added environment."""

    role: str
    url: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def flags(arguments: Arguments) -> list[str]:
    """Writes `{"tp_size": 2, "skip_tokenizer_init": True}` as `--tp-size 2 --skip-tokenizer-init`.

    None and False leave an argument out; lists give several values, mappings JSON.
    """
    words: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is True:
            continue
        if isinstance(value, Mapping):
            words.append(json.dumps(value, separators=(",", ":")))
        elif isinstance(value, Sequence) and not isinstance(value, str):
            words += [str(item) for item in value]
        else:
            words.append(str(value))
    return words


def command(python: str | Path, arguments: Arguments) -> tuple[str, ...]:
    """Returns the command line of a server with these arguments."""
    return (str(python), "-m", MODULE, *flags(arguments))


def engine_arguments(config: EngineConfig, device: str) -> dict[str, Any]:
    """Derives the arguments of a server on `device`, a torch device type, from the settings.

    A stream carries what is new; an idle server sleeps. What concerns the model, its version and
    the port are not among them.
    """
    is_cpu = device == platform.CPU.device_type
    arguments: dict[str, Any] = {
        "device": device,
        "dtype": config.dtype,
        "max_running_requests": config.max_running,
        "max_total_tokens": config.max_cached_tokens or None,
        "disable_radix_cache": not config.prefix_cache_tokens,
        "enable_deterministic_inference": config.deterministic,
        "enable_return_routed_experts": config.routed_experts,
        "skip_server_warmup": True,
        "incremental_streaming_output": True,
        "sleep_on_idle": True,
        "log_level_http": "warning",
        "api_key": config.sglang.api_key or None,
    }
    if "prefill_chunk_tokens" in config.model_fields_set:  # SGLang knows better than our default
        arguments["chunked_prefill_size"] = config.prefill_chunk_tokens
    if is_cpu:
        arguments |= {
            "max_total_tokens": min(CPU_TOKENS, config.cache_tokens),
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_overlap_schedule": True,
            "cuda_graph_backend_decode": "disabled",
            "cuda_graph_backend_prefill": "disabled",
        }
    if (lora := config.sglang.lora) is not None:
        arguments |= {
            "enable_lora": True,
            "lora_backend": "torch_native" if is_cpu else None,
            "max_lora_rank": lora.max_rank,
            "lora_target_modules": list(lora.targets),
            # those held, the base, and one that is let go when its last request ends
            "max_loras_per_batch": config.max_adapters + 2,
        }
    if config.sglang.encoders:
        arguments |= {
            "language_only": True,
            "encoder_transfer_backend": config.sglang.encoder_backend,
        }
    return arguments | config.sglang.server_args


def model_arguments(config: EngineConfig, document: Mapping[str, Any]) -> dict[str, Any]:
    """Derives arguments from a model's `config.json`: images need its processor, tokens none."""
    own = document.get("text_config", document).get("max_position_embeddings")
    wanted = config.max_model_length + CONTEXT_MARGIN
    return {
        "context_length": wanted if isinstance(own, int) and wanted < own else None,
        "skip_tokenizer_init": not reads_media(document),
    }


# What concerns decoding, of no use to an encoder.
_DECODING = (
    "language_only",
    "encoder_urls",
    "weight_version",
    "skip_tokenizer_init",
    "incremental_streaming_output",
    "max_running_requests",
    "chunked_prefill_size",
    "context_length",
    "enable_return_routed_experts",
)


def encoder_arguments(
    shared: Arguments, host: str, port: int, backend: str, own: Arguments
) -> dict[str, Any]:
    """Returns the arguments of an encoder-only server: the `shared` ones that concern it, and
    its `own`, which win."""
    kept = {name: value for name, value in shared.items() if name not in _DECODING}
    return {
        **kept,
        "host": host,
        "port": port,
        "encoder_only": True,
        "encoder_transfer_backend": backend,
        **own,
    }


def dp_size(config: EngineConfig) -> int:
    """Returns the data-parallel ranks of the server that is to be started."""
    return int(config.sglang.server_args.get("dp_size") or 1)


def environment(config: EngineConfig, device: str, ranks: int = 1) -> dict[str, str]:
    """Returns variables added for SGLang's processes; CPU ranks share no core binding."""
    # SGLang keeps what the vision tower made of an image, and forgets it at no weight update: an
    # image seen before would be answered with the tower of before (0.5.23).
    added = {"SGLANG_VLM_CACHE_SIZE_MB": "0"}
    if config.threads or config.deterministic:
        added["OMP_NUM_THREADS"] = str(config.threads or 1)
    if device == platform.CPU.device_type:
        added |= {CPU_VARIABLE: "1", "HF_HUB_OFFLINE": "1"}
        if ranks > 1:  # else it wants one NUMA node a rank
            cores = max(1, config.threads)
            first = [rank * cores for rank in range(ranks)]
            added["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
                str(core) if cores == 1 else f"{core}-{core + cores - 1}" for core in first
            )
    return added | config.sglang.environment


logger = logging.getLogger(__name__)

SHIM = Path(__file__).with_name("launch.py")
POLL_SECONDS = 0.25
USUAL_START_SECONDS = 120.0  # a longer start is explained in the log
PORTS = range(20000, 32000)
OPEN_PORTS = (
    (
        "HTTP of SGLang and of its encoders; only with `engine.backend: sglang`",
        "`engine.sglang.host`, a free port of 20000 to 31999",
        "`engine.sglang.api_key`, where one is set; no TLS: keep it on loopback",
    ),
    (
        "between SGLang's own processes (ZMQ, encoders, NCCL)",
        "what SGLang chooses",
        "nothing: SGLang opens them",
    ),
)


def free_port(host: str) -> int:
    """Finds a port that nobody listens at, of those that no kernel hands out by itself.

    SGLang takes it long after it was chosen. Raises EngineFailedError.
    """
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
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

    async def start(self, answers: Callable[[], Awaitable[bool]], seconds: float) -> None:
        """Starts it and waits until it `answers`. Raises EngineFailedError after ending it."""
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
        process, what = self._process, f"the {self.launch.role} server"

        async def probe() -> None:
            if await answers():
                return
            if process.returncode is not None:
                raise EngineFailedError(
                    f"{what} ended with {process.returncode} before it answered"
                )
            raise NotReadyError("it does not answer")

        try:
            await wait_until_ready(
                what,
                probe,
                seconds,
                EngineFailedError,
                every=POLL_SECONDS,
                usual_seconds=USUAL_START_SECONDS,
            )
        except BaseException:
            await self.stop()
            raise

    async def wait(self) -> int:
        """Waits for the end; returns the exit status."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        """Sends SIGTERM, then SIGKILL to the whole group; returns when the server has ended.

        A scheduler that got the first as well would look crashed, and take seconds to report.
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
    """Whether a stream has a descriptor; captured ones of test runners have none."""
    try:
        stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False
    return True


REGISTER_SECONDS = 10.0


class Servers:
    """Owns one server and the encoders that it was given. `url` is where it listens now."""

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
        self.published_count = 0  # encoders that came back at a new URL
        self.url = ""

    async def start(self, model: Path, weight_version: str) -> None:
        """Starts everything on fresh ports. Raises EngineFailedError; then nothing is left."""
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
        """Waits for the end of the server; returns its exit status."""
        assert self._server is not None
        return await self._server.wait()

    async def stop_server(self) -> None:
        """Ends the server alone; `wait` returns."""
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
        """Process ids of the server, then of its encoders."""
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
        """Adds an encoder as soon as it runs, so that it is ended if another one never does."""
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
        """Starts an encoder that ended anew, and publishes its new URL."""
        failures = 0
        while True:
            status = await self._encoders[number].wait()
            old = self._encoders[number].launch.url
            logger.error("encoder %d at %s ended with %d", number, old, status)
            if failures >= self._sglang.restarts:
                logger.error("encoder %d is given up", number)
                return
            await asyncio.sleep(self._sglang.backoff.seconds(failures + 1))
            try:
                self._encoders[number] = await self._start_encoder(model)
                await self._publish(old, self._encoders[number].launch.url)
                failures = 0
                self.published_count += 1
            except (EngineFailedError, SGLangRefusedError) as error:
                failures += 1
                logger.error("encoder %d: %s", number, error)

    async def _publish(self, old: str, new: str) -> None:
        """Gives the server, which reads prompts, an encoder's new URL."""
        client = SglangClient(f"http://{self._sglang.host}:{self._bootstrap_port}")
        try:
            await client.post("/register_encoder_url", {"url": new}, REGISTER_SECONDS)
            await client.delete("/unregister_encoder_url", {"url": old}, REGISTER_SECONDS)
        finally:
            await client.close()
