"""One operation: every implementation that can run here against the formula, and its time.

The formula is in float64 on the host. What cannot run is told with its reason.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from services.trainer.backends.packing import pack
from services.trainer.backends.reference.attention import attend
from sluice import operations, platform
from sluice.algo.logprobs import linear_logprobs
from sluice.fused_operations import attention_kernel, rms_norm, rotate, swiglu
from sluice.operations import OPERATIONS, Usage
from sluice.side_copies import to_device
from tools.accelerator_check.backends import ragged_rows
from tools.accelerator_check.work import StepWork

GOAL = 0.02  # of the largest value, in bfloat16
ROUNDS = 5
MODULE = torch.nn.Identity()
Tensors = tuple[torch.Tensor, ...]
# What is computed of inputs in bfloat16 on the device by an implementation, and by the formula.
Case = tuple[Tensors, Callable[[str, Tensors], torch.Tensor], Callable[[Tensors], torch.Tensor]]


def run(work: StepWork, operation: str) -> None:
    """Record errors and microseconds of each; fail where one is wrong or none ran."""
    device = platform.current().device()
    torch.manual_seed(0)
    make, trained = CASES[operation]
    inputs, compute, formula = make(work.small)
    exact = tuple(each.double() if each.is_floating_point() else each for each in inputs)
    wanted, *slopes = _with_gradients(formula, exact, trained)
    given = tuple(each.to(device) for each in inputs)
    asked = Usage(
        device_type=device.type,
        dtype="bfloat16",
        heads=(64, 64),
        capability=operations.capability_of(device.type),
    )
    ran = 0
    for each in OPERATIONS[operation]:
        if asked.models not in each.models:
            continue
        if reason := each.obstacle(asked):
            work.note(f"{each.name}: {reason}")
            continue
        forward = partial(compute, each.name)
        made, *gradients = _with_gradients(forward, given, trained)
        errors = {"error": _error(made, wanted)}
        seconds = {"us": _seconds(partial(forward, given))}
        if trained:
            pairs = zip(gradients, slopes, strict=True)
            errors["gradient_error"] = max(_error(*pair) for pair in pairs)
            seconds["both_us"] = _seconds(partial(_with_gradients, forward, given, trained))
        work.record(
            **{f"{each.name}_{key}": error for key, error in errors.items()},
            **{f"{each.name}_{key}": took * 1e6 for key, took in seconds.items()},
        )
        for key, error in errors.items():
            if not error <= GOAL:
                work.fail(f"{each.name}: {key} {error:.2g} is more than {GOAL:g}")
        ran += 1
    work.record(ran=ran, chosen=operations.chosen(operation, device.type))
    if not ran:
        work.fail("nothing ran")


def _with_gradients(
    compute: Callable[[Tensors], torch.Tensor], given: Tensors, trained: int
) -> Tensors:
    """What is computed, and the gradients of the first `trained` inputs of a sum with weights."""
    leaves = tuple(
        each.detach().requires_grad_(place < trained) for place, each in enumerate(given)
    )
    made = compute(leaves)
    if not trained:
        return (made,)
    # the same on every device: about even over what is summed, none like another
    weights = torch.arange(made.numel(), device=made.device).mul_(7).remainder_(11).sub_(5)
    upstream = weights.view(made.shape).to(made.dtype)
    return made.detach(), *torch.autograd.grad(made, leaves[:trained], upstream)


def _error(made: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of the largest value."""
    return float((made.detach().double().cpu() - wanted).abs().max() / wanted.abs().max())


def _seconds(compute: Callable[[], object]) -> float:
    """The fastest of some rounds."""
    fastest = math.inf
    for _ in range(ROUNDS):
        platform.current().synchronize()
        began = time.perf_counter()
        compute()
        platform.current().synchronize()
        fastest = min(fastest, time.perf_counter() - began)
    return fastest


def _half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def _attention(small: bool) -> Case:
    rows = ragged_rows(128, groups=2 if small else 16, longest=64 if small else 1024)
    layout = pack(rows, shares_prompts=False)
    tokens = len(layout.token_ids)
    inputs = (_half(1, 8, tokens, 64), _half(1, 2, tokens, 64), _half(1, 2, tokens, 64))

    def compute(name: str, given: Tensors) -> torch.Tensor:
        placed = to_device(layout, given[0].device)
        query, key, value = given
        kernel = attention_kernel(name)
        return attend(MODULE, query, key, value, None, packed_layout=placed, kernel=kernel)[0]

    def formula(exact: Tensors) -> torch.Tensor:
        """Row by row; rows begin where positions do."""
        starts = [*(layout.position_ids == 0).nonzero()[:, 0].tolist(), tokens]
        query, key, value = exact
        parts = [
            scaled_dot_product_attention(
                query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], is_causal=True, enable_gqa=True
            )
            for a, b in pairwise(starts)
        ]
        return torch.cat(parts, dim=2).transpose(1, 2)

    return inputs, compute, formula


def _norm(small: bool) -> Case:
    size = 256 if small else 4096

    def formula(exact: Tensors) -> torch.Tensor:
        hidden, weight = exact
        return hidden / (hidden.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def compute(name: str, given: Tensors) -> torch.Tensor:
        return rms_norm(name, given[0], given[1], 1e-6)

    return (_half(size, size), _half(size)), compute, formula


def _rotary(small: bool) -> Case:
    tokens = 64 if small else 8192
    angles = torch.rand(1, tokens, 32).repeat(1, 1, 2) * 6
    heads = (_half(1, 8, tokens, 64), _half(1, 2, tokens, 64))
    inputs = (*heads, angles.cos().bfloat16(), angles.sin().bfloat16())

    def compute(name: str, given: Tensors) -> torch.Tensor:
        query, key, cosine, sine = given
        return torch.cat(rotate(name, query.clone(), key.clone(), cosine, sine), dim=1)

    def formula(exact: Tensors) -> torch.Tensor:
        query, key, cosine, sine = exact
        heads = torch.cat((query, key), dim=1)
        first, second = heads.chunk(2, dim=-1)
        (c, _), (s, _) = cosine[:, None].chunk(2, dim=-1), sine[:, None].chunk(2, dim=-1)
        return torch.cat((first * c - second * s, second * c + first * s), dim=-1)

    return inputs, compute, formula


def _gate(small: bool) -> Case:
    size = 256 if small else 8192

    def formula(exact: Tensors) -> torch.Tensor:
        return exact[0] / (1 + (-exact[0]).exp()) * exact[1]

    def compute(name: str, given: Tensors) -> torch.Tensor:
        return swiglu(name, *given)

    return (_half(size, size), _half(size, size)), compute, formula


def _experts(small: bool) -> Case:
    """The two products of experts as transformers has them, over a router's choice."""
    count, chosen, size = 8, 2, 64 if small else 2048
    tokens = 32 if small else 4096
    config: Any = SimpleNamespace(
        num_experts=count, hidden_size=size, moe_intermediate_size=size // 2, hidden_act="silu"
    )
    experts = Qwen3MoeExperts(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=size**-0.5)
    index = torch.rand(tokens, count).topk(chosen).indices
    weights = torch.rand(tokens, chosen).bfloat16()

    def with_kind(kind: str, hidden: torch.Tensor) -> torch.Tensor:
        config._experts_implementation = "eager" if kind == "loop" else "grouped_mm"
        experts.to(hidden.device, hidden.dtype)
        made: torch.Tensor = experts(
            hidden, index.to(hidden.device), weights.to(hidden.device, hidden.dtype)
        )
        return made

    def compute(name: str, given: Tensors) -> torch.Tensor:
        return with_kind(name, given[0])

    return (_half(tokens, size),), compute, lambda exact: with_kind("loop", exact[0])


def _logprobs(small: bool) -> Case:
    rows, size, vocabulary = (64, 64, 512) if small else (2048, 2048, 65536)
    weight = (torch.randn(vocabulary, size) * size**-0.5).bfloat16()
    targets = torch.randint(vocabulary, (rows,))

    def compute(name: str, given: Tensors) -> torch.Tensor:
        hidden, head, wanted = given
        whole = hidden.shape[0] * head.shape[0] <= operations.most_logits(name)
        options: Any = {"float32": True, "chunk_rows": len(hidden) if whole else None}
        return linear_logprobs(hidden, head, wanted, **options)[0]

    def formula(exact: Tensors) -> torch.Tensor:
        hidden, head, wanted = exact
        return (hidden @ head.T).log_softmax(-1).gather(1, wanted[:, None])[:, 0]

    return (_half(rows, size), weight, targets), compute, formula


def _adamw(small: bool) -> Case:
    size = 64 if small else 4096
    rate, betas, epsilon = 1e-2, (0.9, 0.95), 1e-8

    def compute(name: str, given: Tensors) -> torch.Tensor:
        parameter = torch.nn.Parameter(given[0].float())
        adam = torch.optim.AdamW(
            [parameter], rate, betas, epsilon, 0.1, **operations.adamw_options(name)
        )
        for _ in range(3):
            parameter.grad = given[1].float()
            adam.step()
        return parameter

    def formula(exact: Tensors) -> torch.Tensor:
        """Of one gradient, taken three times: moments are its own once their bias is out."""
        parameter, gradient = exact
        for _ in range(3):
            parameter = parameter * (1 - rate * 0.1) - rate * gradient / (gradient.abs() + epsilon)
        return parameter

    return (_half(size, size), _half(size, size)), compute, formula


# and of how many inputs a gradient is asked for
CASES: dict[str, tuple[Callable[[bool], Case], int]] = {
    "attention": (_attention, 3),
    "rms_norm": (_norm, 2),
    "rotary": (_rotary, 2),
    "swiglu": (_gate, 2),
    "experts": (_experts, 1),
    "logprobs": (_logprobs, 2),
    "adamw": (_adamw, 0),
}
