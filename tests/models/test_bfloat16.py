"""In bfloat16, which accelerators train in, a family is as near float32 as transformers' bfloat16.

Nearer no order of the same products can be relied on; an operation that rounds where transformers
does not (a router, a recurrence, the head) is further off.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from services.trainer.backends.families import FAMILIES
from tests.contract.training_backend.cases import Model, Oracle
from tests.fsdp.jobs import rows_of
from tests.fsdp.oracle import Tensors, read_ranks
from tests.models.families import CASES, Case, build
from tests.models.test_megatron import DENSE, NEXT, OTHERS, SINKS, SPARSE
from tests.rank_pool import Pool

MEDIAN, MEAN = 1.5, 2.5  # times transformers'; a token that takes another expert moves the mean
ON_MEGATRON = [DENSE, NEXT, SPARSE, SINKS, *OTHERS]
ON_FSDP = [case for case in CASES if case.known in FAMILIES]


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def marked(cases: list[Case]) -> list[Any]:
    """Among those that the gate runs is one with experts and a recurrence."""
    fast = pytest.mark.fast
    return [pytest.param(c, id=c.name, marks=fast if c is NEXT else ()) for c in cases]


def differences(found: Tensors, expected: Tensors) -> torch.Tensor:
    return torch.cat([(found[name] - wanted).abs() for name, wanted in expected.items()])


def logprobs(model: Any) -> Tensors:
    oracle = Oracle(model)
    return {row.sample_id: oracle.logprobs(row).detach().float() for row in rows_of(0)}


class Rounding:
    """How far from float32 transformers is in bfloat16, and some others."""

    def __init__(self, model: Model) -> None:
        self._exact = logprobs(model.load())
        self._median, self._mean = self._sizes(logprobs(model.load().bfloat16()))

    def _sizes(self, found: Tensors) -> tuple[float, float]:
        off = differences(found, self._exact)
        return off.median().item(), off.mean().item()

    def times(self, found: Tensors) -> tuple[float, float]:
        """The median and the mean difference, as multiples of transformers'."""
        median, mean = self._sizes(found)
        return median / self._median, mean / self._mean


def check(pool: Pool, case: Case, root: Path, **arguments: Any) -> None:
    model, out = build(case, root / "model"), root / "out"
    (out / "published").mkdir(parents=True)
    pool.run("prove", 1, model=str(model.directory), out=str(out), steps=1, **arguments)
    median, mean = Rounding(model).times(read_ranks(out, "logprobs"))
    assert 0.3 < median <= MEDIAN  # near 0 it was float32
    assert mean <= MEAN


@pytest.mark.parametrize("case", marked(ON_MEGATRON))
def test_a_family_on_megatron(case: Case, ranks: Pool, tmp_path: Path) -> None:
    check(ranks, case, tmp_path, layout={"dtype": "bfloat16"})


@pytest.mark.parametrize("case", marked(ON_FSDP))
def test_a_family_on_fsdp(case: Case, pool: Pool, tmp_path: Path) -> None:
    check(pool, case, tmp_path, fsdp={"dtype": "bfloat16"})


def test_weights_of_two_bits_less_are_seen(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "qwen3")
    rounding, narrower = Rounding(model := build(case, tmp_path)), model.load()
    for parameter in narrower.parameters():
        mantissa, exponent = torch.frexp(parameter.data)
        parameter.data = torch.ldexp((mantissa * 64).round() / 64, exponent)
    median, _ = rounding.times(logprobs(narrower.bfloat16()))
    assert median > MEDIAN
