"""Serves rollouts and evaluations: an episode worker and all it owns."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc

from services.rollout import metrics
from services.rollout.config import RolloutConfig
from services.rollout.environments.registry import Allowed
from services.rollout.environments.runner import Environments
from services.rollout.episodes.engines import EngineAccess
from services.rollout.episodes.group import GroupTools
from services.rollout.episodes.leases import RouterLeases
from services.rollout.episodes.rollouts import Rollouts
from services.rollout.episodes.sampler import Sampler
from services.rollout.episodes.spool import Journals, Spool
from services.rollout.episodes.wire import evaluation_from_proto
from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.api.rollout.v1 import rollout_service_pb2_grpc as pb_grpc
from sluice.config import ConfigError
from sluice.runtime.waits import Waits
from sluice.runtime.wire import evaluation_report
from sluice.samples.blobs import BlobStore
from sluice.samples.tokenizer import TextTokenizer


class RolloutServicer(pb_grpc.RolloutServiceServicer):
    """Serves one episode worker."""

    def __init__(self, rollouts: Rollouts, environments: Environments) -> None:
        self._rollouts, self._environments = rollouts, environments

    async def Rollout(
        self, request: pb.RolloutRequest, context: Any
    ) -> AsyncIterator[pb.RolloutResponse]:
        async for event in self._rollouts.follow(request):
            yield event

    async def Evaluate(
        self, request: pb.EvaluateRequest, context: Any
    ) -> AsyncIterator[pb.EvaluateResponse]:
        """Sends settled groups, then the report over all of them."""
        settings = evaluation_from_proto(request)
        finished: list[pb.FinishedGroup] = []
        failed_count = 0
        async for event in self._rollouts.follow(request.rollout, settings):
            outcome = event.WhichOneof("event") or ""
            metrics.EVALUATED_GROUPS.labels(outcome).inc()
            if outcome == "finished":
                finished.append(event.finished)
                yield pb.EvaluateResponse(finished=event.finished)
            else:
                failed_count += 1
                yield pb.EvaluateResponse(failed=event.failed)
        report = evaluation_report(
            finished, failed_count, pass_at=settings.pass_at, threshold=settings.threshold
        )
        yield pb.EvaluateResponse(report=report)

    async def CancelRollout(
        self, request: pb.CancelRolloutRequest, context: Any
    ) -> pb.CancelRolloutResponse:
        cancelled = await self._rollouts.cancel(
            request.rollout_request_id, tuple(request.group_ids)
        )
        return pb.CancelRolloutResponse(cancelled_group_ids=cancelled)

    async def ListEnvironments(
        self, request: pb.ListEnvironmentsRequest, context: Any
    ) -> pb.ListEnvironmentsResponse:
        environments = []
        for name in self._environments.names:
            schema = json.dumps(self._environments.settings_schema(name))
            environments.append(pb.Environment(name=name, settings_schema=schema))
        return pb.ListEnvironmentsResponse(environments=environments)


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
