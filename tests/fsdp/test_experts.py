"""Experts that ranks have whole, and tokens that travel to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.trainer.backend import LayoutError
from services.trainer.backends.fsdp.config import FsdpConfig
from services.trainer.backends.fsdp.layout import mesh_of
from tests.contract.training_backend.cases import build_model
from tests.fsdp.conftest import ExpectedByModel
from tests.fsdp.oracle import expect, gradient_difference, logprob_difference, read_ranks
from tests.fsdp.test_checkpoints import resume, save
from tests.rank_pool import Pool

fast = pytest.mark.fast
EXPERT = {"expert": 2}


@fast
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("tokens", "favoured"),
    [
        pytest.param([3, 7, 5, 1], range(8), id="anywhere"),
        pytest.param([0, 9, 0, 2], range(8), id="from some ranks"),
        pytest.param([4, 4, 4, 4], [2, 3, 6], id="to some ranks"),
        pytest.param([6, 0, 0, 0], [5, 4, 7], id="away from all"),
    ],
)
def test_wherever_tokens_go_a_layer_is_the_whole_one(
    pool: Pool, tokens: list[int], favoured: Any, count: int
) -> None:
    """In float64; with biases, and a gate of its own."""
    answers = pool.run("travels", 4, tokens=tokens, favoured=[*favoured], count=count)
    assert max(answer["off"] for answer in answers) <= 1e-11


@fast
@pytest.mark.parametrize("fsdp", [EXPERT, {"expert": 4}, {**EXPERT, "replicas": 2}])
def test_what_is_published_is_what_was_loaded_bit_for_bit(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path, fsdp: Any
) -> None:
    model, _ = expected("qwen3_moe")
    settings = {"fsdp": fsdp, "steps": 0}
    pool.run("parity", 4, model=str(model.directory), out=str(tmp_path), **settings)
    published = read_ranks(tmp_path, "weights")
    stored = load_file(model.directory / "model.safetensors")
    assert published.keys() == stored.keys()
    assert all(torch.equal(published[name], stored[name]) for name in stored)


def test_shares_of_experts_need_not_be_even(pool: Pool, tmp_path: Path) -> None:
    """Of the three experts of an expert rank one of two ranks has two."""
    model = build_model(tmp_path / "model", "qwen3_moe", num_experts=6)
    (out := tmp_path / "out").mkdir()
    oracle = expect(model, 2)
    given = {"model": str(model.directory), "out": str(out), "fsdp": EXPERT, "steps": 2}
    answers = pool.run("parity", 4, **given)
    assert logprob_difference(read_ranks(out, "logprobs"), oracle.logprobs) <= 5e-6
    assert gradient_difference(read_ranks(out, "gradients"), oracle.gradients) <= 5e-5
    assert sum(answer["counted"] for answer in answers) == answers[0]["whole"]
    saved = save(pool, tmp_path, model.directory, 4, fsdp=EXPERT)
    resumed = resume(pool, tmp_path, model.directory, 2, fsdp={})
    for before, after in zip(saved[0]["steps"], resumed[0]["steps"], strict=True):
        assert after["grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-4)


@fast
def test_the_most_that_is_gathered_is_less_by_what_others_hold(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    model, _ = expected("qwen3_moe", num_experts=16)
    given = {"model": str(model.directory), "out": str(tmp_path)}
    most = {}
    for size in (1, 2, 4):
        answers = pool.run("gathered_weights", 4, **given, fsdp={"expert": size})
        most[size] = max(answer["most"] for answer in answers)
    layer = answers[0]["experts"] // 2
    for size in (2, 4):
        assert most[1] - most[size] >= layer * (size - 1) // size


@fast
def test_copies_hold_the_same_to_the_bit(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    model, _ = expected("qwen3_moe")
    settings = {"steps": 3, "fsdp": {**EXPERT, "replicas": 2}}
    first, second, *others = pool.run(
        "replicas", 4, model=str(model.directory), out=str(tmp_path), **settings
    )
    assert [first, second] == others
    assert first != second


@pytest.mark.parametrize("again", [False, True])
def test_ranks_that_check_each_other_find_nothing(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path, again: bool
) -> None:
    """Some have no row, and other tokens go to each."""
    model, oracle = expected("qwen3_moe")
    settings: dict[str, Any] = {"fsdp": {**EXPERT, "activation_checkpointing": again}, "steps": 2}
    settings["trainer"] = {"ranks": {"check_collectives": True}}
    answers = pool.run("parity", 4, model=str(model.directory), out=str(tmp_path), **settings)
    for found, should in zip(answers[0]["steps"], oracle.steps, strict=False):
        assert found["grad_norm"] == pytest.approx(should["grad_norm"], rel=1e-4)


@fast
def test_ranks_wait_for_each_other_as_long_as_a_command_may_take(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    model, _ = expected("qwen3_moe")
    settings = {"fsdp": EXPERT, "trainer": {"ranks": {"command_timeout": 4321.0}}}
    answers = pool.run("waits", 4, model=str(model.directory), out=str(tmp_path), **settings)
    assert answers == [{"shard": 4321.0, "expert": 4321.0}] * 4


@fast
def test_what_cannot_be_spread_is_refused_by_name(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    dense, mixture = (expected(family)[0] for family in ("qwen3", "qwen3_moe"))
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (dense.directory, {}, "fsdp.expert has no effect on"),
        (mixture.directory, {"expert": 3}, "fsdp.expert 3 does not divide the 4 experts"),
    ]
    for directory, fsdp, reason in cases:
        answers = pool.run(
            "attempt", 2, model=str(directory), out=str(tmp_path), fsdp={**EXPERT, **fsdp}
        )
        assert all(reason in answer["error_message"] for answer in answers), answers


def test_experts_that_do_not_go_round_the_ranks_that_share_them_are_refused(
    pool: Pool, tmp_path: Path
) -> None:
    model = build_model(tmp_path / "model", "qwen3_moe", num_experts=2)
    arguments = {"model": str(model.directory), "out": str(tmp_path)}
    for answer in pool.run("attempt", 4, **arguments, fsdp=EXPERT):
        assert "2 experts, 1 on an expert rank, of which one of 2" in answer["error_message"]
        assert "fsdp.replicas" in answer["error_message"]
    for answer in pool.run("attempt", 4, **arguments, fsdp={**EXPERT, "replicas": 2}):
        assert not answer["error_message"]


def test_places_of_ranks() -> None:
    config = FsdpConfig(expert=2)
    places = [mesh_of(config, rank, 4) for rank in range(4)]
    assert [place.data_rank for place in places] == [0, 1, 2, 3]
    assert all(place.reports and place.data_size == 4 for place in places)
    assert {place.expert_size for place in places} == {2}
    for settings, world in (({}, 3), ({"replicas": 2}, 6), ({"replicas": 4}, 4)):
        with pytest.raises(LayoutError, match=r"do not divide .* x fsdp.expert 2"):
            mesh_of(FsdpConfig(expert=2, **settings), 0, world)
