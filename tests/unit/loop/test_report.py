"""What a run leaves behind where something that draws it is missing."""

from __future__ import annotations

import io
import resource
import sys
from pathlib import Path

import pytest
from rich.console import Console

from sluice.loop.report import RunReport, read_metrics

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


def test_a_damaged_line_is_left_out_and_said(tmp_path: Path) -> None:
    """Wherever a bit flips: those behind the line stay, and nothing ends with a trace."""
    said = io.StringIO()
    with RunReport(tmp_path, 9, Console(file=said)) as report:
        for step in range(1, 4):
            report.step({**ROW, "step": step})
        path = tmp_path / "metrics.jsonl"
        data = path.read_bytes()
        left_out = 0
        for index in range(0, len(data), 7):
            path.write_bytes(data[:index] + bytes([data[index] ^ 0x84]) + data[index + 1 :])
            report.truncate(9)
            steps = [row["step"] for row in read_metrics(tmp_path)]
            assert steps in ([1, 2, 3], [1, 2], [2, 3], [1, 3], [1], [3]), index
            left_out += len(steps) < 3
        assert left_out > len(data) // 10
        for size in range(0, len(data), 20):
            path.write_bytes(data[:size])
            assert len(report.truncate(9)) == data[:size].count(b"\n")
        path.write_bytes(data.replace(b"response_length_mean", b"response_length_meen"))
        assert report.plot() is None
    assert "damaged lines are left out" in said.getvalue()


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RunReport(tmp_path, 9, Console(file=io.StringIO())) as report:
        report.step(ROW)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        try:
            with pytest.raises(OSError, match=r"too large: .*metrics\.jsonl"):
                report.step({**ROW, "note": "x" * 200})
            assert report.plot() is None  # which would hide what went wrong before
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "reward.png").exists()
