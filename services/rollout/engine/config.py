"""Settings of an engine, and of SGLang where it is the backend."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from sluice.address import ServerAddress
from sluice.config import Config
from sluice.operations import OperationsConfig
from sluice.runtime.recovery import Backoff
from sluice.weights.adapter import DEFAULT_TARGETS, MAX_RANK, AdapterSpec
from sluice.weights.errors import InvalidAdapterError

LONGEST_BACKOFF_SECONDS = 60.0

_NOT_ITS_OWN = {  # what this process has to know, by where it is told
    "api_key": "set engine.sglang.api_key",
    "host": "set engine.sglang.host",
    "model_path": "set engine.model",
    "port": "a free one is taken",
    "weight_version": "it follows from the weights",
    "nnodes": "set engine.sglang.nnodes",
    "node_rank": "set engine.sglang.node_rank",
    "dist_init_addr": "it is agreed on at every start; set engine.sglang.node_host",
    "disaggregation_mode": "set engine.sglang.prefill, which starts both servers",
    "disaggregation_transfer_backend": "set engine.sglang.transfer_backend",
    "disaggregation_bootstrap_port": "a free one is taken",
    "encoder_only": "set engine.sglang.encoders",
    "language_only": "set engine.sglang.encoders",
    "encoder_urls": "set engine.sglang.encoders",
}
MAX_NODES = 1024
# what says how a server is started: of the engine, and of `sglang`
_TO_START_WITH = ("dtype", "prefill_chunk_tokens", "threads")
_TO_START = ("python", "environment", "host", "start_seconds", "stop_seconds")


def size_of(arguments: Mapping[str, Any], *names: str) -> int:
    """Returns a size that SGLang knows by several names, 1 by default."""
    for name in names:
        if arguments.get(name) is not None:
            return int(arguments[name])
    return 1


def _check_spread(where: str, arguments: dict[str, Any], nnodes: int) -> None:
    """Raises ValueError unless a server with these arguments can be spread over so many nodes."""
    if nnodes == 1:
        return
    tp_size = size_of(arguments, "tp_size", "tensor_parallel_size")
    ranks = tp_size * size_of(arguments, "pp_size", "pipeline_parallel_size")
    if ranks % nnodes:
        raise ValueError(
            f"{where}nnodes: {ranks} ranks (tp_size times pp_size) cannot be shared out over "
            f"{nnodes} nodes"
        )
    has_copies = size_of(arguments, "dp_size", "data_parallel_size") > 1
    if has_copies and not arguments.get("enable_dp_attention"):
        raise ValueError(
            f"{where}server_args.dp_size: over several nodes data-parallel ranks are those of "
            "attention; set enable_dp_attention, or attn_dp_size instead"
        )


def _check_arguments(where: str, arguments: dict[str, Any]) -> None:
    for name in arguments:
        if "-" in name:
            raise ValueError(f"{where}{name}: write it with underscores")
        if name in _NOT_ITS_OWN:
            raise ValueError(f"{where}{name}: {_NOT_ITS_OWN[name]}")


class SglangLoraConfig(Config):
    """What SGLang has to know of adapters when it starts."""

    max_rank: int = Field(
        16, ge=1, le=MAX_RANK, description="Of an adapter; larger ones are refused."
    )
    targets: tuple[str, ...] = Field(
        DEFAULT_TARGETS, description="Last names of the layers that adapters may be of."
    )

    @model_validator(mode="after")
    def _targets_are_names(self) -> SglangLoraConfig:
        try:
            AdapterSpec(rank=1, alpha=1.0, targets=self.targets, base_digest="0" * 32)
        except InvalidAdapterError as error:
            raise ValueError(f"targets: {error}") from error
        return self


class SglangPrefillConfig(Config):
    """A server of its own for prompts, on nodes of its own."""

    nnodes: int = Field(1, ge=1, le=MAX_NODES, description="Nodes that it is spread over.")
    server_args: dict[str, Any] = Field(
        default_factory=dict, description="Of it; they win over those that both servers share."
    )


class SglangConfig(Config):
    """An SGLang server that this process starts, or, with `url`, one that runs already.

    `server_args` are SGLang's own, by name with underscores: they win over those that follow
    from the engine's settings. True gives the bare flag, null leaves the argument out, a list
    gives several values, a mapping JSON.
    """

    url: str = Field("", description="http://host:port of a running server; empty starts one.")
    python: Path | None = Field(
        None, description="Interpreter that has SGLang; default: the one that runs this process."
    )
    server_args: dict[str, Any] = Field(default_factory=dict, description="Of SGLang.")
    environment: dict[str, str] = Field(default_factory=dict, description="Added for SGLang.")
    host: str = Field("127.0.0.1", description="Where a started server listens.")
    api_key: str = Field("", description="Sent to, and asked of, the server.")
    encoders: int = Field(0, ge=0, description="Encoder-only servers to start for a vision model.")
    encoder_args: dict[str, Any] = Field(default_factory=dict, description="Of the encoders.")
    encoder_backend: str = Field(
        "zmq_to_scheduler", description="How an encoder sends what it computed."
    )
    nnodes: int = Field(
        1, ge=1, le=MAX_NODES, description="Nodes that the server is spread over, one process each."
    )
    node_rank: int = Field(
        0,
        ge=0,
        description="Of this process in the engine; only 0 serves. `sluice up` fills it in.",
    )
    leader: ServerAddress = Field(
        "",
        description="host:port, or FILE#NAME of a services.json, of the process with node_rank 0;"
        " the others need it. `sluice up` fills it in.",
    )
    node_host: str = Field(
        "", description="Under which other nodes reach this one; default: as they reach `server`."
    )
    prefill: SglangPrefillConfig | None = Field(
        None, description="Prefill and decode apart; its nodes come after those that decode."
    )
    transfer_backend: Literal["mooncake", "mooncake_tcp", "nixl", "ascend", "mori"] = Field(
        "mooncake", description="How keys and values get from prefill to decode."
    )
    lora: SglangLoraConfig | None = Field(
        None, description="Start SGLang so that it takes adapters; default: it takes none."
    )
    speculative_steps: int = Field(
        0,
        ge=0,
        le=32,
        description="Tokens that the model's own layer of multi-token prediction drafts at a time;"
        " 0: it drafts none.",
    )
    verify: Literal["checksum", "off"] = Field(
        "checksum", description="What must match before new weights serve."
    )
    start_seconds: float = Field(900.0, gt=0, description="From start to the first answer.")
    stop_seconds: float = Field(10.0, gt=0, description="From SIGTERM to SIGKILL.")
    update_seconds: float = Field(600.0, gt=0, description="One update of weights.")
    silent_seconds: float = Field(
        60.0,
        gt=0,
        description="Without an answer of a server, or a word of a node; then it is lost.",
    )
    restarts: int = Field(5, ge=0, description="In a row, before the engine is given up.")
    backoff_seconds: float = Field(1.0, gt=0, description="Before a restart; doubles each time.")

    @property
    def backoff(self) -> Backoff:
        """Pauses before restarts of a server."""
        return Backoff(self.backoff_seconds, max(self.backoff_seconds, LONGEST_BACKOFF_SECONDS))

    @property
    def node_count(self) -> int:
        """Processes of the engine, each on a node: the first serves."""
        return self.nnodes + (self.prefill.nnodes if self.prefill is not None else 0)

    def _changed(self, *names: str) -> str:
        """The first of these settings that is not as by default; none is empty."""
        default = SglangConfig.model_construct()
        return next((n for n in names if getattr(self, n) != getattr(default, n)), "")

    @model_validator(mode="after")
    def _arguments_are_for_the_server_alone(self) -> SglangConfig:
        _check_arguments("server_args.", self.server_args)
        if self.url and (self.server_args or self.encoders or self.lora):
            raise ValueError("url: a running server takes no server_args, encoders or lora")
        if self.url and (own := self._changed(*_TO_START)):
            raise ValueError(f"url: a running server takes no {own}, which is to start one")
        if not self.encoders and (own := self._changed("encoder_args", "encoder_backend")):
            raise ValueError(f"{own}: has no effect without encoders")
        if self.url and self.speculative_steps:
            raise ValueError("url: a running server takes no speculative_steps")
        if self.url and self.node_count > 1:
            raise ValueError("url: a running server takes no nnodes or prefill")
        if self.lora and size_of(self.server_args, "dp_size", "data_parallel_size") > 1:
            raise ValueError("lora: SGLang takes adapters while it runs only with dp_size 1")
        return self

    @model_validator(mode="after")
    def _nodes_fit(self) -> SglangConfig:
        _check_spread("", self.server_args, self.nnodes)
        if self.prefill is not None:
            _check_arguments("prefill.server_args.", self.prefill.server_args)
            shared = {**self.server_args, **self.prefill.server_args}
            _check_spread("prefill.", shared, self.prefill.nnodes)
            if self.lora is not None:
                raise ValueError("lora: takes one server for prefill and decode")
        elif "transfer_backend" in self.model_fields_set:
            raise ValueError("transfer_backend: is between prefill and decode; set prefill")
        if self.node_rank >= self.node_count:
            raise ValueError(
                f"node_rank: {self.node_rank} is none of {self.node_count} nodes, from 0 on"
            )
        if self.node_rank and not self.leader:
            raise ValueError("leader: a node other than 0 needs one")
        return self


class EngineConfig(Config):
    """Backend, model and limits of an engine.

    Without `model` the engine starts empty and builds itself from the first prepared version.
    """

    backend: Literal["reference", "sglang"] = "reference"
    model: str | None = Field(None, description="HF model directory, served as version 0.")
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_running: int = Field(256, ge=1, description="Samples that decode at once.")
    max_model_length: int = Field(4096, ge=2, description="Prompt and response together.")
    max_cached_tokens: int = Field(
        0, ge=0, description="Tokens that may be reserved at once; 0: all slots at full length."
    )
    prefill_chunk_tokens: int = Field(
        512, ge=1, description="Prompt tokens per step; bounds how long a step delays decoding."
    )
    prefix_cache_tokens: int = Field(
        8192,
        ge=0,
        description="Prompt tokens kept for prompts that begin alike; 0: none. SGLang keeps what"
        " fits, or with 0 none.",
    )
    waiting_limit: int = Field(4096, ge=1, description="Samples that may wait for a slot.")
    max_samples: int = Field(4096, ge=1, description="Of one request.")
    max_stop_tokens: int = Field(1024, ge=0, description="Stop tokens of one request.")
    max_stop_strings: int = Field(64, ge=0, description="Stop strings of one request.")
    max_top_tokens: int = Field(1024, ge=0, description="Likeliest tokens a place, of Score.")
    max_media: int = Field(256, ge=0, description="Files of one request.")
    remembered_tokens: int = Field(
        4_000_000,
        ge=0,
        description="Of answers kept for requests that are sent again, 128 bytes each; a request"
        " counts as 16 and a sample as 8 more.",
    )
    stuck_seconds: float = Field(
        120.0, gt=0, description="Of one step or command; longer, and the engine is not ready."
    )
    threads: int = Field(0, ge=0, description="Threads of one operation; 0 leaves torch's own.")
    deterministic: bool = Field(
        False,
        description="A sample's tokens and log-probs do not depend, to the bit, on its neighbours;"
        " every decode step then costs max_running rows on one thread, and no prefix is shared.",
    )
    routed_experts: bool = Field(
        False,
        description="Completions bring the experts that their tokens were sent to, for a trainer"
        " that replays them (routing_replay: rollout); needs a mixture of experts.",
    )
    max_adapters: int = Field(
        4,
        ge=1,
        description="Adapters held at once; the oldest that no request uses gives way to a newer"
        " one, and one in use when its last request ends.",
    )
    operations: OperationsConfig = Field(
        OperationsConfig(), description="Of the reference engine; attention is that of prompts."
    )
    decode_graphs: Literal["off", "auto", "on"] = Field(
        "off",
        description="Of the reference engine: passes that only decode are captured and replayed,"
        " on CUDA, by models without experts, adapters or images; auto leaves the others as they"
        " are, on refuses them.",
    )
    sglang: SglangConfig = SglangConfig()

    @property
    def shaping(self) -> dict[str, str]:
        """What a run that goes on should have in common with its past, by name, as JSON.

        How many samples there are room for is among it where bits are to be the same.
        """
        told: dict[str, Any] = {"backend": self.backend, "dtype": self.dtype}
        told |= {f"operations.{name}": value for name, value in self.operations}
        if self.deterministic:
            told |= {name: getattr(self, name) for name in ("max_running", "prefill_chunk_tokens")}
        return {name: json.dumps(value) for name, value in told.items()}

    @model_validator(mode="after")
    def _settings_go_together(self) -> EngineConfig:
        if self.backend != "reference" and self.operations != OperationsConfig():
            raise ValueError(f"operations: has no effect with backend {self.backend}; leave it out")
        if self.decode_graphs != "off" and self.backend != "reference":
            raise ValueError(
                f"decode_graphs: has no effect with backend {self.backend}; set its own in"
                " sglang.server_args"
            )
        if self.decode_graphs != "off" and self.deterministic:
            raise ValueError("decode_graphs: deterministic runs one shape, and captures none")
        # How work is cut over threads depends on how much there is.
        if self.deterministic and self.threads > 1:
            raise ValueError("threads: deterministic needs 1")
        self._check_prefix_cache()
        if self.routed_experts and self.sglang.prefill is not None:
            raise ValueError("routed_experts: takes one server for prefill and decode")
        if self.backend != "sglang" and self.sglang.node_count > 1:
            raise ValueError("sglang.nnodes: the reference engine runs on one node")
        if self.backend != "sglang" and self.sglang != SglangConfig():
            raise ValueError(f"sglang: has no effect with backend {self.backend}; leave it out")
        if self.deterministic and self.sglang.url:
            raise ValueError(
                "deterministic: has no effect on a server that runs; start that one with "
                "enable_deterministic_inference"
            )
        if self.sglang.url and (own := self.model_fields_set.intersection(_TO_START_WITH)):
            raise ValueError(
                f"{min(own)}: has no effect on a server that runs, which was started with its own"
            )
        return self

    def _check_prefix_cache(self) -> None:
        tokens = self.prefix_cache_tokens
        if tokens == EngineConfig.model_fields["prefix_cache_tokens"].default:
            return
        if self.backend == "sglang" and tokens:
            raise ValueError(
                f"prefix_cache_tokens: {tokens} has no effect on SGLang, which keeps what fits, or"
                " with 0 none"
            )
        if self.backend == "sglang" and self.sglang.url:
            raise ValueError(
                "prefix_cache_tokens: has no effect on a server that runs; start that one with"
                " disable_radix_cache"
            )
        if self.backend == "reference" and self.deterministic:
            raise ValueError(
                "prefix_cache_tokens: has no effect with deterministic, which shares no prefix"
            )

    @property
    def cache_tokens(self) -> int:
        """Tokens of all running samples together that may be reserved."""
        return self.max_cached_tokens or self.max_running * self.max_model_length
