"""Muon in numpy's float64 beside torch's AdamW, over a plain transformers model in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tests.contract.training_backend.cases import Oracle

Matrix = npt.NDArray[np.float64]
OTHERS = ("embed", "lm_head", "score", "wte", "wpe", "conv1d", "bias", "A_log")  # by their names
MERGED = ("gpt_oss", "granitemoe")  # whose checkpoints have gate and up of an expert in one


def newton_schulz(matrix: Matrix, steps: int) -> Matrix:
    """The quintic of https://kellerjordan.github.io/posts/muon/."""
    x = matrix / max(float(np.linalg.norm(matrix)), 1e-7)
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def matrices_in(name: str, tensor: torch.Tensor, family: str) -> Iterator[torch.Tensor]:
    """Those that the checkpoint has: of each expert its gate, its up and its down projection."""
    if tensor.ndim == 2:
        yield tensor
        return
    for expert in tensor:
        are_two = name.endswith("gate_up_proj") and family not in MERGED
        yield from expert.chunk(2) if are_two else (expert,)


@dataclass
class MuonOracle(Oracle):
    """`step` is Muon's for matrices between the embedding and the head, AdamW's for all else."""

    momenta: dict[tuple[str, int], Matrix] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = dict(self.model.named_parameters())
        self.hidden = {
            name: p
            for name, p in named.items()
            if p.ndim > 1 and p.requires_grad and not any(other in name for other in OTHERS)
        }
        rest = {n: p for n, p in named.items() if p.requires_grad and n not in self.hidden}
        decaying = {
            name for name, p in rest.items() if p.ndim > 1 and not name.endswith(("bias", "A_log"))
        }
        self.adam = torch.optim.AdamW(
            [
                {"params": [p for name, p in rest.items() if name in decaying]},
                {
                    "params": [p for name, p in rest.items() if name not in decaying],
                    "weight_decay": 0.0,
                },
            ],
            lr=self.optim.learning_rate,
            betas=self.optim.betas,
            eps=self.optim.epsilon,
            weight_decay=self.optim.weight_decay,
        )

    def step(self, loss: torch.Tensor, normalizer: float) -> float:
        self.model.zero_grad()
        (loss / normalizer).backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.optim.max_grad_norm)
        self.adam.step()
        for name, parameter in self.hidden.items():
            gradient = parameter.grad
            assert gradient is not None
            both = (
                matrices_in(name, tensor, self.model.config.model_type)
                for tensor in (parameter.detach(), gradient)
            )
            for number, (weight, slope) in enumerate(zip(*both, strict=True)):
                weight.copy_(self._stepped((name, number), weight, slope))
        return float(norm)

    def _stepped(
        self, key: tuple[str, int], weight: torch.Tensor, slope: torch.Tensor
    ) -> torch.Tensor:
        muon, rate = self.optim.muon, self.optim.learning_rate
        gradient = slope.double().numpy()
        before = self.momenta.get(key, np.zeros_like(gradient))
        momentum = self.momenta[key] = muon.momentum * before + (1 - muon.momentum) * gradient
        ahead = muon.momentum * momentum + (1 - muon.momentum) * gradient
        made = newton_schulz(ahead if muon.nesterov else momentum, muon.newton_schulz_steps)
        outside, inside = gradient.shape
        factor = (
            muon.rate_factor
            * {
                "match_rms_adamw": 0.2 * max(outside, inside) ** 0.5,
                "original": max(1.0, outside / inside) ** 0.5,
            }[muon.adjustment]
        )
        kept: Matrix = weight.double().numpy() * (1 - rate * self.optim.weight_decay)
        return torch.from_numpy(kept - rate * factor * made)


@dataclass
class TorchMuonOracle(MuonOracle):
    """The same by torch.optim.Muon, whose iterations are in bfloat16, one matrix at a time."""

    single: dict[tuple[str, int], torch.optim.Optimizer] = field(default_factory=dict)

    def _stepped(
        self, key: tuple[str, int], weight: torch.Tensor, slope: torch.Tensor
    ) -> torch.Tensor:
        muon = self.optim.muon
        if key not in self.single:
            self.single[key] = torch.optim.Muon(
                [torch.nn.Parameter(weight.clone())],
                lr=self.optim.learning_rate,
                weight_decay=self.optim.weight_decay,
                momentum=muon.momentum,
                nesterov=muon.nesterov,
                ns_steps=muon.newton_schulz_steps,
                adjust_lr_fn=muon.adjustment,
            )
        (parameter,) = self.single[key].param_groups[0]["params"]
        parameter.grad = slope.clone()
        self.single[key].step()
        stepped: torch.Tensor = parameter.detach()
        return stepped
