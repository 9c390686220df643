"""What every loss keeps, as a test that anyone can run on a loss of their own.

`sluice check-loss package.module:Name` prints it. A loss that passes may be split over
micro-batches, data-parallel ranks and context-parallel shards as one likes, has the gradient of
what it computes, and has none at tokens that are not trained on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from sluice.algo.aggregation import merge_measured
from sluice.algo.layout import SequenceLayout
from sluice.algo.losses import LossInputs, LossTerms, compute_loss, measure_loss, read_tokens
from sluice.algo.spec import LossSpec, loss_traits
from sluice.samples.sample import top_columns

LENGTHS = (5, 1, 7, 4, 6)  # of responses; the fourth sample is not trained on at all
PROMPTS = (3, 2, 4, 1, 3)
SEEDS = (0, 1, 2)
STEP = 1e-6  # of the finite difference, in nats
SHARDS = 2


FAULTS = (  # of a user's code
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    RuntimeError,
    TypeError,
    ValueError,
)


class BrokenContractError(Exception):
    """A loss does not keep the contract; the message says how."""


@dataclass(frozen=True)
class Point:
    """One point of the contract. problem: empty where it is kept."""

    name: str
    problem: str = ""


def check_loss(spec: LossSpec) -> list[Point]:
    """Checks a loss on random rows in float64; every point is checked whatever others find.

    Raises PluginSettingError and ValueError for a name or settings that are wrong.
    """
    loss_traits(spec)
    found = []
    for name, check in CHECKS.items():
        problem = ""
        for seed in SEEDS:
            try:
                check(spec, make_rows(spec, seed))
            except BrokenContractError as error:
                problem = str(error)
            except FAULTS as error:
                problem = f"{type(error).__name__}: {error}"
            if problem:
                break
        found.append(Point(name, problem))
    return found


def make_rows(spec: LossSpec, seed: int) -> LossInputs:
    """Random samples with every column that the loss reads, and what it measures of them."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(total, generator=generator, dtype=torch.float64)

    outputs_T = -0.05 - (1.5 + normal(0.8)).abs()
    count = spec.loss.top_count
    named = top_columns(count) if count else ()
    names = sorted(loss_traits(spec).columns - set(named))
    columns = {name: outputs_T + normal(0.3) for name in names}
    if "advantages" in columns:
        columns["advantages"] = normal(1.0)
    mask_T = torch.rand(total, generator=generator) > 0.3
    index_T = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    mask_T[:2], mask_T[index_T == 3] = True, False
    top_TK: torch.Tensor | None = None
    if named:  # a teacher and a student, each with probability left for other tokens
        drawn_2TK = torch.randn(2, total, count + 1, generator=generator, dtype=torch.float64)
        teacher_TK, top_TK = drawn_2TK.log_softmax(2)[:, :, :count]
        columns[named[0]] = torch.arange(count, dtype=torch.int32).expand(total, count)
        columns[named[1]] = teacher_TK
        top_TK = top_TK.clone().requires_grad_()
    return LossInputs(
        outputs=outputs_T.requires_grad_(),
        top=top_TK,
        mask=mask_T,
        sample_index=index_T,
        sample_weights=0.2 + torch.rand(len(LENGTHS), generator=generator, dtype=torch.float64),
        columns=columns,
        entropy=normal(1.0).abs(),
        sample_keys=torch.arange(len(LENGTHS)) * 7919 + seed,
    )


def take(inputs: LossInputs, samples: Sequence[int]) -> LossInputs:
    """Returns these samples alone, in this order, with outputs of their own."""
    parts = [(inputs.sample_index == sample).nonzero()[:, 0] for sample in samples]
    places = torch.cat([torch.empty(0, dtype=torch.int64), *parts])
    lengths = torch.tensor([len(part) for part in parts], dtype=torch.int64)
    assert inputs.entropy is not None and inputs.sample_keys is not None
    return LossInputs(
        outputs=inputs.outputs.detach()[places].requires_grad_(),
        top=None if inputs.top is None else inputs.top.detach()[places].requires_grad_(),
        mask=inputs.mask[places],
        sample_index=torch.repeat_interleave(torch.arange(len(samples)), lengths),
        sample_weights=inputs.sample_weights[list(samples)],
        columns={name: values_T[places] for name, values_T in inputs.columns.items()},
        entropy=inputs.entropy[places],
        sample_keys=inputs.sample_keys[list(samples)],
    )


def measured_for(spec: LossSpec, parts: Sequence[LossInputs]) -> LossSpec:
    """Returns the loss for a pass over these parts, measured part by part as ranks do."""
    known: dict[str, float] = {}
    for number in range(loss_traits(spec).rounds):
        column = spec.old_column or "rollout_logprobs"
        ready = spec.with_measured(known)
        found = [
            measure_loss(replace(part, outputs=part.columns[column]), ready, number)
            for part in parts
        ]
        known |= merge_measured(found)
    return spec.with_measured(known)


def differentiate(spec: LossSpec, inputs: LossInputs) -> tuple[LossTerms, torch.Tensor]:
    """Returns the terms, and the gradient by the outputs and then `top`, float64[T, 1 + K]."""
    terms = compute_loss(inputs, spec)
    if not terms.loss.requires_grad:
        raise BrokenContractError("the loss has no gradient at all: were the outputs detached?")
    return terms, _gradients(terms, inputs.outputs, inputs.top)


def _gradients(
    terms: LossTerms, outputs_T: torch.Tensor, top_TK: torch.Tensor | None
) -> torch.Tensor:
    leaves = [outputs_T] if top_TK is None else [outputs_T, top_TK]
    found = torch.autograd.grad(terms.loss, leaves, allow_unused=True, materialize_grads=True)
    return torch.cat([each if each.ndim == 2 else each[:, None] for each in found], dim=1)


def _same(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    if not torch.allclose(found, wanted, rtol=1e-9, atol=1e-11, equal_nan=False):
        worst = (found - wanted).abs().max().item()
        raise BrokenContractError(f"{what}: off by up to {worst:.3g}")


def _check_split(
    spec: LossSpec, inputs: LossInputs, parts: Sequence[Sequence[int]], what: str
) -> None:
    taken = [take(inputs, samples) for samples in parts]
    whole, wanted_T = differentiate(measured_for(spec, [inputs]), inputs)
    ready = measured_for(spec, taken)
    total, found_T = torch.zeros((), dtype=torch.float64), torch.zeros_like(wanted_T)
    for samples, part in zip(parts, taken, strict=True):
        terms, gradient_T = differentiate(ready, part)
        total = total + terms.loss.detach()
        places = [(inputs.sample_index == sample).nonzero()[:, 0] for sample in samples]
        if places:
            found_T[torch.cat(places)] += gradient_T
    _same(total, whole.loss.detach(), f"the loss of {what} is not that of the whole")
    _same(found_T, wanted_T, f"the gradient of {what} is not that of the whole")


def _over_micro_batches(spec: LossSpec, inputs: LossInputs) -> None:
    alone = [[sample] for sample in reversed(range(len(LENGTHS)))]
    _check_split(spec, inputs, alone, "samples one by one")
    _check_split(spec, inputs, [[1, 0], [], [4, 2, 3]], "micro-batches, one of them empty,")


def _over_ranks(spec: LossSpec, inputs: LossInputs) -> None:
    ranks = [[sample for sample in range(len(LENGTHS)) if sample % 3 == rank] for rank in range(3)]
    _check_split(spec, inputs, ranks, "three ranks")


def _over_shards(spec: LossSpec, inputs: LossInputs) -> None:
    """Outputs are cut as context parallelism cuts them, and gathered as it gathers them."""
    ready = measured_for(spec, [inputs])
    whole, wanted_T = differentiate(ready, inputs)
    lengths = tuple(p + n for p, n in zip(PROMPTS, LENGTHS, strict=True))
    layout = SequenceLayout(kind="zigzag", lengths=lengths, size=SHARDS)
    responses = layout.responses(PROMPTS)
    found_T = torch.zeros_like(wanted_T)
    for rank in range(SHARDS):
        own = responses.share(rank)
        leaf = inputs.outputs.detach()[own].requires_grad_()
        gathered = replace(inputs, outputs=inputs.outputs.detach().index_copy(0, own, leaf))
        named = None
        if inputs.top is not None:
            named = inputs.top.detach()[own].requires_grad_()
            gathered = replace(gathered, top=inputs.top.detach().index_copy(0, own, named))
        terms = compute_loss(gathered, ready)
        found_T[own] += _gradients(terms, leaf, named)
        _same(terms.loss.detach(), whole.loss.detach(), "the loss on a shard is not the whole")
    _same(found_T, wanted_T, "the gradient of shards together is not that of the whole")


def _gradient(spec: LossSpec, inputs: LossInputs) -> None:
    """Central differences, with `tokens.fixed` held where it was."""
    ready, at_T = measured_for(spec, [inputs]), inputs.outputs.detach()
    held = replace(inputs, fixed=at_T)
    _, gradient_TK = differentiate(ready, held)
    for place, number in itertools.product(
        inputs.mask.nonzero()[:, 0].tolist(), range(gradient_TK.shape[1])
    ):
        above = compute_loss(_moved(held, place, number, STEP), ready).loss.item()
        below = compute_loss(_moved(held, place, number, -STEP), ready).loss.item()
        wanted, found = (above - below) / (2 * STEP), gradient_TK[place, number].item()
        if not abs(found - wanted) <= 1e-6 + 1e-5 * abs(wanted):
            raise BrokenContractError(
                f"the gradient of a token is {found:.6g}, the loss changes by {wanted:.6g} a nat; "
                "read what is to have none from tokens.fixed, and change nothing in place"
            )


def _moved(inputs: LossInputs, place: int, number: int, by: float) -> LossInputs:
    """One output changed: that of the token itself, or of one that the teacher named."""
    if number == 0:
        moved_T = inputs.outputs.detach().clone()
        moved_T[place] += by
        return replace(inputs, outputs=moved_T)
    assert inputs.top is not None
    moved_TK = inputs.top.detach().clone()
    moved_TK[place, number - 1] += by
    return replace(inputs, top=moved_TK)


def _masked_tokens(spec: LossSpec, inputs: LossInputs) -> None:
    ready = measured_for(spec, [inputs])
    clean, wanted_T = differentiate(ready, inputs)
    if wanted_T[~inputs.mask].any():
        raise BrokenContractError("tokens outside the mask have a gradient")
    for bad in (torch.nan, torch.inf, 1.0):
        spoiled = replace(
            inputs,
            outputs=_spoil(inputs, inputs.outputs.detach(), bad).requires_grad_(),
            top=None
            if inputs.top is None
            else _spoil(inputs, inputs.top.detach(), bad).requires_grad_(),
            columns={name: _spoil(inputs, each, bad) for name, each in inputs.columns.items()},
        )
        dirty, found_T = differentiate(measured_for(spec, [spoiled]), spoiled)
        what = f"{bad} outside the mask changes"
        _same(dirty.loss.detach(), clean.loss.detach(), f"{what} the loss")
        _same(found_T, wanted_T, f"{what} the gradient")
    bare = _without_masked(inputs)
    alone, gradient_T = differentiate(measured_for(spec, [bare]), bare)
    what = "is another one without the tokens outside the mask"
    _same(alone.loss.detach(), clean.loss.detach(), f"the loss {what}")
    _same(gradient_T, wanted_T[inputs.mask], f"the gradient {what}")


def _spoil(inputs: LossInputs, values_T: torch.Tensor, bad: float) -> torch.Tensor:
    if not values_T.is_floating_point():
        return values_T
    return torch.where(inputs.mask if values_T.ndim == 1 else inputs.mask[:, None], values_T, bad)


def _without_masked(inputs: LossInputs) -> LossInputs:
    kept = inputs.mask
    assert inputs.entropy is not None
    return replace(
        inputs,
        outputs=inputs.outputs.detach()[kept].requires_grad_(),
        top=None if inputs.top is None else inputs.top.detach()[kept].requires_grad_(),
        mask=kept[kept],
        sample_index=inputs.sample_index[kept],
        columns={name: values_T[kept] for name, values_T in inputs.columns.items()},
        entropy=inputs.entropy[kept],
    )


def _finite(spec: LossSpec, inputs: LossInputs) -> None:
    terms, gradient_T = differentiate(measured_for(spec, [inputs]), inputs)
    if not (terms.loss.isfinite() and gradient_T.isfinite().all()):
        raise BrokenContractError("the loss or its gradient is no number")
    again, _ = differentiate(measured_for(spec, [inputs]), inputs)
    if again.loss.item() != terms.loss.item():
        raise BrokenContractError("the same rows give another loss the second time")


def _leaves_inputs(spec: LossSpec, inputs: LossInputs) -> None:
    tokens = read_tokens(inputs, measured_for(spec, [inputs]))
    tensors = {"outputs": tokens.outputs, "fixed": tokens.fixed, "old": tokens.old}
    if tokens.top is not None:
        tensors["top"] = tokens.top
    before = {name: each._version for name, each in (*tensors.items(), *tokens.columns.items())}
    spec.loss.token_losses(tokens)
    for name, each in (*tensors.items(), *tokens.columns.items()):
        if each._version != before[name]:
            raise BrokenContractError(f"{name} is changed in place")


def _silent(spec: LossSpec, inputs: LossInputs) -> None:
    if not loss_traits(spec).silent:
        return
    zero = {"advantages": torch.zeros_like(inputs.columns["advantages"])}
    quiet = replace(inputs, columns={**inputs.columns, **zero})
    terms, gradient_T = differentiate(measured_for(spec, [inputs]), quiet)
    if terms.loss.item() != 0 or gradient_T.any():
        raise BrokenContractError("it is marked as silent, but has a loss where advantages are 0")


CHECKS: dict[str, Callable[[LossSpec, LossInputs], None]] = {
    "is a number, and the same one twice": _finite,
    "split over micro-batches equals whole": _over_micro_batches,
    "split over ranks equals whole": _over_ranks,
    "split over context-parallel shards equals whole": _over_shards,
    "gradient is that of the loss (float64)": _gradient,
    "masked tokens have no part": _masked_tokens,
    "inputs are left as they are": _leaves_inputs,
    "silent where advantages are 0, if it says so": _silent,
}


def failures(checks: Sequence[Point]) -> Iterator[Point]:
    """Yields the points that are not kept."""
    return (check for check in checks if check.problem)
