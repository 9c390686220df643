import os
import signal
import sqlite3
import subprocess
import sys
import tracemalloc
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.loop.ledger import (
    SEAL,
    Ledger,
    LedgerDamagedError,
    LedgerGroup,
    groups_of,
    read_groups,
    read_trained,
)
from sluice.samples.blobs import BlobReference
from tests.patience import PATIENCE


def made(position: int, **changes) -> LedgerGroup:
    fields = {
        "position": position,
        "group_id": f"g{position}",
        "state": "generated",
        "issue_step": 0,
        "blob": BlobReference(f"{position:032x}", 10),
        "sample_count": 4,
        "reward_mean": 0.5,
    }
    return LedgerGroup(**{**fields, **changes})


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.issue([(i, f"g{i}") for i in range(4)], step=0)
    yield ledger
    ledger.close()


def ids(groups) -> list[str]:
    return [group.group_id for group in groups]


def test_a_group_walks_from_issued_to_consumed(ledger):
    assert ledger.generated(made(1))
    assert ids(ledger.groups("issued")) == ["g0", "g2", "g3"]
    ledger.consume(["g1"], step=1)
    (group,) = ledger.groups("consumed")
    assert (group.consumed_step, group.blob, group.sample_count) == (1, made(1).blob, 4)
    assert ledger.next_position() == 4


def test_the_age_of_a_group_is_how_far_its_weights_are_whichever_are_newer():
    """After a run went back, groups wait that weights sampled which are yet to come again."""
    young, old = made(1, oldest_step=3, newest_step=3), made(2, oldest_step=2, newest_step=4)
    assert [young.age(step) for step in (2, 3, 5)] == [1, 0, 2]
    assert [old.age(step) for step in (2, 3, 4, 6)] == [2, 1, 2, 4]


def test_a_group_announced_twice_is_recorded_once(ledger):
    assert ledger.generated(made(1))
    assert not ledger.generated(made(1, reward_mean=0.9))
    assert ledger.groups("generated")[0].reward_mean == 0.5


def test_a_step_is_recorded_whole_or_not_at_all(ledger):
    ledger.generated(made(0))
    with pytest.raises(AssertionError, match="g1"):
        ledger.consume(["g0", "g1"], step=1)  # g1 was never generated
    assert ids(ledger.groups("generated")) == ["g0"]
    ledger.consume(["g0"], step=1)
    with pytest.raises(AssertionError, match="consumed twice"):
        ledger.consume(["g0"], step=2)


def test_what_is_recorded_together_is_there_together_or_not_at_all(ledger):
    with pytest.raises(ZeroDivisionError), ledger.transaction():
        ledger.generated(made(0))
        ledger.drop("g1", "stale")
        ledger.consume(["g0"], 1 // 0)
    assert ids(ledger.groups("issued")) == ["g0", "g1", "g2", "g3"]
    with ledger.transaction():
        ledger.generated(made(0))
        ledger.drop("g1", "stale")
    assert ids(ledger.groups("generated")) == ["g0"]
    assert ledger.dropped() == [1]


def test_consumed_groups_are_counted_across_lives(ledger, tmp_path):
    for position in range(3):
        ledger.generated(made(position))
        ledger.consume([f"g{position}"], position + 1)
    with pytest.raises(AssertionError):
        ledger.consume(["g0"], 4)
    assert ledger.consumed_count() == 3
    again = Ledger(tmp_path / "ledger.sqlite")
    assert again.consumed_count() == 3
    again.roll_back(1)
    assert again.consumed_count() == len(again.groups("consumed")) == 1
    again.close()


def test_groups_of_later_weights_are_generated_anew(ledger):
    for position in range(4):
        ledger.generated(made(position, oldest_step=0, newest_step=position))
    ledger.consume(["g3"], step=4)
    assert ledger.sample_again(1) == 1
    assert ids(ledger.groups("generated")) == ["g0", "g1"]
    (again,) = ledger.groups("issued")
    assert (again.group_id, again.blob) == ("g2", None)
    assert ledger.sample_again(-1) == 2 and ids(ledger.groups("consumed")) == ["g3"]


def test_rolling_back_returns_what_came_after_the_run_checkpoint(ledger):
    for position in range(3):
        ledger.generated(made(position))
        ledger.consume([f"g{position}"], step=position + 1)
    assert ledger.roll_back(1) == 2
    assert ids(ledger.groups("consumed")) == ["g0"]
    assert ids(ledger.groups("generated")) == ["g1", "g2"]
    assert ledger.groups("generated")[0].blob is not None  # not to be generated again


def test_what_a_run_checkpoint_still_needs_is_named(ledger):
    for position in range(3):
        assert ledger.generated(made(position))
    ledger.consume(["g0"], step=1)
    ledger.consume(["g1"], step=2)
    assert ledger.needed_blobs(1) == {made(1).blob.digest, made(2).blob.digest}
    ledger.drop("g2", "stale")
    assert ledger.needed_blobs(2) == set()


def test_a_group_whose_blob_is_lost_is_issued_again(ledger):
    ledger.generated(made(1))
    ledger.generated(made(2))
    ledger.consume(["g2"], step=1)
    assert ledger.lose_blob(made(1).blob.digest) == ["g1"]
    assert ledger.lose_blob(made(2).blob.digest) == []  # trained on already
    assert ids(ledger.groups("issued")) == ["g0", "g1", "g3"]
    assert ledger.generated(made(1))


def test_a_run_keeps_its_name_and_shares_it_with_no_other(ledger, tmp_path):
    again, other = Ledger(tmp_path / "ledger.sqlite"), Ledger(tmp_path / "other.sqlite")
    assert again.run_id == ledger.run_id != other.run_id
    again.close()
    other.close()


def test_a_dropped_group_keeps_its_reason(ledger, tmp_path):
    ledger.drop("g2", "stale")
    assert len(ledger.dropped()) == 1
    rows = sqlite3.connect(tmp_path / "ledger.sqlite").execute(
        "SELECT group_id, reason FROM groups WHERE state = 'dropped'"
    )
    assert rows.fetchall() == [("g2", "stale")]


def test_versions_map_to_steps(ledger):
    ledger.record_version(7, "digest", 3)
    assert ledger.step_of_version(7) == 3
    with pytest.raises(AssertionError, match="version 8"):
        ledger.step_of_version(8)


def test_what_was_committed_survives_kill_9(tmp_path):
    code = (
        "import sys, os, pathlib\n"
        "from sluice.loop.ledger import Ledger\n"
        "ledger = Ledger(pathlib.Path(sys.argv[1]))\n"
        "for i in range(10**6):\n"
        "    ledger.issue([(2 * i, f'a{i}'), (2 * i + 1, f'b{i}')], 0)\n"
        "    print(i, flush=True)\n"
    )
    path = tmp_path / "ledger.sqlite"
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    for line in writer.stdout:
        if int(line) == 20:
            break
    os.kill(writer.pid, signal.SIGKILL)
    confirmed = max([20, *(int(line) for line in writer.stdout)])
    writer.wait(timeout=PATIENCE)
    ledger = Ledger(path)
    issued = ids(ledger.groups("issued"))
    ledger.close()
    assert len(issued) >= 2 * (confirmed + 1)
    assert len(issued) % 2 == 0  # a transaction is whole


FULL = """
import resource, sqlite3, sys
from pathlib import Path
from sluice.loop.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    ledger.issue([(i, f"g{i}") for i in range(50_000)], step=0)
except sqlite3.OperationalError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
ledger.issue([(0, "g0")], step=0)
ledger.close()
"""


def test_a_full_disk_is_named_and_leaves_nothing_half_done(tmp_path):
    path = tmp_path / "ledger.sqlite"
    command = [sys.executable, "-c", FULL, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "rollback" not in done.stdout
    assert "disk" in done.stdout
    ledger = Ledger(path)
    assert ids(ledger.groups("issued")) == ["g0"]
    ledger.close()


@pytest.fixture
def promising(ledger):
    """Version 1 is durable, 2 is promised; groups are of 1, 1 to 2, 2, and 1 to 3 in a row."""
    ledger.record_version(1, "one", 0)
    ledger.promise_version(2)
    ledger.record_version(2, "two", 1)
    for position, (first, last) in enumerate([(1, 1), (1, 2), (2, 2), (1, 3)]):
        ledger.generated(made(position, min_version=first, max_version=last))
    return ledger


def test_groups_with_a_token_of_a_lost_version_are_dropped_and_no_others(promising, tmp_path):
    promising.consume(["g2"], step=1)
    promising.roll_back(0)  # the run goes back to before it
    again = Ledger(tmp_path / "ledger.sqlite")  # after a crash
    assert again.promised_versions() == [2]
    assert again.lose_version(2) == 3
    assert ids(again.groups("generated")) == ["g0"]
    assert ids(again.groups("dropped")) == ["g1", "g2", "g3"]
    assert again.promised_versions() == []
    assert (again.lost_version(1, 1), again.lost_version(1, 2), again.lost_version(3, 9)) == (
        None,
        2,
        None,
    )
    again.close()
    later = Ledger(tmp_path / "ledger.sqlite")
    assert later.lost_version(2, 2) == 2
    later.check()
    later.close()


def test_a_version_that_came_to_be_durable_costs_nothing(promising, tmp_path):
    promising.version_durable(2)
    assert promising.promised_versions() == []
    assert promising.lose_version(2) == 0  # which nobody asks for
    assert len(promising.groups("generated")) == 4


def test_a_group_that_was_generated_again_by_others_is_of_those(promising):
    promising.put_back("g2")
    promising.record_version(3, "three", 1)
    assert promising.generated(made(2, min_version=3, max_version=3))
    promising.put_back("g1")  # and is not generated yet
    assert promising.lose_version(2) == 1
    assert ids(promising.groups("generated")) == ["g0", "g2"]
    assert ids(promising.groups("issued")) == ["g1"]


@settings(max_examples=50)
@given(data=st.data())
def test_what_is_dropped_is_what_its_versions_say(tmp_path_factory, data):
    """Any groups, any order of promises kept and broken: against sets."""
    path = tmp_path_factory.mktemp("promises") / "ledger.sqlite"
    ledger, waiting, dropped, lost = Ledger(path), {}, set(), set()
    count = data.draw(st.integers(1, 12))
    ledger.issue([(i, f"g{i}") for i in range(count)], step=0)
    newest, pending = 1, None
    ledger.record_version(1, "1", 0)
    for position in range(count):
        first = data.draw(st.integers(1, newest))
        last = data.draw(st.integers(first, newest))
        if ledger.lost_version(first, last) is not None:
            assert lost & set(range(first, last + 1))
            ledger.generated(made(position, min_version=first, max_version=last), "lost")
            dropped.add(position)
        else:
            assert not lost & set(range(first, last + 1))
            ledger.generated(made(position, min_version=first, max_version=last))
            waiting[position] = range(first, last + 1)
        match data.draw(st.sampled_from(["go on", "publish", "crash"])):
            case "publish":
                if pending is not None:
                    ledger.version_durable(pending)
                newest = pending = newest + 1
                ledger.promise_version(newest)
                ledger.record_version(newest, str(newest), newest)
            case "crash" if pending is not None:
                ledger.close()
                ledger = Ledger(path)
                ledger.lose_version(pending)
                lost.add(pending)
                dropped |= {p for p, versions in waiting.items() if pending in versions}
                pending = None
    waiting = {p for p in waiting if p not in dropped}
    assert {group.position for group in ledger.groups("generated")} == waiting
    assert set(ledger.dropped()) == dropped
    ledger.check()
    ledger.close()


def test_going_back_takes_the_work_of_what_goes_back_however_long_the_run_was(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger._db.execute("PRAGMA synchronous = OFF")

    def add(positions: range) -> None:
        with ledger.transaction():
            ledger.issue([(i, f"g{i}") for i in positions], step=0)
            for i in positions:
                ledger.generated(made(i))
                ledger.consume([f"g{i}"], step=i + 1)

    def work(last: int) -> int:
        """Tens of instructions that SQLite takes."""
        count = 0

        def note() -> int:
            nonlocal count
            count += 1
            return 0

        ledger._db.set_progress_handler(note, 10)
        assert ledger.last_consumed_step() == last
        assert ledger.needed_blobs(last - 2) == {f"{i:032x}" for i in (last - 2, last - 1)}
        assert ledger.roll_back(last - 2) == 2
        ledger._db.set_progress_handler(None, 10)
        ledger.consume([f"g{last - 2}"], step=last - 1)
        ledger.consume([f"g{last - 1}"], step=last)
        return count

    add(range(50))
    few = work(50)
    add(range(50, 2000))
    assert work(2000) <= 2 * few
    ledger.close()


def test_the_groups_of_a_run_take_few_bytes_each_to_look_at(ledger, tmp_path):
    with ledger.transaction():
        ledger.issue([(i, f"g{i}") for i in range(4, 2000)], step=0)
        for position in range(2000):
            ledger.generated(made(position))
    read_groups(tmp_path)
    tracemalloc.start()
    groups, damaged = read_groups(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (len(groups), damaged) == (2000, 0)
    assert (groups[7].group_id, groups[7].blob) == ("g7", made(7).blob)
    assert peak < 400 * len(groups)


def test_a_row_that_is_not_as_it_was_written_is_found_and_left_out(ledger, tmp_path):
    ledger.generated(made(1))
    ledger.check()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as other, other:
        other.execute("DROP TRIGGER groups_update")  # which would digest it anew
        other.execute("UPDATE groups SET blob_size = 11 WHERE position = 1")
    with pytest.raises(sqlite3.DatabaseError, match=r"is damaged: row \d+ of groups"):
        ledger.check()
    told = []
    seen = groups_of(tmp_path, told.append)
    assert [group.group_id for group in seen] == ["g0", "g2", "g3"]
    assert told == ["the ledger has 1 damaged rows, which are left out"]
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as other, other:
        other.execute(f"UPDATE groups SET {SEAL} = NULL")  # of a release that wrote none
    assert len(groups_of(tmp_path, told.append)) == 4
    assert len(told) == 1
    assert read_groups(tmp_path / "nowhere") == ([], 0)


def test_what_a_run_trained_on_is_read_by_step_and_position(ledger, tmp_path):
    ledger.assign([(0, "math", 7), (3, "code", 2)])
    for position, shown in ((3, ("b", "a")), (1, ()), (0, ("a",))):
        ledger.generated(made(position, media=shown, oldest_step=position))
    ledger.consume(["g3"], step=1)
    ledger.consume(["g1", "g0"], step=2)
    for version, digest, step in ((1, "first", 0), (2, "undone", 1), (3, "again", 1)):
        ledger.record_version(version, digest, step)
    groups, weights = read_trained(tmp_path)
    assert [(group.consumed_step, group.position) for group in groups] == [(1, 3), (2, 0), (2, 1)]
    assert [(group.environment, group.task_number) for group in groups] == [
        ("code", 2),
        ("math", 7),
        ("", 1),
    ]
    assert [group.media for group in groups] == [("a", "b"), ("a",), ()]
    assert [group.blob for group in groups] == [made(3).blob, made(0).blob, made(1).blob]
    assert [group.oldest_step for group in groups] == [3, 0, 1]
    assert weights == {0: "first", 1: "again"}
    assert read_trained(tmp_path / "nowhere").groups == []


def test_a_damaged_row_may_be_of_any_step(ledger, tmp_path):
    ledger.generated(made(1))
    ledger.consume(["g1"], step=1)
    assert len(read_trained(tmp_path).groups) == 1
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as other, other:
        other.execute("DROP TRIGGER groups_update")
        other.execute("UPDATE groups SET issue_step = 5 WHERE position = 2")
    with pytest.raises(LedgerDamagedError, match="1 damaged rows"):
        read_trained(tmp_path)
    (tmp_path / "ledger.sqlite").write_bytes(b"no database " * 1000)
    (tmp_path / "ledger.sqlite-wal").unlink(missing_ok=True)
    with pytest.raises(LedgerDamagedError, match="cannot be read"):
        read_trained(tmp_path)


def test_what_a_lost_version_is_promised_is_forgotten_with_it(promising, tmp_path):
    promising.lose_version(2)
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as other:
        assert other.execute("SELECT COUNT(*) FROM promised_groups").fetchone() == (0,)
