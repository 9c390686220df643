"""Starts, watches and ends the processes of SGLang."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.rollout.engine.config import EngineConfig, SglangConfig, size_of
from services.rollout.engine.images import reads_media
from services.rollout.engine.sglang.client import CONTEXT_MARGIN
from services.rollout.errors import EngineFailedError
from sluice import platform
from sluice.config import ConfigError
from sluice.durable import scratch
from sluice.logs import has_file
from sluice.runtime.recovery import NotReadyError, wait_until_ready

PACKAGE, MODULE = "sglang", "sglang.launch_server"
PROBE_SECONDS = 10.0  # an interpreter starts in a tenth, or off a slow disk
ABSENT = 86  # how it ends that has been asked for the package; nothing else ends so
KEY_FLAG, CONFIG_FLAG = "--api-key", "--config"
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


def with_python(config: SglangConfig, words: Sequence[str]) -> tuple[str, ...]:
    """Returns the command line of a server whose arguments are words already."""
    return (str(config.python or sys.executable), "-m", MODULE, *words)


def check_python(config: SglangConfig) -> None:
    """Raises ConfigError unless there is an interpreter to start servers with."""
    if config.url:
        return
    python = str(config.python or sys.executable)
    if not os.access(python, os.X_OK):
        raise ConfigError(
            f"engine.sglang.python: {python} is no program; "
            "`make sglang-cpu` makes build/sglang/bin/python"
        )
    own = config.python is None
    if _lacks_sglang() if own else _says_it_lacks_sglang(python, config.environment):
        named = f"{python}, which runs this process," if own else python
        raise ConfigError(
            f"engine.sglang.python: {named} has no SGLang; name an interpreter that has it "
            "(docs/sglang.md)"
        )


def _lacks_sglang() -> bool:
    return importlib.util.find_spec(PACKAGE) is None


def _says_it_lacks_sglang(python: str, environment: Mapping[str, str]) -> bool:
    """Asks another interpreter, by what it can import; one that does not answer may have it."""
    asked = (
        f"import importlib.util as u; raise SystemExit({ABSENT} * (not u.find_spec('{PACKAGE}')))"
    )
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        answer = subprocess.run(
            [python, "-c", asked],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
        return answer.returncode == ABSENT
    return False


def engine_arguments(config: EngineConfig, device: str) -> dict[str, Any]:
    """Derives the arguments of a server on `device`, a torch device type, from the settings.

    A stream carries what is new; an idle server sleeps. What concerns the model, its version and
    the port are not among them.
    """
    is_cpu = device == platform.CPU.device_type
    own = config.sglang.server_args
    sharing = dp_size(config) if own.get("enable_dp_attention") else _attention_ranks(own)
    arguments: dict[str, Any] = {
        "device": device,
        "dtype": config.dtype,
        "max_running_requests": config.max_running * sharing,  # ranks of attention share it
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
    if steps := config.sglang.speculative_steps:
        arguments |= {
            "speculative_algorithm": "NEXTN",  # by a layer of the checkpoint itself
            "speculative_num_steps": steps,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": steps + 1,
        }
    return arguments | own


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
    """Returns the data-parallel ranks of the server that is to be started.

    Those of attention are `dp_size` with `enable_dp_attention`, or `attn_dp_size` by a newer name.
    """
    return _copies(config.sglang.server_args) * _attention_ranks(config.sglang.server_args)


def _copies(arguments: Arguments) -> int:
    """Whole servers beside each other, or with `enable_dp_attention` ranks of attention."""
    return size_of(arguments, "dp_size", "data_parallel_size")


def _attention_ranks(arguments: Arguments) -> int:
    return size_of(arguments, "attn_dp_size", "attention_data_parallel_size")


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


class ServerProcess:
    """Owns a server and its children, which end with it; also when this process is killed.

    The server leads a process group of its own. Its output goes where this process's errors go.
    Its key is on no command line, which every user of the host sees.
    """

    def __init__(self, launch: Launch, stop_seconds: float) -> None:
        self.launch = launch
        self._stop_seconds = stop_seconds
        self._process: asyncio.subprocess.Process | None = None
        self._files = contextlib.ExitStack()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def spawn(self) -> None:
        """Starts it. Raises OSError."""
        with contextlib.ExitStack() as files:
            command = self._without_key(files)
            self._process = await asyncio.create_subprocess_exec(
                command[0],
                str(SHIM),
                str(os.getpid()),
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if has_file(sys.stderr) else asyncio.subprocess.DEVNULL,
                env={**os.environ, **self.launch.environment},
                start_new_session=True,
            )
            self._files = files.pop_all()
        logger.info("%s server starts at %s", self.launch.role, self.launch.url)

    def _without_key(self, files: contextlib.ExitStack) -> Sequence[str]:
        """The command line, its key in a file; SGLang reads one file, which may be the user's."""
        command = self.launch.command
        if KEY_FLAG not in command or CONFIG_FLAG in command:
            return command
        at = command.index(KEY_FLAG)
        file = files.enter_context(scratch("sluice-sglang-")) / "key.yaml"
        file.touch(mode=0o600)
        file.write_text(json.dumps({KEY_FLAG.removeprefix("--"): command[at + 1]}))
        return (*command[:at], CONFIG_FLAG, str(file), *command[at + 2 :])

    async def start(self, answers: Callable[[], Awaitable[bool]], seconds: float) -> None:
        """Starts it and waits until it `answers`. Raises EngineFailedError after ending it."""
        await self.spawn()
        assert self._process is not None
        process, what = self._process, f"the {self.launch.role} server"

        async def probe() -> None:
            if await answers():
                return
            if process.returncode is not None:
                raise EngineFailedError(
                    f"{what} ended with {process.returncode} before it answered; the log of this "
                    f"process has what it said (it is started by {self.launch.command[0]})"
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
        self._files.close()

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
        await self.kill()

    async def kill(self) -> None:
        """Sends SIGKILL to the whole group; returns when the server has ended."""
        self._files.close()
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # also what has lost its parent
        await self._process.wait()
