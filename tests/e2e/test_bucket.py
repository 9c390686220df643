"""A whole run whose store is a bucket: nothing is shared but that and the run's directory."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.bucket import ObjectBucket
from sluice.loop.run_directory import latest_run_checkpoint
from sluice.loop.run_samples import load_samples
from tests.e2e import conftest
from tests.e2e.conftest import Stack, start_stack, stop_stack
from tests.s3_server import environment, make_bucket, running_s3

URL = "s3://runs/one"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    caches = tmp_path_factory.mktemp("caches")
    with running_s3() as endpoint, pytest.MonkeyPatch.context() as patch:
        make_bucket(endpoint, "runs")
        for name, value in {**environment(endpoint), "TMPDIR": str(caches)}.items():
            patch.setenv(name, value)
            patch.setitem(conftest.ENVIRONMENT, name, value)
        stack = start_stack(tmp_path_factory.mktemp("stack"), {"store": URL})
        yield stack
        stop_stack(stack)


def test_a_run_in_a_bucket_is_killed_and_goes_on(stack: Stack) -> None:
    settings = {"steps": 6, "store": None, "checkpoint_every": 2}
    training = stack.train("killed", dies_at=("consumed", 3), **settings)
    training.died()
    assert latest_run_checkpoint(training.run_dir / "cuts").step == 2
    for name in ("trainer", "rollout"):
        os.kill(stack.pid(name), signal.SIGKILL)
    training = stack.train("killed", resume=True, **settings)
    training.wait_for_step(3)
    os.kill(stack.pid("trainer"), signal.SIGKILL)
    training.finish()
    consumed = {group.group_id: group.consumed_step for group in training.groups("consumed")}
    assert consumed == {f"g{i:07}": i // 4 + 1 for i in range(24)}
    assert [row["step"] for row in training.rows()] == [1, 2, 3, 4, 5, 6]
    bucket = ObjectBucket(URL)
    found = {key.split("/")[0] for key in bucket.keys("")}
    assert {"blobs", "blob_pins", "rollouts", "checkpoints", "weights"} <= found
    newest = latest_run_checkpoint(training.run_dir / "cuts")
    assert bucket.exists(f"{newest.checkpoint}/checkpoint.json")
    assert not (stack.run_dir / "store").exists()
    assert not Path(training.run_dir / "store").exists()
    seen = list(load_samples(training.run_dir, URL, range(6, 7), print))
    assert {sample.step for sample in seen} == {6}
