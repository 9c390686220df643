"""A trainer is of one loop at a time, also where the store is a bucket, which has no locks."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sluice.bucket import ObjectBucket
from sluice.loop.bucket_drivers import Driver, TrainerLog, sole_bucket_driver
from sluice.loop.claims import OVER, RunTakenError
from sluice.loop.run_directory import RunDirectoryError
from tests.patience import PATIENCE
from tests.s3_server import environment, make_bucket, running_s3

URL = "s3://runs/one"


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    with running_s3() as endpoint, pytest.MonkeyPatch.context() as patch:
        make_bucket(endpoint, "runs")
        for name, value in environment(endpoint).items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def bucket(server: None) -> ObjectBucket:
    bucket = ObjectBucket(URL)
    bucket.delete(bucket.keys(""))
    return bucket


@asynccontextmanager
async def driving(name: str, *trainers: str, seconds: float = 30) -> AsyncIterator[None]:
    async with asyncio.timeout(PATIENCE):
        async with sole_bucket_driver(URL, f"loops/{name}", Path(name), trainers, seconds):
            yield


async def test_a_trainer_is_of_one_loop_at_a_time(bucket: ObjectBucket) -> None:
    async with driving("first", "host:1", "[::1]:2", seconds=3):
        for taken in ("host:1", "[::1]:2"):
            told = (
                rf"trainer: {re.escape(taken)} is driven by process {os.getpid()} on .* for first"
            )
            with pytest.raises(RunTakenError, match=told):
                async with driving("second", "host:3", taken, seconds=3):
                    raise AssertionError("two loops")
        async with driving("second", "host:3", seconds=3600):
            """Another trainer of the same store, which a refused loop has let go."""
    async with driving("second", "host:1", seconds=3600):
        """The claim ends with its owner: nobody waits for an hour."""
    async with driving("first", "host:1", "host:1"):
        """A critic that is given as the trainer itself."""


@pytest.mark.parametrize("other", ["127.0.0.1", "LOCALHOST", "[::1]", socket.gethostname()])
async def test_a_trainer_is_the_same_by_whatever_name(bucket: ObjectBucket, other: str) -> None:
    async with driving("first", "localhost:5", seconds=3):
        with pytest.raises(RunTakenError, match=rf"{re.escape(other)}:5 is driven by process"):
            async with driving("second", f"{other}:5", seconds=3):
                raise AssertionError("two loops")
        async with driving("second", f"{other}:6", seconds=3):
            """Another trainer of the same host."""


async def test_a_loop_that_died_is_taken_over_after_its_silence(bucket: ObjectBucket) -> None:
    """At once by another loop of the same run, which is one loop's at a time."""
    clock = asyncio.get_running_loop()
    async with driving("first", "host:1", seconds=0.5):
        (alive,) = await signs(bucket)
        (log,) = [key for key in bucket.keys("") if "/log/" in key]
        claim, sign = bucket.get(log), bucket.get(alive)
    for name, seconds, waited in (("second", 0.25, 0.5), ("first", 3600, 0)):
        bucket.delete(bucket.keys(""))
        bucket.put(log, claim)
        bucket.put(alive, sign)  # as of one that was killed
        began = clock.time()
        async with driving(name, "host:1", seconds=seconds):
            assert clock.time() - began >= waited  # that of the dead one counts


async def signs(bucket: ObjectBucket) -> list[str]:
    while True:
        if found := [key for key in bucket.keys("") if "/alive/" in key]:
            return found
        await asyncio.sleep(0.01)


async def test_a_loop_that_is_taken_over_ends_where_it_waits(bucket: ObjectBucket) -> None:
    with pytest.raises(
        RunTakenError, match="process 7 on elsewhere for second has taken over host:1"
    ):
        async with driving("first", "host:1", seconds=0.3):
            (log,) = [key for key in bucket.keys("") if "/log/" in key]
            await signs(bucket)
            rival = Driver("loops/second", "second", "elsewhere", 7, 0.3)
            await asyncio.to_thread(TrainerLog(bucket, "host:1", "host:1", rival).claim, 2)
            await asyncio.Event().wait()
    assert bucket.get(log.replace("/log/", "/alive/")) == OVER


async def test_a_claim_that_is_damaged_is_of_somebody(bucket: ObjectBucket) -> None:
    async with driving("first", "host:1", seconds=0.3):
        (log,) = [key for key in bucket.keys("") if "/log/" in key]
        await signs(bucket)
        bucket.put(log, b"{")
        with pytest.raises(RunTakenError, match="host:1 is driven by another loop"):
            async with driving("second", "host:1", seconds=3):
                raise AssertionError("two loops")


async def test_an_outage_of_the_bucket_is_an_error_that_names_it(server: None) -> None:
    with pytest.raises(RunDirectoryError, match="s3://no-such-bucket/one/drivers/"):
        async with sole_bucket_driver(
            "s3://no-such-bucket/one", "loops/x", Path("x"), ["host:1"], 30
        ):
            raise AssertionError("claimed")
