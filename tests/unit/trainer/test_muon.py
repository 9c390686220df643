"""Muon beside torch's own, what it takes for a matrix, and which settings it refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from services.trainer.backend import Mesh
from services.trainer.backends import muon
from services.trainer.backends.muon import Matrices, hidden_matrices, orthogonal
from services.trainer.backends.reference.backend import ReferenceBackend
from services.trainer.backends.replica import FlatOptimizer
from services.trainer.config import MuonConfig, OptimConfig, TrainerConfig
from sluice.config import ConfigError, parse_config
from tests.contract.training_backend.cases import (
    PPO,
    SIZES,
    Model,
    build_model,
    ragged_rows,
    relative_distance,
)
from tests.models.families import CASES, Case

MUON = OptimConfig(kind="muon", learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.0)
SHAPES = {"tall": (48, 16), "wide": (16, 48), "square": (32, 32), "row": (1, 32)}


@pytest.mark.parametrize("adjustment", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_are_those_of_torch(adjustment: Any, nesterov: bool) -> None:
    """Five, of matrices of every form, and of a stack beside its matrices one by one."""
    settings = MuonConfig(adjustment=adjustment, nesterov=nesterov, momentum=0.9)
    optim = MUON.model_copy(update={"muon": settings})
    generator = torch.Generator().manual_seed(0)
    start = {n: torch.randn(shape, generator=generator) for n, shape in SHAPES.items()}
    start["stack"] = torch.randn(3, 2 * 24, 16, generator=generator)
    ours = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    matrices = {name: Matrices(*tensor.shape) for name, tensor in start.items() if tensor.ndim < 3}
    matrices["stack"] = Matrices(24, 16)
    optimizer = FlatOptimizer(ours, optim, adamw="torch_foreach", matrices=matrices)
    single = {n: start[n].clone() for n in SHAPES}
    single |= {f"stack/{i}": m.clone() for i, m in enumerate(start["stack"].view(6, 24, 16))}
    theirs = {name: torch.nn.Parameter(tensor) for name, tensor in single.items()}
    torchs = torch.optim.Muon(
        theirs.values(),
        lr=optim.learning_rate,
        weight_decay=optim.weight_decay,
        momentum=settings.momentum,
        nesterov=nesterov,
        adjust_lr_fn=adjustment,
    )
    for _ in range(5):
        for name, view in optimizer.views():
            view.copy_(torch.randn(view.shape, generator=generator))
            if name == "stack":
                for i, gradient in enumerate(view.view(6, 24, 16)):
                    theirs[f"stack/{i}"].grad = gradient.clone()
            else:
                theirs[name].grad = view.clone()
        optimizer.step(1.0, optim.learning_rate, reduce=lambda gradients: None)
        torchs.step()
    with torch.no_grad():
        stacked = torch.stack([theirs[f"stack/{i}"] for i in range(6)]).view_as(start["stack"])
        for name, parameter in ours.items():
            expected = stacked if name == "stack" else theirs[name]
            distance = relative_distance(parameter - start[name], expected - start[name])
            assert distance < 1e-2, (name, distance)


def test_a_matrix_is_made_orthogonal_whatever_its_size_and_zero_stays_zero() -> None:
    made = orthogonal(1e-4 * torch.randn(2, 8, 24), MuonConfig())
    values = torch.linalg.svdvals(made.float())
    assert 0.3 < float(values.min()) <= float(values.max()) < 1.3
    assert not orthogonal(torch.zeros(1, 8, 24), MuonConfig()).any()


def test_many_matrices_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = torch.randn(5, 2 * 8, 24)
    settings = MuonConfig(newton_schulz_dtype="float32")
    whole = Matrices(8, 24).directions(stack, settings)
    monkeypatch.setattr(muon, "MAX_NUMBERS", 3 * 8 * 24)
    parts: list[int] = []

    def counted(matrices: torch.Tensor, settings: MuonConfig) -> torch.Tensor:
        parts.append(len(matrices))
        return orthogonal(matrices, settings)

    monkeypatch.setattr(muon, "orthogonal", counted)
    torch.testing.assert_close(Matrices(8, 24).directions(stack, settings), whole)
    assert parts == [3, 3, 3, 1]


COMPUTING = ("apertus", "gemma4_text")  # as they are made


def layers_of(case: Case) -> tuple[Any, dict[str, Matrices]]:
    """A model without memory, and what Muon takes of it by the names of the first layers."""
    settings = {**SIZES, "tie_word_embeddings": False, **case.settings}
    with torch.device("cpu" if case.model_type in COMPUTING else "meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(case.known, **settings))
    return model, hidden_matrices(model, OptimConfig(kind="muon"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matrices_are_all_but_ends_biases_convolutions_and_decays(case: Case) -> None:
    """By name, as peers tell them: routers are matrices too, of every family."""
    model, found = layers_of(case)
    others = re.compile(r"embed|lm_head|wte|wpe|bias$|conv1d|conv\.conv|A_log")
    expected = {
        name for name, p in model.named_parameters() if p.ndim > 1 and not others.search(name)
    }
    assert found.keys() == expected
    for name, matrices in found.items():
        numbers = model.get_parameter(name).numel()
        assert numbers % (matrices.rows * matrices.columns) == 0


@pytest.mark.parametrize(
    ("family", "name", "expected"),
    [
        ("gpt2", "transformer.h.0.mlp.c_fc.weight", Matrices(32, 128, transposed=True)),
        ("qwen3_moe", "model.layers.0.mlp.experts.gate_up_proj", Matrices(32, 32)),
        ("mixtral", "model.layers.0.mlp.experts.down_proj", Matrices(32, 64)),
        (
            "gpt_oss",
            "model.layers.0.mlp.experts.gate_up_proj",
            Matrices(32, 128, transposed=True),
        ),
        (
            "granitemoe",
            "model.layers.0.block_sparse_moe.experts.gate_up_proj",
            Matrices(128, 32),
        ),
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight", Matrices(128, 32)),
    ],
)
def test_a_matrix_is_what_a_checkpoint_has(family: str, name: str, expected: Matrices) -> None:
    """What is stored in one, as phi3's attention is, stays one; what is merged here does not."""
    case = next(case for case in CASES if case.model_type == family)
    assert layers_of(case)[1][name] == expected


def test_the_original_adjustment_goes_by_outputs_over_inputs() -> None:
    settings = MuonConfig(adjustment="original", rate_factor=3.0)
    assert Matrices(64, 16).adjusted(settings) == 6.0
    assert Matrices(64, 16, transposed=True).adjusted(settings) == 3.0
    assert Matrices(16, 64, transposed=True).adjusted(settings) == 6.0
    assert Matrices(64, 16).adjusted(MuonConfig()) == pytest.approx(1.6)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


def config_of(model: Model, path: Path, **settings: Any) -> TrainerConfig:
    values = {"model": str(model.directory), "store": str(path), "durable": False}
    return parse_config(TrainerConfig, {**values, "optim": {"kind": "muon"}, **settings})


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"optim": {"muon": {"momentum": 0.9}}}, "muon has no effect with kind adamw; leave it"),
        (
            {"optim": {"kind": "muon", "muon": {"momentum": 0}}},
            "nesterov has no effect with momentum 0; set it to false",
        ),
        ({"optim": {"kind": "muon", "muon": {"newton_schulz_steps": 0}}}, "newton_schulz_steps"),
        ({"backend": "megatron"}, "kind muon is not for backend megatron, .*: set backend fsdp"),
        ({"lora": {"rank": 4}}, "optim.kind muon is not for lora: .*; set optim.kind adamw"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    qwen3: Model, tmp_path: Path, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        config_of(qwen3, tmp_path, **settings)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"trainable": {"allow": ["*norm*", "*embed*"]}}, "kind muon has no effect: no matrix"),
        (
            {"optim": {"kind": "muon", "betas": [0.8, 0.9]}, "trainable": {"allow": ["*proj*"]}},
            "optim.betas has no effect: Muon steps all that is trained",
        ),
        (
            {"optim": {"kind": "muon", "epsilon": 1e-6}, "trainable": {"allow": ["*proj*"]}},
            "optim.epsilon has no effect",
        ),
    ],
)
def test_what_trainable_leaves_nothing_of_is_refused(
    qwen3: Model, tmp_path: Path, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        ReferenceBackend(config_of(qwen3, tmp_path, **settings), Mesh(rank=0, world_size=1))


def test_matrices_alone_are_trained_and_their_checkpoint_resumes(
    qwen3: Model, tmp_path: Path
) -> None:
    config = config_of(qwen3, tmp_path, trainable={"allow": ["*proj*"]})
    one, other = (ReferenceBackend(config, Mesh(rank=0, world_size=1)) for _ in range(2))

    def step(backend: ReferenceBackend) -> float:
        backend.forward_backward([ragged_rows()], PPO)
        return backend.step(normalizer=37.0, learning_rate=1e-2).grad_norm

    step(one)
    (tmp_path / "checkpoint").mkdir()
    one.save_checkpoint(tmp_path / "checkpoint")
    other.load_checkpoint(tmp_path / "checkpoint")
    assert [step(one), step(one)] == [step(other), step(other)]


def test_a_head_of_values_goes_by_adamw(qwen3: Model, tmp_path: Path) -> None:
    config = config_of(qwen3, tmp_path, head="value")
    backend = ReferenceBackend(config, Mesh(rank=0, world_size=1))
    matrices = backend._optimizer.muon.parameters
    assert matrices and not any("score" in name for name in matrices)
    assert any("score" in name for name in backend._optimizer.parameters)


def test_kind_and_settings_of_muon_are_told_to_a_run_that_goes_on(
    qwen3: Model, tmp_path: Path
) -> None:
    told = config_of(qwen3, tmp_path).shaping
    assert told["optim.kind"] == '"muon"'
    assert {f"optim.muon.{name}" for name in MuonConfig.model_fields} <= told.keys()
