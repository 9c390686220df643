"""What ranks write is a checkpoint that transformers loads; no rank reads or holds all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sluice.weights.checkpoint import companion_files
from sluice.weights.manifest import ShardFile, TensorEntry
from sluice.weights.store import WeightStore
from tests.megatron.comparison import LOGPROB_TOLERANCE, logprob_difference, read_ranks
from tests.megatron.models import make_rows
from tests.rank_pool import Pool

fast = pytest.mark.fast
LAYOUTS = [
    pytest.param("qwen3_tied", 4, {"tensor": 2, "pipeline": 2}, id="tied-TP2xPP2"),
    pytest.param("qwen3", 2, {"pipeline": 2, "virtual_pipeline": 2}, id="PP2xVPP2", marks=fast),
    pytest.param(
        "qwen3_moe", 4, {"expert": 2, "tensor": 2, "sequence_parallel": True}, id="EP2xTP2+SP"
    ),
    pytest.param("qwen3", 2, {}, id="DP2"),
]


@pytest.mark.parametrize(("family", "world", "layout"), LAYOUTS)
def test_published_version_loads_and_scores_alike(
    family: str, world: int, layout: dict[str, Any], pool: Pool, expected: Any, tmp_path: Path
) -> None:
    directory = expected(family).directory
    store = WeightStore(tmp_path / "weights", durable=False)
    staging = store.allocate(None)
    answers = pool.run(
        "publish",
        world,
        model=str(directory),
        layout={**layout, "max_shard_bytes": 50_000},
        out=str(tmp_path),
        staging=str(staging.directory),
    )
    by_rank = [[_shard(shard) for shard in answer["shards"]] for answer in answers]
    shards = [shard for of_rank in by_rank for shard in of_rank]
    record = store.commit(staging, shards, companion_files(directory), 1)

    sizes = [sum(shard.size for shard in of_rank) for of_rank in by_rank]
    if layout:  # model parallel: the work is divided
        assert max(sizes) < 0.75 * sum(sizes)
        assert len(shards) > sum(1 for size in sizes if size)  # cut near max_shard_bytes
    model = AutoModelForCausalLM.from_pretrained(record.directory, dtype=torch.float32)
    found, wanted = read_ranks(tmp_path, "logprobs"), {}
    for row in make_rows():
        with torch.no_grad():
            logits = model(row.token_ids[None]).logits[0, row.prompt_length - 1 : -1]
        targets = row.token_ids[row.prompt_length :, None]
        wanted[row.sample_id] = logits.log_softmax(-1).gather(1, targets)[:, 0]
    assert logprob_difference(found, wanted) < LOGPROB_TOLERANCE


def _shard(fields: dict[str, Any]) -> ShardFile:
    tensors = {
        name: TensorEntry(entry["dtype"], tuple(entry["shape"]), entry["digest"])
        for name, entry in fields["tensors"].items()
    }
    return ShardFile(fields["file_name"], fields["size"], fields["digest"], tensors)


@pytest.mark.parametrize(
    ("world", "layout", "share"),
    [
        pytest.param(2, {"tensor": 2, "vocab_multiple": 1}, 0.51, id="TP2"),
        pytest.param(2, {"pipeline": 2}, 0.51, id="PP2", marks=fast),
        pytest.param(4, {"tensor": 2, "pipeline": 2, "vocab_multiple": 1}, 0.27, id="TP2xPP2"),
    ],
)
def test_a_rank_reads_its_share(
    world: int, layout: dict[str, Any], share: float, pool: Pool, expected: Any, tmp_path: Path
) -> None:
    directory = expected("qwen3").directory
    whole = (directory / "model.safetensors").stat().st_size
    answers = pool.run("parity", world, model=str(directory), layout=layout, out=str(tmp_path))
    assert all(answer["bytes_read"] < share * whole for answer in answers)


def _copy(source: Path, target: Path) -> dict[str, torch.Tensor]:
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return load_file(source / "model.safetensors")


def test_damaged_checkpoints_are_refused_by_name(pool: Pool, expected: Any, tmp_path: Path) -> None:
    source = expected("qwen3_tied").directory
    norm = "model.layers.2.input_layernorm.weight"
    cases: dict[str, Any] = {
        "MissingTensorError": lambda t: t.pop(norm),
        "UnexpectedTensorError": lambda t: t.update({f"{norm}.scale": torch.ones(1)}),
        "TensorShapeError": lambda t: t.update({norm: torch.ones(63)}),
        "TiedTensorError": lambda t: t.update(
            {"lm_head.weight": t["model.embed_tokens.weight"] + 1}
        ),
    }
    names = {"TiedTensorError": "lm_head.weight"}
    for error, damage in cases.items():
        tensors = _copy(source, tmp_path / error)
        damage(tensors)
        save_file(tensors, tmp_path / error / "model.safetensors")
        model = str(tmp_path / error)
        (answer,) = pool.run("open_error", 1, model=model, layout={}, out=str(tmp_path))
        assert answer["type"] == error
        assert names.get(error, norm) in answer["text"]


def test_an_equal_copy_of_a_tied_tensor_is_accepted(
    pool: Pool, expected: Any, tmp_path: Path
) -> None:
    tensors = _copy(expected("qwen3_tied").directory, tmp_path / "copy")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "copy" / "model.safetensors")
    model = str(tmp_path / "copy")
    (answer,) = pool.run("open_error", 1, model=model, layout={}, out=str(tmp_path))
    assert answer == {}


def test_impossible_layouts_are_refused_by_name(pool: Pool, expected: Any, tmp_path: Path) -> None:
    cases = [
        ("qwen3", 2, {"pipeline": 2, "virtual_pipeline": 4}, "4 layers"),
        ("qwen3", 2, {"expert": 2}, "without experts"),
        ("qwen3_moe", 2, {"tensor": 2}, "sequence_parallel"),
        ("qwen3", 2, {"tensor": 4}, "2 ranks do not divide"),
        ("qwen3", 1, {"routing_replay": "recorded"}, "routing_replay"),
        ("qwen3", 1, {"layer_spec": "transformer_engine"}, "not installed"),
    ]
    for family, world, layout, text in cases:
        model = str(expected(family).directory)
        answers = pool.run("open_error", world, model=model, layout=layout, out=str(tmp_path))
        assert all(text in answer["text"] for answer in answers), json.dumps(answers)
