"""The counters of the fault matrix count: what would be wrong is not taken for right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from sluice import faults
from tests.patience import PATIENCE
from tools.fault_cases import DISTURBANCES, KILLS, LOST_REPLIES, PARTITIONS, SCHEDULED
from tools.fault_damage import FILES, flipped, orphans_of, truncated
from tools.fault_matrix import Totals, against
from tools.fault_stack import Outcome, is_told

REFERENCE = Outcome(1.0, digests=("a", "b", "c"))
OTHER = Outcome(1.0, digests=("a", "x", "y"))


@pytest.mark.parametrize(
    ("kind", "counted"), [("flip", "silent"), ("truncate", "silent"), ("kill", "doubled")]
)
def test_other_weights_are_counted_whatever_the_run_says(kind: str, counted: str):
    outcome = against(REFERENCE, OTHER, kind)
    assert getattr(outcome, counted) == 1
    assert outcome.failure == "other weights from step 2 on"
    totals = Totals()
    totals.add(outcome)
    assert not totals.is_clean
    assert f"{counted}=1" in str(totals)


def test_the_same_weights_and_a_run_that_was_told_are_clean():
    totals = Totals()
    totals.add(against(REFERENCE, REFERENCE, "flip"))
    totals.add(against(REFERENCE, Outcome(1.0, told=2), "flip"))
    assert totals.is_clean
    assert str(totals) == "faults: cases=2 lost=0 doubled=0 hung=0 silent=0 orphans=0"


@pytest.mark.parametrize("wrong", ["lost", "doubled", "hung", "silent", "orphans"])
def test_each_wrong_thing_alone_spoils_the_matrix(wrong: str):
    totals = Totals()
    totals.add(Outcome(1.0, **{wrong: 1}))
    assert not totals.is_clean
    assert f"{wrong}=1" in str(totals)


def test_a_process_that_outlived_its_parent_is_an_orphan(tmp_path: Path):
    environment = {**os.environ, faults.VARIABLE: str(tmp_path / "faults" / "engine-0")}
    code = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', "
        "'import sys; sys.stdin.read()'], stdin=0, stdout=subprocess.DEVNULL, "
        "start_new_session=True); print(child.pid)"
    )
    read, write = os.pipe()
    parent = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        stdin=read,
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    orphan = psutil.Process(int(parent.stdout))
    try:
        assert [each["pid"] for each in orphans_of(tmp_path, faults.VARIABLE, os.getpid())] == [
            orphan.pid
        ]
        assert not orphans_of(tmp_path / "other", faults.VARIABLE, os.getpid())
    finally:
        os.close(write)  # whereupon it ends
        os.close(read)
    psutil.wait_procs([orphan], timeout=PATIENCE)
    assert not orphans_of(tmp_path, faults.VARIABLE, os.getpid())


def test_a_refusal_is_one_line_and_no_trace():
    assert is_told(2, "step 1\nsluice: ledger: it is damaged\n")
    assert not is_told(1, "sluice: x\n")
    assert not is_told(2, "")
    assert not is_told(2, "sluice: x\nsluice: y\n")
    assert not is_told(2, "Traceback (most recent call last):\nsluice: x\n")


def test_damage_changes_one_bit_or_the_end():
    data = bytes(range(9))
    changed = [a ^ b for a, b in zip(data, flipped(data), strict=True)]
    assert sum(bit.bit_count() for bit in changed) == 1
    assert truncated(data) == data[:4]
    assert (flipped(b""), truncated(b"")) == (b"", b"")


def test_the_cases_are_many_and_name_what_there_is():
    assert len((*KILLS, *SCHEDULED, *LOST_REPLIES, *DISTURBANCES, *PARTITIONS)) >= 150
    assert len(set(map(str, DISTURBANCES))) + len(set(PARTITIONS)) >= 140
    damaged = {each.target for each in DISTURBANCES if each.kind in ("flip", "truncate")}
    assert damaged <= FILES.keys()
