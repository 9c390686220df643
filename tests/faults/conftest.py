"""One small stack for all tests, and what an undisturbed run on it comes to."""

from collections.abc import Iterator

import pytest

from tests.patience import PATIENCE
from tools.fault_matrix import running_stack
from tools.fault_run import Outcome
from tools.fault_stack import Stack, small_services


@pytest.fixture(scope="session")
def seconds() -> float:
    return PATIENCE


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Outcome]]:
    directory = tmp_path_factory.mktemp("faults")
    with running_stack(directory, small_services, PATIENCE) as (stack, reference):
        yield stack, reference
