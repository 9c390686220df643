"""A trainer whose store is a bucket saves; another one, laid out otherwise, goes on from there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sluice.bucket import ObjectBucket
from sluice.client import RemoteError, TrainerClient
from tests.s3_server import environment, make_bucket, running_s3
from tests.service.trainer.harness import (
    ACTIVE,
    make_groups,
    running_trainer,
    train_step,
    until,
    upload,
)


@contextmanager
def bucket_url() -> Iterator[str]:
    """Of a place in a bucket that services find by their environment."""
    name = f"b{secrets.token_hex(8)}"
    with running_s3() as endpoint, pytest.MonkeyPatch.context() as patch:
        make_bucket(endpoint, name)
        for key, value in environment(endpoint).items():
            patch.setenv(key, value)
        yield f"s3://{name}/run"


async def check_checkpoints(
    root: Path, model: Path, many: dict[str, Any], few: dict[str, Any]
) -> None:
    """`many` settings save, `few` load: the same weights to the bit, and nearly the same step."""
    with bucket_url() as url:
        bucket = ObjectBucket(url)
        settings = {"store": url, **many, "store_cache": {"directory": str(root / "many-cache")}}
        with running_trainer(root / "many", model, **settings) as running:
            async with running.client() as client:
                await until(client, lambda now: now.state == ACTIVE)
                batch = await upload(client, "first", make_groups("first", seed=8))
                await train_step(client, batch)
                await client.save_checkpoint("kept")
                writing = await client.begin_checkpoint("behind")
                kept = await client.publish_weights()
                after = await train_step(client, batch)
                await writing
        assert left_in(root / "many-cache") == []
        files = [key for key in bucket.keys("checkpoints/kept") if key.count("/") == 3]
        assert len(files) > 1
        settings = {"store": url, **few, "store_cache": {"directory": str(root / "few-cache")}}
        with running_trainer(root / "few", model, **settings) as running:
            async with running.client() as client:
                await until(client, lambda now: now.state == ACTIVE)
                for name in ("kept", "behind"):
                    assert (await client.load_checkpoint(f"checkpoints/{name}")).step == 1
                    found = await client.publish_weights()
                    assert found.weights.digest == kept.weights.digest
                batch = await upload(client, "again", make_groups("first", seed=8))
                again = await train_step(client, batch)
                assert again.loss == pytest.approx(after.loss, rel=1e-3, abs=1e-6)
                assert again.grad_norm == pytest.approx(after.grad_norm, rel=1e-3)
                await check_damage(client, bucket, root / "few-cache", kept.weights.digest)


async def check_damage(
    client: TrainerClient, bucket: ObjectBucket, cache: Path, digest: str
) -> None:
    """What is damaged on the host is fetched again; in the bucket, it is refused by name."""
    cached = [path for path in (cache / "fetched" / "files").iterdir() if path.is_file()]
    largest = max(cached, key=lambda path: path.stat().st_size)
    flip(largest)
    await client.load_checkpoint("checkpoints/kept")
    assert (await client.publish_weights()).weights.digest == digest
    key = max(bucket.list("checkpoints/behind"), key=lambda info: info.size).key
    data = bytearray(bucket.get(key))
    data[-3] ^= 0x40
    bucket.put(key, bytes(data))
    for path in cached:
        path.unlink(missing_ok=True)
    with pytest.raises(RemoteError, match=key.rpartition("/")[2]) as caught:
        await client.load_checkpoint("checkpoints/behind")
    assert caught.value.reason == "CHECKPOINT_DAMAGED"


def flip(path: Path) -> None:
    """A byte, of a file that others may have linked: its content is theirs too."""
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x40
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), data, 0)


def left_in(cache: Path) -> list[Path]:
    """Files on their way to the bucket that are still here."""
    return [path for folder in cache.glob("sluice-checkpoint-*") for path in folder.iterdir()]
