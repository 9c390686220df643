"""What a demo may empty: what a demo has made, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.demo.measured import empty_directory
from sluice.durable import DirectoryError, owned


def listed(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("held", ["notes.txt", "services/code.py", "services/trainer.yaml"])
def test_what_no_demo_has_made_stays(tmp_path: Path, held: str) -> None:
    """A project's own `services`, and the run of a user, whose services have a folder there too."""
    (tmp_path / held).parent.mkdir(exist_ok=True)
    (tmp_path / held).write_text("mine")
    before = listed(tmp_path)
    with pytest.raises(DirectoryError, match="holds no run of a demo"):
        empty_directory(tmp_path)
    assert listed(tmp_path) == before


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DirectoryError, match="holds no run of a demo"):
        empty_directory(tmp_path / "file")


def test_an_earlier_demo_goes_and_what_it_points_to_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a path that is relative to where one stands, which stays a directory, too."""
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("mine")
    run_dir = empty_directory(tmp_path / "runs" / "demo")
    (run_dir / "store" / "blobs").mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text("{}")
    (run_dir / "link").symlink_to(kept)
    monkeypatch.chdir(run_dir)
    assert empty_directory(Path()) == run_dir
    assert not listed(run_dir) & {"store", "metrics.jsonl", "link"}
    assert (kept / "file").exists()
    (Path() / "model").mkdir()
    assert (run_dir / "model").exists()


def test_the_demo_of_another_process_is_left_alone(tmp_path: Path) -> None:
    run_dir = empty_directory(tmp_path / "demo")
    (run_dir / "metrics.jsonl").write_text("{}")
    with owned(run_dir, "up"), pytest.raises(DirectoryError, match="works in"):
        empty_directory(run_dir)
    assert (run_dir / "metrics.jsonl").exists()
