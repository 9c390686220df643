"""Adapters in engines of their own processes: mixed, refused by name, killed and stopped.

The tests share two engines and a store; each publishes what it asks for.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import grpc
import psutil
import pytest
from safetensors.torch import load_file

from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.client import EngineClient, RemoteError, typed_errors
from sluice.runtime.security import SecurityConfig
from sluice.weights.adapter import ADAPTER_CONFIG, ADAPTER_FILE, decode_adapter_config
from sluice.weights.checkpoint import digest_base
from sluice.weights.manifest import MANIFEST_NAME
from sluice.weights.shards import PublishedShards
from sluice.weights.store import StoredVersion, WeightStore
from tests.adapters import import_adapter, make_adapter, peft_logprobs
from tests.patience import PATIENCE
from tests.service.trainer.harness import poll
from tests.service.weights.harness import RunningEngine, running_engines, serves

SECURITY = SecurityConfig()
PROMPT = [1, 2, 3, 10]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    return WeightStore(tmp_path_factory.mktemp("store") / "weights", durable=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[Path]:
    root = tmp_path_factory.mktemp("peft")
    return [make_adapter(model, root / str(index), seed=index) for index in range(3)]


@pytest.fixture(scope="module")
def engines(
    tmp_path_factory: pytest.TempPathFactory, model: Path, store: WeightStore
) -> Iterator[list[RunningEngine]]:
    root, place = tmp_path_factory.mktemp("engines"), Path(store.location).parent
    with running_engines(root, model, place, SECURITY, 2) as running:
        yield running


def named(record: StoredVersion) -> sample_pb2.WeightVersion:
    return sample_pb2.WeightVersion(
        version=record.version, digest=record.digest, adapter=record.line
    )


def publish(store: WeightStore, folder: Path, model: Path) -> StoredVersion:
    parent = max(store.versions(), default=None)
    return import_adapter(store, folder, digest_base(model), parent)


async def serve(client: EngineClient, record: StoredVersion) -> None:
    await client.prepare_weights(named(record))
    await client.commit_weights(named(record))


async def furthest(client: EngineClient, model: Path, folder: Path | None, adapter: str) -> float:
    (found,) = await client.generate(PROMPT, max_new_tokens=6, adapter=adapter)
    expected = peft_logprobs(model, folder, PROMPT, found.token_ids)
    return max(abs(a - b) for a, b in zip(found.logprobs, expected, strict=True))


async def refused(client: EngineClient, record: StoredVersion) -> RemoteError:
    with pytest.raises(RemoteError) as error:
        await client.prepare_weights(named(record))
    return error.value


async def test_requests_pick_adapters_by_name_and_by_version(
    clients: list[EngineClient], store: WeightStore, folders: list[Path], model: Path
) -> None:
    client = clients[0]
    records = [publish(store, folder, model) for folder in folders]
    for record in records:
        await serve(client, record)
    first, second, third = (record.version for record in records)
    assert first < second < third
    names = {
        "base": None,
        f"policy@{first}": folders[0],
        f"policy@{second}": folders[1],
        "": folders[2],
    }
    errors = await asyncio.gather(
        *(furthest(client, model, folder, name) for name, folder in names.items())
    )
    assert max(errors) < 1e-5
    described = await client.get()
    assert described.weights == named(records[2])
    assert list(described.adapters)[-3:] == [named(record) for record in records]
    assert described.base.digest == digest_base(model)
    with typed_errors():
        exact = engine_pb.VersionBounds(exact_version=first)
        tokens = [*PROMPT, 5, 6]
        answer = await client.stub.Score(
            engine_pb.ScoreRequest(token_ids=tokens, prompt_length=4, versions=exact)
        )
    assert answer.weights == named(records[0])
    expected = peft_logprobs(model, folders[0], PROMPT, [5, 6])
    assert list(answer.logprobs) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("policy@99", "VERSION_UNAVAILABLE"),
        ("policy@" + "9" * 5000, "INVALID_FIELD"),
        ("policy@-1", "INVALID_FIELD"),
        ("policy@\u0661", "INVALID_FIELD"),
        ("../1", "INVALID_FIELD"),
        ("policy@1\0", "INVALID_FIELD"),
        ("Policy@1", "VERSION_UNAVAILABLE"),
        ("policy", "INVALID_FIELD"),
        ("alice@", "INVALID_FIELD"),
    ],
)
async def test_names_of_nothing_are_refused(
    clients: list[EngineClient], name: str, reason: str
) -> None:
    with pytest.raises(RemoteError) as error:
        await clients[0].generate(PROMPT, max_new_tokens=2, adapter=name)
    assert error.value.reason == reason


async def test_bounds_and_name_must_agree(
    clients: list[EngineClient], store: WeightStore, folders: list[Path], model: Path
) -> None:
    record = publish(store, folders[0], model)
    await serve(clients[0], record)
    for bounds, reason in (
        ({"exact_version": record.version + 1}, "INVALID_FIELD"),
        ({"min_version": record.version + 1}, "VERSION_UNAVAILABLE"),
    ):
        request = engine_pb.GenerateRequest(
            request_id=f"agree-{reason}",
            prompt_token_ids=PROMPT,
            sampling=engine_pb.SamplingParams(max_new_tokens=2),
            versions=engine_pb.VersionBounds(**bounds),
            adapter=f"policy@{record.version}",
        )
        with pytest.raises(RemoteError) as error, typed_errors():
            await clients[0].stub.Generate(request)
        assert error.value.reason == reason


async def test_what_cannot_serve_is_named_and_the_version_before_serves_on(
    clients: list[EngineClient],
    store: WeightStore,
    folders: list[Path],
    model: Path,
    tmp_path: Path,
) -> None:
    client = clients[0]
    await serve(client, publish(store, folders[2], model))
    before = (await client.get()).weights
    stranger = import_adapter(store, folders[0], "0" * 32)
    error = await refused(client, stranger)
    assert (error.reason, error.code) == ("ADAPTER_BASE", grpc.StatusCode.FAILED_PRECONDITION)
    assert error.metadata["actual"] == digest_base(model)
    for damage in ("flip", "cut", "config", "manifest"):
        record = publish(store, folders[1], model)
        assert record.directory is not None
        names = {"config": ADAPTER_CONFIG, "manifest": MANIFEST_NAME}
        path = record.directory / names.get(damage, ADAPTER_FILE)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data[:-9] if damage == "cut" else data)
        error = await refused(client, record)
        assert error.code == grpc.StatusCode.DATA_LOSS
        assert error.metadata.get("tensor") or error.metadata["file"] == path.name
        shutil.rmtree(record.directory)
    assert (await client.get()).weights == before
    assert await furthest(client, model, folders[2], "") < 1e-5


async def test_files_are_taken_as_they_are_written(
    clients: list[EngineClient], store: WeightStore, folders: list[Path], model: Path
) -> None:
    client, shards = clients[0], PublishedShards(keep=False, sync=False)
    tensors = load_file(folders[0] / ADAPTER_FILE)
    data = (folders[0] / ADAPTER_CONFIG).read_bytes()
    spec = decode_adapter_config(data, digest_base(model))
    staging = store.allocate(None)
    staged = asyncio.create_task(client.stage_weights(staging.version, PATIENCE))
    shards.begin(None)
    announce = partial(store.announce, staging.version, directory=staging.directory)
    written = shards.submit(staging.directory, ADAPTER_FILE, tensors, {}, announce)()
    await asyncio.sleep(0)
    record = store.commit(staging, [written], [], 0, adapter=spec)
    assert await staged in (0, written.size)
    await serve(client, record)
    assert await furthest(client, model, folders[0], "") < 1e-5


@pytest.mark.parametrize("point", ["engine.prepared", "engine.swapped"])
async def test_an_engine_that_dies_while_it_takes_an_adapter_starts_from_its_base(
    engines: list[RunningEngine],
    clients: list[EngineClient],
    store: WeightStore,
    folders: list[Path],
    model: Path,
    point: str,
) -> None:
    engine = engines[1]
    await serve(clients[1], publish(store, folders[0], model))
    record = publish(store, folders[1], model)
    engine.kill_at(point)
    with pytest.raises(RemoteError):
        await serve(clients[1], record)
    engine.process.wait(PATIENCE)
    engine.revive()
    async with engine.client() as client:
        await poll(partial(serves, client))
        described = await client.get()
        assert (described.weights.version, len(described.adapters)) == (0, 0)
        assert await furthest(client, model, None, "") < 1e-5
        await serve(client, record)
        assert await furthest(client, model, folders[1], "") < 1e-5
        described = await client.get()
        assert described.weights == named(record)
    assert store.pins().keys() >= {record.version}


async def test_a_stopped_engine_goes_on_with_the_adapter_that_it_had_or_the_new_one(
    engines: list[RunningEngine],
    clients: list[EngineClient],
    store: WeightStore,
    folders: list[Path],
    model: Path,
) -> None:
    engine, client = engines[1], clients[1]
    before = publish(store, folders[0], model)
    await asyncio.gather(*(serve(each, before) for each in clients))
    record = publish(store, folders[2], model)
    with engine.stopped():
        serving = asyncio.create_task(serve(client, record))
        assert await furthest(clients[0], model, folders[0], "") < 1e-5  # of the other engine
        assert not serving.done()
    async with asyncio.timeout(PATIENCE):
        await serving
    assert await furthest(client, model, folders[2], "") < 1e-5
    engine.kill_at("engine.prepared", number=signal.SIGSTOP)
    late = publish(store, folders[1], model)
    serving = asyncio.create_task(serve(client, late))
    await poll(lambda: _is_stopped(engine))
    engine.signal(signal.SIGCONT)
    async with asyncio.timeout(PATIENCE):
        await serving
    assert await furthest(client, model, folders[1], "") < 1e-5


async def _is_stopped(engine: RunningEngine) -> bool:
    return psutil.Process(engine.process.pid).status() == psutil.STATUS_STOPPED
