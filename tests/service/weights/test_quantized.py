"""A trainer of two ranks publishes FP8 blocks, deltas too; engines serve what they stand for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sluice.client import EngineClient
from sluice.weights.store import WeightStore
from tests import fp8_oracle as oracle
from tests.service.trainer.harness import (
    RunningTrainer,
    make_groups,
    running_trainer,
    train_step,
    upload,
)
from tests.service.weights.harness import RunningEngine
from tests.service.weights.test_transfer import TOKENS, score


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RunningTrainer]:
    settings = {
        "ranks": {"count": 2},
        "publish": {"delta": True, "quantization": "fp8"},
        "optim": {"learning_rate": 1e-5},
        "keep_versions": 0,
    }
    with running_trainer(tmp_path_factory.mktemp("trainer"), model, **settings) as running:
        yield running


def expected_logprobs(model: Path, changed: dict[str, np.ndarray]) -> np.ndarray:
    """Of TOKENS after the first, in float64, by a model some of whose weights are others."""
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    with torch.no_grad():
        for name, value in changed.items():
            module.get_parameter(name).copy_(torch.from_numpy(value))
        logits = module(torch.tensor([TOKENS])).logits[0]
    logprobs = logits.log_softmax(-1)
    return np.array([float(logprobs[i, t]) for i, t in enumerate(TOKENS[1:])])


def stored(directory: Path) -> dict[str, torch.Tensor]:
    return {n: t for path in directory.glob("*.safetensors") for n, t in load_file(path).items()}


async def test_an_engine_serves_what_fp8_stands_for_and_deltas_of_it(
    trainer: RunningTrainer,
    client,
    clients: list[EngineClient],
    engines: list[RunningEngine],
    model: Path,
) -> None:
    store = WeightStore(trainer.store / "weights")
    published = await client.publish_weights()
    version = published.weights.version
    record = store.get(version)
    assert record.directory is not None and record.base is None
    tensors, plain = stored(record.directory), stored(model)
    weights = {n for n, t in tensors.items() if t.dtype == torch.float8_e4m3fn}
    assert {n.split(".")[-2] for n in weights} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    assert tensors.keys() == plain.keys() | {f"{n}_scale_inv" for n in weights}
    config = json.loads((record.directory / "config.json").read_bytes())
    found = config.pop("quantization_config")
    assert config == json.loads((model / "config.json").read_bytes())
    assert (found["quant_method"], found["fmt"]) == ("fp8", "e4m3")
    assert found["weight_block_size"] == [128, 128]
    kept = {n.removesuffix(".weight") for n, t in plain.items() if t.dim() == 2} - {
        n.removesuffix(".weight") for n in weights
    }
    assert set(found["modules_to_not_convert"]) == kept

    numbers = {}
    for name in weights:
        codes = tensors[name].view(torch.uint8).numpy()
        scales, weight = tensors[f"{name}_scale_inv"].numpy(), plain[name].numpy()
        numbers[name] = oracle.numbers(codes, scales)
        errors = np.abs(numbers[name] - weight)
        assert (errors <= oracle.least_errors(weight, scales) + 1e-6 * np.abs(weight)).all()
    (first, second) = clients
    for c in clients:
        await c.prepare_weights(published.weights)
        await c.commit_weights(published.weights)
    served = np.array(await score(first))
    wanted, unquantized = expected_logprobs(model, numbers), expected_logprobs(model, {})
    np.testing.assert_allclose(served, wanted, atol=1e-4)
    cost = np.abs(served - unquantized).max()
    assert cost > 10 * np.abs(served - wanted).max()  # so that the two can be told apart

    # what the engine samples is not quite what the trainer computes, and that is measured
    samples = [
        replace(
            sample,
            columns={
                **sample.columns,
                "rollout_logprobs": np.array(
                    (await score_of(first, sample.token_ids, sample.prompt_length)),
                    dtype=np.float32,
                ),
            },
        )
        for sample in make_groups("measured")
    ]
    batch = await upload(client, "measured", samples)
    mismatch = (await client.compute_logprobs(batch)).rollout_mismatch_mean
    await client.delete_batch(batch)
    assert 1e-4 < mismatch < 0.1

    await train_step(client, await upload(client, "one", make_groups("one")))
    published = await client.publish_weights()
    assert version in store.chain(published.weights.version)[1:]
    assert 0 < published.byte_count < 0.5 * published.full_byte_count
    for c in clients:
        await c.prepare_weights(published.weights)
        await c.commit_weights(published.weights)
    assert await score(first) == await score(second) != list(served)


async def score_of(client: EngineClient, token_ids: np.ndarray, prompt_length: int) -> list[float]:
    from sluice.api.rollout.v1 import engine_service_pb2 as pb

    request = pb.ScoreRequest(token_ids=token_ids.tolist(), prompt_length=prompt_length)
    return list((await client.stub.Score(request)).logprobs)
