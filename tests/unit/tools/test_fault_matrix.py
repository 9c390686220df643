"""The counters of the fault matrix count: what would be wrong is not taken for right."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from sluice import faults
from tests.patience import PATIENCE
from tools.fault_cases import DISTURBANCES, KILLS, LOST_REPLIES, PARTITIONS, SCHEDULED
from tools.fault_damage import FILES, flipped, truncated
from tools.fault_matrix import Totals, against
from tools.fault_network import part_processes
from tools.fault_run import Outcome, is_told
from tools.fault_stack import orphans_of

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


def test_what_one_share_of_the_cases_found_spoils_the_sum():
    first, second = Totals(cases=3, silent=1), Totals(cases=2, hung=2)
    assert str(first + second) == "faults: cases=5 lost=0 doubled=0 hung=2 silent=1 orphans=0"


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


CLIENT = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as end:
    print("connected", flush=True)
    print(end.recv(1), flush=True)
"""


def test_two_processes_can_be_cut_from_each_other_and_from_nobody_else():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-c", CLIENT, str(listener.getsockname()[1])]
        clients = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1)
            for _ in range(2)
        ]
        ends = [listener.accept()[0] for _ in clients]
        for client in clients:
            assert client.stdout.readline() == "connected\n"
    assert part_processes(clients[0].pid, clients[1].pid, "cut") is None
    undo = part_processes(clients[0].pid, os.getpid(), "cut")
    assert clients[0].communicate(timeout=PATIENCE)[0] == "b''\n"
    for end in ends:
        with end, contextlib.suppress(BrokenPipeError):
            end.send(b"x")
    assert clients[1].communicate(timeout=PATIENCE)[0] == "b'x'\n"
    undo()


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
    every = (*DISTURBANCES, *PARTITIONS)
    assert len(set(every)) == len(every) >= 140  # each has a run directory of its own
    damaged = {each.target for each in DISTURBANCES if each.kind in ("flip", "truncate")}
    assert damaged <= FILES.keys()
