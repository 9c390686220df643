"""A trainer of two ranks and an engine that share weights through S3 alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.client import TrainerClient
from sluice.weights.store import WeightStore
from tests.s3_server import environment, make_bucket, running_s3
from tests.service.trainer.harness import RunningTrainer, poll, running_trainer
from tests.service.weights.harness import RunningEngine, running_engines, serves

URL = "s3://weights/run"


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with running_s3() as endpoint, pytest.MonkeyPatch.context() as patch:
        make_bucket(endpoint, "weights")
        for name, value in environment(endpoint).items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def trainer(
    tmp_path_factory: pytest.TempPathFactory, model: Path, s3: None
) -> Iterator[RunningTrainer]:
    root = tmp_path_factory.mktemp("trainer")
    settings = {"ranks": {"count": 2}, "weights": URL, "publish": {"delta": True}}
    with running_trainer(root, model, keep_versions=1, **settings) as running:
        yield running


@pytest.fixture(scope="module")
def engine(
    tmp_path_factory: pytest.TempPathFactory, model: Path, trainer: RunningTrainer
) -> Iterator[RunningEngine]:
    root = tmp_path_factory.mktemp("engines")
    other_store = root / "store"  # nothing is shared but the bucket
    with running_engines(root, model, other_store, trainer.security, 1, weights=URL) as (running,):
        yield running


async def test_versions_travel_through_the_bucket(
    client: TrainerClient, engine: RunningEngine, trainer: RunningTrainer, tmp_path: Path
) -> None:
    store = WeightStore(URL, scratch=tmp_path)
    async with engine.client() as served:
        await poll(lambda: serves(served))
        sizes = []
        for _ in range(3):
            published = await client.publish_weights()
            await served.prepare_weights(published.weights)
            await served.commit_weights(published.weights)
            assert (await served.get()).weights == published.weights
            sizes.append((published.byte_count, published.full_byte_count))
        assert sizes[0][0] == sizes[0][1]
        assert sizes[2][0] < 0.2 * sizes[2][1]  # nothing has changed since
        latest = store.latest()
        assert list(store.chain(latest.version)) == list(store.versions())[::-1]
        assert dataclasses.asdict(latest)["digest"] == published.weights.digest
        assert store.pins() == {latest.version: {engine.engine_id}}
    assert not (trainer.store / "weights" / "versions").exists()
