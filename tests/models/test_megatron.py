"""Families train on Megatron as plain transformers says.

Those with gated delta nets do in every layout; layouts of the others are in tests/megatron.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from sluice.weights.convert.conversion import convert
from sluice.weights.convert.options import ConvertOptions
from sluice.weights.convert.verify import compare
from tests.contract.training_backend.cases import Model
from tests.fsdp.oracle import STEPS, Expected, expect, logprob_difference, read_ranks
from tests.megatron.comparison import GRADIENT_TOLERANCE, LOGPROB_TOLERANCE
from tests.models.families import CASES, MTP, Case, add_tensors, build
from tests.models.proof import (
    MAX_GRADIENT_DIFF,
    MAX_LOGPROB_DIFF,
    SEEING,
    Proof,
    Summary,
    prove,
    short_name,
)
from tests.rank_pool import Pool
from tools.models_table import megatron_families

BY_NAME = {case.name: case for case in CASES}
DENSE, NEXT, SPARSE = (BY_NAME[name] for name in ("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text"))
# Deeper ones amplify: there plain transformers in float32 is 2e-5 from itself in float64.
DEEP = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
DEEP_DENSE = replace(DENSE, settings={**DENSE.settings, **DEEP}, of="deep")
DEEP_NEXT = replace(NEXT, settings={**NEXT.settings, **DEEP, "mlp_only_layers": [1]}, of="deep")
ONE_KEY_HEAD = replace(  # that tensor ranks share
    DENSE, settings={**DENSE.settings, "num_key_value_heads": 1}, of="one-key-head"
)
SCATTERED = {"tensor": 2, "sequence_parallel": True}
OTHERS = [
    BY_NAME[name]
    for name in (
        *("llama", "llama-tied", "qwen2", "qwen3", "qwen3_moe"),
        *("glm4", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "kimi_k2", "mimo"),
        *("minimax_m2", "glm_moe_dsa", "glm_moe_dsa-shared"),
    )
]
SINKS = BY_NAME["gpt_oss"]  # whose experts have biases, which tensor ranks cannot share
fast = pytest.mark.fast


class Known:
    """Models and what plain transformers says of them, each made once."""

    def __init__(self, root: Path) -> None:
        self._root, self._made = root, dict[str, tuple[Model, Expected]]()

    def __call__(self, case: Case) -> tuple[Model, Expected]:
        if case.name not in self._made:
            model = build(case, self._root / case.name)
            self._made[case.name] = model, expect(model, STEPS)
        return self._made[case.name]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return Known(tmp_path_factory.mktemp("models"))


LAYOUTS = [
    pytest.param(DENSE, 1, {}, id="dense-single"),
    pytest.param(DENSE, 2, {"tensor": 2}, id="dense-TP2", marks=fast),
    pytest.param(DENSE, 2, SCATTERED, id="dense-TP2+SP"),
    pytest.param(DENSE, 2, {"pipeline": 2}, id="dense-PP2"),
    pytest.param(DENSE, 2, {}, id="dense-DP2"),
    pytest.param(ONE_KEY_HEAD, 2, {"tensor": 2}, id="one-key-head-TP2"),
    pytest.param(ONE_KEY_HEAD, 2, SCATTERED, id="one-key-head-TP2+SP", marks=fast),
    pytest.param(NEXT, 1, {}, id="next-single"),
    pytest.param(NEXT, 2, SCATTERED, id="next-TP2+SP", marks=fast),
    pytest.param(NEXT, 2, {"pipeline": 2}, id="next-PP2"),
    pytest.param(NEXT, 2, {"expert": 2}, id="next-EP2"),
    pytest.param(SPARSE, 1, {}, id="sparse-single"),
    pytest.param(SPARSE, 2, SCATTERED, id="sparse-TP2+SP"),
    pytest.param(SPARSE, 2, {"pipeline": 2}, id="sparse-PP2"),
    pytest.param(SPARSE, 2, {"expert": 2}, id="sparse-EP2"),
    pytest.param(SINKS, 1, {}, id="gpt_oss-1"),
    pytest.param(SINKS, 2, {**SCATTERED, "expert": 2, "expert_tensor": 1}, id="gpt_oss-TP2+SPxEP2"),
    pytest.param(SINKS, 2, {"pipeline": 2}, id="gpt_oss-PP2"),
    pytest.param(SINKS, 2, {"context": 2}, id="gpt_oss-CP2"),
    *(pytest.param(case, 2, SCATTERED, id=f"{case.name}-TP2+SP") for case in OTHERS),
]
DEEP_LAYOUTS = [
    pytest.param(DEEP_DENSE, 2, {"pipeline": 2, "virtual_pipeline": 2}, id="dense-PP2xVPP2"),
    pytest.param(DEEP_DENSE, 2, {"tensor": 2, "recompute": "full"}, id="dense-TP2-recompute"),
    pytest.param(DEEP_NEXT, 2, {"pipeline": 2, "first_stage_layers": 1}, id="next-PP2-1+3"),
    pytest.param(
        DEEP_NEXT,
        4,
        {**SCATTERED, "pipeline": 2, "expert": 2, "expert_tensor": 1},
        id="next-TP2+SPxPP2xEP2",
    ),
]


@pytest.mark.parametrize(("case", "world", "layout"), LAYOUTS)
def test_a_layout_trains_as_plain_transformers(
    case: Case,
    world: int,
    layout: dict[str, Any],
    ranks: Pool,
    known: Known,
    summary: Summary,
    tmp_path: Path,
) -> None:
    proof = _prove(ranks, known, case, world, layout, tmp_path)
    summary.megatron.append(replace(proof, layout=short_name(world, layout)))
    assert proof.logprob <= proof.logprob_limit
    assert proof.gradient <= MAX_GRADIENT_DIFF
    assert proof.norm <= 1e-3
    assert proof.reloaded <= LOGPROB_TOLERANCE  # behind five steps rounding is amplified


@pytest.mark.parametrize(("case", "world", "layout"), DEEP_LAYOUTS)
def test_a_deeper_model_in_more_layouts(
    case: Case, world: int, layout: dict[str, Any], ranks: Pool, known: Known, tmp_path: Path
) -> None:
    proof = _prove(ranks, known, case, world, layout, tmp_path)
    assert max(proof.logprob, proof.reloaded) <= LOGPROB_TOLERANCE
    assert proof.gradient <= GRADIENT_TOLERANCE
    assert proof.norm <= 5e-3


def _prove(
    ranks: Pool,
    known: Known,
    case: Case,
    world: int,
    layout: dict[str, Any],
    out: Path,
    **more: Any,
) -> Proof:
    model, expected = known(case)
    layout = {"distributed_optimizer": False, **layout}
    return prove(ranks, case, model, expected, out, world, layout=layout, **more)


@pytest.mark.parametrize("case", [DENSE, NEXT, SPARSE, SINKS, *OTHERS], ids=lambda case: case.name)
def test_a_family_rolls_out_what_it_trains(
    case: Case, ranks: Pool, known: Known, summary: Summary, tmp_path: Path
) -> None:
    model, _ = known(case)
    (answer,) = ranks.run("roll_out", 1, model=str(model.directory), layout={}, out=str(tmp_path))
    assert answer["versions"] == [1, 2, 3]
    assert all(norm > 0 for norm in answer["norms"])
    summary.megatron_mismatches[case.name] = answer["mismatch"]
    # three large steps amplify what rounding does
    assert answer["mismatch"] <= LOGPROB_TOLERANCE < answer["stale"] / 100


@fast
def test_every_family_is_here_or_sees() -> None:
    proven = {case.values[0].model_type.removesuffix("_text") for case in LAYOUTS}  # type: ignore[union-attr]
    of_another = {"glm4_moe_lite", "kimi_k2"}  # whose rules are those of deepseek_v3
    found = (proven | {case.model_type for case in SEEING}) - of_another
    assert found == megatron_families()


@pytest.mark.parametrize(
    ("broken", "logprob", "gradient"),
    [("rule", 1e3, 1e3), ("convolution", 1e3, 1e3), ("norm", 0, 1e2)],
)
def test_what_is_broken_is_seen(
    broken: str, logprob: float, gradient: float, ranks: Pool, known: Known, tmp_path: Path
) -> None:
    """States that go on into the next row, and gradients of one rank's heads only."""
    proof = _prove(ranks, known, DENSE, 2, {"tensor": 2}, tmp_path, broken=broken)
    assert proof.logprob >= logprob * MAX_LOGPROB_DIFF
    assert proof.gradient >= gradient * MAX_GRADIENT_DIFF
    if broken == "norm":
        assert proof.logprob <= proof.logprob_limit


def test_other_keys_than_were_chosen_are_seen(ranks: Pool, known: Known, tmp_path: Path) -> None:
    for name in ("glm_moe_dsa", "glm_moe_dsa-shared"):
        (tmp_path / name).mkdir()
        proof = _prove(ranks, known, BY_NAME[name], 1, {}, tmp_path / name / "out", broken="keys")
        assert proof.logprob >= 1e3 * MAX_LOGPROB_DIFF


@pytest.mark.parametrize("case", [DEEP_DENSE, DEEP_NEXT], ids=lambda case: case.name)
def test_a_checkpoint_goes_on_in_another_layout_and_becomes_the_model_again(
    case: Case, ranks: Pool, known: Known, tmp_path: Path
) -> None:
    model, _ = known(case)
    _prove(ranks, known, case, 2, SCATTERED, tmp_path)
    trained = read_ranks(tmp_path, "trained")
    norms = []
    for name, layout, most in (
        ("same", SCATTERED, 0.0),
        ("other", {"pipeline": 2}, LOGPROB_TOLERANCE),
    ):
        (tmp_path / name).mkdir()
        answers = ranks.run(
            "continue_from",
            2,
            model=str(model.directory),
            layout={"distributed_optimizer": False, **layout},
            checkpoint=str(tmp_path / "checkpoint"),
            out=str(tmp_path / name),
        )
        assert logprob_difference(read_ranks(tmp_path / name, "resumed"), trained) <= most
        norms.append(answers[0]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    options = ConvertOptions(to="hf", model=model.directory, sync=False)
    convert(tmp_path / "checkpoint", tmp_path / "back", options)
    assert compare(tmp_path / "published", tmp_path / "back").same


@pytest.mark.parametrize("distributed", [True, False])
def test_a_bfloat16_model_keeps_its_decays_wide(
    distributed: bool, ranks: Pool, known: Known, tmp_path: Path
) -> None:
    """Parameters of two types are in one optimizer, and come back from a checkpoint bit for bit."""
    model, expected = known(NEXT)
    layout = {"dtype": "bfloat16", "distributed_optimizer": distributed}
    (tmp_path / "published").mkdir()
    more = {"model": str(model.directory), "layout": layout}
    answers = ranks.run("prove", 2, out=str(tmp_path), steps=STEPS, **more)
    for step, wanted in zip(answers[0]["steps"], expected.steps, strict=True):
        assert step["loss"] == pytest.approx(wanted["loss"], abs=0.1 * abs(wanted["loss"]) + 1)
    wide = {"A_log", "norm.weight"}
    for path in (tmp_path / "published").glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            keeps = name.rpartition("linear_attn.")[2] in wide
            assert tensor.dtype is (torch.float32 if keeps else torch.bfloat16), name
    (tmp_path / "again").mkdir()
    ranks.run(
        "continue_from",
        2,
        checkpoint=str(tmp_path / "checkpoint"),
        out=str(tmp_path / "again"),
        **more,
    )
    trained, resumed = read_ranks(tmp_path, "trained"), read_ranks(tmp_path / "again", "resumed")
    assert all(torch.equal(resumed[name], trained[name]) for name in trained)


@pytest.mark.parametrize("name", sorted(megatron_families() & MTP.keys()))
@pytest.mark.parametrize("world", [1, 2])
def test_layers_of_multi_token_prediction_go_through_bit_for_bit(
    name: str, world: int, ranks: Pool, known: Known, tmp_path: Path
) -> None:
    """They are not trained, and engines that have them look for them in every version."""
    case = BY_NAME[name]
    model, expected = known(case)
    with_more, more = add_tensors(model, MTP[name], tmp_path / "model")
    layout = {"distributed_optimizer": False, "pipeline" if name == "mimo" else "expert": world}
    out = tmp_path / "out"
    proof = prove(ranks, case, with_more, expected, out, world, layout=layout)  # and their names
    assert proof.logprob <= proof.logprob_limit
    published: dict[str, torch.Tensor] = {}
    for path in (out / "published").glob("*.safetensors"):
        published |= load_file(path)
    for kept, tensor in more.items():
        assert published[kept].dtype is torch.bfloat16
        assert torch.equal(published[kept], tensor)
    if world == 1:
        (tmp_path / "rolled").mkdir()
        (answer,) = ranks.run(
            "roll_out",
            1,
            model=str(with_more.directory),
            layout={},
            out=str(tmp_path / "rolled"),
        )
        assert answer["versions"] == [1, 2, 3]


@fast
@pytest.mark.parametrize(
    ("case", "world", "layout", "text"),
    [
        (DENSE, 2, {"context": 2}, "no context parallelism"),
        (DENSE, 4, {"tensor": 4}, "2 key heads do not divide over 4"),
        (DENSE, 1, {"layer_spec": "transformer_engine"}, "layer_spec transformer_engine"),
        (NEXT, 2, {"tensor": 2}, "need sequence_parallel"),
        (BY_NAME["minimax_m2"], 4, {**SCATTERED, "tensor": 4}, "2 key heads do not divide over 4"),
    ],
)
def test_a_layout_that_is_not_computed_is_refused(
    case: Case,
    world: int,
    layout: dict[str, Any],
    text: str,
    ranks: Pool,
    tmp_path: Path,
) -> None:
    model = build(case, tmp_path / "model")
    answers = ranks.run(
        "open_error", world, model=str(model.directory), layout=layout, out=str(tmp_path)
    )
    for answer in answers:
        assert text in answer["text"]
