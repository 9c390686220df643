"""A run that stops and goes on, under the same or another layout, is the run that never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron.comparison import LOSS_TOLERANCE, read_ranks
from tests.rank_pool import Pool

fast = pytest.mark.fast
PLAIN = {"distributed_optimizer": False}
SAME = [
    pytest.param("qwen3", 1, PLAIN, id="single", marks=fast),
    pytest.param("qwen3", 2, {"tensor": 2, "sequence_parallel": True}, id="TP2+SP"),
    pytest.param("qwen3", 2, {}, id="DP2-distributed"),
    pytest.param("qwen3", 2, {"pipeline": 2, "virtual_pipeline": 2}, id="PP2xVPP2"),
    pytest.param("qwen3_moe", 2, {"expert": 2}, id="EP2"),
    pytest.param("qwen3", 1, {"dtype": "bfloat16"}, id="bfloat16"),
    pytest.param("glm4", 2, {"tensor": 2}, id="glm4-TP2"),
    pytest.param("deepseek_v3", 2, {"expert": 2}, id="deepseek-EP2"),
]
TENSOR, DATA = {"tensor": 2}, {}
RESHARD = [
    pytest.param("qwen3", 2, TENSOR, 1, {}, id="TP2-TP1"),
    pytest.param("qwen3", 2, TENSOR, 2, {"pipeline": 2}, id="TP2-PP2", marks=fast),
    pytest.param("qwen3", 2, {"pipeline": 2, "first_stage_layers": 1}, 2, TENSOR, id="1+3-TP2"),
    pytest.param("qwen3", 2, DATA, 1, {}, id="DP2-DP1"),
    pytest.param("qwen3", 1, {}, 4, {"tensor": 2, "context": 2}, id="single-TP2xCP2"),
    pytest.param("qwen3_tied", 2, {"pipeline": 2}, 2, TENSOR, id="tied-PP2-TP2"),
    pytest.param("qwen3_moe", 2, {"expert": 2}, 4, {"expert": 2, "pipeline": 2}, id="EP2-EP2xPP2"),
    pytest.param("qwen3_moe", 4, {"expert": 4}, 2, {"expert": 2}, id="EP4-EP2"),
]


def _save(pool: Pool, root: Path, family: Any, world: int, layout: Any, **more: Any) -> Any:
    out = root / "saved"
    (out / "checkpoint").mkdir(parents=True)
    model = str(family.directory)
    return pool.run("save_midway", world, model=model, layout=layout, out=str(out), **more)


def _resume(pool: Pool, root: Path, family: Any, world: int, layout: Any, **more: Any) -> Any:
    (root / "resumed").mkdir()
    return pool.run(
        "resume",
        world,
        model=str(family.directory),
        layout=layout,
        out=str(root / "resumed"),
        checkpoint=str(root / "saved/checkpoint"),
        **more,
    )


@pytest.mark.parametrize(("family", "world", "layout"), SAME)
def test_resume_is_bitwise_in_the_same_layout(
    family: str, world: int, layout: Any, pool: Pool, expected: Any, tmp_path: Path
) -> None:
    saved = _save(pool, tmp_path, expected(family), world, layout)
    resumed = _resume(pool, tmp_path, expected(family), world, layout)

    assert resumed == saved  # losses, norms and the next random number
    before = read_ranks(tmp_path / "saved", "weights")
    after = read_ranks(tmp_path / "resumed", "weights")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("family", "world", "layout", "world2", "layout2"), RESHARD)
def test_resume_in_another_layout(
    family: str,
    world: int,
    layout: Any,
    world2: int,
    layout2: Any,
    pool: Pool,
    expected: Any,
    tmp_path: Path,
) -> None:
    _check_reshard(pool, tmp_path, expected(family), (world, layout), (world2, layout2))


def test_vocabulary_padding_may_change(pool: Pool, expected: Any, tmp_path: Path) -> None:
    """131 rows are 132 on two ranks: the padding of the one is not in the other."""
    saved, resumed = {"tensor": 2, "vocab_multiple": 1}, {"vocab_multiple": 1}
    _check_reshard(pool, tmp_path, expected("qwen3"), (2, saved), (1, resumed))


def test_optimizer_that_has_not_stepped(pool: Pool, expected: Any, tmp_path: Path) -> None:
    qwen3 = expected("qwen3")
    for name, layout in (("plain", PLAIN), ("distributed", {})):
        saved = _save(pool, tmp_path / name, qwen3, 1, layout, first=0)
        resumed = _resume(pool, tmp_path / name, qwen3, 1, layout, first=0)
        assert resumed == saved


def test_crossing_one_expert_rank_is_refused(pool: Pool, expected: Any, tmp_path: Path) -> None:
    moe = expected("qwen3_moe")
    _save(pool, tmp_path, moe, 2, {"expert": 2})
    for world, layout, name in ((1, {}, "expert"), (2, {"expert": 2, **PLAIN}, "distributed")):
        answers = pool.run(
            "resume_error",
            world,
            model=str(moe.directory),
            layout=layout,
            out=str(tmp_path),
            checkpoint=str(tmp_path / "saved/checkpoint"),
        )
        assert all(name in answer["error_message"] for answer in answers)


@fast
def test_a_damaged_file_is_named_by_the_ranks_that_find_it(
    pool: Pool, expected: Any, tmp_path: Path
) -> None:
    (tmp_path / "checkpoint").mkdir()
    model = str(expected("qwen3").directory)
    layout = {"tensor": 2}
    answers = pool.run("load_damaged", 2, model=model, layout=layout, out=str(tmp_path))
    on_disk = {path.name for path in (tmp_path / "checkpoint").iterdir()}
    assert set(answers[0]["files"]) == on_disk
    assert {".metadata", "common.pt", "metadata.json", "sluice.json"} < on_disk
    for case in answers[0]["answers"]:
        found = [answer["answers"][case] for answer in answers]
        name = case.split()[0]
        assert set(found) <= {name, ""}, case
        assert name in found, case


@fast
def test_a_rank_whose_disk_is_full_names_the_file(
    pool: Pool, expected: Any, tmp_path: Path
) -> None:
    (tmp_path / "checkpoint").mkdir()
    model = str(expected("qwen3").directory)
    answers = pool.run("save_full", 2, model=model, layout={"tensor": 2}, out=str(tmp_path))
    assert all("was not written" in answer["error_message"] for answer in answers)
    assert "File too large" in answers[1]["error_message"]
    assert "__1_" in answers[1]["error_message"]


def _check_reshard(
    pool: Pool, root: Path, family: Any, first: tuple[int, Any], second: tuple[int, Any]
) -> None:
    saved = _save(pool, root, family, *first)
    resumed = _resume(pool, root, family, *second)
    for before, after in zip(saved[0]["steps"], resumed[0]["steps"], strict=True):
        assert after["loss"] == pytest.approx(before["loss"], abs=LOSS_TOLERANCE / 10)
        assert after["grad_norm"] == pytest.approx(before["grad_norm"], rel=LOSS_TOLERANCE / 10)
