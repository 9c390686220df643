"""Asynchronous and over-sampled runs that are killed keep their bound and their groups."""

import pytest

from sluice.loop.ledger import Ledger
from tools.fault_cases import SCHEDULES, SHORT_SCHEDULED, Fault
from tools.fault_run import GROUPS, STEPS, FaultRun


@pytest.mark.parametrize("fault", SHORT_SCHEDULED, ids=lambda fault: fault.schedule)
def test_a_killed_run_loses_no_group_and_keeps_its_bound(stack, seconds, fault: Fault):
    run = FaultRun(stack[0], fault.schedule, seconds, SCHEDULES[fault.schedule])
    outcome = run.run(fault)
    assert not outcome.failure  # of which an old group would be one
    assert (outcome.starts, outcome.lost, outcome.doubled) == (2, 0, 0)
    ledger = Ledger(run.directory / "ledger.sqlite")
    consumed, dropped = ledger.groups("consumed"), len(ledger.dropped())
    ledger.close()
    assert len(consumed) == STEPS * GROUPS
    assert not dropped
