"""A checkpoint becomes a directory that plain transformers loads as the model that was saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from services.trainer.backend import Mesh
from services.trainer.backends.fsdp.checkpoint import DESCRIPTION
from services.trainer.backends.reference.backend import ReferenceBackend
from services.trainer.config import TrainerConfig
from sluice.config import parse_config
from sluice.weights.convert.conversion import convert
from sluice.weights.convert.options import ConvertOptions
from sluice.weights.convert.pieces import Files
from sluice.weights.convert.plan import plan_conversion
from sluice.weights.convert.stored import METADATA
from sluice.weights.convert.verify import compare
from sluice.weights.errors import (
    DamagedFileError,
    InvalidCheckpointError,
    MissingFileError,
    MissingTensorError,
    TargetExistsError,
    UnexpectedTensorError,
    WeightStoreError,
)
from tests.contract.training_backend.cases import PPO, Model, published
from tests.fsdp.conftest import ExpectedByModel
from tests.fsdp.jobs import NORMALIZER, rows_of
from tests.fsdp.oracle import Tensors, read_ranks
from tests.rank_pool import Pool

fast = pytest.mark.fast
IDS = torch.randint(53, (3, 17), generator=torch.Generator().manual_seed(5))


def to_hf(model: Path, **settings: Any) -> ConvertOptions:
    return ConvertOptions(to="hf", model=model, sync=False, max_file_bytes=60_000, **settings)


def logits_of(directory: Path) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, experts_implementation="eager")
    assert model.dtype == torch.float32
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(IDS).logits
    return logits


def plain_logits(model: Model, weights: Tensors, directory: Path) -> torch.Tensor:
    """Of transformers' model with weights by the names of its own checkpoint."""
    directory.mkdir()
    shutil.copyfile(model.directory / "config.json", directory / "config.json")
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return logits_of(directory)


def only_described(model: Model, directory: Path, **more: Any) -> Path:
    """Its config.json alone, by which transformers would read bfloat16."""
    directory.mkdir()
    config = json.loads((model.directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"} | more))
    return directory


def save(
    pool: Pool, root: Path, model: Model, world: int, fsdp: Any, **more: Any
) -> tuple[Path, Tensors]:
    (root / "saved/checkpoint").mkdir(parents=True)
    out = root / "saved"
    given = {"model": str(model.directory), "out": str(out), "fsdp": fsdp, **more}
    pool.run("save_midway", world, steps_after=0, **given)
    return out / "checkpoint", read_ranks(out, "weights")


@pytest.mark.parametrize(
    ("family", "world", "fsdp"),
    [
        pytest.param("qwen3", 2, {}, marks=fast),
        pytest.param("llama", 2, {}, id="tied"),
        pytest.param("llama", 2, {"tensor": 2}, id="tied, TP2"),
        pytest.param("qwen3_moe", 2, {}, marks=fast),
        pytest.param("qwen3_moe", 2, {"tensor": 2}, id="experts, TP2", marks=fast),
        pytest.param("qwen3_moe", 4, {"replicas": 2, "expert": 2}, id="EP2, two replicas"),
        pytest.param("deepseek_v3", 2, {}, id="biases of routers"),
    ],
)
def test_transformers_loads_the_model_that_was_saved(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path, family: str, world: int, fsdp: Any
) -> None:
    model, _ = expected(family)
    checkpoint, weights = save(pool, tmp_path, model, world, fsdp)
    described = only_described(model, tmp_path / "m") if "tensor" in fsdp else model.directory
    convert(checkpoint, tmp_path / "hf", to_hf(described))
    found = logits_of(tmp_path / "hf")
    assert torch.equal(found, plain_logits(model, weights, tmp_path / "plain"))
    assert not torch.equal(found, logits_of(model.directory)), "it has not trained"
    same = compare(checkpoint, tmp_path / "hf")
    assert same.same and same.equal == len(weights)


def test_of_a_mixture_nothing_is_as_large_as_its_experts(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    model, _ = expected("qwen3_moe")
    for fsdp in ({}, {"tensor": 2}):
        checkpoint, _ = save(pool, tmp_path / str(len(fsdp)), model, 2, fsdp)
        with Files() as files:
            work = plan_conversion(checkpoint, to_hf(model.directory), files)
        contents = [task.content for group in work.groups for task in group.tasks]
        computed = [content for content in contents if content.compute is not None]
        assert bool(computed) == bool(fsdp)  # columns were cut
        assert all(content.working_bytes <= 4 * content.size for content in computed)


@fast
def test_what_is_no_whole_checkpoint_of_the_model_is_refused(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    model, _ = expected("qwen3")
    checkpoint, _ = save(pool, tmp_path, model, 2, {})

    def refused(kind: type[WeightStoreError], options: ConvertOptions) -> str:
        with pytest.raises(kind) as found:
            convert(checkpoint, tmp_path / "hf", options)
        assert not (tmp_path / "hf").exists()
        return str(found.value)

    options = to_hf(model.directory)
    other, _ = expected("llama")
    tied = refused(UnexpectedTensorError, to_hf(other.directory))
    assert "lm_head.weight" in tied
    assert "config.json" in refused(InvalidCheckpointError, ConvertOptions(to="hf"))
    assert "to hf" in refused(InvalidCheckpointError, ConvertOptions(model=model.directory))
    mixture, _ = expected("qwen3_moe")
    assert "experts" in refused(MissingTensorError, to_hf(mixture.directory))
    for name in ("__1_0.distcp", METADATA, DESCRIPTION):
        path = checkpoint / name
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 20])
        assert name in refused(DamagedFileError, options)
        path.unlink()
        kind = InvalidCheckpointError if name == DESCRIPTION else MissingFileError
        assert (name in refused(kind, options)) == (name != DESCRIPTION)
        path.write_bytes(data)
    convert(checkpoint, tmp_path / "hf", options)
    with pytest.raises(TargetExistsError):
        convert(checkpoint, tmp_path / "hf", to_hf(model.directory, dtype="bfloat16"))


@fast
def test_so_does_a_checkpoint_of_a_model_that_is_whole_on_its_rank(
    expected: ExpectedByModel, tmp_path: Path
) -> None:
    model, _ = expected("qwen3_moe")
    values = {"model": str(model.directory), "store": str(tmp_path), "durable": False}
    values |= {"publish_dtype": "float32"}
    config = parse_config(TrainerConfig, values)
    backend: Any = ReferenceBackend(config, Mesh(rank=0, world_size=1))
    backend.forward_backward([rows_of(0)], PPO)
    backend.step(normalizer=NORMALIZER, learning_rate=0.05)
    (tmp_path / "checkpoint").mkdir()
    backend.save_checkpoint(tmp_path / "checkpoint")
    convert(tmp_path / "checkpoint", tmp_path / "hf", to_hf(model.directory))
    found = logits_of(tmp_path / "hf")
    weights = published(backend, tmp_path / "published")
    assert torch.equal(found, plain_logits(model, weights, tmp_path / "plain"))
    assert not torch.equal(found, logits_of(model.directory)), "it has not trained"


def test_a_critic_is_a_classifier_of_tokens(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    model, _ = expected("qwen3")
    checkpoint, weights = save(pool, tmp_path, model, 2, {}, first=0, trainer={"head": "value"})
    critic = only_described(model, tmp_path / "m", architectures=["Qwen3ForTokenClassification"])
    convert(checkpoint, tmp_path / "hf", to_hf(critic))
    loaded: Any = AutoModelForTokenClassification.from_pretrained(tmp_path / "hf", num_labels=1)
    found = dict(loaded.named_parameters())
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    with pytest.raises(MissingTensorError, match=r"lm_head\.weight"):
        convert(checkpoint, tmp_path / "policy", to_hf(model.directory))


def test_an_adapter_is_merged_into_its_base(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    model, _ = expected("qwen3")
    lora = {"rank": 2, "alpha": 6.0, "targets": ["q_proj", "v_proj"]}
    checkpoint, _ = save(pool, tmp_path, model, 2, {}, trainer={"lora": lora})
    options = ConvertOptions(to="hf", origin=model.directory, sync=False)
    convert(checkpoint, tmp_path / "hf", options)
    weights = load_file(model.directory / "model.safetensors")
    factors = load_file(checkpoint / "policy.safetensors")
    for name in [name for name in factors if "lora_A" in name]:
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        update = factors[name.replace("lora_A", "lora_B")] @ factors[name] * 3.0
        assert update.abs().max() > 0
        weights[f"{layer}.weight"] += update
    assert len(factors) == 8
    assert torch.equal(logits_of(tmp_path / "hf"), plain_logits(model, weights, tmp_path / "plain"))
