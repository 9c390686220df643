"""Biases that experts are chosen by move as numpy has them, and go wherever weights go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from services.rollout.engine.reference.model import ServingModel
from services.trainer.backend import Row
from services.trainer.backends.expert_load import NoBiasError, watch_biases, watch_experts
from sluice.routers import hold_biases
from sluice.weights.convert.conversion import convert
from sluice.weights.convert.options import ConvertOptions
from tests.contract.training_backend.cases import SIZES, Model
from tests.fsdp.jobs import rows_of
from tests.models.families import CASES, Case, build
from tests.models.proof import MAX_MISMATCH
from tests.models.test_expert_load import DEEPSEEK, QWEN, SCATTERED, Counts, count_by_row
from tests.models.test_experts import MIXTURES
from tests.rank_pool import Pool

fast = pytest.mark.fast
BY_NAME = {case.name: case for case in CASES}
RATE = 0.05
EXPERTS: dict[str, Any] = {"trainer": {"experts": {"bias_update_rate": RATE}}}
GLM = replace(
    BY_NAME["glm4_moe"], settings={**BY_NAME["glm4_moe"].settings, "num_hidden_layers": 3}
)
MINIMAX = BY_NAME["minimax_m2"]  # no bias of its router, but of the block about it
# that have theirs as weights, which transformers gives no gradient
WEIGHTED = [BY_NAME[name] for name in ("ernie4_5_moe", "afmoe", "laguna")]
BIASES = ("_correction_bias", ".expert_bias")


def biases_of(directory: Path) -> dict[str, torch.Tensor]:
    """Those of a checkpoint, layer by layer."""
    found: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        found |= {n: t for n, t in load_file(path).items() if n.endswith(BIASES)}
    return {name: found[name] for name in sorted(found, key=lambda name: int(name.split(".")[2]))}


def count_chosen(model: Model, rows: list[Row]) -> Counts:
    """What plain transformers gives its experts in float64, each row by itself."""
    plain: Any = model.load().double()  # type: ignore[no-untyped-call]
    layers = [m for name, m in plain.named_modules() if name.endswith(".experts")]
    counts = [[0] * plain.config.num_experts for _ in layers]

    def count(experts: Any, given: tuple[torch.Tensor, ...]) -> None:
        for expert in given[1][:-1].reshape(-1).tolist():  # the last token predicts nothing
            counts[layers.index(experts)][expert] += 1

    for layer in layers:
        layer.register_forward_pre_hook(count)
    with torch.no_grad():
        for row in rows:
            plain(row.token_ids[None])
    return counts


def move_by_numpy(
    model: Model, root: Path, steps: int, count: Callable[[Model, list[Row]], Counts]
) -> dict[str, np.ndarray]:
    """Of weights that stay; each step's counts are of the biases that the one before left."""
    tensors = load_file(model.directory / "model.safetensors")
    names = [*biases_of(model.directory)]
    directory = root / "moved"
    model.load().save_pretrained(directory)
    for step in range(steps):
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        counts = count(Model(directory), rows_of(step))
        for name, layer in zip(names, counts, strict=True):
            tokens = np.array(layer, dtype=np.float64)
            move = np.float32(RATE) * np.sign(tokens.mean() - tokens).astype(np.float32)
            tensors[name] = torch.from_numpy(tensors[name].numpy() + move)
    return {name: tensors[name].numpy() for name in names}


class Known:
    """Models and where numpy has their biases after three steps, each once."""

    def __init__(self, root: Path) -> None:
        self._root, self._made = root, dict[str, tuple[Model, dict[str, np.ndarray]]]()

    def __call__(self, case: Case) -> tuple[Model, dict[str, np.ndarray]]:
        if case.name not in self._made:
            root = self._root / case.name
            model = build(case, root / "model")
            count = count_chosen if case in WEIGHTED else count_by_row
            self._made[case.name] = model, move_by_numpy(model, root, 3, count)
        return self._made[case.name]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Known]:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield Known(tmp_path_factory.mktemp("models"))


def check(out: Path, model: Model, expected: dict[str, np.ndarray]) -> None:
    """To the bit, and nothing else has moved."""
    stored, found = load_file(model.directory / "model.safetensors"), read(out)
    assert found.keys() == stored.keys() and expected
    for name, tensor in found.items():
        wanted = torch.from_numpy(expected[name]) if name in expected else stored[name]
        assert tensor.dtype == wanted.dtype and torch.equal(tensor, wanted), name


ON_FSDP = [
    pytest.param(DEEPSEEK, 1, {}, id="deepseek-1", marks=fast),
    pytest.param(DEEPSEEK, 2, {"expert": 2}, id="deepseek-EP2", marks=fast),
    pytest.param(DEEPSEEK, 2, {"context": 2}, id="deepseek-CP2"),
    pytest.param(DEEPSEEK, 2, {"tensor": 2}, id="deepseek-TP2"),
    pytest.param(DEEPSEEK, 2, {"replicas": 2}, id="deepseek-HSDP2"),
    pytest.param(MINIMAX, 2, {}, id="minimax-2"),
    *(pytest.param(case, 2, {}, id=f"{case.name}-2") for case in WEIGHTED),
    *(pytest.param(case, 2, {"expert": 2}, id=f"{case.name}-EP2") for case in WEIGHTED),
    pytest.param(WEIGHTED[0], 2, {"tensor": 2}, id="ernie4_5_moe-TP2"),
    pytest.param(WEIGHTED[1], 1, {}, id="afmoe-1", marks=fast),
    pytest.param(WEIGHTED[2], 2, {"tensor": 2}, id="laguna-TP2"),
    pytest.param(WEIGHTED[2], 2, {"context": 2}, id="laguna-CP2"),
]


@pytest.mark.parametrize(("case", "world", "fsdp"), ON_FSDP)
def test_on_fsdp(
    pool: Pool, known: Known, tmp_path: Path, case: Case, world: int, fsdp: dict[str, Any]
) -> None:
    model, expected = known(case)
    arguments = {"model": str(model.directory), "out": str(tmp_path), **EXPERTS}
    pool.run("move_biases", world, **arguments, fsdp=fsdp)
    check(tmp_path, model, expected)


@pytest.mark.parametrize("case", WEIGHTED, ids=lambda case: case.name)
def test_in_bfloat16_they_are_not_rounded(pool: Pool, tmp_path: Path, case: Case) -> None:
    """Neither where a trainer computes and publishes in it, nor in an engine."""
    model = build(case, tmp_path / "model")
    trainer = {**EXPERTS["trainer"], "publish_dtype": "bfloat16"}
    arguments = {"model": str(model.directory), "out": str(tmp_path), "trainer": trainer}
    stored = biases_of(model.directory)
    pool.run("move_biases", 2, **arguments, fsdp={"dtype": "bfloat16"}, steps=1)
    found = biases_of(tmp_path / "published")
    assert found.keys() == stored.keys() and found
    for name, bias in found.items():
        moves = torch.stack([stored[name] + step * RATE for step in (-1, 0, 1)])
        assert bias.dtype == torch.float32 and (moves == bias).any(0).all()
        assert not torch.equal(bias, stored[name])
    save_file(read(tmp_path), model.directory / "model.safetensors", metadata={"format": "pt"})
    serving = ServingModel(model.directory, torch.bfloat16, torch.device("cpu"))
    held = [bias for name, bias in serving.module.named_buffers() if name.endswith(BIASES)]
    assert [bias.tolist() for bias in held] == [bias.tolist() for bias in found.values()]


@pytest.mark.parametrize("world", [pytest.param(1, marks=fast), 2])
def test_on_the_reference_backend(pool: Pool, known: Known, tmp_path: Path, world: int) -> None:
    model, expected = known(DEEPSEEK)
    arguments = {"model": str(model.directory), "out": str(tmp_path), **EXPERTS}
    pool.run("move_biases_on_copies", world, **arguments)
    check(tmp_path, model, expected)


ON_MEGATRON = [
    pytest.param(DEEPSEEK, 1, {}, id="deepseek-1"),
    pytest.param(DEEPSEEK, 2, {"pipeline": 2, "recompute": "full"}, id="deepseek-PP2", marks=fast),
    pytest.param(DEEPSEEK, 2, {**SCATTERED}, id="deepseek-TP2+SP"),
    pytest.param(DEEPSEEK, 2, {"context": 2}, id="deepseek-CP2"),
    pytest.param(DEEPSEEK, 2, {"expert": 2}, id="deepseek-EP2"),
    pytest.param(GLM, 2, {}, id="glm-DP2"),
    pytest.param(MINIMAX, 1, {}, id="minimax-1"),
]


@pytest.mark.parametrize(("case", "world", "layout"), ON_MEGATRON)
def test_on_megatron(
    ranks: Pool, known: Known, tmp_path: Path, case: Case, world: int, layout: dict[str, Any]
) -> None:
    model, expected = known(case)
    arguments = {"model": str(model.directory), "out": str(tmp_path), **EXPERTS}
    ranks.run("move_biases", world, **arguments, layout=layout)
    check(tmp_path, model, expected)


@pytest.mark.parametrize(
    ("job", "world", "layout"),
    [
        pytest.param("move_biases", 2, {"fsdp": {"expert": 2}}, id="fsdp", marks=fast),
        pytest.param("move_biases_on_copies", 2, {}, id="reference", marks=fast),
        pytest.param("move_biases", 2, {"layout": {"pipeline": 2}}, id="megatron", marks=fast),
    ],
)
def test_a_run_that_goes_on_is_the_run_that_never_stopped(
    pool: Pool, ranks: Pool, tmp_path: Path, job: str, world: int, layout: dict[str, Any]
) -> None:
    """To the bit, with weights that move too."""
    model = build(DEEPSEEK, tmp_path / "model")
    arguments = {"model": str(model.directory), **EXPERTS, **layout, "rate": 1e-2}
    run = (ranks if "layout" in layout else pool).run
    whole, before, after = (tmp_path / name for name in ("whole", "before", "after"))
    run(job, world, **arguments, out=str(whole), steps=4)
    run(job, world, **arguments, out=str(before), steps=2)
    saved = str(before / "checkpoint")
    run(job, world, **arguments, out=str(after), first=2, steps=2, checkpoint=saved)
    made, wanted = read(after), read(whole)
    assert made.keys() == wanted.keys()
    assert all(torch.equal(made[name], wanted[name]) for name in wanted)
    halfway = biases_of(before / "published")
    assert any(not torch.equal(halfway[n], t) for n, t in biases_of(whole / "published").items())
    if "layout" in layout:  # whose checkpoints are converted
        options = ConvertOptions(to="hf", model=model.directory, sync=False)
        convert(whole / "checkpoint", whole / "converted", options)
        kept = biases_of(whole / "converted")
        assert kept and all(torch.equal(wanted[name], tensor) for name, tensor in kept.items())


def read(out: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in (out / "published").glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.parametrize(
    ("job", "layout"),
    [
        pytest.param("move_biases", {}, id="fsdp"),
        pytest.param("move_biases_on_copies", {}, id="reference", marks=fast),
        pytest.param("move_biases", {"layout": {}}, id="megatron"),
    ],
)
def test_a_step_that_is_skipped_moves_none(
    pool: Pool, ranks: Pool, tmp_path: Path, job: str, layout: dict[str, Any]
) -> None:
    model = build(DEEPSEEK, tmp_path / "model")
    arguments = {"model": str(model.directory), "out": str(tmp_path), **EXPERTS, **layout}
    run = (ranks if "layout" in layout else pool).run
    (answer,) = run(job, 1, **arguments, normalizer=1e-308)
    assert answer["skipped"] == ["non-finite gradient norm"] * 3
    check(tmp_path, model, {name: b.numpy() for name, b in biases_of(model.directory).items()})


@pytest.mark.parametrize(
    "case",
    [pytest.param(DEEPSEEK, marks=fast), *(pytest.param(case) for case in WEIGHTED)],
    ids=lambda case: case.name,
)
def test_an_engine_chooses_by_them(pool: Pool, tmp_path: Path, case: Case) -> None:
    model = build(case, tmp_path / "model")
    arguments = {"model": str(model.directory), "out": str(tmp_path), **EXPERTS}
    (answer,) = pool.run("roll_out", 1, **arguments)
    assert answer["versions"] == [1, 2, 3]
    assert answer["mismatch"] <= MAX_MISMATCH < answer["stale"] / 100


def test_which_families_have_biases_that_move() -> None:
    """The page names them."""
    moving = set()
    for case in MIXTURES:
        config = AutoConfig.for_model(case.known, **{**SIZES, **case.settings})
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        hold_biases(model)
        load = watch_experts(model, torch.device("meta"))
        assert len(load.sizes) > 0, case.name
        with suppress(NoBiasError):
            watch_biases(load, model)
            moving.add(case.known)
    assert moving == {
        *("deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
        *("hy_v3", "kimi_linear", "lfm2_moe", "mimo_v2_flash", "minimax_m2", "nemotron_h"),
        *("solar_open", "ernie4_5_moe", "afmoe", "laguna"),
    }


WITHOUT = [
    pytest.param(QWEN, {}, id="none"),
    pytest.param(BY_NAME["gpt_oss"], {"layout": {}}, id="megatron", marks=fast),
]


@pytest.mark.parametrize(("case", "layout"), WITHOUT)
def test_a_family_without_them_is_refused_by_name(
    pool: Pool, ranks: Pool, tmp_path: Path, case: Case, layout: dict[str, Any]
) -> None:
    model = build(case, tmp_path / "model")
    arguments = {"model": str(model.directory), "out": str(tmp_path), **EXPERTS, **layout}
    run, job = (ranks.run, "open_error") if layout else (pool.run, "attempt")
    (answer,) = run(job, 1, **arguments)
    assert (
        f"experts.bias_update_rate is not for model_type {case.known}: its routers have no bias"
        in answer.get("error_message", answer.get("text"))
    )
