"""Adapters of several users in one engine: each serves those that name it, and nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from functools import partial
from pathlib import Path

import pytest

from sluice.api.common.v1.sample_pb2 import WeightVersion
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.client import EngineClient, RemoteError
from sluice.runtime.security import SecurityConfig
from sluice.weights.checkpoint import digest_base
from sluice.weights.store import StoredVersion, WeightStore
from tests.adapters import import_adapter, make_adapter
from tests.service.trainer.harness import poll
from tests.service.weights.harness import RunningEngine, running_engines, serves
from tests.service.weights.test_adapters import PROMPT, furthest, named, serve

HELD = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[Path]:
    """Adapters of several ranks."""
    root = tmp_path_factory.mktemp("folders")
    return [
        make_adapter(model, root / str(index), 20 + index, rank=2 << index % 3)
        for index in range(HELD + 1)
    ]


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "store" / "weights", durable=False)


@pytest.fixture
def engine(tmp_path: Path, model: Path, store: WeightStore) -> Iterator[RunningEngine]:
    (tmp_path / "token").write_text("a secret")
    security = SecurityConfig(token_file=tmp_path / "token")
    settings = {"model": str(model), "threads": 1, "max_running": 8, "max_adapters": HELD}
    with running_engines(tmp_path, model, tmp_path / "store", security, 1, engine=settings) as (
        engine,
    ):
        yield engine


@pytest.fixture
async def client(engine: RunningEngine) -> AsyncIterator[EngineClient]:
    async with engine.client() as client:
        await poll(partial(serves, client))
        yield client


def publish(store: WeightStore, model: Path, folder: Path, line: str) -> StoredVersion:
    return import_adapter(store, folder, digest_base(model), line=line)


async def refusal(client: EngineClient, adapter: str) -> str:
    with pytest.raises(RemoteError) as error:
        await client.generate(PROMPT, max_new_tokens=2, adapter=adapter)
    return error.value.reason


async def test_one_batch_mixes_lines_and_each_request_gets_its_own(
    client: EngineClient, store: WeightStore, folders: list[Path], model: Path
) -> None:
    lines = ["alice", "bob", "alice", ""]
    records = [publish(store, model, f, line) for f, line in zip(folders, lines, strict=False)]
    for record in records[:2]:  # both are ready, and the older one is not lost to the newer
        await client.prepare_weights(named(record))
    for record in reversed(records[:2]):
        await client.commit_weights(named(record))
    assert (await client.get()).weights.version == 0  # whoever names none has the base
    assert await furthest(client, model, None, "") < 1e-5
    for record in records[2:]:
        await serve(client, record)
    wanted = {
        "alice@1": folders[0],
        "alice": folders[2],
        "alice@3": folders[2],
        "bob": folders[1],
        "bob@2": folders[1],
        "policy@4": folders[3],
        "": folders[3],
        "base": None,
    }
    errors = await asyncio.gather(
        *(furthest(client, model, folder, name) for name, folder in wanted.items())
    )
    assert max(errors) < 1e-5, dict(zip(wanted, errors, strict=True))
    assert await furthest(client, model, folders[1], "alice") > 1e-4  # they are not alike
    for name in ("alice@2", "bob@1", "policy@1", "policy@3", "carol", "carol@1", "alice@9"):
        assert await refusal(client, name) == "VERSION_UNAVAILABLE"
    for name in ("alice@", "alice@x", "@1", "a/b@1", "policy"):
        assert await refusal(client, name) == "INVALID_FIELD"
    told = {(w.version, w.adapter) for w in (await client.get()).adapters}
    assert told == {(1, "alice"), (2, "bob"), (3, "alice"), (4, "")}
    answer = await client.stub.Score(
        engine_pb.ScoreRequest(token_ids=[*PROMPT, 5, 6], prompt_length=4, adapter="bob")
    )
    assert answer.weights == named(records[1])
    await serve(client, records[0])  # again: it is there, and nothing changes
    assert (await client.get()).weights.version == 4


async def test_what_is_replaced_gives_way_before_the_newest_of_anybody(
    client: EngineClient, store: WeightStore, folders: list[Path], model: Path
) -> None:
    first = publish(store, model, folders[0], "quiet")
    await serve(client, first)
    records = [publish(store, model, folder, "busy") for folder in folders[1:]]
    for record in records:
        await serve(client, record)
    held = [(w.version, w.adapter) for w in (await client.get()).adapters]
    assert held == [(1, "quiet"), (3, "busy"), (4, "busy"), (5, "busy")]
    assert await furthest(client, model, folders[0], "quiet") < 1e-5
    assert await refusal(client, "busy@2") == "VERSION_UNAVAILABLE"
    assert store.pins().keys() == {1, 3, 4, 5}


@pytest.mark.parametrize(
    ("line", "wrong"), [("alice", "bob"), ("alice", "../x"), ("alice", "base"), ("", "alice")]
)
async def test_a_version_of_another_adapter_than_the_one_named_is_refused(
    client: EngineClient,
    store: WeightStore,
    folders: list[Path],
    model: Path,
    line: str,
    wrong: str,
) -> None:
    weights = named(publish(store, model, folders[0], line))
    other = WeightVersion(version=weights.version, digest=weights.digest, adapter=wrong)

    async def is_refused(call: Awaitable[float]) -> bool:
        with pytest.raises(RemoteError) as error:
            await call
        whose = error.value.metadata["adapter"]
        return (error.value.reason, whose) == ("ADAPTER_MISMATCH", line)

    assert await is_refused(client.prepare_weights(other))
    await client.prepare_weights(weights)
    assert await is_refused(client.commit_weights(other))
    assert not (await client.get()).adapters
    await client.commit_weights(weights)
    for call in (client.prepare_weights(other), client.commit_weights(other)):
        assert await is_refused(call)  # also once it is there


async def test_the_base_of_an_engine_that_sleeps_is_not_held_and_no_wrong_name(
    client: EngineClient, store: WeightStore, folders: list[Path], model: Path
) -> None:
    await serve(client, publish(store, model, folders[0], "alice"))
    await client.pause(engine_pb.PAUSE_MODE_ABORT)
    await client.sleep()
    for name in ("base", "alice", "alice@1", "policy@0"):
        assert await refusal(client, name) == "VERSION_UNAVAILABLE"
    assert await refusal(client, "alice@") == "INVALID_FIELD"
    await client.wake()
    await client.resume()
    assert await furthest(client, model, None, "base") < 1e-5
