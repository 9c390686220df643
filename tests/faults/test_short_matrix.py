"""Cases of `make fault-matrix`: nothing lost, nothing trained twice, weights equal to the bit."""

import pytest

from tools.fault_cases import SHORT, SHORT_COLOCATED, SHORT_DISTURBANCES, Disturbance, Fault
from tools.fault_matrix import disturb, inject, kill_all
from tools.fault_run import STEPS, FaultRun, Outcome

EPOCHS = {"algorithm": {"mini_batches": 2, "epochs": 2}}
# Of the third step, which follows a run checkpoint: four optimizer steps, two an epoch.
BETWEEN = (
    Fault("loop", "stepped", 2 * 4 + 2),
    Fault("loop", "gradients", 2 * 4 + 3),
    Fault("trainer", "done.StepOptimizer", 2 * 4 + 2),
    Fault("trainer", "rank0.forward_backward", 2 * 4 + 3),
)


def test_steps_change_the_weights(stack):
    _, reference = stack
    assert len(set(reference.digests)) == STEPS  # or comparing them would show nothing


@pytest.mark.parametrize("fault", SHORT, ids=lambda fault: f"{fault.process}-{fault.name}")
def test_a_run_survives(stack, seconds, fault: Fault):
    services, reference = stack
    outcome = inject(services, fault, reference, seconds)
    assert not outcome.failure
    assert not outcome.hung
    assert (outcome.lost, outcome.doubled) == (0, 0)
    assert outcome.digests == reference.digests
    assert outcome.starts == (2 if fault.process == "loop" else 1)
    if not fault.is_kill:
        assert outcome.returns == 0  # a retry gets the answer, no work is done again


@pytest.mark.parametrize(
    "fault", SHORT_COLOCATED, ids=lambda fault: f"{fault.process}-{fault.name}"
)
def test_a_run_on_shared_devices_has_the_weights_of_one_that_shares_none(
    stack, seconds, fault: Fault
):
    services, reference = stack
    outcome = inject(services, fault, reference, seconds)
    assert not outcome.failure
    assert (outcome.lost, outcome.doubled, outcome.hung) == (0, 0, False)
    assert outcome.digests == reference.digests
    assert outcome.starts == (2 if fault.process == "loop" else 1)


@pytest.mark.parametrize("disturbance", SHORT_DISTURBANCES, ids=str)
def test_a_run_survives_or_says_what_is_wrong(stack, seconds, disturbance: Disturbance):
    services, reference = stack
    outcome = disturb(services, disturbance, reference, seconds)
    assert not outcome.failure
    assert not outcome.hung
    wrong = (outcome.lost, outcome.doubled, outcome.silent, outcome.orphans)
    assert wrong == (0, 0, 0, 0)
    assert outcome.digests or outcome.told  # which are those of the undisturbed run


@pytest.fixture(scope="module")
def undisturbed(stack, seconds) -> Outcome:
    """A run of several epochs."""
    services, reference = stack
    outcome = FaultRun(services, "epochs", seconds, EPOCHS).run()
    assert not outcome.failure
    assert len(set(outcome.digests) | set(reference.digests)) == 2 * STEPS
    return outcome


@pytest.mark.parametrize("fault", BETWEEN, ids=lambda fault: f"{fault.process}-{fault.name}")
def test_a_run_survives_between_two_epochs(stack, seconds, undisturbed, fault: Fault):
    services, _ = stack
    name = f"epochs-{fault.process}-{fault.name}"
    outcome = FaultRun(services, name, seconds, EPOCHS).run(fault)
    assert not outcome.failure
    assert (outcome.lost, outcome.doubled, outcome.hung) == (0, 0, False)
    assert outcome.digests == undisturbed.digests
    assert (outcome.starts, outcome.returns) == ((2, 0) if fault.process == "loop" else (1, 1))


def test_a_run_survives_the_death_of_everything(stack, seconds):
    services, reference = stack
    outcome = kill_all(services, reference, seconds)
    assert not outcome.failure
    assert (outcome.lost, outcome.doubled, outcome.hung) == (0, 0, False)
    assert outcome.digests == reference.digests
