"""Runs whose weights are written behind: what a lost version had sampled is dropped and replaced.

Every version that the run trained on, or would go back to, has to be in the store, which keeps all.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from tests.patience import PATIENCE
from tools.fault_cases import SHORT_BEHIND, Fault
from tools.fault_matrix import inject, running_stack
from tools.fault_run import Outcome
from tools.fault_stack import Stack, behind_services, small_services


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Outcome]]:
    services = partial(behind_services, like=small_services)
    with running_stack(tmp_path_factory.mktemp("behind"), services, PATIENCE) as running:
        yield running


@pytest.mark.parametrize("fault", SHORT_BEHIND, ids=lambda fault: fault.name)
def test_a_run_survives_and_names_no_lost_version(behind, seconds, fault: Fault) -> None:
    outcome = inject(behind[0], fault, behind[1], seconds)
    assert not outcome.failure
    assert (outcome.lost, outcome.doubled, outcome.hung) == (0, 0, False)
    assert outcome.starts == (2 if fault.process == "loop" else 1)
    if fault.stops:  # engines sampled from it for as long as the rank was waited for
        assert outcome.dropped > 0
