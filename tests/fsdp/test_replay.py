"""Experts that rows bring, or that were recorded, train as in plain transformers with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.training_backend.cases import Model
from tests.fsdp.conftest import ExpectedByModel
from tests.fsdp.jobs import rows_of
from tests.fsdp.oracle import (
    Tensors,
    as_stored_names,
    gradient_difference,
    logprob_difference,
    read_ranks,
)
from tests.models.forced import ForcedOracle, chosen_by, shape_of, with_experts
from tests.rank_pool import Pool

fast = pytest.mark.fast
EXPERT = {"expert": 2}
AGAIN = {"activation_checkpointing": True}
LAYOUTS = [
    pytest.param("qwen3_moe", 1, {}, id="single", marks=fast),
    pytest.param("qwen3_moe", 2, {"reduce": "call"}, id="call"),
    pytest.param("qwen3_moe", 2, {**EXPERT, **AGAIN}, id="expert, again", marks=fast),
    pytest.param("qwen3_moe", 2, {"context": 2}, id="context", marks=fast),
    pytest.param("qwen3_moe", 2, {"context": 2, "cp_layout": "contiguous"}, id="contiguous"),
    pytest.param("qwen3_moe", 4, {**EXPERT, "context": 2, **AGAIN}, id="expert, context, again"),
    pytest.param("qwen3_moe", 4, {**EXPERT, "replicas": 2}, id="expert, replicas"),
    pytest.param("qwen3_moe", 2, {"tensor": 2}, id="tensor"),
    pytest.param("deepseek_v3", 2, {"tensor": 2, **AGAIN}, id="deepseek, tensor, again"),
    pytest.param("deepseek_v3", 4, {"tensor": 2, "context": 2}, id="deepseek, tensor, context"),
    pytest.param("deepseek_v3", 2, EXPERT, id="deepseek, expert"),
    pytest.param("glm_moe_dsa", 2, {"context": 2}, id="glm5, context"),
]


class Forced:
    """What plain transformers make of rows with drawn experts, by model."""

    def __init__(self) -> None:
        self._made: dict[Path, tuple[Tensors, Tensors]] = {}

    def __call__(self, model: Model) -> tuple[Tensors, Tensors]:
        if model.directory not in self._made:
            rows, oracle = with_experts(rows_of(0), shape_of(model)), ForcedOracle(model.load())
            logprobs = {row.sample_id: oracle.logprobs(row).detach() for row in rows}
            oracle.ppo_loss(rows).backward()
            named = oracle.model.named_parameters()
            found = {name: p.grad for name, p in named if p.grad is not None}
            self._made[model.directory] = logprobs, as_stored_names(oracle.model, found)
        return self._made[model.directory]


@pytest.fixture(scope="module")
def forced() -> Forced:
    return Forced()


@pytest.mark.parametrize(("family", "world", "fsdp"), LAYOUTS)
def test_experts_of_the_rows_train_however_the_model_is_cut(
    pool: Pool,
    expected: ExpectedByModel,
    forced: Forced,
    tmp_path: Path,
    family: str,
    world: int,
    fsdp: dict[str, Any],
) -> None:
    model, own = expected(family)
    logprobs, gradients = forced(model)
    given = {"model": str(model.directory), "out": str(tmp_path), "shape": shape_of(model)}
    trainer = {"ranks": {"check_collectives": True}}
    pool.run("replay", world, **given, fsdp={"routing_replay": "rollout", **fsdp}, trainer=trainer)
    assert logprob_difference(read_ranks(tmp_path, "logprobs"), logprobs) <= 5e-6
    assert gradient_difference(read_ranks(tmp_path, "gradients"), gradients) <= 5e-5
    assert logprob_difference(read_ranks(tmp_path, "reference"), own.logprobs) <= 5e-6
    assert logprob_difference(own.logprobs, logprobs) > 1e-2


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_narrow_passes_take_them_too(
    pool: Pool, expected: ExpectedByModel, forced: Forced, tmp_path: Path, family: str
) -> None:
    """Other experts are further off than the rounding of bfloat16."""
    model, own = expected(family)
    logprobs, _ = forced(model)
    given = {"model": str(model.directory), "out": str(tmp_path), "shape": shape_of(model)}
    pool.run(
        "replay", 2, **given, fsdp={"routing_replay": "rollout", "dtype": "bfloat16", **EXPERT}
    )
    found = read_ranks(tmp_path, "logprobs")
    near = logprob_difference(found, logprobs)
    assert near < 0.1
    assert logprob_difference(found, own.logprobs) > 3 * near


@pytest.mark.parametrize(
    ("family", "world", "fsdp"),
    [
        pytest.param("qwen3_moe", 1, {}, id="single", marks=fast),
        pytest.param("qwen3_moe", 2, {**EXPERT, **AGAIN}, id="expert, again"),
        pytest.param("qwen3_moe", 2, {"context": 2}, id="context", marks=fast),
        pytest.param("deepseek_v3", 4, {"tensor": 2, "context": 2}, id="deepseek, tensor, context"),
    ],
)
def test_recorded_experts_outlive_the_weights(
    pool: Pool,
    expected: ExpectedByModel,
    tmp_path: Path,
    family: str,
    world: int,
    fsdp: dict[str, Any],
) -> None:
    """What is recorded is what plain transformers choose, and stays when the weights move."""
    model, oracle = expected(family)
    given = {"model": str(model.directory), "out": str(tmp_path)}
    answers = pool.run(
        "replay_recorded", world, **given, fsdp={"routing_replay": "recorded", **fsdp}
    )
    for answer in answers:
        assert answer["first"] == pytest.approx(oracle.steps[0]["loss"], rel=1e-6, abs=1e-5)
        assert abs(answer["free"] - answer["replayed"]) > 1e-4  # routers changed their minds
        assert answer["brought"] == pytest.approx(answer["replayed"], rel=1e-6, abs=1e-6)
    for place, reason in enumerate(
        (
            "experts were recorded for other tokens",
            "(algorithm.loss.old_logprobs: old of a run)",
            "no experts were recorded",  # a new set has begun
        )
    ):
        told = [answer["missing"][place] for answer in answers]
        assert all(told)
        assert any(reason in each for each in told), told
    own = {row.sample_id: chosen_by(model, row.token_ids) for row in rows_of(0)}
    recorded = read_ranks(tmp_path, "records")
    assert recorded.keys() == own.keys()
    for name, experts in own.items():
        assert torch.equal(recorded[name].sort(-1).values, experts.sort(-1).values), name


HOSTILE = {
    "none": "has no routed_experts; set engine.routed_experts: true",
    "beyond": "a routed expert is not among 4",
    "negative": "a routed expert is not among 4",
    "layers": "2 mixture layers and 2 choices",
    "choices": "2 mixture layers and 2 choices",
    "tokens": "2 mixture layers and 2 choices",
    "flat": "2 mixture layers and 2 choices",
}


@fast
def test_rows_that_cannot_be_replayed_are_refused_on_every_rank(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    """One rank has the row; none waits, and what follows is trained as ever."""
    model, _ = expected("qwen3_moe")
    given = {"model": str(model.directory), "out": str(tmp_path), "shape": shape_of(model)}
    fsdp = {"routing_replay": "rollout", **EXPERT}
    answers = pool.run("replay_hostile", 2, **given, kinds=[*HOSTILE], fsdp=fsdp)
    for kind, reason in HOSTILE.items():
        told = [answer[kind] for answer in answers]
        assert any(reason in each and "'b/0'" in each for each in told), (kind, told)
        assert all(each.startswith("RoutingMissingError") for each in told), (kind, told)
    assert all(answer["after"] == answers[0]["before"] for answer in answers)


@fast
def test_what_has_nothing_to_replay_is_refused_by_name(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    model, _ = expected("qwen3")
    given = {"model": str(model.directory), "out": str(tmp_path)}
    for answer in pool.run("attempt", 2, **given, fsdp={"routing_replay": "rollout"}):
        assert answer["error_message"].startswith("LayoutError: fsdp.routing_replay: model_type")
        assert "qwen3 has no experts; leave it out" in answer["error_message"]


def test_values_of_a_critic_go_by_the_experts_too(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    """By those of the rows its values are others, and the same on any ranks."""
    model, _ = expected("qwen3_moe")
    values = {}
    for name, world, fsdp in (
        ("own", 1, {}),
        ("one", 1, {"routing_replay": "rollout"}),
        ("two", 2, {"routing_replay": "rollout", "context": 2}),
    ):
        (out := tmp_path / name).mkdir()
        given = {"model": str(model.directory), "out": str(out), "shape": shape_of(model)}
        pool.run("replay_critic", world, **given, fsdp=fsdp)
        values[name] = read_ranks(out, "values")
    assert logprob_difference(values["one"], values["two"]) <= 5e-6
    assert logprob_difference(values["one"], values["own"]) > 1e-3


def test_each_adapter_has_records_of_its_own(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    model, _ = expected("qwen3_moe")
    given = {"model": str(model.directory), "out": str(tmp_path)}
    (answer,) = pool.run("replay_adapters", 1, **given, fsdp={"routing_replay": "recorded"})
    assert "no experts were recorded" in answer["other"]
    assert answer["own"] == answer["again"] == ""
    assert answer["reference"] == answer["base"]
