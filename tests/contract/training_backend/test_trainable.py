"""What is frozen stays bit for bit; what is trained moves as if autograd knew of nothing else."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.trainer.backend import TrainingBackend
from sluice.weights.manifest import ShardFile
from sluice.weights.shards import PublishedShards
from tests.contract.training_backend.cases import (
    OPTIM,
    PPO,
    Model,
    Oracle,
    StartBackend,
    build_model,
    published,
    ragged_rows,
    relative_distance,
)

NORMALIZER = 37.0
# By parameters of the model in memory, what would be one tensor in some backend goes together.
UNITS = (
    "*embed_tokens*",
    "*lm_head*",
    "*layers.{layer}.self_attn.[qkv]_proj*",
    "*layers.{layer}.self_attn.o_proj*",
    "*layers.{layer}.self_attn.[qk]_norm*",
    "*layers.{layer}.mlp.gate.weight",
    "*layers.{layer}.mlp.*gate_proj*",
    "*layers.{layer}.mlp.*down_proj*",
    "*layers.{layer}.input_layernorm*",
    "*layers.{layer}.post_attention_layernorm*",
    "model.norm*",
)


def units(directory: Path) -> list[tuple[str, ...]]:
    """Patterns, those together that go together, which name something of a checkpoint."""
    names = load_file(directory / "model.safetensors")
    found = []
    for unit in UNITS:
        for layer in range(2) if "{layer}" in unit else (0,):
            pattern = unit.format(layer=layer)
            more = (pattern.replace("gate_proj", "up_proj"),) if "gate_proj" in unit else ()
            if any(fnmatchcase(name, pattern) for name in names):
                found.append((pattern, *more))
    return found


def trained_oracle(model: Model, frozen: Callable[[str], bool]) -> Oracle:
    module = model.load()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not frozen(name))
    return Oracle(module)


def check_steps(
    backend: TrainingBackend, oracle: Oracle, model: Model, path: Path, names: set[str]
) -> None:
    """Two steps with decay and clipping; `names` are of the tensors that move."""
    rows = ragged_rows()
    for _ in range(2):
        backend.forward_backward([rows], PPO)
        outcome = backend.step(normalizer=NORMALIZER, learning_rate=OPTIM.learning_rate)
        norm = oracle.step(oracle.ppo_loss(rows), NORMALIZER)
        assert outcome.grad_norm == pytest.approx(norm, rel=1e-4), "of what is trained alone"
    oracle.model.save_pretrained(path / "oracle")
    start, expected = (
        load_file(each / "model.safetensors") for each in (model.directory, path / "oracle")
    )
    found = published(backend, path / "shards")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        moved, should = tensor - start[name], expected[name] - start[name]
        if name in names:
            assert relative_distance(moved, should) < 2e-3, name
        else:
            assert torch.equal(tensor, start[name]), f"{name} is frozen"


@pytest.mark.parametrize("seed", range(3))
def test_random_parts_move_as_with_autograd(
    start_backend: StartBackend, model: Model, tmp_path: Path, seed: int
) -> None:
    drawn = random.Random(seed)
    every = units(model.directory)
    chosen = [pattern for unit in drawn.sample(every, len(every) // 2) for pattern in unit]
    names = load_file(model.directory / "model.safetensors").keys()
    matched = {name for name in names if any(fnmatchcase(name, each) for each in chosen)}
    is_allowed = bool(seed % 2)
    trained = matched if is_allowed else names - matched
    backend = start_backend(model, trainable={"allow" if is_allowed else "deny": chosen})

    def is_frozen(name: str) -> bool:
        unstacked = name.replace("experts.gate_up_proj", "experts.0.gate_proj.weight")
        unstacked = unstacked.replace("experts.down_proj", "experts.0.down_proj.weight")
        return unstacked not in trained

    check_steps(backend, trained_oracle(model, is_frozen), model, tmp_path, trained)


def test_frozen_parameters_have_no_gradients_and_no_state(
    start_backend: StartBackend, qwen3: Model, tmp_path: Path
) -> None:
    whole, part = (
        start_backend(qwen3, **settings) for settings in ({}, {"trainable": {"allow": ["*mlp*"]}})
    )
    tensors = load_file(qwen3.directory / "model.safetensors")
    share = sum(t.numel() for n, t in tensors.items() if "mlp" in n)
    sizes = []
    for backend in (whole, part):
        backend.forward_backward([ragged_rows()], PPO)
        backend.step(normalizer=NORMALIZER, learning_rate=None)
        backend.forward_backward([ragged_rows()], PPO)
        held = backend.held_tensors()
        sizes.append([sum(t.nbytes for t in each) for each in _distinct(held)])
    (state, gradients), (less_state, less_gradients) = sizes
    saved = 4 * (sum(t.numel() for t in tensors.values()) - share)
    assert less_gradients == pytest.approx(4 * share, rel=0.1) and gradients > less_gradients
    assert state - less_state > 1.9 * saved, "two moments"


def _distinct(held: Any) -> list[list[torch.Tensor]]:
    return [list({t.data_ptr(): t for t in each}.values()) for each in (held.state, held.gradients)]


@pytest.mark.parametrize("name", ["*embed_tokens*", "lm_head.weight"])
def test_a_tied_tensor_goes_by_either_name(
    start_backend: StartBackend, tmp_path: Path, name: str
) -> None:
    model = build_model(tmp_path / "model", "llama")
    backend = start_backend(model, trainable={"deny": [name]})
    oracle = trained_oracle(model, lambda each: "embed_tokens" in each)
    names = load_file(model.directory / "model.safetensors").keys()
    trained = {each for each in names if "embed_tokens" not in each}
    check_steps(backend, oracle, model, tmp_path, trained)


def test_the_head_alone(start_backend: StartBackend, qwen3: Model, tmp_path: Path) -> None:
    """Nothing that hidden states are made of takes gradients."""
    backend = start_backend(qwen3, trainable={"allow": ["lm_head.weight"]})
    oracle = trained_oracle(qwen3, lambda name: name != "lm_head.weight")
    check_steps(backend, oracle, qwen3, tmp_path, {"lm_head.weight"})


def test_a_resumed_run_goes_on_as_it_was_and_trains_the_same(
    start_backend: StartBackend, qwen3: Model, tmp_path: Path
) -> None:
    rows, trainable = ragged_rows(), {"deny": ["*embed_tokens*", "*.o_proj.*"]}

    def step(backend: TrainingBackend) -> None:
        backend.forward_backward([rows], PPO)
        assert not backend.step(normalizer=NORMALIZER, learning_rate=None).skipped_reason

    whole = start_backend(qwen3, trainable=trainable)
    step(whole)
    (tmp_path / "checkpoint").mkdir()
    whole.save_checkpoint(tmp_path / "checkpoint")
    step(whole)
    resumed = start_backend(qwen3, trainable=trainable)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    step(resumed)
    expected, found = published(whole, tmp_path / "a"), published(resumed, tmp_path / "b")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    for other in ({}, {"deny": ["*embed_tokens*"]}, {"deny": [*trainable["deny"], "lm_head*"]}):
        backend = start_backend(qwen3, trainable=other)
        with pytest.raises(ValueError, match="saved by a trainer that had"):
            backend.load_checkpoint(tmp_path / "checkpoint")


def test_a_delta_has_nothing_of_what_is_frozen(
    start_backend: StartBackend, qwen3: Model, tmp_path: Path
) -> None:
    backend = start_backend(qwen3, trainable={"allow": ["*.o_proj.*"]})
    shards = PublishedShards(keep=True, sync=False)
    versions: list[list[ShardFile]] = []
    for version, base in ((1, None), (2, 1)):
        (tmp_path / str(version)).mkdir()
        shards.begin(base)
        versions.append(backend.write_shards(tmp_path / str(version), shards.submit))
        shards.settle()
        shards.finish(version)
        backend.forward_backward([ragged_rows()], PPO)
        backend.step(normalizer=NORMALIZER, learning_rate=None)
    whole, delta = ({n: t for each in v for n, t in each.tensors.items()} for v in versions)
    moved = {name for name, tensor in delta.items() if tensor.digest != whole[name].digest}
    assert moved == {name for name in whole if ".o_proj." in name}
    changed = sum(each.delta.changed if each.delta else 10**9 for each in versions[1])
    assert changed <= sum(math.prod(whole[name].shape) for name in moved)


@pytest.mark.parametrize(
    ("trainable", "message"),
    [
        (
            {"allow": ["*.q_porj.*"]},
            r"no parameter is called '\*\.q_porj\.\*'; near are model"
            r"\.layers\.\*\.self_attn\.q_proj\.weight",
        ),
        ({"deny": ["model.layers.7.*"]}, r"deny: no parameter .* near are model\.layers\."),
        ({"deny": ["*"]}, "every parameter is frozen"),
        ({"allow": ["*mlp*"], "deny": ["*embed*"]}, "freezes nothing that allow lets be trained"),
    ],
)
def test_patterns_that_do_nothing_are_refused(
    start_backend: StartBackend, qwen3: Model, trainable: dict[str, list[str]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        start_backend(qwen3, trainable=trainable)


def test_half_of_a_tensor_is_refused_by_name(start_backend: StartBackend, tmp_path: Path) -> None:
    """The experts of a layer are one in every backend, gate and up one of theirs."""
    model = build_model(tmp_path / "model", "qwen3_moe")
    for deny in ("*layers.1.mlp.experts.*.gate_proj.*", "*layers.1.mlp.experts.2.*"):
        with pytest.raises(ValueError, match=r"in one tensor, .*layers\.1.*, which is trained or"):
            start_backend(model, trainable={"deny": [deny]})
