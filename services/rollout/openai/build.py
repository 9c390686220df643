"""Puts the HTTP face of a rollout process together."""

from __future__ import annotations

from services.rollout.config import RolloutConfig
from services.rollout.engine import Engine
from services.rollout.episodes.engines import EngineAccess
from services.rollout.episodes.sampler import Sampler
from services.rollout.episodes.worker import EpisodeWorker
from services.rollout.openai.face import OpenAIFace
from services.rollout.openai.generation import Backing, Generator
from services.rollout.openai.local import ADDRESS, LocalLeases
from services.rollout.openai.recorder import Recorder
from services.rollout.openai.shared import Shared
from sluice.runtime.waits import Waits
from sluice.samples.blobs import BlobStore
from sluice.samples.tokenizer import TextTokenizer


def create_face(config: RolloutConfig, backing: Backing, drain_seconds: float) -> OpenAIFace:
    """Raises ConfigError."""
    assert config.openai is not None
    blobs = BlobStore(config.store, sync=config.store_sync)
    shared = Shared(
        config=config.openai,
        model_name=config.openai.model_name or config.pool,
        tokenizer=backing.tokenizer,
        generator=Generator(backing),
        recorder=Recorder(config.store, blobs, backing.tokenizer, config.openai),
    )
    return OpenAIFace(shared, config.server, drain_seconds)


def worker_backing(config: RolloutConfig, worker: EpisodeWorker) -> Backing:
    """Whatever engine the router leases, as for episodes."""
    return Backing(
        tokenizer=worker.tokenizer,
        sampler=worker.sampler,
        leases=worker.leases,
        engines=worker.engines,
        pool=config.pool,
        attempts=config.episodes.engine_attempts,
    )


def local_backing(config: RolloutConfig, engine: Engine, waits: Waits) -> Backing:
    """The engine of this process alone. Raises ConfigError without a tokenizer."""
    assert config.tokenizer_directory is not None
    engines = EngineAccess(config.server.security)
    engines.add_local(ADDRESS, engine)
    leases = LocalLeases(engine, config.engine_id)
    attempts = config.episodes.engine_attempts
    return Backing(
        tokenizer=TextTokenizer(config.tokenizer_directory),
        sampler=Sampler(leases, engines, waits, attempts=attempts),
        leases=leases,
        engines=engines,
        pool=config.pool,
        attempts=attempts,
    )
