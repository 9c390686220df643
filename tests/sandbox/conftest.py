from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sandbox.users import Trials

TRIALS = Trials()


def pytest_unconfigure() -> None:
    if TRIALS.jailed:
        print(TRIALS.line())


@pytest.fixture(scope="session")
def trials() -> Iterator[Trials]:
    yield TRIALS
