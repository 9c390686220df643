"""Weights get from ranks to an engine whole, or not at all: through the store, or past it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from services.rollout.engine.interface import IncomingWeights, PauseMode
from services.rollout.engine.reference.engine import ReferenceEngine
from services.rollout.errors import DigestMismatchError, TransferFailedError, UnfitWeightsError
from sluice.runtime.errors import NotFoundError, ServiceError
from sluice.weights.host_cache import HostCache
from sluice.weights.transfer.plan import HANDLES
from tests.contract.engine.cases import Model, complete, request_of
from tests.contract.weight_transport.conftest import FILES, SECONDS, Stage, started
from tests.contract.weight_transport.sender import Sender
from tests.patience import PATIENCE

EMBEDDINGS = "model.embed_tokens.weight"
PROJECTION = "model.layers.1.mlp.down_proj.weight"


async def serves(stage: Stage, model: Model) -> bool:
    """Whether what the engine draws has the log-probs of `model`."""
    (sample,) = await complete(stage.engine, request_of(f"check-{time.monotonic()}", [1, 2, 3]))
    expected = model.logprobs([1, 2, 3], sample.token_ids)
    return sample.logprobs == pytest.approx(expected, abs=1e-4)


async def test_what_arrives_is_what_was_published(stage: Stage, models: list[Model]) -> None:
    second = stage.versions[1]
    assert await stage.deliver(second) > 0
    assert stage.engine.status().prepared_versions == (second.version,)
    assert await serves(stage, models[0])  # until the commit
    assert await stage.weights.prepare(second.version, second.digest) == 0.0
    await stage.weights.commit(second.version, second.digest, PauseMode.IN_PLACE)
    status = stage.engine.status()
    assert (status.version, status.digest) == (second.version, second.digest)
    assert await serves(stage, models[1])
    assert not await serves(stage, models[0])
    assert set(stage.store.pins()) == {second.version}


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_running_requests_see_one_swap(stage: Stage, mode: PauseMode) -> None:
    first, second = stage.versions
    request = request_of("long", [1, 2, 3], max_new_tokens=400)
    running = asyncio.create_task(complete(stage.engine, request))
    while not stage.engine.status().rank_loads[0].running_count:
        await asyncio.sleep(0)
    await stage.deliver(second)
    await stage.weights.commit(second.version, second.digest, mode)
    (sample,) = await asyncio.wait_for(running, PATIENCE)
    versions = [(span.version, span.digest) for span in sample.spans]
    spans = [(span.first_token, span.last_token) for span in sample.spans]
    assert spans[0][0] == 0 and spans[-1][1] == len(sample.token_ids) - 1
    if mode is PauseMode.IN_PLACE and len(versions) > 1:
        assert versions == [(first.version, first.digest), (second.version, second.digest)]
        assert spans[1][0] == spans[0][1] + 1
    else:
        assert versions == [(first.version, first.digest)]


@pytest.mark.parametrize("tensor", [EMBEDDINGS, PROJECTION])
async def test_one_flipped_bit_is_refused_by_the_name_of_the_tensor(
    stage: Stage, models: list[Model], tensor: str
) -> None:
    second = stage.versions[1]
    stage.spoil(second, tensor)
    with pytest.raises(DigestMismatchError) as refused:
        await stage.deliver(second)
    assert refused.value.metadata["tensor"] == tensor
    assert stage.engine.status().prepared_versions == ()
    assert await serves(stage, models[0])
    stage.mend(second, tensor)
    await stage.deliver(second)
    await stage.weights.commit(second.version, second.digest, PauseMode.IN_PLACE)
    assert await serves(stage, models[1])


async def test_a_version_that_is_not_whole_is_refused(stage: Stage, models: list[Model]) -> None:
    """Of the transfer: what the senders said they own is not all there is."""
    second = stage.versions[1]
    if stage.is_sent:
        stage.store.get(second.version).directory.joinpath("manifest.json").unlink()
    else:
        next(second.directory.glob("model-0*")).unlink()
    with pytest.raises(ServiceError):
        await stage.deliver(second)
    assert await serves(stage, models[0])


@pytest.mark.parametrize("stage", ["collective", HANDLES], indirect=True)
async def test_files_of_fewer_senders_than_were_joined_are_refused(
    stage: Stage, models: list[Model]
) -> None:
    with pytest.raises(TransferFailedError, match="1 senders for the 2"):
        await stage.deliver(stage.versions[1], FILES[:1])
    assert await serves(stage, models[0])


@pytest.mark.parametrize("stage", ["store", "delta"], indirect=True)
@pytest.mark.parametrize("damage", ["header", "end", "file"])
async def test_a_damaged_file_of_a_version_is_lost_data_by_its_name(
    stage: Stage, damage: str
) -> None:
    """Also where no tensor can be named, and nothing can be compared with a digest."""
    record = stage.versions[1]
    path = next(record.directory.glob("model-*.safetensors*"))
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    if damage == "file":
        path.unlink()
    else:
        path.write_bytes(data if damage == "header" else data[:-7])
    with pytest.raises(DigestMismatchError) as refused:
        await stage.deliver(record)
    assert refused.value.metadata["file"] == path.name
    assert stage.engine.status().prepared_versions == ()


async def test_what_a_transfer_failed_to_bring_comes_from_the_store(
    stage: Stage, models: list[Model]
) -> None:
    second = stage.versions[1]
    if stage.is_sent:
        stage.sender.call("damage", PROJECTION)
        with pytest.raises(DigestMismatchError):
            await stage.deliver(second)
    assert await stage.weights.prepare(second.version, second.digest) > 0
    await stage.weights.commit(second.version, second.digest, PauseMode.IN_PLACE)
    assert await serves(stage, models[1])


async def test_senders_killed_midway_leave_the_engine_serving(
    stage: Stage, models: list[Model], tmp_path
) -> None:
    if not stage.is_sent:
        stage.store.retain(1)  # nobody sends: the engine reads what is there
    else:
        mortal = Sender(tmp_path / "faults")
        first, second = stage.versions
        for model, base in ((models[0], None), (models[1], first.version)):
            record = mortal.call("publish", stage.store.location, model.directory, base)
        mortal.kill_at(3)
        stage.sender = mortal
        async with asyncio.timeout(SECONDS):  # nobody waits for the deadline
            with pytest.raises(TransferFailedError):
                await stage.deliver(record)
        mortal.close()
        assert stage.weights.transfers.group == ""
        assert second.version < record.version
    assert await serves(stage, models[0])
    latest = stage.store.latest()
    await stage.weights.prepare(latest.version, latest.digest)
    await stage.weights.commit(latest.version, latest.digest, PauseMode.IN_PLACE)
    assert await serves(stage, models[1])


@pytest.mark.parametrize("stage", ["delta"], indirect=True)
async def test_a_directory_on_this_host_is_held_while_its_version_serves(
    stage: Stage, models: list[Model], tmp_path
) -> None:
    second = stage.versions[1]
    cache = HostCache(tmp_path / "cache", stage.store)
    directory = tmp_path / "cache" / f"{second.version:08d}-{second.digest}"
    await stage.deliver(second)
    await stage.weights.commit(second.version, second.digest, PauseMode.IN_PLACE)
    cache.discard(second.version)
    assert directory.is_dir()
    third = stage.sender.call("publish", stage.store.location, models[0].directory, None)
    await stage.deliver(third)
    await stage.weights.commit(third.version, third.digest, PauseMode.IN_PLACE)
    cache.discard(second.version)
    assert not directory.exists()


@pytest.mark.parametrize("stage", ["delta"], indirect=True)
@pytest.mark.parametrize("name", ["model-*", "config.json", "manifest.json"])
async def test_a_version_cut_short_on_this_host_is_fetched_again(
    stage: Stage, models: list[Model], tmp_path, name: str
) -> None:
    """A crash of the machine leaves files empty: they are not synced, for they are copies."""
    second = stage.versions[1]
    held = HostCache(tmp_path / "cache", stage.store).take(second.version)
    held.release()
    next(held.directory.glob(name)).write_bytes(b"")
    await stage.deliver(second)
    await stage.weights.commit(second.version, second.digest, PauseMode.IN_PLACE)
    assert await serves(stage, models[1])


@pytest.mark.parametrize("stage", ["store"], indirect=True)
async def test_an_engine_that_looks_in_another_store_says_where(stage: Stage) -> None:
    with pytest.raises(NotFoundError, match=f"'77' does not exist in {stage.store.location}"):
        await stage.weights.prepare(77, "0" * 32)


@pytest.mark.parametrize("stage", ["store"], indirect=True)
async def test_a_pin_is_not_lost_to_a_preparation_that_ends(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One looks for pins to remove while the next one has just made its own."""
    looking, go_on = threading.Event(), threading.Event()
    original, (_, second) = stage.store.pins, stage.versions

    def pins() -> dict[int, set[str]]:
        looking.set()
        go_on.wait(1)
        return original()

    monkeypatch.setattr(stage.store, "pins", pins)
    ending = asyncio.create_task(stage.weights.forget_old_pins())
    await asyncio.to_thread(looking.wait, 5)
    preparing = asyncio.create_task(stage.weights.prepare(second.version, second.digest))
    await asyncio.sleep(0.2)
    go_on.set()
    await asyncio.gather(ending, preparing)
    assert second.version in original()


class OneVersion(ReferenceEngine):
    """As SGLang does: what it receives serves at once."""

    async def receive(self, incoming: IncomingWeights) -> None:
        await super().receive(incoming)
        await super().commit(incoming.manifest.version, incoming.mode)


@pytest.mark.parametrize("stage", ["collective", HANDLES], indirect=True)
async def test_an_engine_that_holds_one_version_tells_when_it_serves_it(
    stage: Stage, models: list[Model], tmp_path
) -> None:
    first, second = stage.versions
    told: list[int | None] = []
    async with started(stage.store, tmp_path / "one", OneVersion, told) as (engine, weights):
        await weights.prepare(first.version, first.digest)
        await weights.commit(first.version, first.digest, PauseMode.IN_PLACE)
        stage.engine, stage.weights = engine, weights
        await stage.deliver(second)
        assert told == [first.version, second.version]
        assert await weights.commit(second.version, second.digest, PauseMode.IN_PLACE) == 0.0
        assert await serves(stage, models[1])


async def test_an_engine_without_a_model_begins_with_the_store(
    stage: Stage, models: list[Model], tmp_path
) -> None:
    """A transfer carries tensors; what they are tensors of is in the config beside them."""
    second = stage.versions[1]
    async with started(stage.store, tmp_path / "other") as (engine, weights):
        stage.engine, stage.weights = engine, weights
        if stage.is_sent:
            with pytest.raises(UnfitWeightsError, match="needs the store"):
                await stage.deliver(second)
            await weights.prepare(second.version, second.digest)
        else:
            await stage.deliver(second)
        await weights.commit(second.version, second.digest, PauseMode.IN_PLACE)
        assert await serves(stage, models[1])
