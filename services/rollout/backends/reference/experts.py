"""Which experts a mixture sends its tokens to."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from services.rollout.errors import UnsupportedModelError

CHOSEN = 2  # place of the chosen experts in what a router answers, after logits and weights


class ExpertTap:
    """Listens to the routers of a transformers model, pass by pass."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Raises UnsupportedModelError for a model without routers that name their choice."""
        recorded = getattr(model, "_can_record_outputs", None) or {}
        kind = getattr(recorded.get("router_logits"), "target_class", None)
        routers = [] if kind is None else [m for m in model.modules() if isinstance(m, kind)]
        if not routers or not _tells(routers[0]):
            raise UnsupportedModelError(
                f"{type(model).__name__} has no routers that tell their experts; leave "
                "routed_experts off",
                key="routed_experts",
            )
        self._chosen: list[Any] = [None] * len(routers)  # by depth, each of the last pass
        for index, router in enumerate(routers):
            router.register_forward_hook(partial(self._hear, index))

    def take(self) -> torch.Tensor:
        """int16[tokens, mixture layers, chosen] of the last pass."""
        return torch.stack(self._chosen, dim=1).to(torch.int16)

    def _hear(self, index: int, router: torch.nn.Module, inputs: Any, answer: Any) -> None:
        self._chosen[index] = answer[CHOSEN]


@torch.inference_mode()
def _tells(router: torch.nn.Module) -> bool:
    """Whether a router answers its choice; those of some families answer logits alone."""
    weight = router.get_parameter("weight")
    answer = router(torch.zeros_like(weight[:1]))
    chosen = answer[CHOSEN] if isinstance(answer, tuple) and len(answer) > CHOSEN else None
    return isinstance(chosen, torch.Tensor) and not chosen.is_floating_point()
