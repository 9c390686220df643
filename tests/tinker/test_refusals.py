"""What is not served is refused by name, once, and the model goes on."""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Callable
from typing import Any

import pytest
import tinker
from tinker import types

from tests.patience import PATIENCE
from tests.tinker.base import EQUALS_ID, reversed_pair
from tests.tinker.conftest import Gateway, datum

TOKENS = [1, 2, EQUALS_ID, 2, 1, 11]
FIVE = [0.5] * 5


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> tinker.TrainingClient:
    return gateway.begin()


@pytest.mark.parametrize(
    ("loss", "inputs", "config", "why"),
    [
        ("gspo", {"logprobs": FIVE, "advantages": FIVE}, None, "gspo.* is not served"),
        ("custom", {}, {"loss_id": "x"}, "custom.* is not served"),
        ("ppo", {"logprobs": FIVE, "advantages": FIVE}, {"epsilon": 0.1}, "epsilon"),
        ("ppo", {"logprobs": FIVE, "advantages": FIVE}, {"clip_low_threshold": "a"}, "number"),
        ("cispo", {"logprobs": FIVE, "advantages": FIVE}, {"clip_low_threshold": 1.5}, "cispo"),
        ("dro", {"logprobs": FIVE, "advantages": FIVE}, {"beta": -1.0}, "loss_fn_config"),
        ("ppo", {"advantages": FIVE}, None, "lacks 'logprobs'"),
        ("ppo", {"logprobs": FIVE[:4], "advantages": FIVE}, None, "4 numbers for 5"),
        ("ppo", {"logprobs": FIVE, "advantages": [float("nan")] * 5}, None, "not finite"),
        (
            "ppo",
            {"logprobs": FIVE, "advantages": FIVE, "weights": FIVE},
            None,
            "is not read by ppo",
        ),
        ("cross_entropy", {"weights": [float("inf")] * 5}, None, "not finite"),
        ("cross_entropy", {"target_tokens": [2, EQUALS_ID, 2, 1]}, None, "4 for 5"),
        ("cross_entropy", {"target_tokens": [9, EQUALS_ID, 2, 1, 11]}, None, "that follow"),
        ("cross_entropy", {"target_tokens": [[1, 2]] * 5}, None, "one number a token"),
        ("cross_entropy", {"target_tokens": [2, EQUALS_ID, 2, 1, 10**6]}, None, "vocabulary|token"),
    ],
)
def test_a_pass(
    client: tinker.TrainingClient, loss: Any, inputs: dict[str, Any], config: Any, why: str
) -> None:
    began = time.monotonic()
    with pytest.raises(tinker.RequestFailedError, match=why) as caught:
        client.forward_backward([datum(TOKENS, **inputs)], loss, config).result()
    assert caught.value.category == "user"
    assert time.monotonic() - began < 60  # no retry
    client.forward([datum(TOKENS)], "cross_entropy").result()


def test_a_row_that_no_micro_batch_takes(client: tinker.TrainingClient) -> None:
    with pytest.raises(tinker.RequestFailedError, match="tokens"):
        client.forward_backward([datum([1] * 20_000)], "cross_entropy").result()


def test_a_picture(client: tinker.TrainingClient) -> None:
    picture = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png")])
    row = types.Datum(model_input=picture, loss_fn_inputs={"target_tokens": [1]})
    with pytest.raises(tinker.RequestFailedError, match="text alone"):
        client.forward_backward([row], "cross_entropy").result()


def test_steps(client: tinker.TrainingClient) -> None:
    with pytest.raises(tinker.RequestFailedError, match="no gradient"):
        client.optim_step(types.AdamParams()).result()
    rows = [datum(reversed_pair(random.Random(0)))]
    for wrong, why in (
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"beta1": 1.0}, "betas|beta"),
        ({"eps": 0.0}, "epsilon"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"grad_clip_norm": -1.0}, "max_grad_norm"),
    ):
        client.forward_backward(rows, "cross_entropy").result()
        with pytest.raises(tinker.RequestFailedError, match=why):
            client.optim_step(types.AdamParams(**wrong)).result()
    client.optim_step(types.AdamParams()).result()  # of the gradients of all
    dimuon = types.DimuonParams(learning_rate=0.1)
    with pytest.raises(tinker.RequestFailedError, match="adam_params"):
        client.optim_step(dimuon).result()


def test_models(gateway: Gateway) -> None:
    service = gateway.service()
    with pytest.raises(tinker.APIStatusError, match=r"Qwen/Qwen3-8B.* is not served here"):
        service.create_lora_training_client("Qwen/Qwen3-8B").result()
    with pytest.raises(tinker.RequestFailedError, match="rank"):
        service.create_lora_training_client(str(gateway.model), rank=10**6).result()
    with pytest.raises(tinker.APIStatusError, match="nothing is trained"):
        service.create_lora_training_client(
            str(gateway.model), train_mlp=False, train_attn=False
        ).result()
    with pytest.raises(tinker.APIStatusError, match=r"dimuon.* is not served"):
        service.create_lora_training_client(
            str(gateway.model), optimizer=types.DimuonOptimizerConfig()
        ).result()


def test_kinds_of_sampling(gateway: Gateway, client: tinker.TrainingClient) -> None:
    with pytest.raises(tinker.RequestFailedError, match="snapshots alone"):
        client.save_weights_and_get_sampling_client(kind="inflight").result()
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt, one = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=1)

    def refused(why: str, params: types.SamplingParams = one, **more: Any) -> None:
        prompt_given = more.pop("prompt", prompt)
        with pytest.raises(tinker.RequestFailedError, match=why) as caught:
            sampler.sample(prompt_given, more.pop("count", 1), params, **more).result()
        assert caught.value.category == "user"

    refused("prompt_alt_tokens_k", prompt_alt_tokens_k=2)
    refused("stop", types.SamplingParams(max_tokens=1, stop=[]))
    refused("stop", types.SamplingParams(max_tokens=1, stop=[""]))
    refused("num_samples", count=100_000)
    refused("no room", prompt=types.ModelInput.from_ints([1] * 64))
    refused("no token", prompt=types.ModelInput.from_ints([]))
    refused(
        "temperature 1", types.SamplingParams(max_tokens=1, temperature=2), topk_sample_logprobs=1
    )
    refused("token|vocabulary", prompt=types.ModelInput.from_ints([10**6]))
    refused("prompt_logprobs_last_n", include_prompt_logprobs=True, prompt_logprobs_last_n=2)
    assert sampler.sample(prompt, 1, one).result().sequences[0].tokens


def test_what_is_not_there_is_no_failure_that_passes(gateway: Gateway) -> None:
    began = time.monotonic()
    with pytest.raises(tinker.NotFoundError, match="not served here"):
        gateway.rest().publish_checkpoint_from_tinker_path("tinker://a/weights/b").result()
    assert time.monotonic() - began < 60


def test_what_is_damaged_in_the_journal_is_told_once_and_for_good(gateway: Gateway) -> None:
    """Each in the first try, though the client would try again for minutes at a 5xx."""
    client, service, rest = gateway.begin(), gateway.service(), gateway.rest()
    state = client.save_state("damaged").result().path
    weights = client.save_weights_for_sampler("damaged").result().path
    sampler = service.create_sampling_client(model_path=weights).result()
    (journal,) = gateway.stack.run_dir.glob("*/journal.sqlite")
    with sqlite3.connect(journal, PATIENCE) as database:
        database.execute("UPDATE checkpoints SET about = '{}' WHERE model = ?", (client.model_id,))
        database.execute("UPDATE samplers SET about = '{}' WHERE id = ?", (sampler_id(sampler),))
    prompt, one = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=1)
    asked: list[Callable[[], Any]] = [
        lambda: rest.get_weights_info_by_tinker_path(state).result(),
        lambda: rest.delete_checkpoint_from_tinker_path(state).result(),
        lambda: service.create_sampling_client(model_path=weights).result(),
        lambda: service.create_training_client_from_state(state).result(),
        lambda: sampler.sample(prompt, 1, one).result(),
    ]
    began = time.monotonic()
    for ask in asked:
        with pytest.raises(tinker.APIStatusError, match="is damaged") as caught:
            ask()
        assert caught.value.status_code == 410
        assert caught.value.body["error"]["code"] == "journal_damaged"
    with pytest.raises(tinker.RequestFailedError, match="is damaged") as failed:
        client.load_state(state).result()
    assert failed.value.category == "server"
    assert time.monotonic() - began < 60  # no retry
    client.forward([datum(TOKENS)], "cross_entropy").result()


def sampler_id(sampler: tinker.SamplingClient) -> str:
    return str(sampler._sampling_session_id)
