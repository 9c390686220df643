"""The optimizer step: reduce once, divide by the global normalizer, check, clip, apply."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import (
    OptimizerConfig,
    ParamKey,
    ParamWithNamePredicate,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from services.trainer.backend import NON_FINITE, StepOutcome, refuse_norm
from services.trainer.backends.megatron import upstream
from services.trainer.backends.megatron.config import MegatronConfig
from services.trainer.backends.megatron.model import PolicyModel
from services.trainer.backends.megatron.parallel import RankGroups
from services.trainer.config import OptimConfig
from services.trainer.parking import HeldTensors
from sluice.vision import part_of
from sluice.weights.rules.common import PREDICTION

FLOAT16_SCALE = 2.0**12  # losses are sums: the usual 2**32 would skip the first forty steps


def _own_rates(scales: Mapping[str, float]) -> dict[ParamKey, Any]:
    """Parts whose learning rate is not that of the text; the same on ranks that have none of it."""

    def belongs(part: str) -> ParamWithNamePredicate:
        return ParamWithNamePredicate(name=part, fn=lambda _, name: part_of(name) == part)

    return {
        ParamKey(with_name_predicate=belongs(part)): {"lr_mult": scale}
        for part, scale in scales.items()
        if scale not in (0.0, 1.0)
    }


class Stepper:
    """Owns the optimizer of one policy.

    `scales`: learning rates of its parts by that of the text.
    """

    def __init__(
        self,
        policy: PolicyModel,
        config: MegatronConfig,
        settings: OptimConfig,
        groups: RankGroups,
        scales: Mapping[str, float],
    ) -> None:
        self._chunks: list[Any] = list(policy.chunks)
        self._settings, self._groups = settings, groups
        self._offloads = config.optimizer_offload > 0
        core = policy.config
        options = OptimizerConfig(
            optimizer="adam",
            lr=settings.learning_rate,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            clip_grad=settings.max_grad_norm,
            bf16=core.bf16,
            fp16=core.fp16,
            params_dtype=core.params_dtype,
            use_distributed_optimizer=config.distributed_optimizer,
            initial_loss_scale=FLOAT16_SCALE,
            hysteresis=1,
            optimizer_cpu_offload=self._offloads,
            optimizer_offload_fraction=config.optimizer_offload,
        )
        with upstream.own_offloading(options):
            self.optimizer: Any = get_megatron_optimizer(
                options,
                self._chunks,
                get_standard_config_overrides(options) | _own_rates(scales),
                use_gloo_process_groups=False,
            )
        for group in self.optimizer.param_groups:  # left to Megatron's scheduler, not used here
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]
        upstream.start_state(self.optimizer)
        # Apart from the policy, of whose steps nothing is to change.
        apart = {
            tensor.parameter
            for tensor in policy.tensors
            if tensor.binding.megatron.startswith(PREDICTION)
        }
        mains = {main for own, main in upstream.main_parameters(self.optimizer) if own in apart}
        self._sets: tuple[Callable[[torch.Tensor], bool], ...] = (lambda main: main not in mains,)
        if policy.source.predicts:  # on all stages: norms are sums over all ranks
            self._sets = (*self._sets, lambda main: main in mains)
        self.steps = 0  # that were applied, by ranks that train nothing too
        core.grad_scale_func = self.optimizer.scale_loss  # 1 but for float16
        self.clear()

    def step(self, *, normalizer: float, learning_rate: float | None) -> StepOutcome:
        """Reduces, clips and applies the gradients; collective over all ranks.

        Raises ValueError for a normalizer that is not positive.
        """
        self.reduce(normalizer)
        overflow = self.optimizer.prepare_grads()
        norms = []
        for keeps in self._sets:
            with upstream.only(self.optimizer, keeps):
                norms.append(float(self.optimizer.get_grad_norm()))
        # Ranks agree, whatever part of the norm each has seen. Left alone, Megatron steps on
        # non-finite gradients unless it scales losses, as it only does in float16.
        clips = bool(self._settings.max_grad_norm)
        refused = next(filter(None, (refuse_norm(norm, clips=clips) for norm in norms)), "")
        applied = not self._groups.any_rank(overflow or bool(refused))
        rate = self._settings.learning_rate if learning_rate is None else learning_rate
        if applied:
            for keeps, norm in zip(self._sets, norms, strict=True):
                with upstream.only(self.optimizer, keeps):
                    self._clip(norm)
            for group in self.optimizer.param_groups:
                group["lr"] = rate * group.get("lr_mult", 1.0)
            self.optimizer.step_with_ready_grads()
            self.steps += 1
        self.clear()
        return StepOutcome(
            grad_norm=norms[0],
            learning_rate=rate,
            skipped_reason="" if applied else refused or NON_FINITE,
        )

    def reduce(self, normalizer: float) -> None:
        """Sum gradients over data, context and tied copies and divide by `normalizer`."""
        if not (normalizer > 0 and math.isfinite(normalizer)):
            raise ValueError(f"normalizer must be positive and finite, got {normalizer}")
        finalize_model_grads(self._chunks, None)
        for chunk in self._chunks:
            chunk.scale_gradients(1.0 / normalizer)

    def resume(self, steps: int) -> None:
        """Go on behind so many steps; bias corrections are of the next one."""
        self.steps = steps
        upstream.set_step(self.optimizer, steps)

    def clear(self) -> None:
        """Forget gathered gradients."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def held(self, others: Iterable[torch.Tensor]) -> HeldTensors:
        """Return the buffers of Megatron's that parameters and gradients are views of, and masters
        and moments of the optimizer, and others beside them."""
        state, gradients = list(others), []
        for chunk in self._chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                state += [] if buffer.param_data is None else [buffer.param_data]
                gradients.append(buffer.grad_data)
        return HeldTensors([*state, *upstream.held_state(self.optimizer)], gradients)

    def _clip(self, norm: float) -> None:
        if not self._settings.max_grad_norm:
            return
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            parameters = [] if part.is_stub_optimizer else part.get_parameters()
            if parameters:
                limit = self._settings.max_grad_norm
                clip_grad_by_total_norm_fp32(parameters, limit, norm, self._offloads)
