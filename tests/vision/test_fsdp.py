"""Models that see, cut over ranks with their towers, against plain transformers, row by row."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from services.rollout.engine.reference.foreign import foreign_reason
from services.trainer.backend import Row
from services.trainer.backends.families import FAMILIES, TENSOR_REFUSED
from services.trainer.config import OptimConfig
from tests.contract.training_backend import cases as text
from tests.fsdp.jobs import NORMALIZER, OPTIM
from tests.fsdp.oracle import STEPS, gradient_difference, logprob_difference, read_ranks
from tests.models.forced import ForcedRouters, with_experts
from tests.models.proof import (
    MAX_GRADIENT_DIFF,
    MAX_LOGPROB_DIFF,
    MAX_MISMATCH,
    Proof,
    Summary,
)
from tests.rank_pool import Pool
from tests.vision.cases import (
    DEEP,
    Model,
    Oracle,
    build_model,
    mixed_rows,
    part_of,
    record,
    stored_tensors,
)
from tests.vision.cases import FAMILIES as SEEN
from tests.vision.test_parts import RATE, SETTINGS, check_moves, original

fast = pytest.mark.fast
Tensors = dict[str, torch.Tensor]
CASES = [
    pytest.param("qwen3_vl", 1, {}, id="one rank"),
    pytest.param("qwen3_vl", 2, {}, id="two ranks", marks=fast),
    pytest.param("qwen3_vl", 4, {}, id="four ranks"),
    pytest.param("qwen3_vl", 2, {"activation_checkpointing": True}, id="activations run again"),
    pytest.param("qwen3_vl", 2, {"reduce": "call"}, id="reduced once a call"),
    pytest.param("qwen3_vl", 2, {"reshard_after_forward": False}, id="kept gathered"),
    pytest.param("qwen3_vl_moe", 1, {}, id="MoE, one rank"),
    pytest.param("qwen3_vl_moe", 2, {}, id="MoE, two ranks", marks=fast),
    pytest.param("qwen3_vl_moe", 4, {"activation_checkpointing": True}, id="MoE, four, run again"),
    pytest.param("qwen3_vl_moe", 2, {"expert": 2}, id="MoE, EP2"),
    pytest.param("qwen2_5_vl", 1, {}, id="2.5, one rank"),
    pytest.param("qwen2_5_vl", 2, {}, id="2.5, two ranks", marks=fast),
    pytest.param("qwen2_5_vl", 4, {"activation_checkpointing": True}, id="2.5, four, run again"),
    pytest.param("qwen3_5", 1, {}, id="3.5, one rank"),
    pytest.param("qwen3_5", 2, {}, id="3.5, two ranks", marks=fast),
    pytest.param("qwen3_5", 4, {"activation_checkpointing": True}, id="3.5, four, run again"),
    pytest.param("qwen3_5_moe", 1, {}, id="3.5-MoE, one rank"),
    pytest.param("qwen3_5_moe", 2, {"activation_checkpointing": True}, id="3.5-MoE, two ranks"),
    pytest.param("qwen3_5_moe", 4, {"expert": 2}, id="3.5-MoE, EP2"),
]


class Stepping(text.Oracle):
    """AdamW of plain torch over what `Oracle` says of rows with images."""

    def __init__(self, eyes: Oracle) -> None:
        super().__init__(eyes.model, OptimConfig(**OPTIM))  # type: ignore[arg-type]
        self._eyes = eyes

    def table(self, row: Row, temperature: float) -> torch.Tensor:
        return self._eyes.table(row, temperature)


@dataclass(frozen=True)
class Expected:
    """Of one family: before any step, and after all of them."""

    model: Model
    logprobs: Tensors
    gradients: Tensors
    steps: list[dict[str, float]]
    weights: Tensors


def expect(model: Model) -> Expected:
    torch.set_num_threads(1)
    eyes = Oracle(model)
    oracle, rows = Stepping(eyes), mixed_rows(eyes.rules)
    logprobs = {row.sample_id: oracle.logprobs(row).detach() for row in rows}
    gradients = stored_tensors(eyes.model, eyes.gradients(rows))
    steps = []
    for step in range(STEPS):
        loss = oracle.ppo_loss(mixed_rows(eyes.rules, step))
        steps.append({"loss": loss.item(), "grad_norm": oracle.step(loss, NORMALIZER)})
    named = {name: p.detach().clone() for name, p in eyes.model.named_parameters()}
    return Expected(model, logprobs, gradients, steps, stored_tensors(eyes.model, named))


class ExpectedByFamily:
    def __init__(self, root: Path) -> None:
        self._root, self._made = root, dict[str, Expected]()

    def __call__(self, family: str) -> Expected:
        if family not in self._made:
            self._made[family] = expect(build_model(self._root / family, family))
        return self._made[family]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> ExpectedByFamily:
    return ExpectedByFamily(tmp_path_factory.mktemp("models"))


def reload(model: Model, tensors: Tensors, folder: Path) -> Model:
    """A checkpoint of other weights."""
    shutil.copytree(model.directory, folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return Model(folder)


def published_tensors(folder: Path) -> Tensors:
    found: Tensors = {}
    for path in folder.glob("*.safetensors"):
        held = load_file(path)
        assert not found.keys() & held.keys()
        found |= held
    return found


@pytest.mark.parametrize(
    ("family", "world", "fsdp"),
    [
        pytest.param("qwen3_vl_moe", 2, {"expert": 2}, id="MoE, EP2"),
        pytest.param("qwen3_5_moe", 2, {"activation_checkpointing": True}, id="3.5-MoE, again"),
    ],
)
def test_experts_that_rows_bring_train_behind_images_too(
    cut_ranks: Pool,
    expected: ExpectedByFamily,
    tmp_path: Path,
    family: str,
    world: int,
    fsdp: dict[str, Any],
) -> None:
    """Tokens that an image stands for have experts as all others."""
    want = expected(family)
    eyes, shape = Oracle(want.model), (4, 4, 2)
    routers, rows = ForcedRouters(eyes.model), with_experts(mixed_rows(eyes.rules), shape)
    logprobs, total = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for row in rows:
        routers.take(row)
        logprobs[row.sample_id] = eyes.logprobs(row).detach()
        for name, gradient in eyes.gradients([row]).items():
            total[name] = total[name] + gradient if name in total else gradient
    given: dict[str, Any] = {"model": str(want.model.directory), "out": str(tmp_path)}
    fsdp = {"routing_replay": "rollout", **fsdp}
    cut_ranks.run("replay", world, **given, shape=shape, fsdp=fsdp)
    assert logprob_difference(read_ranks(tmp_path, "logprobs"), logprobs) <= MAX_LOGPROB_DIFF
    gradients = {n: g for n, g in stored_tensors(eyes.model, total).items() if g.any()}
    found = read_ranks(tmp_path, "gradients")
    assert gradient_difference(found, gradients) <= MAX_GRADIENT_DIFF
    assert logprob_difference(want.logprobs, logprobs) > 0.01


@pytest.mark.parametrize(("family", "world", "fsdp"), CASES)
def test_ranks_are_one_process_of_transformers(
    cut_ranks: Pool,
    expected: ExpectedByFamily,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    summary: Summary,
    family: str,
    world: int,
    fsdp: dict[str, Any],
) -> None:
    """Of several ranks the last sees no image, and every rank has a micro-batch without rows."""
    want, name = expected(family), f"fsdp {request.node.callspec.id}"
    directory = str(want.model.directory)
    answers = cut_ranks.run(
        "prove", world, model=directory, out=str(tmp_path), fsdp=fsdp, steps=len(want.steps)
    )
    logprob = logprob_difference(read_ranks(tmp_path, "logprobs"), want.logprobs)
    assert record("logprob", logprob, name) <= MAX_LOGPROB_DIFF
    gradient = gradient_difference(read_ranks(tmp_path, "gradients"), want.gradients)
    assert record("gradient", gradient, name) <= MAX_GRADIENT_DIFF
    seen = {part_of(n) for n, tensor in want.gradients.items() if tensor.abs().max() > 0}
    assert seen >= {"text", "tower", "merger"} | ({"deepstack"} if family in DEEP else set())
    exchanged = read_ranks(tmp_path, "exchanged")
    for row in mixed_rows(want.model.rules):
        moved = float((exchanged[row.sample_id] - want.logprobs[row.sample_id]).abs().max())
        shown = {span.token_count for span in row.media}
        # there is but one image of two tokens; behind an image a row has its last response
        assert moved > 0.01 if 6 in shown else moved < MAX_LOGPROB_DIFF, row.sample_id
    norm = 0.0
    for answer in answers:
        for found, should in zip(answer["steps"], want.steps, strict=True):
            assert found["loss"] == pytest.approx(should["loss"], rel=1e-4, abs=1e-4)
            norm = max(norm, abs(found["grad_norm"] / should["grad_norm"] - 1))
    assert norm <= 1e-4
    published = published_tensors(tmp_path / "published")
    assert published.keys() == original(want.model).keys() == want.weights.keys()
    exported = read_ranks(tmp_path, "weights")
    for key, tensor in want.weights.items():
        assert (published[key] - tensor).abs().max() < 2e-4, key
        assert torch.equal(published[key], exported[key]), key
    oracle = Oracle(reload(want.model, published, tmp_path / "reloaded"))
    rows = mixed_rows(want.model.rules)
    again = {row.sample_id: oracle.logprobs(row).detach() for row in rows}
    reloaded = logprob_difference(read_ranks(tmp_path, "trained"), again)
    assert record("logprob", reloaded, name) <= MAX_LOGPROB_DIFF
    assert sum(answer["tower_held"] for answer in answers) == answers[0]["tower"]
    if world > 1:
        assert max(answer["tower_held"] for answer in answers) < answers[0]["tower"] * 1.3 / world
    summary.proofs.append(Proof(family, world, logprob, gradient, norm, reloaded))


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=fast if name == "qwen3_5" else ()) for name in SEEN]
)
def test_a_family_rolls_out_what_it_trains(
    cut_ranks: Pool, tmp_path: Path, summary: Summary, family: str
) -> None:
    model = build_model(tmp_path / "model", family)
    (answer,) = cut_ranks.run("roll_out", 1, model=str(model.directory), out=str(tmp_path))
    assert answer["versions"] == [1, 2, 3]
    assert all(norm > 0 for norm in answer["norms"])
    config = AutoConfig.from_pretrained(model.directory).get_text_config()
    summary.mismatches[family] = answer["mismatch"]
    summary.facts[family] = {
        "packing": FAMILIES[family],
        "whole_rows": bool(foreign_reason(config)),
    }
    assert answer["mismatch"] <= MAX_MISMATCH < answer["stale"] / 100


@fast
def test_narrow_passes_are_near(
    cut_ranks: Pool, expected: ExpectedByFamily, tmp_path: Path
) -> None:
    """bfloat16 products, float32 weights: no further off than rounding is."""
    want = expected("qwen3_vl")
    settings = {"fsdp": {"dtype": "bfloat16"}, "steps": 1}
    (answer,) = cut_ranks.run(
        "prove", 1, model=str(want.model.directory), out=str(tmp_path), **settings
    )
    difference = logprob_difference(read_ranks(tmp_path, "logprobs"), want.logprobs)
    assert 1e-4 < difference < 0.3
    assert answer["steps"][0]["grad_norm"] == pytest.approx(want.steps[0]["grad_norm"], rel=0.1)
    gradients = read_ranks(tmp_path, "gradients")
    assert all(tensor.dtype == torch.float32 for tensor in gradients.values())
    seen = {n: g for n, g in want.gradients.items() if "visual" in n and g.abs().max() > 1e-3}
    for name, tensor in seen.items():
        similar = torch.cosine_similarity(gradients[name].flatten(), tensor.flatten(), dim=0)
        assert similar > 0.9, name


@pytest.mark.parametrize(("vision", "moves"), SETTINGS)
def test_parts_may_be_frozen_or_have_rates_of_their_own(
    cut_ranks: Pool,
    qwen3_vl: Model,
    tmp_path: Path,
    vision: dict[str, Any],
    moves: dict[str, float],
) -> None:
    check_parts(cut_ranks, qwen3_vl, tmp_path, vision, moves)


def test_parts_of_a_model_that_recurs(
    cut_ranks: Pool, expected: ExpectedByFamily, tmp_path: Path
) -> None:
    vision = {"frozen_tower": True, "projector_learning_rate": RATE / 4}
    moves = {"tower": 0, "projector": 0.25}
    check_parts(cut_ranks, expected("qwen3_5").model, tmp_path, vision, moves)


def check_parts(
    cut_ranks: Pool, model: Model, tmp_path: Path, vision: dict[str, Any], moves: dict[str, float]
) -> None:
    """Also where activations are run again, and over a checkpoint, on other ranks too."""
    trainer = {"vision": vision, "optim": {"learning_rate": RATE, "max_grad_norm": 0}}
    settings: dict[str, Any] = {
        "model": str(model.directory),
        "out": str(tmp_path),
        "trainer": trainer,
        "fsdp": {"activation_checkpointing": True},
    }
    cut_ranks.run("parts", 2, **settings)
    check_moves(original(model), read_ranks(tmp_path, "weights"), moves, RATE)
    checkpoint = str(tmp_path / "checkpoint")
    answers = cut_ranks.run("parts", 2, checkpoint=checkpoint, name="resumed", **settings)
    assert not any(answer["refused"] for answer in answers)
    second, resumed = read_ranks(tmp_path, "second"), read_ranks(tmp_path, "resumed")
    assert second.keys() == resumed.keys()
    for name, tensor in second.items():
        assert torch.equal(resumed[name], tensor), name
    cut_ranks.run("parts", 1, checkpoint=checkpoint, name="alone", **settings)
    alone = read_ranks(tmp_path, "alone")
    for name, tensor in second.items():
        assert (alone[name] - tensor).abs().max() <= 0.05 * RATE * max(1, *moves.values()), name


def test_muon_steps_matrices_of_a_part_by_its_own_rate(
    cut_ranks: Pool, qwen3_vl: Model, tmp_path: Path
) -> None:
    """The first step adds a quarter of what it adds at four times the rate."""
    before, added = original(qwen3_vl), []
    for name, vision in (("alike", {}), ("apart", {"tower_learning_rate": RATE / 4})):
        optim = {"kind": "muon", "learning_rate": RATE, "max_grad_norm": 0}
        (tmp_path / name).mkdir()
        cut_ranks.run(
            "parts",
            2,
            model=str(qwen3_vl.directory),
            out=str(tmp_path / name),
            trainer={"vision": vision, "optim": optim},
        )
        after = read_ranks(tmp_path / name, "weights")
        added.append({name: after[name] - before[name] for name in after})
    alike, apart = added
    for name, tensor in alike.items():
        if tensor.ndim == 2 and tensor.any():
            scale = 0.25 if part_of(name) == "tower" else 1.0
            assert (apart[name] - scale * tensor).norm() < 1e-3 * tensor.norm(), name


@fast
def test_a_checkpoint_of_a_frozen_tower_has_no_moments_of_it(
    cut_ranks: Pool, qwen3_vl: Model, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"model": str(qwen3_vl.directory), "out": str(tmp_path)}
    cut_ranks.run("parts", 1, trainer={"vision": {"frozen_tower": True}}, **settings)
    checkpoint = str(tmp_path / "checkpoint")
    (answer,) = cut_ranks.run("parts", 1, checkpoint=checkpoint, name="thawed", **settings)
    assert "had frozen model.visual." in answer["refused"]


@fast
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_tensor_and_context_ranks_are_refused_by_name(
    cut_ranks: Pool, expected: ExpectedByFamily, tmp_path: Path, family: str
) -> None:
    model = str(expected(family).model.directory)
    answers = cut_ranks.run("attempt", 2, model=model, out=str(tmp_path), fsdp={"tensor": 2})
    for answer in answers:
        assert f"{family} cannot be trained with fsdp.tensor" in answer["error_message"]
        assert TENSOR_REFUSED[family] in answer["error_message"]
    answers = cut_ranks.run("attempt", 2, model=model, out=str(tmp_path), fsdp={"context": 2})
    for answer in answers:
        assert "fsdp.context above 1 for a model that reads images" in answer["error_message"]


@pytest.mark.parametrize(
    ("family", "world", "fsdp"),
    [
        pytest.param("qwen3_vl", 1, {}, id="critic-1"),
        pytest.param("qwen3_vl", 2, {}, id="critic-2", marks=fast),
        pytest.param("qwen3_vl", 2, {"activation_checkpointing": True}, id="critic-2, run again"),
        pytest.param("qwen3_vl_moe", 2, {}, id="MoE, critic-2"),
        pytest.param("qwen2_5_vl", 2, {}, id="2.5, critic-2"),
        pytest.param("qwen3_5", 2, {}, id="3.5, critic-2"),
    ],
)
def test_a_critic_has_the_values_and_gradients_of_transformers(
    cut_ranks: Pool,
    expected: ExpectedByFamily,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    family: str,
    world: int,
    fsdp: dict[str, Any],
) -> None:
    """Of the weights that two steps of the value loss have made: a new head says zero."""
    model, name = expected(family).model, f"fsdp {request.node.callspec.id}"
    answers = cut_ranks.run(
        "critic", world, model=str(model.directory), out=str(tmp_path), fsdp=fsdp
    )
    assert all(answer["before"] == 0 for answer in answers)
    found = read_ranks(tmp_path, "weights")
    weight, bias = (found.pop(f"score.{kind}").requires_grad_() for kind in ("weight", "bias"))
    untrained = original(model)["lm_head.weight"]
    oracle = Oracle(reload(model, {**found, "lm_head.weight": untrained}, tmp_path / "trained"))
    values, total = read_ranks(tmp_path, "values"), torch.zeros(())
    for row in mixed_rows(model.rules):
        wanted = oracle.values(row, weight, bias)
        difference = (values[row.sample_id] - wanted).abs().max().item()
        assert record("logprob", difference, name) <= MAX_LOGPROB_DIFF, row.sample_id
        squares = (wanted - row.columns["returns"])[row.loss_mask].square()
        total = total + 0.5 * row.loss_weight * squares.sum()
    assert max(float(each.abs().max()) for each in values.values()) > 0.01
    assert answers[0]["loss"] == pytest.approx(total.item(), rel=1e-5)
    oracle.model.zero_grad()
    total.backward()
    named = {n: p.grad for n, p in oracle.model.named_parameters() if p.grad is not None}
    gradients = stored_tensors(oracle.model, named)
    parts = {"text", "tower", "merger"} | ({"deepstack"} if family in DEEP else set())
    assert {part_of(name) for name in gradients} == parts
    assert weight.grad is not None and bias.grad is not None
    gradients |= {"score.weight": weight.grad, "score.bias": bias.grad}
    difference = gradient_difference(read_ranks(tmp_path, "gradients"), gradients)
    assert record("gradient", difference, name) <= MAX_GRADIENT_DIFF
