"""The reference trainer sees what transformers sees, and learns from it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.trainer.backend import Mesh
from services.trainer.backends import packing
from services.trainer.backends.reference.backend import ReferenceBackend
from services.trainer.config import TrainerConfig
from sluice.algo.spec import LossSpec
from sluice.config import parse_config
from sluice.samples.sample import MediaSpan
from sluice.vision import VisionTower, rotary_positions
from sluice.weights.convert.conversion import convert
from sluice.weights.convert.options import ConvertOptions, Layout
from sluice.weights.convert.verify import compare
from tests.vision.cases import (
    IMAGE,
    MAX_GRADIENT_DIFF,
    MAX_LOGPROB_DIFF,
    PPO,
    Model,
    Oracle,
    draw_image,
    make_row,
    mixed_rows,
    record,
    relative_distances,
)

LAYOUT = "reference"


def start(model: Model, path: Path, **settings: Any) -> ReferenceBackend:
    values = {"model": str(model.directory), "store": str(path), "durable": False, **settings}
    return ReferenceBackend(parse_config(TrainerConfig, values), Mesh(rank=0, world_size=1))


def gradients(backend: ReferenceBackend) -> dict[str, torch.Tensor]:
    found = {n: p.grad for n, p in backend._policy.model.named_parameters()}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


@pytest.mark.parametrize("seed", range(20))
def test_positions_are_those_of_transformers(model: Model, oracle: Oracle, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens, media, types, grids = 0, list[MediaSpan](), list[int](), list[tuple[int, ...]]()
    for _ in range(rng.integers(1, 5)):
        text, tall, wide = int(rng.integers(1, 9)), *rng.integers(1, 7, 2).tolist()
        types += [0] * text + [1] * (tall * wide)
        grids.append((1, tall * 2, wide * 2))
        media.append(
            MediaSpan(
                digest="0" * 32,
                size=1,
                kind="image",
                first_token=tokens + text,
                token_count=tall * wide,
                grid_thw=grids[-1],
            )
        )
        tokens = len(types)
    types += [0] * int(rng.integers(0, 9))
    expected, deltas = oracle.model.model.get_rope_index(
        torch.zeros(1, len(types), dtype=torch.int64),
        torch.tensor([types]),
        image_grid_thw=torch.tensor(grids),
    )
    found = rotary_positions(len(types), media, model.rules.merge_size)
    assert (found == expected[:, 0].numpy()).all()
    assert found.max() + 1 - len(types) == deltas.item()


@pytest.fixture(scope="module")
def oracle(model: Model) -> Oracle:
    return Oracle(model)


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.fast), 0.7])
def test_logprobs_are_those_of_transformers(
    model: Model, oracle: Oracle, tmp_path: Path, temperature: float
) -> None:
    rows = mixed_rows(model.rules)
    backend = start(model, tmp_path)
    whole = backend.compute_logprobs([rows], model="policy", temperature=temperature)
    split = backend.compute_logprobs(
        [[row] for row in rows], model="policy", temperature=temperature
    )
    for row in rows:
        expected = oracle.logprobs(row, temperature).detach()
        for found in (whole, split):
            difference = (found[row.sample_id] - expected).abs().max().item()
            assert record("logprob", difference, LAYOUT) <= MAX_LOGPROB_DIFF, row.sample_id


@pytest.mark.fast
def test_an_image_is_looked_at(model: Model, tmp_path: Path) -> None:
    """The negative control: another picture gives other log-probs."""
    (row,) = mixed_rows(model.rules)[:1]
    backend = start(model, tmp_path)
    other = draw_image(model.rules, 9, 2, 3).png
    found = [
        backend.compute_logprobs([[each]], model="policy", temperature=1.0)[row.sample_id]
        for each in (row, row._replace(images=dict.fromkeys(row.images, other)))
    ]
    assert (found[0] - found[1]).abs().max() > 0.01


@pytest.mark.fast
def test_gradients_are_those_of_transformers(model: Model, oracle: Oracle, tmp_path: Path) -> None:
    rows = mixed_rows(model.rules)
    backend = start(model, tmp_path)
    backend.forward_backward([rows[:4], rows[4:]], PPO)
    parts = relative_distances(gradients(backend), oracle.gradients(rows))
    assert parts.keys() >= {"text", "tower", "merger"}
    assert ("deepstack" in parts) == hasattr(oracle.model.model.visual, "deepstack_merger_list")
    for part, difference in parts.items():
        assert record("gradient", difference, LAYOUT) <= MAX_GRADIENT_DIFF, part


def test_the_tower_sees_an_image_once_a_micro_batch(
    model: Model, oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows show it, and into however many passes they are split."""
    rows, seen = mixed_rows(model.rules), list[int]()
    encode = VisionTower.encode

    def counted(tower: VisionTower, images: dict[str, bytes]) -> Any:
        seen.append(len(images))
        return encode(tower, images)

    monkeypatch.setattr(VisionTower, "encode", counted)
    monkeypatch.setattr(packing, "PASS_TOKENS", 20)
    backend = start(model, tmp_path)
    backend.forward_backward([rows], PPO)
    assert seen == [4]
    for part, difference in relative_distances(gradients(backend), oracle.gradients(rows)).items():
        assert record("gradient", difference, LAYOUT) <= MAX_GRADIENT_DIFF, part


@pytest.mark.fast
def test_rows_without_images_leave_the_tower_alone(
    model: Model, oracle: Oracle, tmp_path: Path
) -> None:
    rows = mixed_rows(model.rules)[3:5]
    backend = start(model, tmp_path)
    backend.forward_backward([rows, []], PPO)
    found, expected = gradients(backend), oracle.gradients(rows)
    assert not any(found[name].any() for name in found if "visual" in name)
    text = {name: found[name] for name in found if "visual" not in name}
    parts = relative_distances(text, {name: expected[name] for name in text})
    assert record("gradient", parts["text"], LAYOUT) <= MAX_GRADIENT_DIFF


@pytest.mark.fast
def test_a_sampled_placeholder_is_a_token_like_others(model: Model, tmp_path: Path) -> None:
    """Images go by their spans: transformers itself counts the tokens and gives up."""
    (row,) = mixed_rows(model.rules)[:1]
    drawn = make_row("one/0", [3, draw_image(model.rules, 0, 2, 3), 4], [5], seed=1)
    drawn.token_ids[-1] = IMAGE
    backend = start(model, tmp_path)
    found = backend.compute_logprobs([[drawn]], model="policy", temperature=1.0)["one/0"]
    plain = backend.compute_logprobs([[row]], model="policy", temperature=1.0)["one/0"]
    torch.testing.assert_close(found[:-1], plain[:-1], atol=1e-6, rtol=0)


def test_a_critic_sees(model: Model, tmp_path: Path) -> None:
    """It starts at zero, learns, and its checkpoint holds what it has learnt."""
    rows, loss = mixed_rows(model.rules), LossSpec(name="value")
    critic = start(model, tmp_path, head="value", optim={"learning_rate": 1e-3})
    assert not any(v.any() for v in critic.compute_values([rows]).values())
    stored, found = model.load().state_dict(), critic._policy.model.state_dict()
    assert found.keys() - stored.keys() == {"score.weight", "score.bias"}
    for name in found.keys() & stored.keys():
        assert torch.equal(found[name], stored[name]), name
    sums = [critic.forward_backward([rows], loss).loss]
    for _ in range(3):
        assert not critic.step(normalizer=50.0, learning_rate=None).skipped_reason
        sums.append(critic.forward_backward([rows], loss).loss)
    assert sums == sorted(sums, reverse=True)
    critic.discard_gradients()
    values = critic.compute_values([rows])
    (tmp_path / "checkpoint").mkdir()
    critic.save_checkpoint(tmp_path / "checkpoint")
    other = start(model, tmp_path, head="value")
    other.load_checkpoint(tmp_path / "checkpoint")
    for name, found in other.compute_values([rows]).items():
        assert torch.equal(found, values[name])
    blind = [row._replace(images=dict.fromkeys(row.images, b"")) for row in rows[:1]]
    with pytest.raises(ValueError, match="image"):
        other.compute_values([blind])


def test_what_is_published_can_be_loaded(model: Model, tmp_path: Path) -> None:
    """Under the names of the checkpoint that the trainer began with."""
    rows = mixed_rows(model.rules)
    backend = start(model, tmp_path, optim={"learning_rate": 1e-2})
    backend.forward_backward([rows], PPO)
    backend.step(normalizer=50.0, learning_rate=None)
    (tmp_path / "shards").mkdir()
    published: dict[str, torch.Tensor] = {}
    for shard in backend.write_shards(tmp_path / "shards"):
        published.update(load_file(tmp_path / "shards" / shard.file_name))
    before = load_file(model.directory / "model.safetensors")
    shapes = {name: tensor.shape for name, tensor in before.items()}
    assert {name: tensor.shape for name, tensor in published.items()} == shapes
    assert all((published[name] != before[name]).any() for name in before if "visual" in name)
    folder = shutil.copytree(model.directory, tmp_path / "trained")
    save_file(published, folder / "model.safetensors", {"format": "pt"})
    trained = Oracle(Model(folder))
    found = backend.compute_logprobs([rows], model="policy", temperature=1.0)
    for row in rows:
        difference = (found[row.sample_id] - trained.logprobs(row)).abs().max().item()
        assert record("logprob", difference, LAYOUT) <= MAX_LOGPROB_DIFF
    # And so it is after a way to Megatron's format, cut over ranks, and back.
    layout = ConvertOptions(layout=Layout(tensor=2, pipeline=2), vocab_multiple=8, sync=False)
    convert(folder, tmp_path / "megatron", layout)
    convert(tmp_path / "megatron", tmp_path / "back", ConvertOptions(to="hf", sync=False))
    assert compare(folder, tmp_path / "back").same
    again = Oracle(Model(tmp_path / "back"))
    for row in rows:
        assert torch.equal(again.logprobs(row), trained.logprobs(row))
