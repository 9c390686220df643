"""Blob stores under contract: a directory, and a bucket of moto's S3 server."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sluice.bucket import ObjectBucket
from sluice.place import StoreCacheConfig
from sluice.samples.blob_store import BlobStore
from sluice.samples.blobs import Blobs
from sluice.samples.bucket_blobs import BucketBlobs
from tests.s3_server import Faults, environment, make_bucket, running_s3

OpenBlobs = Callable[[], Blobs]


@pytest.fixture(scope="session")
def all_faults() -> Faults:
    return Faults()


@pytest.fixture
def faults(all_faults: Faults) -> Iterator[Faults]:
    """Of the server; none are left when the test ends."""
    yield all_faults
    all_faults.coming.clear()
    all_faults.met.clear()
    all_faults.calls.clear()


@pytest.fixture(scope="session")
def s3_endpoint(all_faults: Faults) -> Iterator[str]:
    with running_s3(all_faults) as endpoint:
        yield endpoint


@pytest.fixture
def url(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a place in a fresh bucket, with credentials and endpoint in the environment."""
    name = f"b{secrets.token_hex(8)}"
    make_bucket(s3_endpoint, name)
    for key, value in environment(s3_endpoint).items():
        monkeypatch.setenv(key, value)
    return f"s3://{name}/run"


@pytest.fixture
def bucket(url: str) -> ObjectBucket:
    return ObjectBucket(url, request_seconds=20, retry_seconds=10)


@pytest.fixture
def cache(tmp_path: Path) -> StoreCacheConfig:
    return StoreCacheConfig(directory=tmp_path / "cache")


@pytest.fixture(params=["directory", "bucket"])
def open_again(
    request: pytest.FixtureRequest, tmp_path: Path, cache: StoreCacheConfig
) -> OpenBlobs:
    """Opens one and the same store, as another process would."""
    if request.param == "directory":
        return lambda: BlobStore(tmp_path / "store", sync=False)
    bucket = request.getfixturevalue("bucket")
    return lambda: BucketBlobs(bucket.url, cache, bucket)


@pytest.fixture
def blobs(open_again: OpenBlobs) -> Blobs:
    return open_again()
