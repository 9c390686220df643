"""A critic on the reference backend: values, their gradients, and what is kept of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from services.trainer.backend import Mesh, Row
from services.trainer.backends.reference.backend import ReferenceBackend
from services.trainer.config import TrainerConfig
from sluice.algo.spec import LossSpec
from sluice.config import ConfigError, parse_config
from sluice.weights.classifier import reward_model_config
from tests.contract.training_backend.cases import (
    OPTIM,
    Model,
    build_model,
    ragged_rows,
    relative_distance,
)

CLIPPED = LossSpec(name="value", value_clip=0.2)


@pytest.fixture(scope="module", params=["qwen3", "llama", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build_model(tmp_path_factory.mktemp("model"), request.param)


def start(directory: Path, path: Path, **settings: Any) -> ReferenceBackend:
    values = {"model": str(directory), "store": str(path), "head": "value", "optim": OPTIM}
    config = parse_config(TrainerConfig, {**values, **settings})
    return ReferenceBackend(config, Mesh(rank=0, world_size=1))


def give_weights(backend: ReferenceBackend) -> tuple[torch.Tensor, torch.Tensor]:
    """A head that is not zero, so that the body has gradients."""
    score: Any = backend._policy.model.score
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        score.weight.copy_(torch.randn(score.weight.shape, generator=generator) * 0.3)
        score.bias.fill_(0.25)
    return score.weight.detach().clone(), score.bias.detach().clone()


def critic_rows() -> list[Row]:
    """Rows with targets, and values that the critic has moved away from."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for row in ragged_rows():
        columns = {
            name: torch.randn(row.response_length, generator=generator)
            for name in ("returns", "values")
        }
        rows.append(row._replace(columns=columns))
    return rows


def oracle_values(body: PreTrainedModel, row: Row, head: Sequence[torch.Tensor]) -> torch.Tensor:
    """The head's product with the body's last state in front of each response token."""
    hidden_TH = body(row.token_ids[None]).last_hidden_state[0, row.prompt_length - 1 : -1]
    return (hidden_TH @ head[0].T + head[1])[:, 0]


def oracle_loss(values: torch.Tensor, row: Row) -> torch.Tensor:
    old, returns = row.columns["values"], row.columns["returns"]
    clipped = old + (values - old).clamp(-0.2, 0.2)
    loss = 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    return row.loss_weight * loss[row.loss_mask].sum()


def test_values_and_every_gradient_equal_autograd(model: Model, tmp_path: Path) -> None:
    rows = critic_rows()
    backend = start(model.directory, tmp_path)
    head = [tensor.requires_grad_() for tensor in give_weights(backend)]
    body: Any = model.load().model
    expected = [oracle_values(body, row, head) for row in rows]
    found = backend.compute_values([rows[:4], [], rows[4:]])
    for row, values in zip(rows, expected, strict=True):
        torch.testing.assert_close(found[row.sample_id], values.detach(), atol=2e-5, rtol=1e-4)
    sums = backend.forward_backward([rows[:4], [], rows[4:]], CLIPPED)
    losses = [oracle_loss(values, row) for values, row in zip(expected, rows, strict=True)]
    total = torch.stack(losses).sum()
    assert sums.loss == pytest.approx(total.item(), rel=1e-4)
    assert sums.metrics["clipped_value"][0] > 0
    total.backward()
    parameters = dict(body.named_parameters(prefix="model"))
    parameters |= {"score.weight": head[0], "score.bias": head[1]}
    own = backend._optimizer.parameters
    assert own.keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert parameter.grad is not None and own[name].grad is not None
        assert relative_distance(own[name].grad, parameter.grad) < 1e-4, name


def test_a_new_head_says_zero_under_any_seed(model: Model, tmp_path: Path) -> None:
    rows = critic_rows()
    for seed in (0, 1):
        found = start(model.directory, tmp_path, seed=seed).compute_values([rows])
        assert all(not values.any() for values in found.values())
        assert [len(values) for values in found.values()] == [r.response_length for r in rows]


def test_a_critic_goes_on_where_it_was_saved(model: Model, tmp_path: Path) -> None:
    rows = critic_rows()

    def train(backend: ReferenceBackend) -> dict[str, torch.Tensor]:
        backend.forward_backward([rows], CLIPPED)
        backend.step(normalizer=10.0, learning_rate=0.01)
        return backend.compute_values([rows])

    first = start(model.directory, tmp_path)
    train(first)
    (tmp_path / "checkpoint").mkdir()
    first.save_checkpoint(tmp_path / "checkpoint")
    expected = train(first)
    second = start(model.directory, tmp_path)
    second.load_checkpoint(tmp_path / "checkpoint")
    found = train(second)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    policy = start(model.directory, tmp_path, head="policy")
    with pytest.raises(ValueError, match="of another model"):
        policy.load_checkpoint(tmp_path / "checkpoint")


def test_what_is_published_is_a_checkpoint_of_transformers(model: Model, tmp_path: Path) -> None:
    rows = critic_rows()
    backend = start(model.directory, tmp_path)
    give_weights(backend)
    expected = backend.compute_values([rows])
    published = tmp_path / "published"
    published.mkdir()
    (shard,) = backend.write_shards(published)
    (published / shard.file_name).rename(published / "model.safetensors")
    shutil.copy(model.directory / "config.json", published)
    assert "score.weight" in load_file(published / "model.safetensors")
    again = start(published, tmp_path).compute_values([rows])
    for name, values in expected.items():  # files are mapped: not aligned, and not equal to the bit
        torch.testing.assert_close(again[name], values, atol=1e-6, rtol=1e-5)
    plain: Any = AutoModelForTokenClassification.from_pretrained(published, num_labels=1).eval()
    row = rows[0]
    values = plain(row.token_ids[None]).logits[0, row.prompt_length - 1 : -1, 0]
    torch.testing.assert_close(values, expected[row.sample_id], atol=2e-5, rtol=1e-4)


def test_a_reward_model_is_a_sequence_classifier_of_transformers(
    model: Model, tmp_path: Path
) -> None:
    """Its weight alone; a critic's bias is not left out without a word."""
    rows, backend = critic_rows(), start(model.directory, tmp_path, head="reward")
    torch.nn.init.normal_(backend._policy.model.score.weight)
    expected = backend.compute_values([rows])
    published = tmp_path / "published"
    published.mkdir()
    (shard,) = backend.write_shards(published)
    (published / shard.file_name).rename(published / "model.safetensors")
    document = json.loads((model.directory / "config.json").read_text())
    (published / "config.json").write_text(json.dumps(reward_model_config(document)))
    again = start(published, tmp_path, head="reward").compute_values([rows])
    plain, loading = AutoModelForSequenceClassification.from_pretrained(
        published, output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    for row in rows:
        torch.testing.assert_close(again[row.sample_id], expected[row.sample_id])
        for index, value in enumerate(expected[row.sample_id]):  # of the text in front of each
            with torch.no_grad():
                found = plain(row.token_ids[None, : row.prompt_length + index]).logits[0, 0]
            torch.testing.assert_close(found, value, atol=2e-5, rtol=1e-4)
    critic = start(model.directory, tmp_path)
    (tmp_path / "critic").mkdir()
    (shard,) = critic.write_shards(tmp_path / "critic")
    shutil.copy(tmp_path / "critic" / shard.file_name, tmp_path / "critic" / "model.safetensors")
    shutil.copy(model.directory / "config.json", tmp_path / "critic")
    with pytest.raises(ValueError, match=r"has a score\.bias: it is a critic, no reward model"):
        start(tmp_path / "critic", tmp_path, head="reward")


def test_settings_without_effect_are_refused(model: Model, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reference_model has no effect"):
        start(model.directory, tmp_path, reference_model=str(model.directory))
