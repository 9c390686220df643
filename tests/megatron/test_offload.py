"""Optimizer state that waits on the host: steps and checkpoints of state that does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from services.trainer.backends.megatron import offloaded_adamw
from services.trainer.backends.megatron.config import MegatronConfig
from services.trainer.backends.megatron.offloaded_adamw import OffloadedAdamW
from services.trainer.config import TrainerConfig
from sluice import platform
from tests.lazy_device import lazy_device
from tests.megatron.comparison import read_ranks
from tests.rank_pool import Pool
from tests.two_memories import two_memories

fast = pytest.mark.fast
BF16, SEQUENCE = {"dtype": "bfloat16"}, {"tensor": 2, "sequence_parallel": True}
BOTH = (1.0, 0.3)
CASES = [
    pytest.param("qwen3", 1, {}, BOTH, id="single", marks=fast),
    pytest.param("qwen3", 2, BF16, BOTH, id="DP2-bfloat16", marks=fast),
    pytest.param("qwen3", 2, {}, (1.0,), id="DP2"),
    pytest.param("qwen3", 2, {**BF16, **SEQUENCE}, BOTH, id="TP2+SP-bfloat16"),
    pytest.param("qwen3_tied", 2, {**BF16, "pipeline": 2}, BOTH, id="tied-PP2-bfloat16"),
    pytest.param("qwen3_moe", 2, {**BF16, "expert": 2}, BOTH, id="EP2-bfloat16"),
    pytest.param("qwen3", 2, {"dtype": "float16"}, (1.0,), id="DP2-float16"),
]
RATES, BETAS, EPSILON = (1e-3, 3e-3, 2e-3, 5e-4), (0.9, 0.95), 1e-8


def _run(pool: Pool, root: Path, model: Path, world: int, layout: Any, **more: Any) -> Any:
    root.mkdir()
    return pool.run("offloaded", world, model=str(model), layout=layout, out=str(root), **more)


@pytest.mark.parametrize(("family", "world", "layout", "shares"), CASES)
def test_steps_are_those_of_state_on_the_device(
    family: str,
    world: int,
    layout: dict[str, Any],
    shares: tuple[float, ...],
    pool: Pool,
    expected: Any,
    tmp_path: Path,
) -> None:
    """To the bit, with clipping, weight decay, a schedule, and a sleep in the middle.

    The host has what is asked for, 12 bytes an element or 8 of float32, and the device not.
    """
    model, layout = expected.directory(family), {**layout, "vocab_multiple": 1}
    plain = _run(pool, tmp_path / "plain", model, world, layout)
    weights = read_ranks(tmp_path / "plain", "weights")
    width = 8 if layout.get("dtype", "float32") == "float32" else 12
    for share in shares:
        out = tmp_path / f"{share}"
        own = _run(pool, out, model, world, {**layout, "optimizer_offload": share})
        assert [each["steps"] for each in own] == [each["steps"] for each in plain]
        found = read_ranks(out, "weights")
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weights[name]) for name in weights)
        freed = sum(b["device"] - a["device"] for b, a in zip(plain, own, strict=True))
        host = sum(a["host"] - b["host"] for b, a in zip(plain, own, strict=True))
        assert freed == pytest.approx(host, rel=0.01)  # but for a few counts of steps
        elements = sum(tensor.numel() for tensor in weights.values())
        assert host == pytest.approx(
            share * width * elements, rel=0.06
        )  # more where ties or norms are
        if share == 1.0:  # weights and float32 gradients alone are left
            left = (width // 4 + 1) * 2 + 2 * (width == 8)
            assert max(each["device"] / each["trained"] for each in own) < left * 1.02


def _adamw64(
    weights: np.ndarray, gradients: list[np.ndarray], rates: tuple[float, ...], decay: float
) -> list[np.ndarray]:
    """Weights and both moments after these steps in float64 (arXiv 1711.05101, algorithm 2)."""
    first, second = np.zeros_like(weights), np.zeros_like(weights)
    for number, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        first = BETAS[0] * first + (1 - BETAS[0]) * gradient
        second = BETAS[1] * second + (1 - BETAS[1]) * gradient**2
        whole = first / (1 - BETAS[0] ** number)
        spread = np.sqrt(second / (1 - BETAS[1] ** number))
        weights = weights * (1 - rate * decay) - rate * whole / (spread + EPSILON)
    return [weights, first, second]


@fast
@pytest.mark.parametrize("device", [lazy_device(), platform.CPU], ids=["late", "plain"])
@pytest.mark.parametrize("share", [0.0, 0.37, 1.0])
def test_steps_are_adamws(
    share: float, device: platform.Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, of weights of two types, of parts of parameters, of tiny and large gradients."""
    monkeypatch.setattr(offloaded_adamw, "BLOCK_BYTES", 1000)
    generator = torch.Generator().manual_seed(3)
    sizes = ((7, 13), (300,), (1,), (64, 3))
    owners = [
        torch.randn(size, generator=generator).to(dtype)
        for size in sizes
        for dtype in (
            torch.float32,
            torch.bfloat16,
        )
    ]
    decays = {0.1: owners[:5], 0.0: owners[5:]}
    groups = [{"params": own, "weight_decay": decay} for decay, own in decays.items()]
    starts = [owner.flatten().double().numpy().copy() for owner in owners]
    taken: list[list[np.ndarray]] = [[] for _ in owners]
    with two_memories(device) as host:
        adam = OffloadedAdamW(
            groups, offload_fraction=share, lr=9.0, betas=BETAS, eps=EPSILON, weight_decay=9.0
        )
        adam.start()
        for rate in RATES:
            for owner, steps in zip(owners, taken, strict=True):
                scale = 10.0 ** torch.randint(-9, 4, owner.shape, generator=generator)
                gradient = torch.randn(owner.shape, generator=generator) * scale
                owner.decoupled_grad = gradient
                steps.append(gradient.flatten().double().numpy())
            for group in adam.param_groups:
                group["lr"] = rate
            with host.watched():
                adam.step()
    found = [(torch.full((3, owner.numel()), torch.nan)) for owner in owners]
    for kept in adam.kept():
        (index,) = (i for i, owner in enumerate(owners) if owner is kept.owner)
        for row, part in zip(found[index], (kept.main, *kept.moments.values()), strict=True):
            row[kept.begin : kept.begin + len(part)] = part
    for index, owner in enumerate(owners):
        should = _adamw64(starts[index], taken[index], RATES, 0.1 if index < 5 else 0.0)
        largest = np.abs(taken[index]).max(axis=0)
        scales = abs(starts[index]) + sum(RATES), largest, largest**2  # sums may cancel
        for ours, exact, scale in zip(found[index].double().numpy(), should, scales, strict=True):
            assert (abs(ours - exact) <= 1e-6 * scale + 1e-37).all()
        assert torch.equal(owner.flatten(), found[index][0].to(owner.dtype))
    assert host.nbytes == 4 * sum(
        len(part) * (2 + (kept.owner.dtype != torch.float32))
        for kept in adam.kept()
        for part in [kept.main]
        if host.has(kept.moments["exp_avg"])
    )


SAME = [
    pytest.param("qwen3", 2, {"dtype": "bfloat16"}, id="DP2-bfloat16", marks=fast),
    pytest.param("qwen3", 1, {}, id="single"),
    pytest.param("qwen3_moe", 2, {"expert": 2, "dtype": "bfloat16"}, id="EP2-bfloat16"),
    pytest.param("qwen3", 2, {"dtype": "float16"}, id="DP2-float16"),
]


def _job(pool: Pool, name: str, model: Path, world: int, layout: Any, **where: Path) -> Any:
    where["out"].mkdir(parents=True, exist_ok=True)
    paths = {key: str(path) for key, path in where.items()}
    return pool.run(name, world, model=str(model), layout=layout, **paths)


@pytest.mark.parametrize(
    ("layout", "allow"),
    [
        pytest.param({"pipeline": 2, **BF16}, ["*.layers.3.*"], id="PP2-last", marks=fast),
        pytest.param(BF16, ["*.[qkv]_proj.*"], id="DP2-attention"),
    ],
)
def test_what_is_frozen_has_no_state(
    layout: dict[str, Any], allow: list[str], pool: Pool, expected: Any, tmp_path: Path
) -> None:
    """Nothing of the first stage is trained, or a part of each layer: as on the device."""
    model, trainer = expected.directory("qwen3"), {"trainable": {"allow": allow}}
    layout = {**layout, "vocab_multiple": 1}
    plain = _run(pool, tmp_path / "plain", model, 2, layout, trainer=trainer)
    offloaded = {**layout, "optimizer_offload": 1.0}
    own = _run(pool, tmp_path / "own", model, 2, offloaded, trainer=trainer)
    assert [each["steps"] for each in own] == [each["steps"] for each in plain]
    found, weights = (read_ranks(tmp_path / name, "weights") for name in ("own", "plain"))
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    spread = 1 if "pipeline" in layout else 2  # data ranks
    state = sum(each["trained"] for each in own) / spread * 12
    assert sum(a["host"] - b["host"] for b, a in zip(plain, own, strict=True)) == state


@pytest.mark.parametrize(("family", "world", "layout"), SAME)
def test_checkpoints_are_those_of_state_on_the_device(
    family: str, world: int, layout: dict[str, Any], pool: Pool, expected: Any, tmp_path: Path
) -> None:
    """Resumed with and without, to the bit: losses, norms, the next random number, weights."""
    model = expected.directory(family)
    half, whole = ({**layout, "optimizer_offload": share} for share in (0.5, 1.0))
    contents, answers = [], []
    for name, own in (("plain", layout), ("half", half), ("whole", whole)):
        checkpoint = tmp_path / name / "checkpoint"
        checkpoint.mkdir(parents=True)
        answers.append(_job(pool, "save_midway", model, world, own, out=tmp_path / name))
        contents.append(_content(checkpoint))
    assert answers[0] == answers[1] == answers[2]
    for content in contents[1:]:
        assert content.keys() == contents[0].keys()
        assert all(torch.equal(content[key], contents[0][key]) for key in content)
    masters = [key for key in contents[0] if key.startswith("optimizer.state.param.")]
    assert bool(masters) == ("dtype" in layout)
    weights = read_ranks(tmp_path / "plain", "weights")
    for saved, own in (("half", layout), ("plain", half), ("half", whole), ("half", half)):
        out = tmp_path / f"{saved}-resumed-{own.get('optimizer_offload', 0)}"
        checkpoint = tmp_path / saved / "checkpoint"
        found = _job(pool, "resume", model, world, own, out=out, checkpoint=checkpoint)
        assert found == answers[0], (saved, own)
        resumed = read_ranks(out, "weights")
        assert all(torch.equal(resumed[name], weights[name]) for name in weights)


def _content(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors, read by torch alone."""
    stored = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    whole = {
        key: torch.full(entry.size, torch.nan, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if hasattr(entry, "chunks")
    }
    dcp.load(whole, checkpoint_id=checkpoint, no_dist=True)
    return whole


def test_checkpoints_fit_other_layouts(pool: Pool, expected: Any, tmp_path: Path) -> None:
    model = expected.directory("qwen3")
    _check_moved(pool, model, tmp_path / "a", (2, BF16), (2, {**BF16, "tensor": 2}))
    _check_moved(pool, model, tmp_path / "b", (2, {"tensor": 2}), (2, {"pipeline": 2}))
    plain = {"distributed_optimizer": False}
    _check_moved(pool, model, tmp_path / "c", (1, {}), (1, plain), saved_only=True)


def _check_moved(
    pool: Pool,
    model: Path,
    root: Path,
    first: tuple[int, dict[str, Any]],
    second: tuple[int, dict[str, Any]],
    *,
    saved_only: bool = False,
) -> None:
    """What goes on from a checkpoint, to the bit, whoever of both offloads; saved_only: one may."""
    found = []
    for name, shares in (("none", (0.0, 0.0)), ("both", (0.5, 0.0 if saved_only else 0.5))):
        layouts = [
            {**layout, "optimizer_offload": share}
            for (_, layout), share in zip((first, second), shares, strict=True)
        ]
        checkpoint = root / name / "checkpoint"
        checkpoint.mkdir(parents=True)
        _job(pool, "save_midway", model, first[0], layouts[0], out=root / name)
        out = root / f"{name}-resumed"
        steps = _job(pool, "resume", model, second[0], layouts[1], out=out, checkpoint=checkpoint)
        found.append(([each["steps"] for each in steps], read_ranks(out, "weights")))
    (steps, weights), (own_steps, own_weights) = found
    assert steps == own_steps
    assert all(torch.equal(weights[name], own_weights[name]) for name in weights)


@fast
def test_a_checkpoint_is_of_its_moment(pool: Pool, expected: Any, tmp_path: Path) -> None:
    """Steps are taken before anything is written, and beside the writing."""
    model = expected.directory("qwen3")
    for name in ("at-once", "beside"):
        (tmp_path / name).mkdir()
    layout = {"dtype": "bfloat16", "optimizer_offload": 0.5}
    out, when = str(tmp_path), "before"
    pool.run("save_beside_steps", 2, model=str(model), layout=layout, out=out, when=when)
    at_once, beside = (_content(tmp_path / name) for name in ("at-once", "beside"))
    assert at_once.keys() == beside.keys()
    assert all(torch.equal(at_once[key], beside[key]) for key in at_once)


@fast
@pytest.mark.parametrize("share", [-0.1, 1.5, 2, float("nan"), float("inf"), "half"])
def test_a_share_that_is_none_is_refused_by_name(share: Any) -> None:
    with pytest.raises(ValueError, match="optimizer_offload"):
        MegatronConfig(optimizer_offload=share)


@fast
def test_what_offloads_nothing_is_refused_by_name(expected: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="optimizer_offload needs distributed_optimizer"):
        MegatronConfig(optimizer_offload=0.5, distributed_optimizer=False)
    with pytest.raises(ValueError, match="optimizer_offload has no effect with lora"):
        TrainerConfig(
            model=str(expected.directory("qwen3")),
            store=tmp_path,
            backend="megatron",
            megatron={"optimizer_offload": 0.5, "dtype": "float32"},
            lora={"rank": 4},
        )
