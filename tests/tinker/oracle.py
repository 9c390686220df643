"""What Tinker's documentation says of its losses and of its optimizer, by transformers and peft.

In float64, and with none of this project's code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file
from tinker import types
from transformers import AutoModelForCausalLM

Tensors = Mapping[str, torch.Tensor]


class Oracle:
    """The base with an adapter of a folder of peft, trained on."""

    def __init__(self, base: Path, adapter: Path | None) -> None:
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
        self.model = plain
        if adapter is not None:
            self.model = PeftModel.from_pretrained(plain, adapter, is_trainable=True).double()
        self.optimizer: torch.optim.AdamW | None = None

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.model(input_ids=torch.tensor([list(tokens)])).logits[0]

    def logprobs(self, datum: types.Datum) -> torch.Tensor:
        """Of the targets."""
        logits = self.logits(datum.model_input.to_ints())
        targets = datum.loss_fn_inputs["target_tokens"].to_torch()
        return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    def loss(self, data: Sequence[types.Datum], name: str, **config: float) -> torch.Tensor:
        """Summed over all tokens."""
        return torch.stack([self._loss(each, name, config) for each in data]).sum()

    def _loss(self, datum: types.Datum, name: str, config: Mapping[str, float]) -> torch.Tensor:
        target_logprobs = self.logprobs(datum)
        given = {k: v.to_torch().double() for k, v in datum.loss_fn_inputs.items()}
        if name == "cross_entropy":
            return (-target_logprobs * given["weights"]).sum()
        sampling_logprobs, advantages = given["logprobs"], given["advantages"]
        prob_ratio = torch.exp(target_logprobs - sampling_logprobs)
        low = config.get("clip_low_threshold", 0.8)
        high = config.get("clip_high_threshold", 1.2)
        clipped_ratio = torch.clamp(prob_ratio, low, high)
        if name == "importance_sampling":
            return -(prob_ratio * advantages).sum()
        if name == "ppo":
            return -torch.min(prob_ratio * advantages, clipped_ratio * advantages).sum()
        if name == "cispo":
            return -(clipped_ratio.detach() * target_logprobs * advantages).sum()
        assert name == "dro", name
        quadratic_term = (target_logprobs - sampling_logprobs) ** 2
        beta = config.get("beta", 0.05)
        return -(target_logprobs * advantages - 0.5 * beta * quadratic_term).sum()

    def step(self, params: types.AdamParams) -> float:
        """As torch.optim.AdamW does it; returns the norm of the gradient before it is clipped."""
        parameters = list(self.parameters.values())
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(parameters)
        (group,) = self.optimizer.param_groups
        group["lr"], group["betas"] = params.learning_rate, (params.beta1, params.beta2)
        group["eps"], group["weight_decay"] = params.eps, params.weight_decay
        largest = params.grad_clip_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(parameters, largest)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def tensors(self) -> dict[str, torch.Tensor]:
        """By the names of peft's files."""
        return {n.replace(".default", ""): p.detach() for n, p in self.parameters.items()}


def published(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def largest_difference(found: Tensors, expected: Tensors, before: Tensors) -> float:
    """Of what steps changed, by the largest change of each tensor."""
    assert found.keys() == expected.keys() == before.keys()
    worst = 0.0
    for name, tensor in expected.items():
        change = (tensor - before[name].double()).abs().max()
        assert change > 0, name
        worst = max(worst, float((found[name].double() - tensor).abs().max() / change))
    return worst
