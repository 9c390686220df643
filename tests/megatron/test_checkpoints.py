"""A run that stops and goes on, under the same or another layout, is the run that never stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

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
    pytest.param("glm_moe_dsa_shared", 2, {}, id="glm5-shared-DP2-distributed"),
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
    pytest.param("qwen3_moe", 2, {"expert": 2}, 1, {}, id="EP2-single"),
    pytest.param("qwen3_moe", 2, {}, 2, {"expert": 2}, id="DP2-EP2"),
    pytest.param("glm_moe_dsa_shared", 2, {"pipeline": 2}, 2, {"context": 2}, id="glm5-PP2-CP2"),
    pytest.param("qwen3", 1, PLAIN, 2, DATA, id="plain-DP2"),
    pytest.param("qwen3", 2, DATA, 2, {"tensor": 2, **PLAIN}, id="DP2-TP2-plain"),
    pytest.param("qwen3", 2, {"pipeline": 2, "virtual_pipeline": 2}, 2, TENSOR, id="PP2xVPP2-TP2"),
]
FORMER = [
    pytest.param("qwen3", 2, {}, id="DP2-distributed", marks=fast),
    pytest.param("qwen3", 1, {"dtype": "bfloat16", **PLAIN}, id="plain-bfloat16"),
    pytest.param("qwen3", 2, {"dtype": "float16"}, id="float16"),
    pytest.param("qwen3_moe", 2, {"expert": 2}, id="EP2"),
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


def test_every_thread_that_saves_has_a_file_of_its_own(
    pool: Pool, expected: Any, tmp_path: Path
) -> None:
    qwen3 = expected("qwen3")
    saved = _save(pool, tmp_path, qwen3, 1, {"save_threads": 3})
    files = sorted(path.name for path in (tmp_path / "saved/checkpoint").glob("*.distcp"))
    assert files == ["__0_0.distcp", "__0_1.distcp", "__0_2.distcp"]
    assert _resume(pool, tmp_path, qwen3, 1, {}) == saved


def test_optimizer_that_has_not_stepped(pool: Pool, expected: Any, tmp_path: Path) -> None:
    qwen3 = expected("qwen3")
    for name, layout in (("plain", PLAIN), ("distributed", {})):
        saved = _save(pool, tmp_path / name, qwen3, 1, layout, first=0)
        resumed = _resume(pool, tmp_path / name, qwen3, 1, layout, first=0)
        assert resumed == saved


@pytest.mark.parametrize(("family", "world", "layout"), FORMER)
def test_the_format_of_earlier_releases_is_read(
    family: str, world: int, layout: Any, pool: Pool, expected: Any, tmp_path: Path
) -> None:
    saved = _save(pool, tmp_path, expected(family), world, layout, former=True)
    resumed = _resume(pool, tmp_path, expected(family), world, layout)
    assert resumed == saved
    before = read_ranks(tmp_path / "saved", "weights")
    after = read_ranks(tmp_path / "resumed", "weights")
    assert all(torch.equal(before[name], after[name]) for name in before)


SIMPLE = {  # (name in the model, key of the checkpoint): where layers have the same name but for 0
    "embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
    "output_layer.weight": "output_layer.weight",
    "decoder.final_layernorm.weight": "decoder.final_layernorm.weight",
    "decoder.layers.{}.self_attention.linear_qkv.weight": (
        "decoder.layers.self_attention.linear_qkv.weight"
    ),
    "decoder.layers.{}.mlp.linear_fc1.weight": "decoder.layers.mlp.linear_fc1.weight",
    "decoder.layers.{}.mlp.linear_fc2.weight": "decoder.layers.mlp.linear_fc2.weight",
    "decoder.layers.{}.input_layernorm.weight": (
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight"
    ),
}
LAYERS = 4


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(2, {}, id="DP2", marks=fast),
        pytest.param(2, TENSOR, id="TP2"),
        pytest.param(4, {"pipeline": 2}, id="PP2xDP2"),
    ],
)
def test_what_is_stored_is_what_torchs_adam_has(
    world: int, layout: Any, pool: Pool, expected: Any, tmp_path: Path
) -> None:
    """Read by torch alone, beside AdamW's own state of one rank that took the same steps."""
    qwen3 = expected("qwen3")
    _save(pool, tmp_path / "one", qwen3, 1, {"vocab_multiple": 2, **PLAIN}, dump=True)
    _save(pool, tmp_path / "many", qwen3, world, {"vocab_multiple": 2 // _tensor(layout), **layout})
    adam = load_file(tmp_path / "one/saved/adam-0.safetensors")
    checkpoint = tmp_path / "many/saved/checkpoint"
    stored = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    whole = {
        key: torch.full(entry.size, torch.nan, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if hasattr(entry, "chunks")
    }
    dcp.load(whole, checkpoint_id=checkpoint, no_dist=True)
    for name, key in SIMPLE.items():
        for kind, prefix in (
            ("weight", ""),
            ("exp_avg", "optimizer.state.exp_avg."),
            ("exp_avg_sq", "optimizer.state.exp_avg_sq."),
        ):
            names = [name.format(layer) for layer in range(LAYERS)] if "{}" in name else [name]
            ours = [adam[f"{each}/{kind}"] for each in names]
            truth = torch.stack(ours) if "{}" in name else ours[0]
            found = whole[prefix + key]
            assert found.dtype == torch.float32
            assert found.shape == truth.shape, key
            limit = 1e-4 * float(truth.abs().max())
            assert float((found - truth).abs().max()) <= limit, (kind, key)
            assert float(truth.abs().max()) > 0, (kind, key)


def _tensor(layout: Any) -> int:
    return int(layout.get("tensor", 1))


@pytest.mark.parametrize("when", [pytest.param("after", marks=fast), "before"])
@pytest.mark.parametrize("layout", [{}, {"dtype": "bfloat16", "tensor": 2}], ids=str)
def test_steps_beside_the_writing_change_nothing_of_it(
    layout: Any, when: str, pool: Pool, expected: Any, tmp_path: Path
) -> None:
    """`before`: the step is taken before anything is written; else files and steps race."""
    for name in ("at-once", "beside"):
        (tmp_path / name).mkdir()
    answers = pool.run(
        "save_beside_steps",
        2,
        model=str(expected("qwen3").directory),
        layout=layout,
        out=str(tmp_path),
        when=when,
    )
    names = {path.name for path in (tmp_path / "at-once").iterdir()}
    assert names == {path.name for path in (tmp_path / "beside").iterdir()}
    assert set().union(*(answer["files"] for answer in answers)) == names
    for name in names - {".metadata"}:  # which is a pickle of sets and paths
        before, after = ((tmp_path / d / name).read_bytes() for d in ("at-once", "beside"))
        assert before == after, name


@pytest.mark.parametrize(
    ("change", "named"),
    [({"format": 3}, "format 3"), ({"kind": "else"}, "kind 'else'"), ({"backend": "b"}, "'b'")],
)
def test_another_kind_is_refused_by_name(
    change: Any, named: str, pool: Pool, expected: Any, tmp_path: Path
) -> None:
    qwen3 = expected("qwen3")
    _save(pool, tmp_path, qwen3, 1, {})
    description = tmp_path / "saved/checkpoint/sluice.json"
    made = json.loads(description.read_text())
    assert (made["format"], made["kind"]) == (2, "ranges")
    description.write_text(json.dumps({**made, **change}))
    (answer,) = pool.run(
        "resume_error",
        1,
        model=str(qwen3.directory),
        layout={},
        out=str(tmp_path),
        checkpoint=str(tmp_path / "saved/checkpoint"),
    )
    assert named in answer["error_message"]
    assert "publish the weights" in answer["error_message"]


def test_another_dtype_is_refused(pool: Pool, expected: Any, tmp_path: Path) -> None:
    qwen3 = expected("qwen3")
    _save(pool, tmp_path, qwen3, 1, {})
    (answer,) = pool.run(
        "resume_error",
        1,
        model=str(qwen3.directory),
        layout={"dtype": "bfloat16"},
        out=str(tmp_path),
        checkpoint=str(tmp_path / "saved/checkpoint"),
    )
    assert "dtype float32" in answer["error_message"]


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
