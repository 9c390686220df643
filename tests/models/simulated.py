"""What plain transformers says of a model whose experts compute by 4 bits, in numpy and float64."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from services.trainer.backend import Row
from services.trainer.config import OptimConfig
from tests.contract.training_backend.cases import Model, Oracle
from tests.fsdp.jobs import NORMALIZER, OPTIM, rows_of
from tests.fsdp.oracle import Expected, Tensors, as_stored_names

STACKED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")  # of transformers' own models
STORED = re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$")


def stands_for(weight: torch.Tensor, size: int) -> torch.Tensor:
    """The numbers that the weight [..., inputs] is stored as; float64.

    Of every `size` inputs the largest magnitude, over 7 and rounded to 8 binary digits as bfloat16
    has them, is the scale; numbers are the nearest of -7 to 7 times it.
    """
    groups = weight.detach().double().numpy().reshape(-1, size)
    digits, exponent = np.frexp(np.abs(groups).max(-1, keepdims=True) / 7)
    scale = np.ldexp(np.rint(digits * 256) / 256, exponent)
    stored = np.clip(np.rint(groups / scale), -7, 7) * scale
    return torch.from_numpy(stored.reshape(weight.shape))


class SimulatedOracle(Oracle):
    """Steps of a plain model by the gradients of one that computes with what it is stored as."""

    def __init__(self, model: Model, size: int, optim: OptimConfig) -> None:
        super().__init__(model.load(), optim)
        self.plain, self.model, self._size = self.model, model.load(), size
        self.take()

    def take(self) -> None:
        """Compute with what the plain model has now."""
        pairs = zip(self.plain.named_parameters(), self.model.parameters(), strict=True)
        with torch.no_grad():
            for (name, weight), own in pairs:
                own.copy_(stands_for(weight, self._size) if STACKED.search(name) else weight)
                own.grad = None

    def gradients(self, rows: Sequence[Row]) -> Tensors:
        self.ppo_loss(rows).backward()
        named = self.model.named_parameters()
        return as_stored_names(self.model, {n: p.grad for n, p in named if p.grad is not None})

    def step(self, loss: torch.Tensor, normalizer: float) -> float:
        (loss / normalizer).backward()
        for weight, own in zip(self.plain.parameters(), self.model.parameters(), strict=True):
            weight.grad = own.grad
        norm = torch.nn.utils.clip_grad_norm_(self.plain.parameters(), self.optim.max_grad_norm)
        self.adam.step()
        self.take()
        return float(norm)


def expect_simulated(model: Model, size: int, steps: int) -> Expected:
    """As `expect`, of passes that compute with groups of `size`."""
    torch.set_num_threads(1)
    oracle = SimulatedOracle(model, size, OptimConfig(**OPTIM))  # type: ignore[arg-type]
    rows = rows_of(0)
    logprobs = {row.sample_id: oracle.logprobs(row).detach() for row in rows}
    gradients = oracle.gradients(rows)
    oracle.take()
    made = []
    for step in range(steps):
        loss = oracle.ppo_loss(rows_of(step))
        made.append({"loss": loss.item(), "grad_norm": oracle.step(loss, NORMALIZER)})
    weights = as_stored_names(
        oracle.plain, {n: p.detach() for n, p in oracle.plain.named_parameters()}
    )
    return Expected(logprobs, gradients, made, weights, rounding=0.0)


def scored_as_stored(model: Model, weights: Tensors, size: int) -> Tensors:
    """Log-probs of the rows by the weights of a checkpoint, experts as they would be stored."""
    numbers: Any = {
        name: stands_for(tensor, size).float() if STORED.search(name) else tensor
        for name, tensor in weights.items()
    }
    module: Any = type(model.load()).from_pretrained(
        None, config=model.load().config, state_dict=numbers, experts_implementation="eager"
    )
    module.get_input_embeddings().padding_idx = None
    oracle = Oracle(module.eval())
    return {row.sample_id: oracle.logprobs(row).detach() for row in rows_of(0)}
