"""Checkpoints resume to the bit; shards are a checkpoint that transformers loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from services.trainer.backend import TrainingBackend
from sluice.weights.checkpoint import companion_files
from sluice.weights.shards import host_bytes, load_verified
from sluice.weights.store import WeightStore
from tests.contract.training_backend.cases import (
    PPO,
    Model,
    StartBackend,
    build_model,
    published,
    ragged_rows,
)


def train(backend: TrainingBackend, steps: int) -> list[float]:
    norms = []
    for _ in range(steps):
        backend.forward_backward([ragged_rows()], PPO)
        norms.append(backend.step(normalizer=40.0, learning_rate=1e-2).grad_norm)
    return norms


def test_a_resumed_run_equals_one_that_never_stopped(
    start_backend: StartBackend, model: Model, tmp_path: Path
) -> None:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    straight = start_backend(model)
    train(straight, 2)
    straight.save_checkpoint(directory)
    expected = train(straight, 2)
    resumed = start_backend(model)
    resumed.forward_backward([ragged_rows()[:3]], PPO)  # gradients that loading has to drop
    resumed.load_checkpoint(directory)
    assert train(resumed, 2) == expected
    left, right = published(straight, tmp_path / "a"), published(resumed, tmp_path / "b")
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_without_optimizer_moments_the_next_step_differs(
    start_backend: StartBackend, qwen3: Model, tmp_path: Path
) -> None:
    """Negative control of the resume test: weights alone are not enough."""
    straight = start_backend(qwen3)
    train(straight, 2)
    store = WeightStore(tmp_path / "weights", durable=False)
    staging = store.allocate(None)
    shards = straight.write_shards(staging.directory)
    record = store.commit(staging, shards, companion_files(qwen3.directory), 2)
    fresh = start_backend(Model(record.directory))
    train(straight, 1)
    train(fresh, 1)
    left, right = published(straight, tmp_path / "a"), published(fresh, tmp_path / "b")
    assert any(not torch.equal(left[name], right[name]) for name in left)


def test_damaged_and_foreign_checkpoints_are_refused(
    start_backend: StartBackend,
    qwen3: Model,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    backend = start_backend(qwen3)
    train(backend, 1)
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    backend.save_checkpoint(directory)
    llama = build_model(tmp_path_factory.mktemp("llama"), "llama")
    with pytest.raises(ValueError, match="another model"):
        start_backend(llama).load_checkpoint(directory)
    for file in directory.rglob("*.safetensors"):
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2])
        with pytest.raises((ValueError, OSError)):
            backend.load_checkpoint(directory)
        file.write_bytes(data)
    backend.load_checkpoint(directory)


def test_shards_load_with_from_pretrained(
    start_backend: StartBackend, model: Model, tmp_path: Path
) -> None:
    backend = start_backend(model)
    train(backend, 1)
    store = WeightStore(tmp_path / "weights", durable=False)
    staging = store.allocate(None)
    shards = backend.write_shards(staging.directory)
    record = store.commit(staging, shards, companion_files(model.directory), 1)
    loaded = AutoModelForCausalLM.from_pretrained(record.directory, dtype=torch.float32)
    rows = ragged_rows()
    found = backend.compute_logprobs([rows], model="policy", temperature=1.0)
    for row in rows:
        logits = loaded(row.token_ids[None]).logits[0, row.prompt_length - 1 : -1]
        targets = row.token_ids[row.prompt_length :, None]
        expected = logits.log_softmax(-1).gather(1, targets)[:, 0]
        torch.testing.assert_close(found[row.sample_id], expected, atol=1e-5, rtol=0)


def test_equal_weights_have_equal_digests_and_others_do_not(
    start_backend: StartBackend, qwen3: Model, tmp_path: Path
) -> None:
    backend = start_backend(qwen3)
    store = WeightStore(tmp_path / "weights", durable=False)
    digests = []
    for steps in (0, 0, 1):
        train(backend, steps)
        staging = store.allocate(None)
        shards = backend.write_shards(staging.directory)
        digests.append(store.commit(staging, shards, [], 0).digest)
    assert digests[0] == digests[1] != digests[2]


def test_published_dtype(start_backend: StartBackend, qwen3: Model, tmp_path: Path) -> None:
    backend = start_backend(qwen3, publish_dtype="bfloat16")
    directory = tmp_path / "shards"
    directory.mkdir()
    shards = backend.write_shards(directory)
    assert {e.dtype for shard in shards for e in shard.tensors.values()} == {"BF16"}
    original = load_file(qwen3.directory / "model.safetensors")
    for shard in shards:
        for name, tensor in load_file(directory / shard.file_name).items():
            assert torch.equal(tensor, original[name].bfloat16())


def test_layers_of_multi_token_prediction_are_published_as_they_were(
    start_backend: StartBackend, tmp_path: Path
) -> None:
    """transformers drops them; engines that draft by them look for them in every version."""
    model = build_model(tmp_path / "model", "deepseek_v3")
    file = tmp_path / "model/model.safetensors"
    generator = torch.Generator().manual_seed(5)
    kept = {
        "model.layers.2.eh_proj.weight": torch.randn((3, 33), generator=generator).bfloat16(),
        "model.layers.2.enorm.weight": torch.randn(7, generator=generator),
        "model.layers.2.shared_head.head.weight": torch.tensor([[-0.0, torch.nan, torch.inf]]),
        "model.layers.2.self_attn.scale": torch.tensor(2.5, dtype=torch.float64),
        "model.layers.2.mlp.empty": torch.empty((0, 4)),
    }
    save_file({**load_file(file), **kept}, file, metadata={"format": "pt"})
    backend = start_backend(model)
    train(backend, 1)
    store = WeightStore(tmp_path / "weights", durable=False)
    staging = store.allocate(None)
    shards = backend.write_shards(staging.directory)
    record = store.commit(staging, shards, companion_files(model.directory), 1)
    found = dict(load_verified(record.directory, store.manifest(record.version)))
    assert found.keys() == load_file(file).keys()
    for name, tensor in kept.items():
        assert found[name].dtype == tensor.dtype, name
        assert bytes(host_bytes(found[name])) == bytes(host_bytes(tensor)), name
    assert AutoModelForCausalLM.from_pretrained(record.directory).config.num_hidden_layers == 2
