"""Tower and projector may be frozen, or have learning rates of their own, on either backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.trainer.backend import Mesh
from services.trainer.backends.reference.backend import ReferenceBackend
from services.trainer.config import TrainerConfig
from sluice.config import ConfigError, parse_config
from tests.contract.training_backend.cases import build_model as build_text_model
from tests.megatron.comparison import read_ranks
from tests.rank_pool import JobError, Pool
from tests.vision.cases import PPO, Model, mixed_rows, part_of

fast = pytest.mark.fast
RATE = 1e-3
Tensors = dict[str, torch.Tensor]
PARTS = {"text": "text", "tower": "tower", "merger": "projector", "deepstack": "projector"}
# What is set, and how far parts move in a first step of Adam beside the text.
SETTINGS = [
    pytest.param({}, {"tower": 1, "projector": 1}, id="plain"),
    pytest.param({"frozen_tower": True}, {"tower": 0, "projector": 1}, id="tower", marks=fast),
    pytest.param({"frozen_projector": True}, {"tower": 1, "projector": 0}, id="projector"),
    pytest.param(
        {"frozen_tower": True, "frozen_projector": True}, {"tower": 0, "projector": 0}, id="both"
    ),
    pytest.param(
        {"tower_learning_rate": RATE / 10, "projector_learning_rate": RATE * 3},
        {"tower": 0.1, "projector": 3},
        id="rates",
        marks=fast,
    ),
    pytest.param(
        {"frozen_tower": True, "projector_learning_rate": RATE / 4},
        {"tower": 0, "projector": 0.25},
        id="frozen-and-rate",
    ),
]


def original(model: Model) -> Tensors:
    return load_file(model.directory / "model.safetensors")


def check_moves(before: Tensors, after: Tensors, expected: dict[str, float], rate: float) -> None:
    """The first step of Adam moves what has a large gradient by its learning rate."""
    for name, old in before.items():
        part = PARTS[part_of(name)]
        scale = {"text": 1.0, **expected}[part]
        moved = (after[name] - old).abs()
        if scale == 0:
            assert torch.equal(after[name], old), f"{name} is frozen"
            continue
        assert moved.max() <= rate * scale * 1.001, name
        if moved.numel() > 64:  # some of it had a gradient that is large beside epsilon
            assert moved.max() >= rate * scale * 0.9, name


def start(model: Model, path: Path, vision: dict[str, Any], **settings: Any) -> ReferenceBackend:
    values: dict[str, Any] = {
        "model": str(model.directory),
        "store": str(path),
        "durable": False,
        "vision": vision,
        "optim": {"learning_rate": RATE, "max_grad_norm": 0},
    }
    return ReferenceBackend(
        parse_config(TrainerConfig, {**values, **settings}), Mesh(rank=0, world_size=1)
    )


def tensors_of(backend: ReferenceBackend) -> Tensors:
    return {n: p.detach().clone() for n, p in backend._policy.model.named_parameters()}


def step(backend: Any, model: Model, rate: float | None = None) -> None:
    rows = mixed_rows(model.rules)
    backend.forward_backward([rows[:4], rows[4:]], PPO)
    assert not backend.step(normalizer=1.0, learning_rate=rate).skipped_reason


@pytest.mark.parametrize(("vision", "expected"), SETTINGS)
def test_parts_of_the_reference_backend(
    model: Model, tmp_path: Path, vision: dict[str, Any], expected: dict[str, float]
) -> None:
    """A step that is told its rate has the parts follow in proportion."""
    backend = start(model, tmp_path, vision)
    for rate in (None, RATE / 5):
        before = tensors_of(backend)
        step(backend, model, rate)
        if rate is None:
            check_moves(before, tensors_of(backend), expected, RATE)
    moved = {"text": 0.0, "tower": 0.0, "projector": 0.0}
    for name, tensor in tensors_of(backend).items():
        part = PARTS[part_of(name)]
        moved[part] = max(moved[part], float((tensor - before[name]).abs().max()))
    for part, scale in expected.items():
        assert moved[part] == pytest.approx(scale * moved["text"], rel=0.3)


def test_a_tower_is_trained_alone_beside_rows_that_it_does_not_see(
    qwen3_vl: Model, tmp_path: Path, pool: Pool
) -> None:
    """Rows of text pass by all that is trained; a stage behind the tower trains nothing."""
    trainable = {"allow": ["*visual*"]}
    backend = start(qwen3_vl, tmp_path, {}, trainable=trainable)
    rows, before = mixed_rows(qwen3_vl.rules), tensors_of(backend)
    text = [row for row in rows if not row.media]
    assert text
    backend.forward_backward([text], PPO)
    assert backend.step(normalizer=1.0, learning_rate=None).grad_norm == 0
    backend = start(qwen3_vl, tmp_path, {}, trainable=trainable)
    step(backend, qwen3_vl)
    after = tensors_of(backend)
    for name, old in before.items():
        assert torch.equal(after[name], old) == (part_of(name) == "text"), name
    run(pool, 2, qwen3_vl, tmp_path, {"pipeline": 2}, {}, trainable=trainable)
    for name, tensor in read_ranks(tmp_path, "weights").items():
        assert torch.allclose(tensor, after[name], rtol=0, atol=RATE / 10), name


def test_a_rate_of_a_part_that_is_frozen_by_name_is_refused(
    qwen3_vl: Model, tmp_path: Path
) -> None:
    vision = {"tower_learning_rate": RATE / 10}
    assert start(qwen3_vl, tmp_path, vision, trainable={"deny": ["*visual.merger*"]})
    with pytest.raises(ValueError, match="tower_learning_rate has no effect"):
        start(qwen3_vl, tmp_path, vision, trainable={"deny": ["*visual*"]})


def test_a_resumed_reference_run_goes_on_as_it_was(qwen3_vl: Model, tmp_path: Path) -> None:
    vision = {"frozen_tower": True, "projector_learning_rate": RATE / 4}
    whole = start(qwen3_vl, tmp_path, vision)
    step(whole, qwen3_vl)
    (tmp_path / "checkpoint").mkdir()
    whole.save_checkpoint(tmp_path / "checkpoint")
    step(whole, qwen3_vl)
    resumed = start(qwen3_vl, tmp_path, vision)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    step(resumed, qwen3_vl)
    for name, tensor in tensors_of(whole).items():
        assert torch.equal(tensors_of(resumed)[name], tensor), name


@pytest.mark.parametrize(("vision", "expected"), SETTINGS)
def test_parts_of_the_megatron_backend(
    pool: Pool,
    qwen3_vl: Model,
    tmp_path: Path,
    vision: dict[str, Any],
    expected: dict[str, float],
) -> None:
    layout = {"tensor": 2, "sequence_parallel": True, "distributed_optimizer": False}
    run(pool, 2, qwen3_vl, tmp_path, layout, vision)
    check_moves(original(qwen3_vl), read_ranks(tmp_path, "weights"), expected, RATE)


def run(
    pool: Pool,
    world: int,
    model: Model,
    out: Path,
    layout: dict[str, Any],
    vision: dict[str, Any],
    job: str = "vision_parts",
    trainable: dict[str, Any] | None = None,
    **more: Any,
) -> None:
    optim = {"learning_rate": RATE, "max_grad_norm": 0}
    trainer = {"vision": vision, "optim": optim, "trainable": trainable or {}}
    pool.run(
        job,
        world,
        model=str(model.directory),
        out=str(out),
        layout=layout,
        trainer=trainer,
        **more,
    )


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(2, {"pipeline": 2}, id="PP2"),
        pytest.param(2, {"distributed_optimizer": True}, id="DP2-distributed", marks=fast),
        pytest.param(4, {"pipeline": 2, "context": 2}, id="CP2xPP2"),
    ],
)
def test_parts_hold_under_other_layouts_and_over_a_checkpoint(
    pool: Pool, qwen3_vl: Model, tmp_path: Path, world: int, layout: dict[str, Any]
) -> None:
    """Stages that have no tower and ranks that see no image take part in the same collectives."""
    vision = {"frozen_tower": True, "projector_learning_rate": RATE / 4}
    run(pool, world, qwen3_vl, tmp_path, layout, vision)
    before, after = original(qwen3_vl), read_ranks(tmp_path, "weights")
    check_moves(before, after, {"tower": 0, "projector": 0.25}, RATE)
    run(
        pool,
        world,
        qwen3_vl,
        tmp_path,
        layout,
        vision,
        job="vision_parts",
        checkpoint=str(tmp_path / "checkpoint"),
        name="resumed",
    )
    expected, resumed = read_ranks(tmp_path, "second"), read_ranks(tmp_path, "resumed")
    assert expected.keys() == resumed.keys()
    for name, tensor in expected.items():
        assert torch.equal(resumed[name], tensor), name
    with pytest.raises(JobError, match="learning rates of"):
        run(
            pool,
            world,
            qwen3_vl,
            tmp_path,
            layout,
            {"frozen_projector": True},
            checkpoint=str(tmp_path / "checkpoint"),
            name="other",
        )


def config(model: Path, vision: dict[str, Any]) -> TrainerConfig:
    return parse_config(TrainerConfig, {"model": str(model), "store": "/tmp", "vision": vision})


@pytest.mark.parametrize(
    "vision",
    [
        {"frozen_tower": True, "tower_learning_rate": 1e-4},
        {"frozen_projector": True, "projector_learning_rate": 1e-4},
        {"tower_learning_rate": 0},
        {"tower_learning_rate": -1.0},
        {"tower_learning_rate": 1e30},
        {"projector_learning_rate": float("nan")},
        {"projector_learning_rate": float("inf")},
        {"frozen": True},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(qwen3_vl: Model, vision: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        config(qwen3_vl.directory, vision)


def test_a_model_of_text_has_no_such_parts(tmp_path: Path) -> None:
    text = build_text_model(tmp_path, "qwen3").directory
    assert config(text, {}).vision.frozen_tower is False
    with pytest.raises(ConfigError, match="text only"):
        config(text, {"frozen_tower": True})


def test_no_part_loses_more_by_decay_than_there_is_of_it(qwen3_vl: Model) -> None:
    values = {"model": str(qwen3_vl.directory), "store": "/tmp"}
    optim = {"learning_rate": 1e-3, "weight_decay": 0.5}
    highest = {"tower_learning_rate": 2.0}
    assert parse_config(TrainerConfig, {**values, "optim": optim, "vision": highest})
    with pytest.raises(ConfigError, match=r"tower_learning_rate x optim\.weight_decay"):
        parse_config(
            TrainerConfig, {**values, "optim": optim, "vision": {"tower_learning_rate": 2.01}}
        )
    # A step that is given another rate moves the parts with rates of their own in proportion.
    own = {"projector_learning_rate": 1e-2}
    held = parse_config(TrainerConfig, {**values, "optim": optim, "vision": own})
    assert held.highest_rate == pytest.approx(0.2)
    assert parse_config(TrainerConfig, {**values, "optim": optim}).highest_rate == 2.0
