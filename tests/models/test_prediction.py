"""A layer of multi-token prediction trains on Megatron as plain torch says, and alters nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sluice.weights.convert.conversion import convert
from sluice.weights.convert.options import ConvertOptions
from sluice.weights.convert.verify import compare
from tests.contract.training_backend.cases import build_model, relative_distance
from tests.fsdp.oracle import STEPS, gradient_difference, read_ranks
from tests.megatron.comparison import GRADIENT_TOLERANCE, LOGPROB_TOLERANCE
from tests.models.families import CASES
from tests.models.prediction import (
    Predicted,
    Predicting,
    Tensors,
    build_predicting,
    expect_prediction,
    loss_of,
)
from tests.models.test_megatron import DEEP, SCATTERED
from tests.rank_pool import JobError, Pool

BY_NAME = {case.name: case for case in CASES}
DENSE, NEXT, LATENT = (BY_NAME[name] for name in ("qwen3_5_text", "qwen3_next", "deepseek_v3"))
SPARSE, GLM, MIMO = (BY_NAME[name] for name in ("qwen3_5_moe_text", "glm4_moe", "mimo"))
CHOOSING, SHARING = (BY_NAME[name] for name in ("glm_moe_dsa", "glm_moe_dsa-shared"))
DEEP_DENSE = replace(DENSE, settings={**DENSE.settings, **DEEP}, of="deep")
TIED = replace(DENSE, settings={**DENSE.settings, "tie_word_embeddings": True}, of="tied")
SCALE = 0.3
fast = pytest.mark.fast


class Known:
    """Models and what the oracle says of them, each made once."""

    def __init__(self, root: Path) -> None:
        self._root, self._made = root, dict[str, tuple[Predicting, Predicted]]()

    def __call__(self, case: Any) -> tuple[Predicting, Predicted]:
        if case.name not in self._made:
            predicting = build_predicting(case, self._root / case.name)
            self._made[case.name] = predicting, expect_prediction(predicting, SCALE, STEPS)
        return self._made[case.name]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return Known(tmp_path_factory.mktemp("models"))


def run(
    ranks: Pool, predicting: Predicting, world: int, layout: dict[str, Any], out: Path, **more: Any
) -> dict[str, Any]:
    out.mkdir(exist_ok=True)
    layout = {"distributed_optimizer": False, "mtp_loss_scaling_factor": SCALE, **layout}
    arguments = {"model": str(predicting.model.directory), "steps": STEPS, **more}
    answers = ranks.run("predict", world, layout=layout, out=str(out), **arguments)
    return answers[0]


def published(out: Path) -> Tensors:
    found: Tensors = {}
    for path in sorted((out / "published").glob("*.safetensors")):
        tensors = load_file(path)
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


LAYOUTS = [
    pytest.param(LATENT, 1, {}, id="latent-single"),
    pytest.param(LATENT, 2, SCATTERED, id="latent-TP2+SP", marks=fast),
    pytest.param(LATENT, 2, {"pipeline": 2}, id="latent-PP2"),
    pytest.param(LATENT, 2, {"expert": 2, "distributed_optimizer": True}, id="latent-EP2"),
    pytest.param(LATENT, 2, {"context": 2}, id="latent-CP2"),
    pytest.param(LATENT, 2, {"context": 2, "cp_layout": "contiguous"}, id="latent-CP2-contiguous"),
    pytest.param(
        LATENT,
        4,
        {**SCATTERED, "pipeline": 2, "expert": 2, "expert_tensor": 1},
        id="latent-TP2+SPxPP2xEP2",
    ),
    pytest.param(LATENT, 4, {"context": 2, "pipeline": 2}, id="latent-CP2xPP2"),
    pytest.param(GLM, 2, SCATTERED, id="glm-TP2+SP"),
    pytest.param(GLM, 2, {"expert": 2, "context": 2}, id="glm-EP2xCP2"),
    pytest.param(CHOOSING, 1, {}, id="choosing-single"),
    pytest.param(CHOOSING, 2, {**SCATTERED, "recompute": "full"}, id="choosing-TP2+SP-recompute"),
    pytest.param(CHOOSING, 4, {"context": 2, "pipeline": 2}, id="choosing-CP2xPP2"),
    pytest.param(SHARING, 2, {"recompute": "selective"}, id="sharing-DP2-recompute"),
    pytest.param(MIMO, 2, {"tensor": 2}, id="mimo-TP2"),
    pytest.param(MIMO, 2, {"pipeline": 2}, id="mimo-PP2"),
    pytest.param(DENSE, 2, {"tensor": 2}, id="dense-TP2"),
    pytest.param(DENSE, 2, {"pipeline": 2}, id="dense-PP2", marks=fast),
    pytest.param(DENSE, 2, {"tensor": 2, "recompute": "full"}, id="dense-TP2-recompute"),
    pytest.param(DENSE, 2, {"distributed_optimizer": True}, id="dense-DP2"),
    pytest.param(TIED, 2, {"pipeline": 2}, id="tied-PP2"),
    pytest.param(NEXT, 1, {}, id="next-single"),
    pytest.param(NEXT, 2, SCATTERED, id="next-TP2+SP"),
    pytest.param(SPARSE, 2, {"expert": 2}, id="sparse-EP2"),
    pytest.param(DEEP_DENSE, 1, {}, id="deep-single"),
    pytest.param(DEEP_DENSE, 2, {"pipeline": 2, "virtual_pipeline": 2}, id="deep-PP2xVPP2"),
]


@pytest.mark.parametrize(("case", "world", "layout"), LAYOUTS)
def test_it_trains_as_plain_torch_says(
    case: Any, world: int, layout: dict[str, Any], ranks: Pool, known: Known, tmp_path: Path
) -> None:
    predicting, expected = known(case)
    answer = run(ranks, predicting, world, layout, tmp_path / "out")
    assert _mean(answer["loss"]) == pytest.approx(expected.loss, abs=LOGPROB_TOLERANCE)
    assert answer["loss"][1] == pytest.approx(answer["after"][1])
    gradients = read_ranks(tmp_path / "out", "gradients")
    assert expected.gradients.keys() <= gradients.keys()
    assert gradient_difference(gradients, expected.gradients) <= GRADIENT_TOLERANCE
    for found, wanted in zip(answer["losses"], expected.losses, strict=True):
        assert _mean(found) == pytest.approx(wanted, abs=1e-3)
    # after steps, float32 lets four recurrent layers drift from float64 whatever the layout
    assert answer["norms"][0] == pytest.approx(expected.norms[0], rel=1e-4)
    drift = 2e-2 if case is DEEP_DENSE else 5e-3
    assert answer["norms"] == pytest.approx(expected.norms, rel=drift)
    assert expected.after < expected.loss - 0.01  # it learns
    assert _mean(answer["after"]) == pytest.approx(expected.after, abs=1e-3)
    tensors = published(tmp_path / "out")
    assert tensors.keys() == load_file(predicting.model.directory / "model.safetensors").keys()
    for name, weight in expected.weights.items():
        assert relative_distance(tensors[name].double(), weight) < 2e-3, name
    for copied, name in predicting.copies().items():
        assert torch.equal(tensors[copied], tensors[name])
    reloaded = loss_of(predicting, tmp_path / "out/published")
    assert reloaded == pytest.approx(_mean(answer["after"]), abs=LOGPROB_TOLERANCE)


def _mean(pair: list[float]) -> float:
    return pair[0] / pair[1]


@pytest.mark.parametrize(
    ("case", "world", "layout"),
    [
        pytest.param(LATENT, 2, SCATTERED, id="latent-TP2+SP"),
        pytest.param(NEXT, 2, {"pipeline": 2}, id="next-PP2"),
        pytest.param(DENSE, 1, {"dtype": "bfloat16"}, id="dense-bfloat16", marks=fast),
    ],
)
def test_the_policy_steps_to_the_bit_as_without_it(
    case: Any, world: int, layout: dict[str, Any], ranks: Pool, known: Known, tmp_path: Path
) -> None:
    """Its gradients, how they are clipped, its weights and log-probs."""
    predicting, _ = known(case)
    beside = run(ranks, predicting, world, layout, tmp_path / "with")
    alone = run(
        ranks, predicting, world, {**layout, "mtp_loss_scaling_factor": 0.0}, tmp_path / "without"
    )
    assert alone["loss"] == [0.0, 0.0]
    assert beside["norms"] == alone["norms"]
    left, right = published(tmp_path / "with"), published(tmp_path / "without")
    start = load_file(predicting.model.directory / "model.safetensors")
    assert left.keys() == right.keys() == start.keys()
    own = set(predicting.copies()) | {
        name for name in start if name in predicting.names or predicting.names[-1] in name
    }
    for name in start.keys() - own:
        assert torch.equal(left[name], right[name]), name
    for name in own:  # as they were, to the bit, where it is not trained
        assert torch.equal(right[name], start[name]), name
    moved = [name for name in own if "correction_bias" not in name]
    assert not any(torch.equal(left[name].float(), start[name].float()) for name in moved)
    for kind in ("gradients", "trained"):
        first, second = (read_ranks(tmp_path / each, kind) for each in ("with", "without"))
        assert all(torch.equal(first[name], second[name]) for name in second)


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(NEXT, {"dtype": "bfloat16"}, id="next-DP2-bfloat16"),  # of two types
        pytest.param(DENSE, {"pipeline": 2}, id="dense-PP2"),
    ],
)
def test_state_on_the_host_changes_nothing(
    case: Any, layout: dict[str, Any], ranks: Pool, known: Known, tmp_path: Path
) -> None:
    """Of steps, to the bit, and of a checkpoint, with which steps go on on the device."""
    predicting, _ = known(case)
    layout = {"distributed_optimizer": True, **layout}
    device = run(ranks, predicting, 2, layout, tmp_path / "device")
    host = run(ranks, predicting, 2, {**layout, "optimizer_offload": 0.5}, tmp_path / "host")
    assert host == device
    left, right = published(tmp_path / "host"), published(tmp_path / "device")
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in right)
    for name in ("host", "device"):
        checkpoint = str(tmp_path / name / "checkpoint")
        run(ranks, predicting, 2, layout, tmp_path / f"{name}-on", checkpoint=checkpoint)
    left, right = published(tmp_path / "host-on"), published(tmp_path / "device-on")
    assert all(torch.equal(left[name], right[name]) for name in right)


@fast
def test_a_guess_across_rows_would_be_seen(ranks: Pool, known: Known, tmp_path: Path) -> None:
    predicting, expected = known(DENSE)
    answer = run(ranks, predicting, 1, {}, tmp_path / "out", broken="rows", steps=0)
    assert abs(_mean(answer["loss"]) - expected.loss) > 5 * LOGPROB_TOLERANCE
    gradients = read_ranks(tmp_path / "out", "gradients")
    assert gradient_difference(gradients, expected.gradients) > 10 * GRADIENT_TOLERANCE


def test_no_split_changes_it(ranks: Pool, known: Known, tmp_path: Path) -> None:
    """Every row a micro-batch of its own, some of them without a token that is guessed."""
    predicting, expected = known(LATENT)
    answer = run(ranks, predicting, 2, {"context": 2}, tmp_path / "out", parts=0, steps=0)
    assert _mean(answer["loss"]) == pytest.approx(expected.loss, abs=LOGPROB_TOLERANCE)
    gradients = read_ranks(tmp_path / "out", "gradients")
    assert gradient_difference(gradients, expected.gradients) <= GRADIENT_TOLERANCE


def test_its_scale_is_that_of_its_gradients(ranks: Pool, known: Known, tmp_path: Path) -> None:
    predicting, expected = known(DENSE)
    run(ranks, predicting, 1, {"mtp_loss_scaling_factor": 0.6}, tmp_path / "out", steps=0)
    doubled = {name: 2 * tensor for name, tensor in expected.gradients.items()}
    gradients = read_ranks(tmp_path / "out", "gradients")
    assert gradient_difference(gradients, doubled) <= GRADIENT_TOLERANCE


@pytest.mark.parametrize("case", [LATENT, MIMO], ids=lambda case: case.name)
def test_a_checkpoint_goes_on_in_another_layout_and_becomes_the_model_again(
    case: Any, ranks: Pool, known: Known, tmp_path: Path
) -> None:
    predicting, _ = known(case)
    before = run(ranks, predicting, 2, SCATTERED, tmp_path / "before")
    checkpoint = {"checkpoint": str(tmp_path / "before/checkpoint")}
    same = run(ranks, predicting, 2, SCATTERED, tmp_path / "same", **checkpoint)
    assert same["loss"] == before["after"]
    other = run(
        ranks, predicting, 2, {"pipeline": 2, "expert": 1}, tmp_path / "other", **checkpoint
    )
    assert _mean(other["loss"]) == pytest.approx(_mean(same["loss"]), abs=LOGPROB_TOLERANCE)
    assert _mean(other["after"]) == pytest.approx(_mean(same["after"]), abs=1e-3)
    assert other["norms"] == pytest.approx(same["norms"], rel=1e-3)
    options = ConvertOptions(to="hf", model=predicting.model.directory, sync=False)
    convert(tmp_path / "before/checkpoint", tmp_path / "back", options)
    files = (tmp_path / "back").glob("*.safetensors")
    back = {name: tensor for file in files for name, tensor in load_file(file).items()}
    first = published(tmp_path / "before")
    assert back.keys() == first.keys()
    assert all(torch.equal(back[name], first[name]) for name in first)
    assert compare(tmp_path / "before/checkpoint", tmp_path / "back").same
    alone = {"mtp_loss_scaling_factor": 0.0}
    with pytest.raises(JobError, match=r"has a layer of multi-token prediction that was trained"):
        run(ranks, predicting, 2, {**SCATTERED, **alone}, tmp_path / "without", **checkpoint)


def open_error(ranks: Pool, directory: Path, layout: dict[str, Any], out: Path) -> tuple[str, str]:
    out.mkdir(exist_ok=True)
    layout = {"mtp_loss_scaling_factor": SCALE, **layout}
    (answer,) = ranks.run("open_error", 1, model=str(directory), layout=layout, out=str(out))
    return answer["type"], answer["text"]


@fast
def test_what_cannot_be_trained_is_refused_by_name(
    ranks: Pool, known: Known, tmp_path: Path
) -> None:
    def changed(name: str, change: Callable[[Tensors], object]) -> Path:
        directory = tmp_path / name
        shutil.copytree(known(LATENT)[0].model.directory, directory)
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    def keep_trunk(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".layers.2." in name]:
            del tensors[name]

    other = torch.ones(3)
    cases: dict[str, Callable[[Tensors], object]] = {
        "has no layer of multi-token prediction": keep_trunk,
        "model.layers.2.eh_proj.weight": lambda t: t.pop("model.layers.2.eh_proj.weight"),
        "model.layers.2.mlp.other.weight": lambda t: t.update(
            {"model.layers.2.mlp.other.weight": other}
        ),
        "model.layers.3.enorm.weight": lambda t: t.update({"model.layers.3.enorm.weight": other}),
        "are tied but differ": lambda t: t["model.layers.2.embed_tokens.weight"].mul_(1.5),
        "has shape": lambda t: t.update({"model.layers.2.hnorm.weight": other}),
    }
    for number, (text, change) in enumerate(cases.items()):
        directory = changed(f"model-{number}", change)
        assert text in open_error(ranks, directory, {}, tmp_path / "out")[1]
    plain = build_model(tmp_path / "plain", "qwen3")
    kind, text = open_error(ranks, plain.directory, {}, tmp_path / "out")
    assert kind == "UnsupportedFeatureError"
    assert "of models of family 'qwen3' no layer of multi-token prediction is trained" in text


def test_experts_are_replayed_beside_it(ranks: Pool, known: Known, tmp_path: Path) -> None:
    """Its own are chosen as ever: no engine and no earlier pass has said which."""
    predicting, expected = known(LATENT)
    layout = {"routing_replay": "recorded"}
    answer = run(ranks, predicting, 1, layout, tmp_path / "out", steps=0, records=True)
    assert _mean(answer["loss"]) == pytest.approx(expected.loss, abs=LOGPROB_TOLERANCE)
    gradients = read_ranks(tmp_path / "out", "gradients")
    assert gradient_difference(gradients, expected.gradients) <= GRADIENT_TOLERANCE
