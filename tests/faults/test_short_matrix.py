"""Cases of `make fault-matrix`: nothing lost, nothing trained twice, weights equal to the bit."""

from collections.abc import Iterator

import pytest

from tools.fault_cases import SHORT, Fault
from tools.fault_matrix import inject, running_stack
from tools.fault_stack import STEPS, Outcome, Stack, small_services

SECONDS = 200.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Outcome]]:
    directory = tmp_path_factory.mktemp("faults")
    with running_stack(directory, small_services, SECONDS) as (stack, reference):
        yield stack, reference


def test_steps_change_the_weights(stack):
    _, reference = stack
    assert len(set(reference.digests)) == STEPS  # or comparing them would show nothing


@pytest.mark.parametrize("fault", SHORT, ids=lambda fault: f"{fault.process}-{fault.name}")
def test_a_run_survives(stack, fault: Fault):
    services, reference = stack
    outcome = inject(services, fault, reference, SECONDS)
    assert not outcome.failure
    assert not outcome.hung
    assert (outcome.lost, outcome.doubled) == (0, 0)
    assert outcome.digests == reference.digests
    assert outcome.starts == (2 if fault.process == "loop" else 1)
    if not fault.is_kill:
        assert outcome.returns == 0  # a retry gets the answer, no work is done again
