"""docs/tutorial-compose.md on a real Docker engine, in a checkout of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from tests.tutorials import ROOT, follow
from tools.compose_smoke import create_project


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What a clone has, with ports and a project of its own; nothing of it stays."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
    copy = ["tar", "-C", str(ROOT), "--null", "-T", "-", "-cf", "-"]
    packed = subprocess.run(copy, input=files.stdout, check=True, capture_output=True)
    subprocess.run(["tar", "-C", str(tmp_path), "-xf", "-"], input=packed.stdout, check=True)
    project = create_project()
    for name, value in project.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COMPOSE_PROJECT_NAME", f"sluice-tutorial-{os.getpid()}")
    yield tmp_path
    project.name = os.environ["COMPOSE_PROJECT_NAME"]
    project.down()


def test_an_environment_of_ones_own_in_containers(checkout: Path) -> None:
    output = follow("compose", checkout, 3 * PATIENCE)  # it builds images
    (answer,) = re.findall(r'^\{"status":"success".*?\}\]\}\}', output, re.MULTILINE)
    (series,) = json.loads(answer)["data"]["result"]
    assert float(series["value"][1]) >= 1
    assert re.search(r"trainer:50051\s+serving", output)
    # compose clears the line before each of a log
    rewards = re.findall(r"^(?:\x1b\[2K)?step +\d+  reward (\S+)", output, re.MULTILINE)
    assert rewards and float(rewards[-1]) > 0.7
    assert "matplotlib" not in output  # it found a place to write to
    assert "5 samples, the first" in output
    assert re.search(r"  (\d)=  +\1{4} ", output)  # prompt and response as text
    assert "<html" in (checkout / "report.html").read_text()
