"""Mixtures of every family train by experts that others chose, as plain transformers would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from services.trainer.backends.families import REPLAY_REFUSED
from tests.fsdp.jobs import rows_of
from tests.fsdp.oracle import (
    Tensors,
    as_stored_names,
    gradient_difference,
    logprob_difference,
    read_ranks,
)
from tests.models.families import Case, build
from tests.models.forced import ForcedOracle, shape_of, with_experts
from tests.models.proof import MAX_GRADIENT_DIFF, MAX_LOGPROB_DIFF
from tests.models.test_experts import MIXTURES, named
from tests.rank_pool import Pool

fast = pytest.mark.fast
FAST = ("deepseek_v2", "gpt_oss")  # limits of groups; weights of the chosen alone, and biases
COVERED = [case for case in MIXTURES if case.known not in REPLAY_REFUSED]


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def forced(case: Case, directory: Path) -> tuple[Any, Tensors, Tensors, float]:
    """The model, and log-probs and gradients of rows whose experts were drawn; their rounding."""
    model = build(case, directory)
    rows = with_experts(rows_of(0), shape_of(model))
    oracle = ForcedOracle(model.load())
    logprobs = {row.sample_id: oracle.logprobs(row).detach() for row in rows}
    oracle.ppo_loss(rows).backward()
    named = {n: p.grad for n, p in oracle.model.named_parameters() if p.grad is not None}
    exact = ForcedOracle(model.load().double())  # type: ignore[no-untyped-call]
    wide = {row.sample_id: exact.logprobs(row).detach() for row in rows}
    rounding = logprob_difference(wide, logprobs)
    return model, logprobs, as_stored_names(oracle.model, named), rounding


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=fast if c.name in FAST else ()) for c in COVERED],
)
def test_a_family_trains_by_the_experts_that_rows_bring(
    pool: Pool, tmp_path: Path, case: Case
) -> None:
    model, logprobs, gradients, rounding = forced(case, tmp_path / "model")
    arguments = {"model": str(model.directory), "out": str(tmp_path), "shape": shape_of(model)}
    pool.run("replay", 2, **arguments, fsdp={"routing_replay": "rollout"})
    limit = max(MAX_LOGPROB_DIFF, 5 * rounding)
    assert logprob_difference(read_ranks(tmp_path, "logprobs"), logprobs) <= limit
    assert gradient_difference(read_ranks(tmp_path, "gradients"), gradients) <= MAX_GRADIENT_DIFF
    own = logprob_difference(read_ranks(tmp_path, "reference"), logprobs)
    assert own > 100 * limit  # routers would have chosen others


@fast
def test_what_chooses_otherwise_is_refused_by_name(pool: Pool, tmp_path: Path) -> None:
    assert [*REPLAY_REFUSED] == ["phimoe"]
    model = build(named("phimoe"), tmp_path / "model")
    arguments = {"model": str(model.directory), "out": str(tmp_path)}
    for answer in pool.run("attempt", 2, **arguments, fsdp={"routing_replay": "rollout"}):
        assert "fsdp.routing_replay" in answer["error_message"]
        assert "phimoe" in answer["error_message"]


def test_layers_that_take_other_numbers_of_experts_are_refused_by_name(
    pool: Pool, tmp_path: Path
) -> None:
    case = Case("hunyuan_v1_moe", "Hunyuan", {"num_experts": 4, "moe_topk": [1, 2]})
    model = build(case, tmp_path / "model")
    arguments = {"model": str(model.directory), "out": str(tmp_path)}
    for answer in pool.run("attempt", 1, **arguments, fsdp={"routing_replay": "recorded"}):
        assert answer["error_message"] == (
            "LayoutError: fsdp.routing_replay: layers of model_type hunyuan_v1_moe choose other "
            "numbers of experts: 1 of 4, 2 of 4; leave it out"
        )
