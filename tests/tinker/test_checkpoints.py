"""State that is saved, loaded into other models, listed, and that expires."""

from __future__ import annotations

import random

import pytest
import tinker
import torch
from tinker import types

from tests.tinker.base import reversed_pair
from tests.tinker.conftest import Gateway, datum
from tests.tinker.oracle import published
from tests.tinker.test_training import folder_of

ADAM = types.AdamParams(learning_rate=3e-3)


def train(client: tinker.TrainingClient, first: int, count: int) -> None:
    for step in range(first, first + count):
        rows = [datum(reversed_pair(random.Random(100 * step + i))) for i in range(4)]
        client.forward_backward(rows, "cross_entropy")
        client.optim_step(ADAM).result()


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_a_run_goes_on_to_the_bit_where_another_was_saved(gateway: Gateway) -> None:
    client = gateway.begin(seed=2)
    train(client, 0, 3)
    path = client.save_state("middle", user_metadata={"at": "3"}).result().path
    train(client, 3, 3)
    whole = published(folder_of(gateway, client))

    resumed = gateway.service().create_training_client_from_state_with_optimizer(path).result()
    train(resumed, 3, 3)
    assert equal(published(folder_of(gateway, resumed)), whole)
    fresh = gateway.service().create_training_client_from_state(path).result()
    train(fresh, 3, 3)
    assert not equal(published(folder_of(gateway, fresh)), whole)  # its optimizer began anew
    client.load_state_with_optimizer(path).result()
    train(client, 3, 3)
    assert equal(published(folder_of(gateway, client)), whole)


def test_what_is_saved_is_listed_and_deleted(gateway: Gateway) -> None:
    client = gateway.begin(user_metadata={"name": "listed"})
    state = client.save_state("a b:c", user_metadata={"x": "y"}).result().path
    weights = client.save_weights_for_sampler("w", ttl_seconds=3600).result().path
    rest = gateway.rest()
    listed = {
        each.tinker_path: each
        for each in rest.list_checkpoints(client.model_id).result().checkpoints
    }
    assert set(listed) == {state, weights}
    assert listed[state].user_metadata == {"x": "y"}
    assert listed[state].expires_at is None
    assert listed[weights].expires_at is not None
    info = rest.get_weights_info_by_tinker_path(state).result()
    assert (info.base_model, info.lora_rank, info.is_lora) == (str(gateway.model), 4, True)
    run = rest.get_training_run(client.model_id).result()
    assert run.last_checkpoint.tinker_path == state
    assert run.user_metadata == {"name": "listed"}
    session = client.holder.get_session_id()
    assert client.model_id in rest.get_session(session).result().training_run_ids
    rest.delete_checkpoint_from_tinker_path(state).result()
    with pytest.raises(tinker.RequestFailedError, match="names no checkpoint"):
        client.load_state(state).result()
    train(client, 0, 1)  # and the model goes on


def test_names_are_given_once(gateway: Gateway) -> None:
    client = gateway.begin()
    client.save_state("same").result()
    with pytest.raises(tinker.RequestFailedError, match="exists"):
        client.save_state("same").result()
    client.save_state("same", overwrite=True).result()
    for name in ("", "../x", "a/b", ".", "..", "\0", "x" * 5000):
        with pytest.raises(tinker.RequestFailedError, match="a name has"):
            client.save_state(name).result()
        with pytest.raises(tinker.RequestFailedError, match="a name has"):
            client.save_weights_for_sampler(name).result()
    train(client, 0, 1)


def test_another_rank_and_a_path_of_nothing_are_refused(gateway: Gateway) -> None:
    client = gateway.begin(rank=2)
    path = client.save_state("two").result().path
    with pytest.raises(tinker.RequestFailedError, match="rank"):
        gateway.begin(rank=4).load_state(path).result()
    weights = client.save_weights_for_sampler("w").result().path
    with pytest.raises(tinker.APIStatusError, match="to sample from"):
        gateway.service().create_training_client_from_state(weights).result()
    with pytest.raises(tinker.APIStatusError, match="names no weights"):
        gateway.service().create_sampling_client(model_path=path).result()
    with pytest.raises(tinker.APIStatusError, match="names no"):
        gateway.service().create_sampling_client(
            model_path="tinker://no/sampler_weights/x"
        ).result()


def test_a_session_that_ends_gives_its_models_up(gateway: Gateway) -> None:
    service = gateway.service()
    client = service.create_lora_training_client(str(gateway.model), 4).result()
    path = client.save_state("left").result().path
    service.close("success").result()
    other = gateway.service().create_training_client_from_state(path).result()
    assert other.forward([datum(reversed_pair(random.Random(0)))], "cross_entropy").result()
    runs = gateway.rest().get_training_run(client.model_id).result()
    assert runs.training_run_id == client.model_id
