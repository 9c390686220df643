"""A trainer publishes a mixture in INT4, deltas too; engines serve what it stands for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sluice.client import EngineClient
from sluice.weights.store import WeightStore
from tests import int4_oracle
from tests.models.families import CASES, build
from tests.service.trainer.harness import (
    RunningTrainer,
    make_groups,
    running_trainer,
    train_step,
    upload,
)
from tests.service.weights.test_quantized import stored
from tests.service.weights.test_transfer import TOKENS, score


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = next(case for case in CASES if case.name == "qwen3_moe")
    return build(case, tmp_path_factory.mktemp("mixture") / "model").directory


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RunningTrainer]:
    settings = {
        "publish": {"delta": True, "quantization": "int4_32"},
        "optim": {"learning_rate": 1e-5},
        "keep_versions": 0,
    }
    with running_trainer(tmp_path_factory.mktemp("trainer"), model, **settings) as running:
        yield running


def expected_logprobs(model: Path, numbers: dict[str, torch.Tensor], place: Path) -> np.ndarray:
    """Of TOKENS after the first, in float64, by plain transformers."""
    place.mkdir()
    (place / "config.json").write_bytes((model / "config.json").read_bytes())
    save_file({n: t.double() for n, t in numbers.items()}, place / "model.safetensors")
    module: Any = AutoModelForCausalLM.from_pretrained(
        place, dtype=torch.float64, experts_implementation="eager"
    )
    with torch.no_grad():
        logprobs = module(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    return np.array([float(logprobs[i, t]) for i, t in enumerate(TOKENS[1:])])


async def test_an_engine_serves_what_int4_stands_for_and_deltas_of_it(
    trainer: RunningTrainer, client, clients: list[EngineClient], model: Path, tmp_path: Path
) -> None:
    store = WeightStore(trainer.store / "weights")
    published = await client.publish_weights()
    version = published.weights.version
    record = store.get(version)
    assert record.directory is not None
    plain = load_file(model / "model.safetensors")
    numbers = int4_oracle.plain(stored(record.directory))
    assert numbers.keys() == plain.keys()
    experts = {name for name in plain if ".experts." in name}
    for name in plain.keys() - experts:
        assert torch.equal(numbers[name], plain[name])
    for name in experts:
        scale = stored(record.directory)[f"{name}_scale"].double().numpy()
        errors = np.abs(numbers[name].numpy() - plain[name].double().numpy())
        nearest = int4_oracle.least_errors(plain[name].numpy(), scale)
        assert (errors <= nearest + 1e-6).all() and errors.max() > 0
    config = json.loads((record.directory / "config.json").read_bytes())
    found = config.pop("quantization_config")
    assert config == json.loads((model / "config.json").read_bytes())
    assert (found["quant_method"], found["format"]) == ("compressed-tensors", "pack-quantized")
    assert not any(".experts." in name for name in found["ignore"])

    (first, second) = clients
    for each in clients:
        await each.prepare_weights(published.weights)
        await each.commit_weights(published.weights)
    served = np.array(await score(first))
    wanted = expected_logprobs(model, numbers, tmp_path / "int4")
    unquantized = expected_logprobs(model, plain, tmp_path / "plain")
    np.testing.assert_allclose(served, wanted, atol=1e-5)
    assert np.abs(served - unquantized).max() > 100 * np.abs(served - wanted).max()

    await train_step(client, await upload(client, "one", make_groups("one")))
    published = await client.publish_weights()
    assert version in store.chain(published.weights.version)[1:]
    assert 0 < published.byte_count < 0.9 * published.full_byte_count
    for each in clients:
        await each.prepare_weights(published.weights)
        await each.commit_weights(published.weights)
    again = await score(first)
    assert again == await score(second) != list(served)
