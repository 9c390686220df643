"""Losses of routers, beside that of a call: even use of experts, and small logits.

Of all tokens of a call, on all ranks, each counted as in `expert_load`, and of each layer: E times
the sum over experts of (share of the choices that went to it) x (mean probability of it), which is
1 where use is even (arXiv 2101.03961, over all tokens at once as in 2501.11873); and the mean
square of the logarithm of the summed exponentials of logits (2202.08906). Shares are constants, of
a pass that goes before. So neither depends on how rows are packed, or on ranks. Steps tell what
both come to, without their coefficients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from services.trainer.backend import MicroBatch
from services.trainer.backends.expert_load import ExpertLoad, layers_of, watch_experts
from services.trainer.config import ExpertsConfig
from sluice.algo.collectives import Collectives

# By what their routers make of logits; of others the logits are not known.
SOFTMAX = {
    *("deepseek_v2", "ernie4_5_moe", "flex_olmo", "gemma4_text", "gpt_oss", "granitemoe"),
    *("granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "jamba", "mixtral", "olmoe"),
    *("phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text"),
}
SIGMOID = {
    *("afmoe", "deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
    *("hy_v3", "kimi_linear", "laguna", "lfm2_moe", "mimo_v2_flash", "minimax_m2", "nemotron_h"),
    "solar_open",
}
# Layers whose products are the logits, where routers tell something else or are no more.
LINEAR = {"gemma4_text": "router.proj", "jamba": "router"}
AUX, Z = "experts_aux_loss", "experts_z_loss"  # as steps tell them
Probabilities = Callable[[torch.Tensor], torch.Tensor]  # of logits [T, E]


class UnknownRouterError(ValueError):
    """Losses of routers are asked for of a family whose logits are not known here."""

    def __init__(self, setting: str, model_type: str) -> None:
        known = ", ".join(sorted(SOFTMAX | SIGMOID))
        super().__init__(
            f"experts.{setting} is not for model_type {model_type}, of whose routers the logits "
            f"are not known here: leave it out; known: {known}"
        )


class _Carried(torch.autograd.Function):
    """What a layer goes on with, as it is; its gradient brings that of a loss beside it."""

    @staticmethod
    def forward(ctx: Any, carried: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.of_loss = torch.ones_like(loss)
        return carried.view_as(carried)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, ctx.of_loss


class ExpertLosses:
    """Has routers be given the gradients of their losses while a pass is `trained`."""

    def __init__(
        self,
        settings: ExpertsConfig,
        counts: ExpertLoad,
        told: ExpertLoad,
        probabilities: Probabilities,
    ) -> None:
        """`counts`: another one than what steps tell of, `told`, of the same layers."""
        named = {AUX: settings.aux_loss_coefficient, Z: settings.z_loss_coefficient}
        self._coefficients = {name: each for name, each in named.items() if each}
        self.counts, self._told = counts, told
        told.tell_losses([*self._coefficients])
        self._probabilities = probabilities
        self._shares: list[torch.Tensor] = []
        self._scale = 0.0
        self.rows_T: torch.Tensor | None = None  # of the pass that runs

    def start_counting(self) -> bool:
        """Return whether a pass is to count first, with nothing but `counts`.

        They are empty then: a pass that failed leaves what it had counted.
        """
        self.counts.clear()
        return AUX in self._coefficients

    def begin(
        self, ranks: Collectives | None, tokens: int, normalizer: float, *, is_counted: bool = True
    ) -> None:
        """Take the shares of what was counted, behind a pass; collective.

        tokens: of this rank's rows, where it stands for them, as `count_tokens` says. normalizer:
        by which a step divides what the call adds, times any scale of losses.
        """
        device = self.counts.device
        total = torch.tensor(tokens, dtype=torch.int64, device=device)
        if ranks is not None:
            ranks.all_reduce(total, "sum")
        self._scale = normalizer / max(1, int(total))
        self._told.begin_call(normalizer)
        if AUX in self._coefficients:
            counted = self.counts.take(ranks, is_counted=is_counted)
            self._shares = [
                torch.tensor(layer, dtype=torch.float32, device=device) / max(1, sum(layer))
                for layer in counted
            ]

    @contextmanager
    def trained(self, rows_T: torch.Tensor | None) -> Iterator[None]:
        """Passes meanwhile, and layers run again for them, have the gradients of these losses.

        rows_T: see `ExpertLoad.counting`.
        """
        self.rows_T = rows_T
        try:
            yield
        finally:
            self.rows_T = None

    def carry(
        self,
        layer: int,
        logits_TE: torch.Tensor,
        carried: torch.Tensor,
        rows_T: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return what a layer goes on with, which brings the gradients of its losses.

        What they come to is told once, by the run of the layer that is counted.
        """
        has_gradient = torch.is_grad_enabled() and carried.requires_grad
        if rows_T is None or not (has_gradient or self._told.is_counting):
            return carried
        logits_TE, weights_T = logits_TE.float().reshape(len(rows_T), -1), rows_T.float()
        values = [
            self._value_T(name, layer, logits_TE) @ weights_T * self._scale
            for name in self._coefficients
        ]
        if self._told.is_counting:
            self._told.add_losses(layer, values)
        if not has_gradient:
            return carried
        terms = zip(self._coefficients.values(), values, strict=True)
        loss = torch.stack([coefficient * value for coefficient, value in terms]).sum()
        made: torch.Tensor = _Carried.apply(carried, loss)
        return made

    def _value_T(self, name: str, layer: int, logits_TE: torch.Tensor) -> torch.Tensor:
        """What each token brings to a loss, of which all have the mean."""
        if name == Z:
            return logits_TE.logsumexp(1).square()
        return logits_TE.shape[1] * (self._probabilities(logits_TE) @ self._shares[layer])


def count_tokens(micro_batches: Sequence[MicroBatch]) -> int:
    """Return how many tokens of the rows another follows."""
    return sum(len(row.token_ids) - 1 for rows in micro_batches for row in rows)


def softmax(logits_TE: torch.Tensor) -> torch.Tensor:
    return logits_TE.softmax(1)


def sigmoids(logits_TE: torch.Tensor) -> torch.Tensor:
    """Scores that need not add up to 1, by their sum."""
    scores_TE = logits_TE.sigmoid()
    return scores_TE / (scores_TE.sum(1, keepdim=True) + 1e-20)


def trained(
    losses: ExpertLosses | None, rows_T: torch.Tensor | None
) -> AbstractContextManager[None]:
    """See `ExpertLosses.trained`."""
    return nullcontext() if losses is None else losses.trained(rows_T)


def watch_logits(settings: ExpertsConfig, model: Any, told: ExpertLoad) -> ExpertLosses | None:
    """Have the routers of a transformers model be given gradients; None where none are asked for.

    A router tells its logits; the weights that it has given experts bring the gradients. `told`:
    what steps tell of. Raises UnknownRouterError.
    """
    if not settings.losses:
        return None
    counts = watch_experts(model, told.device)
    kind = model.config.get_text_config().model_type
    owners = [owner for owner, _ in layers_of(model)]
    routers = list(_routers(model, kind, owners))
    if not owners or len(routers) < len(owners) or kind not in SOFTMAX | SIGMOID:
        raise UnknownRouterError(next(iter(settings.losses)), kind)
    losses = ExpertLosses(settings, counts, told, softmax if kind in SOFTMAX else sigmoids)
    logits = dict[int, torch.Tensor]()

    def tell(layer: int, index: int, _: torch.nn.Module, __: Any, made: Any) -> None:
        logits[layer] = made if isinstance(made, torch.Tensor) else made[index]

    def bring(layer: int, _: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> Any:
        hidden, chosen, weights = given
        return hidden, chosen, losses.carry(layer, logits.pop(layer), weights, losses.rows_T)

    for layer, ((_, experts), (router, index)) in enumerate(
        zip(layers_of(model), routers, strict=True)
    ):
        router.register_forward_hook(partial(tell, layer, index))
        experts.register_forward_pre_hook(partial(bring, layer))
    return losses


def _routers(
    model: torch.nn.Module, kind: str, owners: Sequence[torch.nn.Module]
) -> Iterator[tuple[torch.nn.Module, int]]:
    """What makes the logits of each layer, and which of what it makes they are."""
    if kind in LINEAR:
        for owner in owners:
            yield owner.get_submodule(LINEAR[kind]), 0
        return
    recorded = [
        found
        for module in model.modules()
        if (found := (getattr(module, "_can_record_outputs", None) or {}).get("router_logits"))
    ]
    for owner in owners if recorded else ():
        recorder = recorded[-1]
        (router,) = (m for m in owner.modules() if isinstance(m, recorder.target_class))
        yield router, recorder.index
