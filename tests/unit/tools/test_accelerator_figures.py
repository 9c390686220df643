"""What the check of an accelerator reckons with, and when it says that a figure is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from tools.accelerator_check.models import SHAPES
from tools.accelerator_check.parity import compare
from tools.accelerator_check.steps import STEPS
from tools.accelerator_check.work import StepWork


@pytest.mark.parametrize(("name", "parameters"), [("0.5b", 494e6), ("1.5b", 1544e6)])
def test_parameters_are_those_of_the_model(name: str, parameters: float) -> None:
    shape = SHAPES[name]
    with torch.device("meta"):
        model = Qwen3ForCausalLM(shape.config(0.02))
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.parameters == pytest.approx(parameters, rel=0.01)


def test_training_flops_are_those_of_the_products() -> None:
    """2 FLOP a weight, token and pass, three passes; scores and values over half of a row."""
    shape, tokens, length = SHAPES["0.5b"], 2048, 1024
    with torch.device("meta"):
        model = Qwen3ForCausalLM(shape.config(0.02))
    weights = sum(
        module.weight.numel()
        for module in model.model.modules()
        if isinstance(module, torch.nn.Linear)
    )
    attention = 2 * shape.layers * shape.heads * shape.head * length / 2 * 2
    head = 2 * shape.vocabulary * shape.hidden
    expected = 3 * (tokens * (2 * weights + attention) + 100 * head)
    assert shape.training_flops(tokens, 100, length) == pytest.approx(expected, rel=1e-3)


Figures = dict[str, torch.Tensor]


def figures() -> Figures:
    return {
        "logprobs": torch.linspace(-9, -1, 50),
        "loss": torch.tensor(3.0, dtype=torch.float64),
        "gradient": torch.linspace(-1, 1, 40, dtype=torch.float64),
        "losses": torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64),
        "logprobs_after": torch.linspace(-8, -1, 50),
        "logprobs_bf16": torch.linspace(-9, -1, 50) + 0.01,
        "reference_bf16": torch.linspace(-9, -1, 50) + 0.01,
    }


def shifted(name: str, by: float) -> Callable[[Figures], None]:
    def change(found: Figures) -> None:
        found[name] = found[name] + by

    return change


def unmoved(found: Figures) -> None:
    found["logprobs_after"] = found["logprobs"]


@pytest.mark.parametrize(
    ("change", "failure"),
    [
        (shifted("logprobs", 1e-5), ""),
        (shifted("logprobs", 1e-3), "fp32 differs by 0.001"),
        (shifted("loss", 1e-2), "fp32 differs by 0.0033"),
        (shifted("gradient", 1e-2), "fp32 differs by 0.017"),
        (shifted("losses", -1e-2), "fp32 differs by 0.0033"),
        (shifted("logprobs_after", 1e-3), "fp32 differs by 0.001"),
        (shifted("logprobs_bf16", 0.1), "bf16 log-probs differ by 0.11"),
        (shifted("reference_bf16", 0.1), "bf16 log-probs differ by 0.11"),
        (shifted("logprobs", float("nan")), "a figure is not finite"),
    ],
)
def test_a_device_that_differs_too_much_fails(
    tmp_path: Path, change: Callable[[Figures], None], failure: str
) -> None:
    work = StepWork(STEPS[1], tmp_path, "full")
    found = figures()
    change(found)
    compare(work, found, figures(), rehearsal=False)
    assert failure in "; ".join(work.failures)
    assert bool(work.failures) == bool(failure)


def test_steps_that_change_nothing_compare_nothing(tmp_path: Path) -> None:
    work = StepWork(STEPS[1], tmp_path, "full")
    found = figures()
    unmoved(found)
    compare(work, found, found, rehearsal=True)
    assert work.failures == ["five steps moved log-probs by 0 only: nothing was compared"]
