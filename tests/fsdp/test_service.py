"""A trainer of two sharded ranks behind its API: trains, publishes, survives kill -9."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice import faults
from sluice.algo.spec import AdvantageSpec, LossSpec
from sluice.client import RemoteError
from sluice.weights.convert.conversion import convert
from sluice.weights.convert.options import ConvertOptions
from sluice.weights.errors import DamagedFileError, FileDigestError, MissingFileError
from tests.behind_run import check_run
from tests.service.trainer.harness import (
    ACTIVE,
    RESTART_SECONDS,
    check_full_disk,
    killed_in_a_pass,
    long_rows,
    make_groups,
    running_trainer,
    train_step,
    until,
    upload,
)
from tests.service.trainer.sleeping import check_steps
from tests.service.weights.harness import check_delta

SFT = LossSpec(name="sft")
SETTINGS = {
    "backend": "fsdp",
    "fsdp": {"dtype": "float32"},
    "ranks": {"count": 2, "heartbeat_seconds": 0.5, "restart_backoff": 0.1},
}


@pytest.mark.parametrize(
    ("data", "tensor", "context"),
    [pytest.param(2, 1, 1, marks=pytest.mark.fast), (1, 2, 1), (1, 1, 2)],
)
async def test_a_rank_killed_in_mid_pass_costs_no_number(
    tmp_path: Path, data: int, tensor: int, context: int
) -> None:
    model = build_tiny_qwen3(tmp_path / "model", 0)
    layout = {"tensor": tensor, "context": context}
    settings = {**SETTINGS, "fsdp": {"dtype": "float32", **layout}}
    with running_trainer(tmp_path / "trainer", model, **settings) as running:
        async with running.client() as client:
            ready = await until(client, lambda now: now.state == ACTIVE)
            found = ready.layout.data, ready.layout.tensor, ready.layout.context
            assert found == (data, tensor, context)
            assert not ready.layout.replicas
            batch = await upload(client, "kill", make_groups("kill", seed=8))
            await client.compute_logprobs(batch)
            await train_step(client, batch)
            await client.save_checkpoint("before-kill")
            expected = await train_step(client, batch)
            await killed_in_a_pass(client, batch)
            await client.compute_advantages(batch, AdvantageSpec(name="grpo"))
            assert await train_step(client, batch) == expected

            await client.publish_weights()
            directory = next(running.store.rglob("model-00001-*.safetensors")).parent
            names = {n for f in directory.glob("*.safetensors") for n in load_file(f)}
            assert names == load_file(model / "model.safetensors").keys()
            loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
            assert loaded.config.model_type == "qwen3"
            await client.save_checkpoint("published")
            newest = max((running.store / "weights/versions").glob("0*"))
            check_converted(running.store / "checkpoints/published", model, newest)
            await check_full_disk(client)


def check_converted(checkpoint: Path, model: Path, version: Path) -> None:
    """What was saved becomes what was published; what is no longer as it was saved is named."""
    target = checkpoint.parent.parent / "converted"
    options = ConvertOptions(to="hf", model=model, sync=False)
    convert(checkpoint, target, options)
    made, files = load_file(target / "model.safetensors"), version.glob("*.safetensors")
    expected = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], expected[name]) for name in made)
    shutil.rmtree(target)
    for name in ("__1_0.distcp", ".metadata", "sluice.json", "checkpoint.json"):
        path = checkpoint / name
        data, middle = path.read_bytes(), path.stat().st_size // 2
        for kind, damaged in (
            (FileDigestError, data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]),
            (DamagedFileError, data[:middle]),
        ):
            path.write_bytes(damaged)
            found = (kind, DamagedFileError) if name == "checkpoint.json" else kind
            with pytest.raises(found, match=re.escape(name)):
                convert(checkpoint, target, options)
        path.unlink()
        if name != "checkpoint.json":
            with pytest.raises(MissingFileError, match=re.escape(name)):
                convert(checkpoint, target, options)
        path.write_bytes(data)
        assert not target.exists()


@pytest.mark.fast
async def test_a_pass_beyond_the_memory_of_a_rank_is_made_in_smaller_micro_batches(
    tmp_path: Path,
) -> None:
    """Ranks exchange tensors within a pass, and restart behind one that failed in its middle."""
    model = build_tiny_qwen3(tmp_path / "model", 0)
    settings = {**SETTINGS, "ranks": {"count": 1, "restart_backoff": RESTART_SECONDS}}
    rows = long_rows(16, 50)
    with running_trainer(tmp_path / "trainer", model, **settings) as running:
        async with running.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
            batch = (await client.upload_batch("long", len(rows), samples=rows)).batch
            faults.arm(tmp_path / "trainer" / "faults", "rank0.forward_backward.memory")
            with pytest.raises(RemoteError, match="is out of memory") as caught:
                await client.forward_backward(batch, SFT, expected_step=0, part_id="a")
            assert caught.value.reason == "RANK_LOST"
            await until(client, lambda now: now.restart_count == 1 and now.state == ACTIVE)
            passed = await client.forward_backward(batch, SFT, expected_step=0, part_id="a")
            assert passed.micro_batch_count == 2
            assert (await client.step_optimizer(0, ["a"])).step == 1


async def test_copies_of_the_model_are_told_of(tmp_path: Path) -> None:
    """A run that goes on with others has sums in another order."""
    model = build_tiny_qwen3(tmp_path / "model", 0)
    settings = {**SETTINGS, "fsdp": {"dtype": "float32", "replicas": 2}}
    with running_trainer(tmp_path / "trainer", model, **settings) as running:
        async with running.client() as client:
            ready = await until(client, lambda now: now.state == ACTIVE)
            assert (ready.layout.data, ready.layout.replicas) == (2, 2)


async def test_tensor_ranks_that_slept_make_the_same_steps(tmp_path: Path) -> None:
    model = build_tiny_qwen3(tmp_path / "model", 0)
    settings = {**SETTINGS, "fsdp": {"dtype": "float32", "tensor": 2}}
    with running_trainer(tmp_path / "trainer", model, **settings) as running:
        async with running.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
            await check_steps(client, 2.99)


@pytest.mark.fast
@pytest.mark.long
def test_a_run_survives_a_rank_lost_while_it_writes_behind(tmp_path: Path) -> None:
    check_run(tmp_path, {"backend": "fsdp", "fsdp": SETTINGS["fsdp"]})


async def test_an_engine_receives_what_the_ranks_published_as_deltas(tmp_path: Path) -> None:
    await check_delta(tmp_path, SETTINGS)
