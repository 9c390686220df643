from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fast_part import keep_fast_part
from tests.models.proof import RESULTS, Summary
from tests.rank_pool import Pool

SUMMARY = Summary()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The whole suite runs where it is asked for by name; elsewhere its fast part does."""
    keep_fast_part(Path(__file__).parent, config, items)


def pytest_unconfigure() -> None:
    if SUMMARY.proofs or SUMMARY.megatron or SUMMARY.mismatches:
        SUMMARY.write(RESULTS)
        print(SUMMARY.line())


@pytest.fixture(scope="session")
def summary() -> Summary:
    return SUMMARY


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool("tests.models.jobs")
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    """Those of Megatron."""
    pool = Pool("tests.models.megatron_jobs")
    yield pool
    pool.close()
