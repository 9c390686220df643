"""`sluice convert` and `sluice verify`, here and at a converter."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from sluice.config import ConfigError
from sluice.convert_command import CheckpointError, _in_thread, convert, verify
from sluice.weights.convert.work import Control
from tests.patience import PATIENCE
from tests.service.converter.conftest import Converter
from tests.unit.weights_rules.models import save_model


async def test_the_command_does_the_same_here_and_there(
    converter: Converter, model: Path, tmp_path: Path
) -> None:
    client = await converter.start("--no-durable")
    other, reports = save_model("qwen3", converter.root / "other", seed=1), []
    for number, address in enumerate(("", client.address)):
        made, report = converter.root / f"made-{number}", tmp_path / f"{number}.json"
        flags = ["--layout.tensor", "2", "--vocab_multiple", "8", "--report", str(report)]
        at = ["--address", address] if address else []
        await convert([str(model), str(made), *flags, *at])
        await verify([str(model), str(made), *at])
        reports.append(json.loads(report.read_bytes()))
        with pytest.raises(CheckpointError, match="differ") as error:
            await verify([str(other), str(made), *at])
        assert "made" in str(error.value)
    assert reports[0]["digests"] == reports[1]["digests"]
    assert len(reports[0]["converted"]) == 47


async def test_the_command_refuses_in_a_line(model: Path) -> None:
    with pytest.raises(CheckpointError, match="exists already"):
        await convert([str(model), str(model)])
    with pytest.raises(CheckpointError, match=r"Not a directory|File exists"):
        await convert([str(model), str(model / "config.json/made")])
    with pytest.raises(CheckpointError, match="for HF"):
        await convert([str(model), str(model.with_name("x")), "--quantize", "fp8"])


async def test_a_directory_that_lacks_a_file_is_named(model: Path, tmp_path: Path) -> None:
    """Of two that are compared it was one or the other."""
    empty = tmp_path / "empty"
    empty.mkdir()
    for arguments in ([model, empty], [empty, model]):
        with pytest.raises(CheckpointError, match=rf"'model.safetensors' is missing in '{empty}'"):
            await verify([str(each) for each in arguments])
    with pytest.raises(CheckpointError, match=rf"'config.json' is missing in '{empty}'"):
        await convert([str(empty), str(tmp_path / "made")])


async def test_a_report_that_cannot_be_written_is_refused_before_the_work(
    model: Path, tmp_path: Path
) -> None:
    for report in (tmp_path / "none" / "report.json", tmp_path, tmp_path / ("x" * 300)):
        with pytest.raises(ConfigError, match="report: "):
            await convert([str(model), str(tmp_path / "made"), "--report", str(report)])
    assert not (tmp_path / "made").exists()


async def test_a_signal_stops_the_work_and_waits_for_what_it_leaves() -> None:
    """SIGTERM ended with its code once all was converted."""
    control, begun, told = Control(), threading.Event(), list[str]()

    def work() -> None:
        begun.set()
        told.append("stopped" if control.stop.wait(PATIENCE) else "went on")
        control.check()

    working = asyncio.create_task(_in_thread(work, control))
    assert await asyncio.to_thread(begun.wait, PATIENCE)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert told == ["stopped"]
