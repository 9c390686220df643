"""The reference backend beyond the contract: every gradient, chunked logits, lower precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from services.trainer.backend import Mesh
from services.trainer.backends.packing import NOTHING
from services.trainer.backends.reference.backend import ReferenceBackend
from services.trainer.config import TrainerConfig
from sluice import platform
from sluice.algo.spec import LossSpec
from sluice.config import parse_config
from sluice.weights.errors import InvalidAdapterError
from tests.contract.training_backend.cases import (
    PPO,
    SIZES,
    VOCABULARY,
    Model,
    Oracle,
    build_model,
    make_row,
    ragged_rows,
    relative_distance,
)
from tests.lazy_device import lazy_device
from tools.accelerator_check.backends import even_rows

BONUS = LossSpec(name="ppo_clip", clip_low=0.2, entropy_coefficient=0.05)


@pytest.fixture(scope="module", params=["qwen3", "llama", "glm4", "deepseek_v3", "glm_moe_dsa"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build_model(tmp_path_factory.mktemp("model"), request.param)


def start(model: Model, path: Path, **settings: Any) -> ReferenceBackend:
    values = {"model": str(model.directory), "store": str(path), **settings}
    config = parse_config(TrainerConfig, values)
    return ReferenceBackend(config, Mesh(rank=0, world_size=1))


def gradients(backend: ReferenceBackend) -> dict[str, torch.Tensor]:
    parameters = backend._optimizer.parameters
    return {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}


def is_reached(name: str) -> bool:
    """Not so what makes a hard choice."""
    return ".indexer." not in name


def test_a_row_has_its_numbers_whatever_it_is_packed_with(tmp_path: Path) -> None:
    """Angles of this kind go by the longest row of a pass, from the length of the model's own on:
    there a neighbour put log-probs off by more than one."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    sizes = {"rope_parameters": rope, "max_position_embeddings": 64}
    model = build_model(tmp_path / "model", "llama", **sizes)
    backend = start(model, tmp_path, max_tokens_per_micro_batch=64)
    short = make_row("a/0", [1, 2, 3], [*range(20)], seed=1)
    long = make_row("b/0", [1, 2, 3], [*range(VOCABULARY), *range(8)], seed=2)
    alone, beside = (
        backend.compute_logprobs([rows], model="policy", temperature=1.0)["a/0"]
        for rows in ([short], [short, long])
    )
    torch.testing.assert_close(alone, beside, atol=5e-6, rtol=0)
    for settings in ({}, {"max_tokens_per_micro_batch": 64, "oversize_policy": "alone"}):
        with pytest.raises(ValueError, match="to 64 at most"):
            start(model, tmp_path, **settings)


def test_every_gradient_equals_autograd(model: Model, tmp_path: Path) -> None:
    rows = ragged_rows()
    backend, oracle = start(model, tmp_path), Oracle(model.load())
    backend.forward_backward([rows[:5], rows[5:]], PPO)
    oracle.ppo_loss(rows).backward()
    expected = {name: p.grad for name, p in oracle.model.named_parameters() if is_reached(name)}
    found = gradients(backend)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        reference = expected[name]
        assert reference is not None
        assert relative_distance(gradient, reference) < 1e-4, name


def test_gradients_of_long_rows_equal_autograd_in_float64(model: Model, tmp_path: Path) -> None:
    """Siblings of one length and others, behind a shorter and behind a longer prompt."""
    generator = torch.Generator().manual_seed(3)

    def draw(count: int) -> list[int]:
        return torch.randint(VOCABULARY, (count,), generator=generator).tolist()

    short, long = draw(40), draw(700)
    rows = [make_row(f"s/{i}", short, draw(n), seed=i) for i, n in enumerate((600, 600, 560, 90))]
    rows += [make_row(f"l/{i}", long, draw(n), seed=9 + i) for i, n in enumerate((610, 540, 70))]
    backend, oracle = start(model, tmp_path), Oracle(model.load().double())
    backend.forward_backward([rows], PPO)
    logprobs = {row.sample_id: oracle.logprobs(row) for row in rows}
    oracle.ppo_loss(rows, logprobs).backward()
    expected = {name: p.grad for name, p in oracle.model.named_parameters()}
    for name, gradient in gradients(backend).items():
        reference = expected[name]
        assert reference is not None
        assert relative_distance(gradient.double(), reference) < 1e-4, name
    found = backend.compute_logprobs([rows], model="policy", temperature=1.0)
    for name, each in logprobs.items():
        torch.testing.assert_close(found[name].double(), each.detach(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("loss", [PPO, BONUS])
def test_logits_made_in_chunks_change_nothing(model: Model, tmp_path: Path, loss: LossSpec) -> None:
    rows = ragged_rows()
    backend = start(model, tmp_path)
    whole = backend.forward_backward([rows], loss)
    expected = gradients(backend)
    backend = start(model, tmp_path, operations={"logprobs": "chunked"})
    chunked = backend.forward_backward([rows], loss)
    assert chunked.loss == pytest.approx(whole.loss, rel=1e-5)
    for name, gradient in gradients(backend).items():
        assert relative_distance(gradient, expected[name]) < 1e-4, name


def test_autocast_stays_near_and_keeps_float32_gradients(model: Model, tmp_path: Path) -> None:
    rows = ragged_rows()
    exact, fast = start(model, tmp_path), start(model, tmp_path, autocast=True)
    left = exact.compute_logprobs([rows], model="policy", temperature=1.0)
    right = fast.compute_logprobs([rows], model="policy", temperature=1.0)
    gaps = torch.cat([left[row.sample_id] - right[row.sample_id] for row in rows]).abs()
    assert 1e-5 < float(gaps.mean()) < 0.1, "bfloat16, and not another model"
    fast.forward_backward([rows], PPO)
    assert {gradient.dtype for gradient in gradients(fast).values()} == {torch.float32}


@pytest.mark.parametrize(
    ("settings", "least", "most"), [({}, 0.0, 1e-5), ({"float32_head": False}, 1e-3, 0.1)]
)
@pytest.mark.parametrize("logprobs", ["chunked", "whole"])
def test_the_head_is_float32_under_autocast_unless_told_not_to(
    model: Model,
    tmp_path: Path,
    settings: dict[str, Any],
    least: float,
    most: float,
    logprobs: str,
) -> None:
    """Against a float64 head over the same factors, with logits of a trained model's size."""
    rows = ragged_rows()
    operations = {"logprobs": logprobs}
    backend = start(model, tmp_path, autocast=True, operations=operations, **settings)
    policy = backend._policy.model
    weight_VH = policy.get_output_embeddings().weight
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        weight_VH.mul_(2)
        layout = backend._policy.pack(rows, NOTHING)
        hidden_TH = backend._policy.run(layout, NOTHING)
    hidden_RH = hidden_TH.index_select(0, layout.predictors).bfloat16().double()
    factor_VH = weight_VH.detach().bfloat16().double()
    table_RV = (hidden_RH @ factor_VH.T / 0.8).log_softmax(-1)
    exact = table_RV.gather(1, layout.targets[:, None])[:, 0]
    found = backend.compute_logprobs([rows], model="policy", temperature=0.8)
    gap = (torch.cat([found[row.sample_id] for row in rows]) - exact).abs().mean()
    assert least <= float(gap) <= most


class Products(TorchDispatchMode):
    """Keeps how many rows of logits each product makes."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.rows = vocabulary, list[int]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        if function.overloadpacket is torch.ops.aten.mm and made.shape[1] == self.vocabulary:
            self.rows.append(len(made))
        return made


@pytest.mark.parametrize(
    ("logprobs", "rows"), [("whole", [720]), ("by_size", [720]), ("chunked", [512, 208])]
)
def test_wide_logits_of_narrow_factors_are_whole_where_that_is_asked_for(
    model: Model, tmp_path: Path, logprobs: str, rows: list[int]
) -> None:
    backend = start(model, tmp_path, autocast=True, operations={"logprobs": logprobs})
    vocabulary = SIZES["vocab_size"]
    assert isinstance(vocabulary, int)
    with Products(vocabulary) as products:
        batch = even_rows(vocabulary, 6, 20, 120)
        backend.compute_logprobs([batch], model="policy", temperature=1.0)
    assert products.rows == rows


def test_a_model_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="gpt2 is unknown here; known: deepseek_v3, glm4, "):
        start(Model(tmp_path), tmp_path)


def test_published_biases_of_routers_are_not_rounded(tmp_path: Path) -> None:
    model = build_model(tmp_path / "model", "deepseek_v3")
    backend = start(model, tmp_path, publish_dtype="bfloat16")
    (shard,) = backend.write_shards(tmp_path)
    published = load_file(tmp_path / shard.file_name)
    original = load_file(model.directory / "model.safetensors")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(published.pop(bias), original[bias])
    assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}


def test_what_chooses_keys_stays_as_it_is(tmp_path: Path) -> None:
    """It has no gradient; weight decay, and a learning rate that moves all else, leave it alone."""
    model = build_model(tmp_path / "model", "glm_moe_dsa")
    original = load_file(model.directory / "model.safetensors")
    chooses = {name for name in original if not is_reached(name)}
    assert len(chooses) == 5
    optim = {"learning_rate": 1e-2, "weight_decay": 0.5}
    for number, trainable in enumerate(({}, {"deny": ["*.indexer.*"]}, {"deny": ["*embed*"]})):
        backend = start(model, tmp_path, optim=optim, trainable=trainable)
        assert not chooses & {*backend._optimizer.parameters}
        backend.forward_backward([ragged_rows()], PPO)
        assert not backend.step(normalizer=9.0, learning_rate=None).skipped_reason
        (tmp_path / str(number)).mkdir()
        (shard,) = backend.write_shards(tmp_path / str(number))
        published = load_file(tmp_path / str(number) / shard.file_name)
        same = {name for name, tensor in original.items() if torch.equal(published[name], tensor)}
        left = {name for name in original if name.endswith("bias") and "indexer" not in name}
        left |= {"model.embed_tokens.weight"} if trainable == {"deny": ["*embed*"]} else set()
        assert same == chooses | left
    for allowed in ("*.indexer.wk.*", "*.layers.0.self_attn.indexer.*"):
        with pytest.raises(ValueError, match=r"names indexers alone, which no gradient reaches"):
            start(model, tmp_path, trainable={"allow": ["*norm*", allowed]})
    for target in ("wq_b", "weights_proj"):
        with pytest.raises(InvalidAdapterError, match=f"targets name '{target}', which no"):
            start(model, tmp_path, lora={"rank": 4, "targets": ["o_proj", target]})


def test_equal_seeds_give_equal_bits(model: Model, tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        backend = start(model, tmp_path, seed=3)
        backend.forward_backward([ragged_rows()], PPO)
        found.append(gradients(backend))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_passes_that_copy_beside_the_one_before_give_the_same(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that makes its copies only when it is waited for."""
    rows = ragged_rows()
    parts = [rows[:2], rows[2:3], [], rows[3:]]
    plain, device = start(model, tmp_path), lazy_device()
    sums = plain.forward_backward(parts, BONUS)
    wanted = plain.compute_logprobs(parts, model="policy", temperature=0.7)
    monkeypatch.setattr(platform, "current", lambda: device)
    beside = start(model, tmp_path)
    assert beside.forward_backward(parts, BONUS) == sums
    found = beside.compute_logprobs(parts, model="policy", temperature=0.7)
    for name, gradient in gradients(plain).items():
        assert torch.equal(gradients(beside)[name], gradient), name
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert len(device.copies) == 6  # one a pass
    assert device.journal.index("begin 1") < device.journal.index("await 0")
