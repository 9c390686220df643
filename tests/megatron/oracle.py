"""What transformers says: log-probs, gradients and steps by plain autograd, by HF names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from services.trainer.backend import Row
from services.trainer.config import OptimConfig
from sluice.algo.inputs import pack_rows
from sluice.algo.logprobs import token_logprobs
from sluice.algo.losses import compute_loss
from sluice.algo.spec import LossSpec

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class OracleStep:
    loss: float
    grad_norm: float


class Oracle:
    def __init__(self, directory: Path, optim: OptimConfig, dtype: torch.dtype) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        self._optim = optim
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": optim.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=optim.learning_rate,
            betas=optim.betas,
            eps=optim.epsilon,
        )

    @torch.no_grad()
    def logprobs(self, rows: Sequence[Row], temperature: float) -> Tensors:
        return {row.sample_id: self._outputs(row, temperature)[0].float() for row in rows}

    def gradients(self, rows: Sequence[Row], spec: LossSpec, normalizer: float) -> Tensors:
        """Gradient of every tensor of the checkpoint, by its name there."""
        self.model.zero_grad()
        self._backward(rows, spec, normalizer)
        found = {
            name: parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            for name, parameter in self.model.named_parameters()
        }
        self.model.zero_grad()
        return split_experts(found)

    def step(self, rows: Sequence[Row], spec: LossSpec, normalizer: float) -> OracleStep:
        self._optimizer.zero_grad()
        loss = self._backward(rows, spec, normalizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._optim.max_grad_norm)
        self._optimizer.step()
        return OracleStep(loss, float(norm))

    def weights(self) -> Tensors:
        named = self.model.named_parameters()
        return split_experts({name: parameter.detach() for name, parameter in named})

    def _backward(self, rows: Sequence[Row], spec: LossSpec, normalizer: float) -> float:
        total = 0.0
        for row in rows:
            outputs, entropy = self._outputs(row, spec.temperature or 1.0)
            loss = compute_loss(pack_rows([row], spec, outputs, entropy), spec).loss
            (loss / normalizer).backward()
            total += loss.item()
        return total / normalizer

    def _outputs(self, row: Row, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.model(row.token_ids[None]).logits[0, row.prompt_length - 1 : -1]
        return token_logprobs(
            logits,
            row.token_ids[row.prompt_length :],
            temperature=temperature,
            entropy="gradient",
        )


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
