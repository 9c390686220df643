"""RolloutService: decodes a request, calls the episodes, encodes the answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from services.rollout.environments.runner import Environments
from services.rollout.episodes.evaluation import Evaluations
from services.rollout.episodes.rollouts import Rollouts
from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.api.rollout.v1 import rollout_service_pb2_grpc as pb_grpc


class RolloutServicer(pb_grpc.RolloutServiceServicer):
    """One episode worker on the wire."""

    def __init__(self, rollouts: Rollouts, environments: Environments) -> None:
        self._rollouts, self._environments = rollouts, environments
        self._evaluations = Evaluations(rollouts)

    async def Rollout(
        self, request: pb.RolloutRequest, context: Any
    ) -> AsyncIterator[pb.RolloutResponse]:
        async for event in self._rollouts.follow(request):
            yield event

    async def Evaluate(
        self, request: pb.EvaluateRequest, context: Any
    ) -> AsyncIterator[pb.EvaluateResponse]:
        async for event in self._evaluations.follow(request):
            yield event

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
