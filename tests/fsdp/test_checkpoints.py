"""A run that stops and goes on, on as many ranks or others, is the run that never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fsdp.conftest import ExpectedByModel
from tests.fsdp.oracle import read_ranks
from tests.rank_pool import Pool

fast = pytest.mark.fast
CONTEXT, EXPERT = {"context": 2}, {"expert": 2}


def save(pool: Pool, root: Path, model: Path, world: int, **more: Any) -> Any:
    (root / "saved/checkpoint").mkdir(parents=True)
    return pool.run("save_midway", world, model=str(model), out=str(root / "saved"), **more)


def resume(pool: Pool, root: Path, model: Path, world: int, **more: Any) -> Any:
    (root / "resumed").mkdir(exist_ok=True)
    checkpoint = str(root / "saved/checkpoint")
    out = str(root / "resumed")
    return pool.run("resume", world, model=str(model), out=out, checkpoint=checkpoint, **more)


@pytest.mark.parametrize(
    ("family", "first", "fsdp"),
    [
        pytest.param("qwen3", 2, {}, marks=fast),
        pytest.param("llama", 2, {}, id="tied"),
        pytest.param("qwen3_moe", 2, {}),
        pytest.param("qwen3", 0, {}, id="before the first step"),
        pytest.param("qwen3_moe", 2, CONTEXT, id="CP2"),
        pytest.param("qwen3", 2, {"replicas": 2}, id="two replicas"),
        pytest.param("qwen3_moe", 2, EXPERT, id="EP2", marks=fast),
        pytest.param("qwen3_moe", 2, {"replicas": 2, **EXPERT}, id="EP2, two replicas"),
    ],
)
def test_on_as_many_ranks_it_is_so_to_the_bit(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path, family: str, first: int, fsdp: Any
) -> None:
    model, _ = expected(family)
    world = 2 * fsdp.get("replicas", 1)
    saved = save(pool, tmp_path, model.directory, world, first=first, fsdp=fsdp)
    resumed = resume(pool, tmp_path, model.directory, world, first=first, fsdp=fsdp)
    for before, after in zip(saved, resumed, strict=True):
        assert (after["steps"], after["draw"]) == (before["steps"], before["draw"])
    before, after = (read_ranks(tmp_path / part, "weights") for part in ("saved", "resumed"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("family", "world", "other", "before", "after"),
    [
        pytest.param("qwen3", 2, 1, {}, {}),
        pytest.param("llama", 1, 2, {}, {}, id="tied-1-2"),
        pytest.param("qwen3_moe", 2, 4, {}, {}),
        pytest.param("qwen3", 4, 2, {}, {}),
        pytest.param("qwen3", 2, 1, CONTEXT, {}, id="CP2-1"),
        pytest.param("qwen3_moe", 2, 4, {}, CONTEXT, id="2-CP2xDP2"),
        pytest.param("qwen3_moe", 4, 1, {"replicas": 2}, {}, id="two replicas-1"),
        pytest.param("qwen3", 2, 4, {}, {"replicas": 2}, id="2-two replicas"),
        pytest.param("qwen3_moe", 4, 1, EXPERT, {}, id="EP2 of four-1", marks=fast),
        pytest.param("qwen3_moe", 2, 4, {}, {"expert": 4}, id="2-EP4"),
        pytest.param("qwen3_moe", 4, 2, {"replicas": 2, **EXPERT}, EXPERT, id="EP2, replicas-EP2"),
        pytest.param("qwen3_moe", 2, 4, EXPERT, {**EXPERT, **CONTEXT}, id="EP2-EP2 beside CP2"),
    ],
)
def test_on_other_ranks_the_next_steps_are_the_same(
    pool: Pool,
    expected: ExpectedByModel,
    tmp_path: Path,
    family: str,
    world: int,
    other: int,
    before: Any,
    after: Any,
) -> None:
    model, _ = expected(family)
    saved = save(pool, tmp_path, model.directory, world, fsdp=before)
    resumed = resume(pool, tmp_path, model.directory, other, fsdp=after)
    for should, found in zip(saved[0]["steps"], resumed[0]["steps"], strict=True):
        assert found["loss"] == pytest.approx(should["loss"], rel=1e-4, abs=1e-4)
        assert found["grad_norm"] == pytest.approx(should["grad_norm"], rel=1e-4)


@fast
def test_files_are_named_and_damaged_or_foreign_ones_refused(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    model, _ = expected("qwen3")
    saved = save(pool, tmp_path, model.directory, 2)
    checkpoint = tmp_path / "saved/checkpoint"
    on_disk = {path.name for path in checkpoint.iterdir()}
    assert sorted(name for answer in saved for name in answer["files"]) == sorted(on_disk)
    assert {"sluice.json", ".metadata", "__0_0.distcp", "__1_0.distcp"} <= on_disk

    def errors(directory: Path = model.directory) -> list[str]:
        answers = resume(pool, tmp_path, directory, 2)
        return [answer.get("error", "") for answer in answers]

    other, _ = expected("llama")
    assert all("another model" in error for error in errors(other.directory))
    for name, reason in (("__1_0.distcp", "cannot be read"), ("sluice.json", "no complete")):
        data = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(data[: len(data) // 2])
        assert all(reason in error for error in errors()), name
        (checkpoint / name).write_bytes(data)
    assert errors() == ["", ""]
