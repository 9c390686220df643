"""Command lines of SGLang servers, as pure functions of settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.rollout.engine.config import EngineConfig
from sluice import platform

MODULE = "sglang.launch_server"
CPU_VARIABLE = "SGLANG_USE_CPU_ENGINE"  # what SGLang itself asks for, and our stand-ins too
CONTEXT_MARGIN = 8  # SGLang keeps a few places of the context to itself
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
    """`{"tp_size": 2, "skip_tokenizer_init": True}` as `--tp-size 2 --skip-tokenizer-init`.

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
    """The command line of a server with these arguments."""
    return (str(python), "-m", MODULE, *flags(arguments))


def engine_arguments(config: EngineConfig, device: str) -> dict[str, Any]:
    """What follows from an engine's settings for a server on `device`, a torch device type.

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
    if config.sglang.encoders:
        arguments |= {
            "language_only": True,
            "encoder_transfer_backend": config.sglang.encoder_backend,
        }
    return arguments | config.sglang.server_args


def model_arguments(config: EngineConfig, document: Mapping[str, Any]) -> dict[str, Any]:
    """What follows from a model's `config.json`: images need its processor, tokens alone none."""
    own = document.get("text_config", document).get("max_position_embeddings")
    wanted = config.max_model_length + CONTEXT_MARGIN
    return {
        "context_length": wanted if isinstance(own, int) and wanted < own else None,
        "skip_tokenizer_init": not reads_media(document),
    }


def reads_media(document: Mapping[str, Any]) -> bool:
    """Whether the model of this `config.json` sees."""
    return "vision_config" in document


def dp_size(config: EngineConfig) -> int:
    """Data-parallel ranks of the server that is to be started."""
    return int(config.sglang.server_args.get("dp_size") or 1)


def environment(config: EngineConfig, device: str, ranks: int = 1) -> dict[str, str]:
    """What SGLang's processes find added to the environment; CPU ranks share no core binding."""
    added: dict[str, str] = {}
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
