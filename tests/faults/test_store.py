"""A run leaves in the store what it needs, and little else."""

from __future__ import annotations

import pytest

from sluice.loop.ledger import Ledger
from sluice.loop.run_directory import list_run_checkpoints
from sluice.samples.blob_store import BlobStore
from sluice.weights.store import WeightStore
from tools.fault_run import GROUPS, FaultRun

LONG = 20


@pytest.fixture(scope="module")
def long_run(stack, seconds):
    run = FaultRun(stack[0], "long", seconds, {"steps": LONG})
    outcome = run.run()
    assert not outcome.failure
    return run


def test_blobs_stay_bounded_and_no_named_one_is_removed(stack, long_run):
    blobs = BlobStore(stack[0].directory / "store")
    named = set().union(*(blobs.pinned(owner) for owner in blobs.owners()))
    there = {path.name for path in (blobs.root / "blobs").glob("?" * 32)}
    assert named <= there
    assert len(there - named) <= GROUPS  # of a rollout let go of beside the last collection
    ledger = Ledger(long_run.directory / "ledger.sqlite")
    own = {group.blob.digest for group in ledger.groups("consumed")}
    ledger.close()
    assert len(own) == LONG * GROUPS
    assert len(own & there) <= 6 * GROUPS  # those of the rollouts that a worker remembers


def test_old_weights_are_removed_unless_pinned(stack, long_run):
    store = WeightStore(stack[0].directory / "store" / "weights")
    versions, pinned = set(store.versions()), store.pins()
    assert pinned.keys() <= versions
    newest = sorted(versions)[-1]
    assert {"rollout"} <= pinned[newest]  # the engine serves it
    ledger = Ledger(long_run.directory / "ledger.sqlite")
    assert f"run/{ledger.run_id}" in pinned[newest]
    ledger.close()
    assert len(versions - pinned.keys()) <= 2
    assert newest > LONG  # one a step was published


def test_superseded_checkpoints_are_removed_and_the_last_one_loads(stack, long_run, seconds):
    (run_checkpoint,) = list_run_checkpoints(long_run.directory / "cuts")
    ledger = Ledger(long_run.directory / "ledger.sqlite")
    directory = stack[0].directory / "store" / "checkpoints"
    own = [path.name for path in directory.iterdir() if ledger.run_id in path.name]
    ledger.close()
    assert own == [run_checkpoint.checkpoint.removeprefix("checkpoints/")]
    assert (directory / "first" / "checkpoint.json").is_file()  # of nobody's run checkpoint
    longer = FaultRun(stack[0], "long", seconds, {"steps": LONG + 2}, starts=1)
    (long_run.directory / "run.yaml").unlink()
    outcome = longer.run()
    assert not outcome.failure
    assert (outcome.lost, outcome.doubled) == (0, 0)
