"""What plain transformers, autograd and AdamW say of a checkpoint, by the names in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.core_model_loading import revert_weight_conversion

from services.trainer.config import OptimConfig
from tests.contract.training_backend.cases import Model, Oracle
from tests.fsdp.jobs import NORMALIZER, OPTIM, rows_of

Tensors = dict[str, torch.Tensor]
STEPS = 5


@dataclass(frozen=True)
class Expected:
    """rounding: how far its log-probs are from those that it has in float64."""

    logprobs: Tensors
    gradients: Tensors
    steps: list[dict[str, float]]
    weights: Tensors
    rounding: float


def expect(
    model: Model, steps: int = STEPS, trainable: Mapping[str, Sequence[str]] | None = None
) -> Expected:
    """One sample at a time, each whole; see `Oracle`. `trainable`: as of a trainer."""
    torch.set_num_threads(1)
    oracle = Oracle(model.load(), OptimConfig(**OPTIM))  # type: ignore[arg-type]
    _freeze(oracle.model, trainable or {})
    rows = rows_of(0)
    logprobs = {row.sample_id: oracle.logprobs(row).detach() for row in rows}
    oracle.ppo_loss(rows).backward()
    named = dict(oracle.model.named_parameters())
    gradients = as_stored_names(
        oracle.model, {n: p.grad for n, p in named.items() if p.grad is not None}
    )
    oracle.adam.zero_grad()
    made = []
    for step in range(steps):
        loss = oracle.ppo_loss(rows_of(step))
        made.append({"loss": loss.item(), "grad_norm": oracle.step(loss, NORMALIZER)})
    weights = as_stored_names(oracle.model, {n: p.detach() for n, p in named.items()})
    return Expected(logprobs, gradients, made, weights, _rounding(model, logprobs))


def _freeze(model: Any, trainable: Mapping[str, Sequence[str]]) -> None:
    """All names of experts in one tensor, and of a tied one, say the same of it."""
    tied = ["lm_head.weight"] if model.config.tie_word_embeddings else []
    for name, parameter in model.named_parameters():
        names = [*as_stored_names(model, {name: parameter.detach()})]
        names += tied if "embed_tokens" in name else []
        allowed, denied = (
            any(fnmatchcase(each, pattern) for pattern in patterns for each in names)
            for patterns in (trainable.get("allow", ["*"]), trainable.get("deny", []))
        )
        parameter.requires_grad_(allowed and not denied)


def _rounding(model: Model, logprobs: Tensors) -> float:
    exact = Oracle(model.load().double())  # type: ignore[no-untyped-call]
    found = {row.sample_id: exact.logprobs(row).detach() for row in rows_of(0)}
    return logprob_difference(found, logprobs)


def as_stored_names(model: Any, tensors: Tensors) -> Tensors:
    made: Tensors = revert_weight_conversion(model, {n: t.clone() for n, t in tensors.items()})
    return made


def read_ranks(out: Path, kind: str) -> Tensors:
    """The files of all ranks; every tensor must come from exactly one."""
    found: Tensors = {}
    for path in sorted(out.glob(f"{kind}-*.safetensors")):
        for name, tensor in load_file(path).items():
            assert name not in found, f"{name} was written by two ranks"
            found[name] = tensor
    return found


def logprob_difference(found: Tensors, expected: Tensors) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def gradient_difference(found: Tensors, expected: Tensors) -> float:
    """Largest difference of any tensor, relative to the tensor's largest element.

    A gradient that is 0 but for rounding (a bias of keys has no effect) must be so in both. That of
    one number is a sum over all tokens, which may cancel: it is by a thousandth of the largest.
    """
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    rounding = 1e-6 * largest
    assert expected.keys() <= found.keys(), expected.keys() - found.keys()
    worst = 0.0
    for name, tensor in expected.items():
        scale = float(tensor.abs().max())
        assert scale > 0, f"{name} has no gradient to compare"
        if scale < rounding:
            assert float(found[name].abs().max()) < rounding, name
            continue
        scale = max(scale, 1e-3 * largest) if tensor.numel() == 1 else scale
        worst = max(worst, float((found[name].float() - tensor).abs().max()) / scale)
    return worst
