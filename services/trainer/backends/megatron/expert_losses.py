"""Losses of Megatron's routers, whose own are of one micro-batch, or of those that went before."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from services.trainer.backends.expert_load import ExpertLoad
from services.trainer.backends.expert_losses import (
    ExpertLosses,
    UnknownRouterError,
    sigmoids,
    softmax,
)
from services.trainer.backends.megatron.expert_load import all_routers, watch_routers
from services.trainer.backends.megatron.model import PolicyModel
from services.trainer.config import ExpertsConfig


class _Told:
    """The logits of a router's last pass, and tokens of passes that are to run again.

    Stages go forward on further micro-batches before they go back; what is recomputed is the oldest
    first.
    """

    def __init__(self, losses: ExpertLosses, place: int, router: Any) -> None:
        self._losses, self._place, self._gating = losses, place, router.gating
        self.waiting = deque[torch.Tensor]()
        self._logits: torch.Tensor | None = None
        router.gating = self._score
        router.register_forward_hook(self._bring)

    def _score(self, hidden: torch.Tensor) -> torch.Tensor:
        self._logits = logits = self._gating(hidden)
        return logits

    def _bring(self, _: torch.nn.Module, __: Any, made: tuple[torch.Tensor, torch.Tensor]) -> Any:
        logits, self._logits = self._logits, None
        rows_T = self._losses.rows_T
        if not torch.is_grad_enabled():
            if rows_T is not None:
                self.waiting.append(rows_T)
        elif rows_T is None and self.waiting:
            rows_T = self.waiting.popleft()
        assert logits is not None
        probabilities, chosen = made
        return self._losses.carry(self._place, logits, probabilities, rows_T), chosen


def watch_logits(
    settings: ExpertsConfig, policy: PolicyModel, told: ExpertLoad
) -> ExpertLosses | None:
    """Have the routers of this stage be given gradients; None where none are asked for.

    `told`: what steps tell of. Raises UnknownRouterError.
    """
    if not settings.losses:
        return None
    source = policy.source
    if not source.shape.experts:
        raise UnknownRouterError(next(iter(settings.losses)), source.hf_config.model_type)
    counts = watch_routers(policy, told.device)
    losses = ExpertLosses(settings, counts, told, sigmoids if source.biased else softmax)
    for place, router in all_routers(policy):
        _Told(losses, place, router)
    return losses
