"""What the reference backend says: log-probs, gradients, steps and weights, by HF names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

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
        return checkpoint_names(self._backend._policy.model, found)

    def step(self, rows: Sequence[Row], spec: LossSpec, normalizer: float) -> OracleStep:
        sums = self._backend.forward_backward([rows], spec)
        outcome = self._backend.step(normalizer=normalizer, learning_rate=None)
        return OracleStep(sums.loss / normalizer, outcome.grad_norm)

    def weights(self) -> Tensors:
        named = dict(self._backend._policy.model.named_parameters())
        for name, buffer in self._backend._policy.model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # part of a checkpoint
                named[name] = buffer
        found = {name: p.detach().clone() for name, p in named.items()}
        return checkpoint_names(self._backend._policy.model, found)


def checkpoint_names(model: Any, tensors: Tensors) -> Tensors:
    """Tensors of a model under their names in checkpoints, where each expert has its own."""
    found: Tensors = revert_weight_conversion(model, tensors)
    return found


def reference_config(directory: Path, optim: dict[str, float]) -> TrainerConfig:
    return TrainerConfig(model=str(directory), store=directory, optim=optim, durable=False)
