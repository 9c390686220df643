"""What a run leaves behind where something that draws it is missing."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from sluice.loop.report import RunReport

ROW = {"step": 1, "reward_mean": 0.5, "response_length_mean": 4.0, "skipped": []}


def test_a_run_without_matplotlib_does_not_fail_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = io.StringIO()
    with RunReport(tmp_path, 1, Console(file=said)) as report:
        report.step(ROW)
        assert report.plot() == tmp_path / "reward.png"
        (tmp_path / "reward.png").unlink()
        monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
        assert report.plot() is None
    assert not (tmp_path / "reward.png").exists()
    assert "matplotlib is not installed" in said.getvalue()
