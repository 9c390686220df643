"""A store and a run directory that an earlier release wrote are opened, and the run goes on.

`data/first_house.tar.gz`: a tiny model, its store with five weight versions and two
checkpoints, and a run of eight steps that was killed after its fifth; written by commit
7c3d425. `@ROOT@` stands for its directory.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.conftest import ENVIRONMENT, Stack, Training, stop_stack, wait_until

ARCHIVE = Path(__file__).parent / "data" / "first_house.tar.gz"
STEPS, GROUPS = 8, 4


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        # Python 3.11 has had filters since 3.11.4; Debian 12 has 3.11.2.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path)
    root = tmp_path / "first_house"
    for path in (root / "services.yaml", root / "runs" / "old" / "run.yaml"):
        path.write_text(path.read_text().replace("@ROOT@", str(root)))
    return root


@pytest.fixture
def services(root: Path) -> Iterator[Stack]:
    command = [sys.executable, "-m", "sluice.cli", "up", str(root / "services.yaml")]
    with (root / "up.log").open("w") as log:
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log)

    def is_up() -> bool:
        assert process.poll() is None, (root / "up.log").read_text()
        return (root / "services.json").exists()

    wait_until(is_up, what="sluice up")
    stack = Stack(root, process)
    yield stack
    stop_stack(stack)


@pytest.mark.long
def test_a_run_of_the_first_house_goes_on_where_it_was_killed(root: Path, services: Stack) -> None:
    run_dir = root / "runs" / "old"
    before = Training(run_dir, services.process).groups("consumed")
    assert {group.consumed_step for group in before} == {1, 2, 3, 4, 5}
    path = run_dir / "run.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "resume": True}))
    process = subprocess.Popen(
        [sys.executable, "-m", "sluice.cli", "train", str(path)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    training = Training(run_dir, process)
    training.finish()
    consumed = {group.group_id: group.consumed_step for group in training.groups("consumed")}
    assert consumed == {f"g{i:07}": i // GROUPS + 1 for i in range(STEPS * GROUPS)}
    assert [row["step"] for row in training.rows()] == list(range(1, STEPS + 1))
    blobs = {group.group_id: group.blob for group in training.groups("consumed")}
    kept = [group for group in before if blobs[group.group_id] == group.blob]
    assert len(kept) == len(before), "what was generated is not generated again"


def test_the_commands_read_what_the_first_house_wrote(root: Path) -> None:
    page = root / "trace.html"
    command = [sys.executable, "-m", "sluice.cli", "trace", str(root / "runs" / "old")]
    done = subprocess.run(
        [*command, "-o", str(page)], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert page.stat().st_size > 10_000
