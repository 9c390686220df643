"""Routers of transformers models: the experts that they choose are recorded, or told to them.

And what they choose by beside their scores: biases that no gradient reaches.

One thing is the same in all families: a router's last `topk`, of scores [tokens, experts], is its
choice. What it makes of the choice (weights, normalised and scaled) stays its own code, and so do
their gradients. So a router that is told what to choose is its own forward, whose last `topk`
answers that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

BIASES = {"e_score_correction_bias", "expert_bias"}  # as transformers' routers call them
_CHOICES = {torch.topk, torch.Tensor.topk}
_LIMITS = {torch.masked_fill, torch.Tensor.masked_fill}


@contextmanager
def biases_unrounded() -> Iterator[None]:
    """transformers reads biases of routers in float32 meanwhile, whatever it reads the rest in.

    Of some families it rounds them, others it keeps as they are by itself.
    """
    from transformers import PreTrainedModel

    before = PreTrainedModel._get_dtype_plan

    def plan(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
        return {**before(model, dtype), **dict.fromkeys(sorted(BIASES), torch.float32)}

    PreTrainedModel._get_dtype_plan = plan
    try:
        yield
    finally:
        PreTrainedModel._get_dtype_plan = before


def hold_biases(model: torch.nn.Module) -> None:
    """Have all families hold biases of routers as most do: buffers, in float32.

    Some have weights that take no gradient: cut over ranks, rounded as weights are.
    """
    for module in model.modules():
        for name in BIASES & module._parameters.keys():
            bias = module._parameters.pop(name)
            assert bias is not None
            module.register_buffer(name, bias.detach().float())


class UnknownRoutersError(ValueError):
    """A model has no routers, or such as choose otherwise than by scores of all experts."""


class Router:
    """A router of one layer, whose forward is taken over.

    experts, count: how many it chooses among and takes, once it has run. told: int[tokens, count],
    what it is to choose; None leaves it free.
    """

    def __init__(self, owner: Any, forward: str) -> None:
        self.experts = self.count = 0
        self.told: torch.Tensor | None = None
        self._records, self._recorded = False, torch.empty(0)
        self._place = -1  # of its choice, among what is called `topk` in a forward
        self._forward = getattr(owner, forward)
        setattr(owner, forward, self._run)

    def record(self, *, on: bool) -> None:
        """Keep what is chosen from now on, or no more."""
        self._records, self._recorded = on, torch.empty(0)

    def take(self) -> torch.Tensor:
        """Return int64[tokens, count], as it was chosen last."""
        return self._recorded

    def _run(self, *arguments: Any, **options: Any) -> Any:
        assert self.told is None or self.count, "it has to run once before it is told anything"
        if self.told is None and not self._records and self.count:
            return self._forward(*arguments, **options)
        with _Choice(self._place, self.told) as choice:
            answer = self._forward(*arguments, **options)
        assert self.told is None or choice.chosen is not None, "it has not asked what to choose"
        if choice.chosen is not None:
            if not self.count:
                self._place = choice.calls - 1
                self.experts, self.count = choice.experts, choice.chosen.shape[-1]
            if self._records:
                self._recorded = choice.chosen.detach()
        return answer


class _Choice(TorchFunctionMode):
    """What is chosen within; with `told`, that is: by the `topk` at `place`."""

    def __init__(self, place: int, told: torch.Tensor | None) -> None:
        super().__init__()
        self.calls, self.experts = 0, 0
        self.chosen: torch.Tensor | None = None
        self._place, self._told = place, told

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        options = options or {}
        if self._told is not None and function in _LIMITS:
            return arguments[0]  # groups of experts limit its own choice
        if function not in _CHOICES:
            return function(*arguments, **options)
        place, self.calls = self.calls, self.calls + 1
        scores: torch.Tensor = arguments[0]
        if self._told is None:
            answer = function(*arguments, **options)
        elif place != self._place:
            return function(*arguments, **options)
        else:
            told = self._told.to(torch.int64)
            answer = torch.return_types.topk((scores.gather(-1, told), told))
        self.chosen, self.experts = answer.indices, scores.shape[-1]
        return answer


class Routers:
    """The routers of a model by depth. It has to run once before they are told anything."""

    def __init__(self, model: Any) -> None:
        """Raise UnknownRoutersError for a model without any."""
        self._kind = getattr(model.config, "model_type", type(model).__name__)
        self._each = [Router(*place) for place in _places(model)]
        if not self._each:
            raise UnknownRoutersError(f"model_type {self._kind} has no experts")

    def __len__(self) -> int:
        return len(self._each)

    @property
    def experts(self) -> int:
        """Return among how many each chooses."""
        return self._each[0].experts

    @property
    def count(self) -> int:
        """Return how many experts a token goes to."""
        return self._each[0].count

    def check(self) -> None:
        """Raise UnknownRoutersError, after a pass, unless all choose, as many of as many."""
        shapes = {(router.experts, router.count) for router in self._each}
        if (0, 0) in shapes:
            raise UnknownRoutersError(
                f"routers of model_type {self._kind} choose otherwise than by scores of all experts"
            )
        if len(shapes) > 1:
            raise UnknownRoutersError(
                f"layers of model_type {self._kind} choose other numbers of experts: "
                + ", ".join(f"{count} of {experts}" for experts, count in sorted(shapes))
            )

    def tell(self, chosen_LTK: Sequence[torch.Tensor] | torch.Tensor | None) -> None:
        """Have each choose what is there for its layer, from now on; None leaves them free."""
        told: Iterable[torch.Tensor | None] = chosen_LTK if chosen_LTK is not None else ()
        for router in self._each:
            router.told = None
        for router, chosen in zip(self._each, told, strict=False):
            router.told = chosen

    def record(self, *, on: bool) -> None:
        """Keep what is chosen from now on, or no more."""
        for router in self._each:
            router.record(on=on)

    def take(self) -> torch.Tensor:
        """Return int16[tokens, layers, count], as they were chosen in the last pass."""
        return torch.stack([router.take().to(torch.int16) for router in self._each], dim=1)


def _places(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str]]:
    """Where each layer with experts has the forward in which it chooses, by depth."""
    for layer in model.modules():
        if not any(True for _ in _experts_of(layer)):
            continue
        routers = [layer._modules.get(name) for name in ("gate", "router")]
        router = next((each for each in routers if each is not None), None)
        if hasattr(layer, "route_tokens_to_experts"):  # its router is a linear layer
            yield layer, "route_tokens_to_experts"
        elif router is not None:
            yield router, "forward"
        else:
            raise UnknownRoutersError(f"{type(layer).__name__} has experts and no router")


def _experts_of(layer: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    experts = layer._modules.get("experts")
    return iter(()) if experts is None else experts.parameters()
