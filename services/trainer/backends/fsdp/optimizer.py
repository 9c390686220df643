"""AdamW and Muon over this rank's parts of tensors; gradients are divided, clipped once a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from services.trainer.backend import StepOutcome, decays, refuse_norm
from services.trainer.backends.fsdp.directions import ShardedDirections
from services.trainer.backends.muon import MOMENTUM, Matrices, Muon
from services.trainer.config import OptimConfig
from services.trainer.parking import HeldTensors
from sluice import operations
from sluice.algo.collectives import Collectives
from sluice.vision import part_of

CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_
MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedOptimizer:
    """Works on the plain tensors under the parts, which every element of the model is in once."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        optim: OptimConfig,
        ranks: Collectives,
        device: torch.device,
        *,
        scales: Mapping[str, float],
        is_counted: Callable[[torch.Tensor], bool],
        adamw: str,
        matrices: Mapping[str, Matrices] = {},
        mesh: DeviceMesh,
    ) -> None:
        """`scales`: learning rates by part of the model. `adamw`: the implementation of it.

        `is_counted`: whether this rank's part is in the norm; others may hold the same.
        `matrices`: of the parameters that Muon steps, by name; AdamW steps the others.
        """
        self._max_norm, self._ranks, self._device = optim.max_grad_norm, ranks, device
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self.locals = {
            name: torch.nn.Parameter(local_part(p.detach())) for name, p in self.parameters.items()
        }
        self._counted = [name for name, p in self.parameters.items() if is_counted(p)]
        groups: dict[tuple[float, float], list[torch.nn.Parameter]] = {}
        for name, parameter in self.parameters.items():
            if name not in matrices:
                decay = optim.weight_decay if decays(name, parameter.ndim) else 0.0
                groups.setdefault((decay, scales[part_of(name)]), []).append(self.locals[name])
        self.muon = Muon(
            {name: self.locals[name] for name in matrices},
            matrices,
            optim,
            scales={name: scales[part_of(name)] for name in matrices},
            directions=ShardedDirections(self.parameters, matrices, optim.muon, mesh),
        )
        self.adam = torch.optim.AdamW(
            [
                {"params": parameters, "weight_decay": decay, "scale": scale}
                for (decay, scale), parameters in (groups or {(0.0, 1.0): []}).items()
            ],
            lr=optim.learning_rate,
            betas=optim.betas,
            eps=optim.epsilon,
            **operations.adamw_options(adamw),
        )

    def step(self, normalizer: float, rate: float) -> StepOutcome:
        """Divide by `normalizer`, clip by the norm over all ranks, apply, clear; collective."""
        self._take_gradients()
        gradients = [p.grad for p in self.locals.values() if p.grad is not None]
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for name in self._counted:
            gradient = self.locals[name].grad
            if gradient is not None:
                norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
                total += norm.square().to(self._device)
        self._ranks.all_reduce(total, "sum")
        self._ranks.end_step()
        norm = math.sqrt(total.item()) / normalizer if total.item() >= 0 else math.nan
        if refused := refuse_norm(norm, clips=bool(self._max_norm)):
            self.clear()
            return StepOutcome(grad_norm=norm, learning_rate=rate, skipped_reason=refused)
        clip = min(1.0, self._max_norm / (norm + CLIP_EPSILON)) if self._max_norm else 1.0
        torch._foreach_mul_(gradients, clip / normalizer)
        for group in self.adam.param_groups:
            group["lr"] = rate * group["scale"]
        self.adam.step()
        self.muon.step(rate)
        self.clear()
        return StepOutcome(grad_norm=norm, learning_rate=rate)

    @property
    def has_stepped(self) -> bool:
        """Whether there are moments."""
        return bool(self.adam.state or self.muon.momenta)

    def moments(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Parts of what is kept, each with the name of its parameter and its own."""
        for name, local in self.locals.items():
            if name in self.muon.momenta:
                yield name, MOMENTUM, self.muon.momenta[name]
            else:
                yield from ((name, kind, self.adam.state[local][kind]) for kind in MOMENTS)

    def start(self) -> None:
        """Have moments of zero, at step 0."""
        self.muon.start()
        for local in self._adams():
            self.adam.state[local] = {
                **{kind: torch.zeros_like(local.detach()) for kind in MOMENTS},
                "step": torch.zeros((), device=local.device),  # as the fused optimizer keeps it
            }

    def forget(self) -> None:
        """Begin anew."""
        self.adam.state.clear()
        self.muon.momenta = {}

    @property
    def step_number(self) -> torch.Tensor | None:
        """How many steps AdamW has made, the same of all; None where it has nothing to step."""
        return next((state["step"] for state in self.adam.state.values()), None)

    def set_step(self, number: torch.Tensor) -> None:
        """Have made so many steps."""
        for state in self.adam.state.values():
            state["step"] = number.clone()

    def _adams(self) -> Iterator[torch.nn.Parameter]:
        return (local for name, local in self.locals.items() if name not in self.muon.parameters)

    def clear(self) -> None:
        """Forget all gradients."""
        for name, local in self.locals.items():
            self.parameters[name].grad = local.grad = None

    def held(self) -> HeldTensors:
        """Return the parts of all parameters, of what was gathered, and the optimizer's moments."""
        moments = [kept for state in self.adam.state.values() for kept in state.values()]
        moments += self.muon.momenta.values()
        gradients = [local_part(p.grad) for p in self.parameters.values() if p.grad is not None]
        return HeldTensors([*self.locals.values(), *moments], gradients)

    def _take_gradients(self) -> None:
        for name, local in self.locals.items():
            gradient = self.parameters[name].grad
            local.grad = torch.zeros_like(local) if gradient is None else local_part(gradient)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
