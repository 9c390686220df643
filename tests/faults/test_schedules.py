"""Asynchronous runs that are killed keep their bound and their groups."""

from sluice.loop.ledger import Ledger
from tools.fault_cases import Fault
from tools.fault_stack import GROUPS, STEPS, FaultRun


def test_a_killed_asynchronous_run_consumes_the_same_groups(stack, seconds):
    changes = {"deterministic": False, "max_staleness": 3}
    run = FaultRun(stack[0], "asynchronous", seconds, changes)
    outcome = run.run(Fault("loop", "consumed", 4))
    assert not outcome.failure
    assert (outcome.starts, outcome.lost, outcome.doubled) == (2, 0, 0)
    ledger = Ledger(run.directory / "ledger.sqlite")
    groups, dropped = ledger.groups("consumed"), ledger.dropped_count()
    ledger.close()
    assert {group.group_id for group in groups} == {f"g{i:07}" for i in range(STEPS * GROUPS)}
    assert not dropped
    assert max(group.consumed_step - 1 - group.oldest_step for group in groups) <= 3
