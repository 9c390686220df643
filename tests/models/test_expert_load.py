"""Tokens that go to each expert are counted as plain transformers has them, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from services.trainer.backend import Row
from tests.contract.training_backend.cases import Model
from tests.fsdp.jobs import rows_of
from tests.models.families import CASES, Case, build
from tests.rank_pool import Pool

fast = pytest.mark.fast
BY_NAME = {case.name: case for case in CASES}
DEEPER = {"num_hidden_layers": 4}
QWEN = replace(BY_NAME["qwen3_moe"], settings={**BY_NAME["qwen3_moe"].settings, **DEEPER})
DEEPSEEK = replace(BY_NAME["deepseek_v3"], settings={**BY_NAME["deepseek_v3"].settings, **DEEPER})
SINKS = BY_NAME["gpt_oss"]
SCATTERED = {"tensor": 2, "sequence_parallel": True}

Counts = list[list[int]]


def choose(logits: np.ndarray, bias: np.ndarray | None, config: Any) -> np.ndarray:
    """Which experts tokens of these logits go to: DeepSeek-V3's rule where there is a bias."""
    count = config.num_experts_per_tok
    if bias is None:
        return np.argsort(-logits, axis=1)[:, :count]
    scores = 1 / (1 + np.exp(-logits)) + bias
    groups = scores.reshape(len(scores), getattr(config, "n_group", 1), -1)
    best = np.sort(groups, axis=2)[:, :, -2:].sum(2)
    kept = np.argsort(-best, axis=1)[:, : getattr(config, "topk_group", 1)]
    of_group = np.full_like(groups, -np.inf)
    for group in kept.T:
        rows = np.arange(len(scores))
        of_group[rows, group] = groups[rows, group]
    return np.argsort(-of_group.reshape(scores.shape), axis=1)[:, :count]


def count_by_row(model: Model, rows: list[Row]) -> Counts:
    """In float64, each row by itself; its last token predicts nothing."""
    plain: Any = model.load().double()  # type: ignore[no-untyped-call]
    routers = [m for m in plain.modules() if type(m).__name__.endswith("TopKRouter")]
    routers = routers or [m for m in plain.modules() if type(m).__name__.endswith("TopkRouter")]
    biases = [b.numpy() for name, b in plain.named_buffers() if name.endswith("correction_bias")]
    given: list[torch.Tensor] = []
    for router in routers:
        router.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    counts = [[0] * len(router.weight) for router in routers]
    for row in rows:
        given.clear()
        with torch.no_grad():
            plain(row.token_ids[None])
        for layer, (router, hidden) in enumerate(zip(routers, given, strict=True)):
            hidden = hidden.reshape(len(row.token_ids), -1)[:-1].numpy()
            logits = hidden @ router.weight.detach().numpy().T
            if getattr(router, "bias", None) is not None:
                logits = logits + router.bias.detach().numpy()
            chosen = choose(logits, biases[layer] if biases else None, plain.config)
            for expert in chosen.reshape(-1):
                counts[layer][expert] += 1
    return counts


def told_of(counts: Counts) -> dict[str, float]:
    """What a step tells of them, by numpy."""
    loads = [np.max(layer) / np.mean(layer) for layer in counts]
    return {
        "expert_load_max": max(loads),
        "expert_load_mean": float(np.mean(loads)),
        "experts_unused": float(sum(np.sum(np.array(layer) == 0) for layer in counts)),
    }


class Known:
    """Models and what plain transformers counts, each once."""

    def __init__(self, root: Path) -> None:
        self._root, self._made = root, dict[str, tuple[Model, Counts]]()

    def __call__(self, case: Case) -> tuple[Model, Counts]:
        if case.name not in self._made:
            model = build(case, self._root / case.name)
            self._made[case.name] = model, count_by_row(model, rows_of(0))
        return self._made[case.name]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Known]:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield Known(tmp_path_factory.mktemp("models"))


def check(answers: list[dict[str, Any]], expected: Counts) -> None:
    for answer in answers:
        assert answer["counts"] == expected
        assert answer["metrics"] == pytest.approx(told_of(expected), rel=1e-12)
        assert answer["behind"] == {}, "nothing is left for the next step"


ON_FSDP = [
    pytest.param(QWEN, 1, {}, id="qwen-1", marks=fast),
    pytest.param(QWEN, 2, {}, id="qwen-2"),
    pytest.param(QWEN, 2, {"expert": 2}, id="qwen-EP2"),
    pytest.param(QWEN, 2, {"tensor": 2}, id="qwen-TP2", marks=fast),
    pytest.param(QWEN, 2, {"context": 2}, id="qwen-CP2", marks=fast),
    pytest.param(QWEN, 2, {"context": 2, "cp_layout": "contiguous"}, id="qwen-CP2-contiguous"),
    pytest.param(QWEN, 2, {"replicas": 2}, id="qwen-HSDP2"),
    pytest.param(QWEN, 1, {"activation_checkpointing": True}, id="qwen-recompute", marks=fast),
    pytest.param(QWEN, 4, {"expert": 2, "replicas": 2}, id="qwen-EP2xHSDP2"),
    pytest.param(DEEPSEEK, 2, {"expert": 2}, id="deepseek-EP2", marks=fast),
    pytest.param(DEEPSEEK, 2, {"context": 2}, id="deepseek-CP2"),
    pytest.param(SINKS, 2, {}, id="gpt_oss-2"),
]


@pytest.mark.parametrize(("case", "world", "fsdp"), ON_FSDP)
def test_on_fsdp(
    pool: Pool, known: Known, tmp_path: Path, case: Case, world: int, fsdp: dict[str, Any]
) -> None:
    model, expected = known(case)
    arguments = {"model": str(model.directory), "out": str(tmp_path)}
    check(pool.run("count_experts", world, **arguments, fsdp=fsdp), expected)


@pytest.mark.parametrize("world", [pytest.param(1, marks=fast), 2])
@pytest.mark.parametrize("case", [QWEN, DEEPSEEK], ids=lambda case: case.name)
def test_on_the_reference_backend(
    pool: Pool, known: Known, tmp_path: Path, case: Case, world: int
) -> None:
    model, expected = known(case)
    arguments = {"model": str(model.directory), "out": str(tmp_path)}
    check(pool.run("count_on_copies", world, **arguments), expected)


ON_MEGATRON = [
    pytest.param(QWEN, 1, {}, id="qwen-1"),
    pytest.param(QWEN, 2, {}, id="qwen-DP2"),
    pytest.param(QWEN, 2, {"expert": 2}, id="qwen-EP2", marks=fast),
    pytest.param(QWEN, 2, {"pipeline": 2}, id="qwen-PP2", marks=fast),
    pytest.param(QWEN, 2, {"pipeline": 2, "virtual_pipeline": 2}, id="qwen-PP2xVPP2"),
    pytest.param(QWEN, 2, SCATTERED, id="qwen-TP2+SP", marks=fast),
    pytest.param(QWEN, 2, {"context": 2}, id="qwen-CP2", marks=fast),
    pytest.param(QWEN, 1, {"recompute": "full"}, id="qwen-recompute"),
    pytest.param(
        QWEN, 4, {**SCATTERED, "pipeline": 2, "expert": 2, "expert_tensor": 1}, id="qwen-all"
    ),
    pytest.param(DEEPSEEK, 2, {"expert": 2}, id="deepseek-EP2"),
    pytest.param(DEEPSEEK, 2, {"pipeline": 2, "recompute": "full"}, id="deepseek-PP2-recompute"),
    pytest.param(SINKS, 2, {"context": 2}, id="gpt_oss-CP2"),
]


@pytest.mark.parametrize(("case", "world", "layout"), ON_MEGATRON)
def test_on_megatron(
    ranks: Pool, known: Known, tmp_path: Path, case: Case, world: int, layout: dict[str, Any]
) -> None:
    model, expected = known(case)
    arguments = {"model": str(model.directory), "out": str(tmp_path), "layout": layout}
    check(ranks.run("count_experts", world, **arguments), expected)


@fast
def test_a_model_without_experts_tells_nothing(pool: Pool, tmp_path: Path) -> None:
    model = build(BY_NAME["llama"], tmp_path / "model")
    arguments = {"model": str(model.directory), "out": str(tmp_path)}
    (answer,) = pool.run("count_on_copies", 1, **arguments)
    assert answer == {"counts": [], "metrics": {}, "behind": {}}
