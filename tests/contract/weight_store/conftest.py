"""Stores under contract: a directory, and a bucket of moto's S3 server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sluice.weights.store import WeightStore
from tests.contract.weight_store.policy import Policy
from tests.s3_server import environment, make_bucket, running_s3

OpenStore = Callable[[], WeightStore]


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    with running_s3() as endpoint:
        yield endpoint


@pytest.fixture
def bucket(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> str:
    """The URL of a fresh bucket, with credentials and endpoint in the environment."""
    name = f"b{abs(hash(request.node.nodeid))}"
    make_bucket(s3_endpoint, name)
    for key, value in environment(s3_endpoint).items():
        monkeypatch.setenv(key, value)
    return f"s3://{name}/run"


@pytest.fixture(params=["directory", "bucket"])
def open_again(request: pytest.FixtureRequest, tmp_path: Path) -> OpenStore:
    """Opens one and the same store, as another process would."""
    if request.param == "directory":
        return lambda: WeightStore(tmp_path / "store", durable=False)
    url = request.getfixturevalue("bucket")
    return lambda: WeightStore(url, scratch=tmp_path / "scratch")


@pytest.fixture
def store(open_again: OpenStore) -> WeightStore:
    return open_again()


@pytest.fixture
def policy(store: WeightStore, tmp_path: Path) -> Policy:
    made = Policy(store)
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text(f'{{"name": "{name}"}}')
        made.companions.append(tmp_path / name)
    return made
