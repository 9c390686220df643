"""An episode worker: what RolloutService stands on, built from the configuration."""

from __future__ import annotations

import grpc

from services.rollout.config import RolloutConfig
from services.rollout.environments.runner import Allowed, Environments
from services.rollout.episodes.engines import EngineAccess
from services.rollout.episodes.group import GroupTools
from services.rollout.episodes.journal import Journals
from services.rollout.episodes.leases import RouterLeases
from services.rollout.episodes.rollouts import Rollouts
from services.rollout.episodes.sampler import Sampler
from services.rollout.episodes.servicer import RolloutServicer
from services.rollout.episodes.spool import Spool
from sluice.config import ConfigError
from sluice.runtime.waits import Waits
from sluice.samples.blobs import BlobStore
from sluice.samples.tokenizer import TextTokenizer


class EpisodeWorker:
    """Owns environments, leases, channels to engines and the rollouts."""

    def __init__(self, config: RolloutConfig, router: grpc.aio.Channel, waits: Waits) -> None:
        """Raises ConfigError when the tokenizer cannot be loaded."""
        assert config.tokenizer_directory is not None
        self.tokenizer = TextTokenizer(config.tokenizer_directory)
        blobs = BlobStore(config.store, sync=config.store_sync)
        self._spool = Spool(blobs, Journals(config.store, blobs, sync=config.store_sync))
        episodes = config.episodes
        try:
            self._environments = Environments(
                episodes.environments,
                episodes.graders,
                self.tokenizer,
                Allowed(episodes.user_modules, episodes.reward_urls),
            )
        except ValueError as error:
            raise ConfigError(f"episodes.environments: {error}") from None
        self.engines = EngineAccess(config.server.security)
        self.leases = RouterLeases(router)
        self.sampler = Sampler(
            self.leases,
            self.engines,
            waits,
            attempts=episodes.engine_attempts,
            chunk_tokens=episodes.chunk_tokens,
        )
        tools = GroupTools(self.tokenizer, self.sampler, self._spool, waits)
        self._rollouts = Rollouts(episodes, self._environments, tools)
        self.servicer = RolloutServicer(self._rollouts, self._environments)

    async def drain(self, seconds: float) -> None:
        """Let rollouts end for so long; the rest goes on at another worker."""
        await self._rollouts.drain(seconds)

    async def close(self) -> None:
        """Stop the rollouts; what is finished stays in the store."""
        await self._rollouts.close()
        await self._spool.close()
        await self._environments.close()
        await self.leases.close()
        await self.engines.close()
