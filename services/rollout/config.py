"""Settings of the rollout process, of its episodes and of its OpenAI-compatible port."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from services.rollout.engine.config import EngineConfig
from sluice.address import ServerAddress, split_address
from sluice.config import Config, ProcessConfig
from sluice.place import PlaceText, StoreCacheConfig, StorePlace, directory_of, is_bucket, within
from sluice.profiler import DIRECTORY
from sluice.runtime.server import LAST_PORT, ServerConfig


class OpenAIConfig(Config):
    """HTTP beside gRPC: the host, the TLS files and the token (the API key) of `server`."""

    port: int = Field(0, ge=0, le=LAST_PORT, description="0 takes a free one.")
    model_name: str = Field("", description="What callers name; default: the pool.")
    max_running: int = Field(256, ge=1, description="Requests at once; then 429.")
    max_body_bytes: int = Field(4 << 20, ge=1024, description="Of a request; then 413.")
    max_tokens: int = Field(
        4096, ge=1, description="Of an answer at most, and where a chat request does not say."
    )
    max_choices: int = Field(128, ge=1, description="Answers to one request: prompts times n.")
    request_seconds: float = Field(600.0, gt=0, description="One request; then 504.")
    open_groups: int = Field(1024, ge=1, description="Recorded groups at once; then 429.")
    kept_groups: int = Field(
        256, ge=1, description="Closed groups that stay in the store until they are deleted."
    )
    records: Path | None = Field(
        None, description="Directory of the calls of open groups; default: <store>/records."
    )


class GraderPoolConfig(Config):
    """Processes that make tasks and reward samples, per environment that needs them."""

    size: int = Field(2, ge=1, description="Processes of one environment.")
    slow_seconds: float = Field(
        5.0, gt=0, description="A call that takes longer gives its place to another process."
    )
    max_slow: int = Field(8, ge=0, description="Such calls, beside `size` quick ones.")
    timeout_seconds: float = Field(60.0, gt=0, description="One call; then the process is ended.")
    attempts: int = Field(2, ge=1, description="Calls of one group before it fails.")
    start_seconds: float = Field(120.0, gt=0, description="Import of an environment.")
    idle_seconds: float = Field(600.0, gt=0, description="Without work a process is ended.")


class EpisodesConfig(Config):
    """Limits of an episode worker."""

    max_open_groups: int = Field(
        16384, ge=1, description="Accepted and not settled; then QUEUE_FULL."
    )
    max_open_rollouts: int = Field(64, ge=1, description="Rollouts that run; then QUEUE_FULL.")
    max_running_groups: int = Field(1024, ge=1, description="Groups that run at once.")
    max_evaluated_groups: int = Field(
        64, ge=1, description="Groups of evaluations that run at once, beside the others."
    )
    max_samples: int = Field(4096, ge=1, description="Of one group.")
    engine_attempts: int = Field(
        4, ge=1, description="Leases tried in a row for samples of a group without one token."
    )
    chunk_tokens: int = Field(
        0, ge=0, description="Asked of an engine at once, so lost with it at most; 0 asks for all."
    )
    orphan_seconds: float = Field(
        120.0, gt=0, description="A rollout nobody listens to for so long is stopped."
    )
    kept_rollouts: int = Field(
        64, ge=1, description="Settled rollouts that can be asked for again; then unpinned."
    )
    environments: dict[str, str] = Field(
        default_factory=dict, description="Further environments, name to `package.module:Class`."
    )
    user_modules: tuple[str, ...] = Field(
        (), description="Modules, with those inside them, whose functions requests may name."
    )
    reward_urls: tuple[str, ...] = Field(
        ("http://127.0.0.1", "http://localhost"),
        description="Addresses below which requests may name reward services.",
    )
    tokenizer_roots: tuple[Path, ...] = Field(
        (), description="Directories below which requests may name tokenizers; default: none."
    )
    graders: GraderPoolConfig = GraderPoolConfig()


class ImagesConfig(Config):
    """Images of prompts and observations, for models that read them."""

    roots: tuple[Path, ...] = Field(
        (), description="Directories below which prompts may name image files; default: none."
    )
    max_count: int = Field(64, ge=0, description="Images of one sample; then TOO_MANY_IMAGES.")
    max_bytes: int = Field(32 << 20, ge=1, description="Of one file; then IMAGE_TOO_LARGE.")
    max_pixels: int = Field(1 << 26, ge=1, description="Before resizing; then IMAGE_TOO_LARGE.")
    threads: int = Field(2, ge=1, description="Images that are decoded and resized at once.")


class RolloutConfig(ProcessConfig):
    """Rollout service: one engine replica, one episode worker, or both."""

    former_keys: ClassVar[Mapping[str, str]] = {"engine.sglang.staging": "weights_cache"}

    roles: tuple[Literal["episodes", "engine"], ...] = ("episodes", "engine")
    engine_id: str = Field("rollout-0", min_length=1, description="The same after a restart.")
    pool: str = Field("policy", min_length=1, description="Engines that serve the same weights.")
    router: ServerAddress = Field(
        "",
        description="host:port, or FILE#NAME of a services.json; the episodes role needs it.",
    )
    store: StorePlace = Field(
        description="Shared store, blobs and weight versions: a directory, or s3://bucket/prefix."
    )
    store_cache: StoreCacheConfig = StoreCacheConfig()
    store_sync: bool = Field(True, description="False: a crash of the machine may lose groups.")
    weights: PlaceText = Field(
        "", description="Weight versions, e.g. s3://bucket/prefix; default: <store>/weights."
    )
    weights_cache: Path | None = Field(
        None,
        description="Directory of this host that its engines share: whole versions are put there "
        "once. Default: only versions of deltas are, below the store.",
    )
    tokenizer: Path | None = Field(None, description="HF model directory; default: engine.model.")
    engine: EngineConfig = EngineConfig()
    episodes: EpisodesConfig = EpisodesConfig()
    images: ImagesConfig = ImagesConfig()
    services: Path | None = Field(
        None,
        description="services.json by which requests may name reward services, as FILE#NAME.",
    )
    openai: OpenAIConfig | None = Field(None, description="HTTP as OpenAI's clients speak it.")
    server: ServerConfig = ServerConfig()

    @model_validator(mode="after")
    def _roles_have_what_they_need(self) -> RolloutConfig:
        if not self.roles:
            raise ValueError("roles: name episodes, engine, or both")
        if "episodes" in self.roles:
            if not self.router:
                raise ValueError("router: the episodes role needs one")
            if self.tokenizer_directory is None:
                raise ValueError("tokenizer: the episodes role needs one, or engine.model")
        if self.openai is not None and is_bucket(self.store) and self.openai.records is None:
            raise ValueError(
                "openai.records: name a directory, for the store is a bucket: recorded calls are "
                "appended to files"
            )
        if self.openai is not None and self.tokenizer_directory is None:
            raise ValueError("tokenizer: openai needs one, or engine.model")
        return self

    @model_validator(mode="after")
    def _nodes_reach_each_other(self) -> RolloutConfig:
        sglang = self.engine.sglang
        if sglang.node_count == 1 or "engine" not in self.roles:
            return self
        if is_bucket(str(self.store)) and self.weights_cache is None:
            raise ValueError(
                "weights_cache: all nodes of an engine read the same files; with a store in a "
                "bucket name a directory that they all see"
            )
        if self.node_host in ("0.0.0.0", "[::]", "::"):
            raise ValueError(
                f"engine.sglang.node_host: {self.node_host} is no address at which other nodes "
                "reach this one; name one, or server.advertise"
            )
        return self

    @property
    def is_further_node(self) -> bool:
        """Whether this process is a part of an engine that another one serves."""
        return "engine" in self.roles and self.engine.sglang.node_rank > 0

    @property
    def node_host(self) -> str:
        """Under which the other nodes of the engine reach this one."""
        advertised, _ = split_address(self.server.advertise)
        return self.engine.sglang.node_host or advertised or self.server.host

    @property
    def placed_engine(self) -> EngineConfig:
        """The engine's settings, with the host of this node."""
        sglang = self.engine.sglang.model_copy(update={"node_host": self.node_host})
        return self.engine.model_copy(update={"sglang": sglang})

    @property
    def tokenizer_directory(self) -> Path | None:
        """Directory of the tokenizer."""
        if self.tokenizer is not None:
            return self.tokenizer
        return Path(self.engine.model) if self.engine.model else None

    @property
    def cache_directory(self) -> Path:
        """Directory of the host cache of weight versions."""
        if self.weights_cache is not None:
            return self.weights_cache
        root = directory_of(self.store)
        if root is None:
            return self.store_cache.directory / "weights"
        return root / "weights" / "hosts" / socket.gethostname()

    @property
    def profiles(self) -> Path:
        """Directory of the profiles of engines."""
        return (directory_of(self.store) or self.store_cache.directory) / DIRECTORY

    @property
    def weights_location(self) -> str:
        """Directory or URL of the versions of weights."""
        return self.weights or str(within(self.store, "weights"))
