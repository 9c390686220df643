"""Passes that compute with what experts are published as give plain transformers' numbers of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.contract.training_backend.cases import Model
from tests.fsdp.oracle import (
    Expected,
    Tensors,
    gradient_difference,
    logprob_difference,
    read_ranks,
)
from tests.megatron.comparison import GRADIENT_TOLERANCE, LOGPROB_TOLERANCE
from tests.models.families import CASES, Case, build
from tests.models.proof import MAX_GRADIENT_DIFF, MAX_LOGPROB_DIFF, MAX_MISMATCH
from tests.models.simulated import STORED, expect_simulated, scored_as_stored, stands_for
from tests.rank_pool import Pool

fast = pytest.mark.fast
SIZE, STEPS = 32, 3
AWARE = {"publish": {"quantization": "int4_32", "quantization_aware": True}}
WIDE = {"hidden_size": 64, "moe_intermediate_size": 64}  # several groups a row
BY_NAME = {case.name: case for case in CASES}
STORED_ONE_BY_ONE = (
    *("qwen3_moe", "deepseek_v3", "mixtral", "qwen2_moe", "qwen3_next", "glm4_moe"),
    *("glm4_moe_lite", "glm_moe_dsa", "minimax_m2", "deepseek_v2", "olmoe", "dots1"),
    *("ernie4_5_moe", "phimoe", "kimi_k2"),
)


def wide(name: str) -> Case:
    case = BY_NAME[name]
    return replace(case, settings={**case.settings, **WIDE}, of="wide")


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


class Known:
    def __init__(self, root: Path) -> None:
        self._root, self._made = root, dict[str, tuple[Model, Expected]]()

    def __call__(self, case: Case) -> tuple[Model, Expected]:
        if case.name not in self._made:
            model = build(case, self._root / case.name)
            self._made[case.name] = model, expect_simulated(model, SIZE, STEPS)
        return self._made[case.name]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    return Known(tmp_path_factory.mktemp("models"))


def check(
    pool: Pool, model: Model, expected: Expected, out: Path, world: int, **arguments: Any
) -> tuple[float, float]:
    """Largest differences of log-probs and of gradients. Steps and what is published fit too."""
    (out / "published").mkdir(parents=True)
    answers = pool.run(
        "prove",
        world,
        model=str(model.directory),
        out=str(out),
        steps=STEPS,
        **{"trainer": AWARE, **arguments},
    )
    for made, wanted in zip(answers[0]["steps"], expected.steps, strict=True):
        assert made["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-3)
        assert made["loss"] == pytest.approx(wanted["loss"], rel=1e-3)
    published: Tensors = {}
    for path in (out / "published").glob("*.safetensors"):
        published |= load_file(path)
    assert published.keys() >= expected.weights.keys()
    for name, weight in expected.weights.items():
        torch.testing.assert_close(published[name], weight, atol=5e-4, rtol=0)
    stored = scored_as_stored(model, published, SIZE)
    assert logprob_difference(read_ranks(out, "trained"), stored) <= MAX_MISMATCH
    return (
        logprob_difference(read_ranks(out, "logprobs"), expected.logprobs),
        gradient_difference(read_ranks(out, "gradients"), expected.gradients),
    )


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=fast if n == "mixtral" else ()) for n in STORED_ONE_BY_ONE]
)
def test_a_family_on_fsdp(name: str, pool: Pool, known: Known, tmp_path: Path) -> None:
    model, expected = known(BY_NAME[name])
    logprob, gradient = check(pool, model, expected, tmp_path / "out", 2)
    assert logprob <= MAX_LOGPROB_DIFF
    assert gradient <= MAX_GRADIENT_DIFF


@pytest.mark.parametrize(
    ("name", "world", "settings"),
    [
        pytest.param(
            name,
            world,
            settings,
            id=f"{layout}-{name}",
            marks=fast if (layout, name) == ("EP2", "deepseek_v3") else (),
        )
        for name in ("qwen3_moe", "deepseek_v3", "mixtral")
        for layout, world, settings in (
            ("1", 1, {}),
            ("recomputed", 2, {"activation_checkpointing": True}),
            ("TP2", 2, {"tensor": 2}),
            ("CP2", 2, {"context": 2}),
            ("EP2", 2, {"expert": 2}),
            ("EP2, recomputed", 4, {"expert": 2, "activation_checkpointing": True}),
            ("kept", 2, {"reduce": "call", "reshard_after_forward": False}),
        )
    ],
)
def test_a_layout_of_fsdp(
    name: str, world: int, settings: dict[str, Any], pool: Pool, known: Known, tmp_path: Path
) -> None:
    model, expected = known(wide(name))
    logprob, gradient = check(pool, model, expected, tmp_path / "out", world, fsdp=settings)
    assert logprob <= MAX_LOGPROB_DIFF
    assert gradient <= MAX_GRADIENT_DIFF


SCATTERED = {"tensor": 2, "sequence_parallel": True}


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "minimax_m2"])
@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(1, {}, id="1"),
        pytest.param(1, {"recompute": "full"}, id="recomputed"),
        pytest.param(2, {"expert": 2}, id="EP2"),
        pytest.param(2, SCATTERED, id="TP2"),
        pytest.param(2, {"pipeline": 2}, id="PP2"),
        pytest.param(2, {**SCATTERED, "expert": 2, "expert_tensor": 1}, id="TP2xEP2"),
        pytest.param(2, {"context": 2}, id="CP2"),
    ],
)
def test_a_layout_of_megatron(
    name: str, world: int, layout: dict[str, Any], ranks: Pool, known: Known, tmp_path: Path
) -> None:
    model, expected = known(wide(name))
    layout = {"distributed_optimizer": False, **layout}  # whose gradients are in parts
    logprob, gradient = check(ranks, model, expected, tmp_path / "out", world, layout=layout)
    assert logprob <= LOGPROB_TOLERANCE
    assert gradient <= GRADIENT_TOLERANCE


def test_in_bfloat16_a_version_is_what_passes_computed_with(pool: Pool, tmp_path: Path) -> None:
    """Weights are float32, and passes have them in bfloat16: of either other codes would come."""
    model = build(wide("qwen3_moe"), tmp_path / "model")
    arguments = {"model": str(model.directory), "out": str(tmp_path), "trainer": AWARE}
    pool.run("publish_computed", 2, **arguments, fsdp={"dtype": "bfloat16"})
    computed = load_file(tmp_path / "computed.safetensors")
    stored: Tensors = {}
    for path in (tmp_path / "weights/staging").glob("*.safetensors"):
        stored |= load_file(path)
    plain = load_file(model.directory / "model.safetensors")
    names = {name for name in plain if STORED.search(name)}
    assert computed.keys() == names and len(names) == 24
    others = 0
    for name in names:
        scale = stored[f"{name}_scale"].double()
        words = stored[f"{name}_packed"].long() & 0xFFFFFFFF
        codes = torch.stack([(words >> (4 * i)) & 15 for i in range(8)], -1).flatten(1) - 8
        numbers = codes * scale.repeat_interleave(SIZE, 1)
        assert computed[name].dtype == torch.bfloat16
        assert torch.equal(numbers.bfloat16(), computed[name])
        others += int((stands_for(plain[name], SIZE) != numbers).sum())
    assert others > 0


def test_groups_that_ranks_would_share_are_refused(pool: Pool, ranks: Pool, tmp_path: Path) -> None:
    model = build(BY_NAME["qwen3_moe"], tmp_path / "model")  # 32 inputs of each down_proj
    arguments = {"model": str(model.directory), "out": str(tmp_path), "trainer": AWARE}
    (answer, _) = pool.run("attempt", 2, **arguments, fsdp={"tensor": 2})
    assert "16 inputs of model.layers.0.mlp.experts.down_proj" in answer["error_message"]
    (answer, _) = ranks.run("open_error", 2, **arguments, layout=SCATTERED)
    assert answer["type"] == "QuantizationAwareError"
    assert "16 inputs of decoder.layers.0.mlp.experts" in answer["text"]
    assert "lower megatron.expert_tensor" in answer["text"]


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_steps_go_on_from_a_checkpoint_as_if_there_had_been_none(
    backend: str, pool: Pool, ranks: Pool, tmp_path: Path
) -> None:
    case = wide("qwen3_moe")
    case = replace(case, settings={**case.settings, "vocab_size": 131})  # of Megatron's rows
    model = build(case, tmp_path / "model")
    arguments: dict[str, Any] = {"model": str(model.directory), "trainer": AWARE}
    arguments |= {"layout": {"expert": 2}} if backend == "megatron" else {}
    used = ranks if backend == "megatron" else pool
    found = []
    for job in ("save_midway", "resume"):
        (out := tmp_path / job).mkdir()
        checkpoint = str(tmp_path / "save_midway/checkpoint")
        if job == "save_midway":
            Path(checkpoint).mkdir()
        answers = used.run(job, 2, **arguments, out=str(out), checkpoint=checkpoint)
        found.append((answers[0]["steps"], read_ranks(out, "weights")))
    (steps, weights), (again, resumed) = found
    assert steps == again
    assert weights.keys() == resumed.keys()
    assert all(torch.equal(resumed[name], weight) for name, weight in weights.items())
