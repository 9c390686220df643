"""Whether processes see one store, where that is a bucket."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping

import pytest

from sluice.bucket import ObjectBucket
from sluice.client import Client
from sluice.config import ConfigError
from sluice.loop.store_inspection import inspect_store
from sluice.place import Place
from sluice.runtime.server import Server, ServerConfig
from sluice.runtime.store_checks import add_store_service
from sluice.store_check import FOLDER
from tests.s3_server import environment, make_bucket, running_s3

STORE, WEIGHTS = "s3://shared/run", "s3://shared/run/weights"
OWN: dict[str, Place] = {"store": STORE, "weights": WEIGHTS}


@pytest.fixture(scope="module", autouse=True)
def buckets() -> Iterator[None]:
    with running_s3() as endpoint, pytest.MonkeyPatch.context() as patch:
        for name in ("shared", "other"):
            make_bucket(endpoint, name)
        for name, value in environment(endpoint).items():
            patch.setenv(name, value)
        yield


@contextlib.asynccontextmanager
async def process(places: Mapping[str, Place]) -> AsyncIterator[Client]:
    """A process that uses these."""
    server = Server(ServerConfig())
    add_store_service(server, places)
    await server.start()
    try:
        async with Client(server.address) as client:
            yield client
    finally:
        await server.stop()


async def inspected(**others: Mapping[str, Place]) -> None:
    async with contextlib.AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(process(places))
            for name, places in others.items()
        }
        await inspect_store(OWN, clients)


async def test_those_who_use_one_prefix_are_let_begin_and_leave_nothing() -> None:
    await inspected(trainer=OWN, engine={"weights": WEIGHTS}, worker={"store": STORE})
    assert ObjectBucket("s3://shared").keys("") == []


@pytest.mark.parametrize(
    ("use", "place", "reason"),
    [
        ("store", "s3://shared/run2", "is another one than s3://shared/run here"),
        ("store", "s3://other/run", "is another one than s3://shared/run here"),
        ("weights", "s3://shared/weights", "is another one than s3://shared/run/weights here"),
        ("store", "s3://nowhere/run", "s3://nowhere/run"),
    ],
)
async def test_another_bucket_or_prefix_is_refused_by_name(
    use: str, place: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        await inspected(trainer=OWN, worker={**OWN, use: place})
    assert str(refused.value).startswith(f"{use}: worker (process ")
    for name in ("shared", "other"):
        assert [key for key in ObjectBucket(f"s3://{name}").keys("") if FOLDER in key] == []


async def test_a_bucket_that_this_process_cannot_write_is_refused_first() -> None:
    with pytest.raises(ConfigError, match=r"^store: s3://nowhere/run cannot be written"):
        await inspect_store({"store": "s3://nowhere/run"}, {})
