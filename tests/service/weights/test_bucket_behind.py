"""Weights that an engine serves before the bucket has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice import faults
from sluice.bucket import ObjectBucket
from sluice.client import RemoteError, TrainerClient
from sluice.weights.store import WeightStore
from tests.patience import PATIENCE
from tests.s3_server import environment, make_bucket, running_s3
from tests.service.trainer.harness import (
    ACTIVE,
    RESTART_SECONDS,
    RunningTrainer,
    poll,
    running_trainer,
    until,
)
from tests.service.weights.harness import RunningEngine, running_engines, serves

URL = "s3://weights/behind"


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RunningTrainer]:
    settings = {
        "ranks": {"count": 2, "restart_backoff": RESTART_SECONDS},
        "weights": URL,
        "transfer": {"enabled": True, "write_behind": True, "timeout_seconds": PATIENCE / 2},
    }
    with running_s3() as endpoint, pytest.MonkeyPatch.context() as patch:
        make_bucket(endpoint, "weights")
        for name, value in environment(endpoint).items():
            patch.setenv(name, value)
        with running_trainer(tmp_path_factory.mktemp("trainer"), model, **settings) as running:
            yield running


@pytest.fixture(scope="module")
def engine(
    tmp_path_factory: pytest.TempPathFactory, model: Path, trainer: RunningTrainer
) -> Iterator[RunningEngine]:
    root = tmp_path_factory.mktemp("engines")
    with running_engines(root, model, root / "store", trainer.security, 1, weights=URL) as (one,):
        yield one


async def test_a_promise_in_a_bucket_is_kept_or_lost_with_the_ranks(
    client: TrainerClient, engine: RunningEngine, trainer: RunningTrainer, tmp_path: Path
) -> None:
    store = WeightStore(URL, scratch=tmp_path)
    async with engine.client() as served:
        await poll(lambda: serves(served))
        published = await client.publish_weights([engine.target])
        weights = published.weights
        assert published.promised
        await served.commit_weights(weights)
        await until(client, lambda now: now.promised_version != weights.version)
        assert store.get(weights.version).digest == weights.digest
        manifest = store.manifest(weights.version)
        assert {shard.file_name for shard in manifest.shards()} <= {
            key.rpartition("/")[2]
            for key in ObjectBucket(URL).keys(f"versions/{weights.version:08d}")
        }
        faults.arm(trainer.store.parent / "faults", "weights.behind")
        lost = (await client.publish_weights([engine.target])).weights
        await until(client, lambda now: now.promised_version == 0 and now.state == ACTIVE)
        assert not store.has(lost.version)
        with pytest.raises(RemoteError):
            await client.publish_weights([engine.target])  # tells that it is lost
        again = (await client.publish_weights([engine.target])).weights
        await until(client, lambda now: now.promised_version != again.version)
        assert again.version > lost.version
        assert list(store.versions()) == [weights.version, again.version]
    assert ObjectBucket(URL).keys("promised") == []
