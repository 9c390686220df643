"""What the reference backend says: log-probs, gradients, steps and weights, by HF names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from services.trainer.backend import Mesh, Row
from services.trainer.backends.reference.backend import ReferenceBackend
from services.trainer.config import TrainerConfig
from sluice.algo.spec import LossSpec

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class OracleStep:
    loss: float
    grad_norm: float


class Oracle:
    def __init__(self, config: TrainerConfig) -> None:
        self._backend = ReferenceBackend(config, Mesh(rank=0, world_size=1))

    def logprobs(self, rows: Sequence[Row], temperature: float) -> Tensors:
        return self._backend.compute_logprobs([rows], model="policy", temperature=temperature)

    def gradients(self, rows: Sequence[Row], spec: LossSpec, normalizer: float) -> Tensors:
        """Gradient of every tensor of the checkpoint, by its name there."""
        self._backend.forward_backward([rows], spec)
        parameters = self._backend._optimizer.parameters
        found = {name: p.grad / normalizer for name, p in parameters.items() if p.grad is not None}
        self._backend.discard_gradients()
        return split_experts(found)

    def step(self, rows: Sequence[Row], spec: LossSpec, normalizer: float) -> OracleStep:
        sums = self._backend.forward_backward([rows], spec)
        outcome = self._backend.step(normalizer=normalizer, learning_rate=None)
        return OracleStep(sums.loss / normalizer, outcome.grad_norm)

    def weights(self) -> Tensors:
        named = dict(self._backend._optimizer.parameters)
        for name, buffer in self._backend._policy.model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # part of a checkpoint
                named[name] = buffer
        return split_experts({name: p.detach().clone() for name, p in named.items()})


def split_experts(tensors: Tensors) -> Tensors:
    """Experts that transformers keeps in one tensor, under the names they have in checkpoints."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                stem = f"{name.removesuffix('gate_up_proj')}{expert}"
                gate, up = both.chunk(2)
                found |= {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                found[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = down
        else:
            found[name] = tensor
    return found


def reference_config(directory: Path, optim: dict[str, float]) -> TrainerConfig:
    return TrainerConfig(model=str(directory), store=directory, optim=optim, durable=False)
