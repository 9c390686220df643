"""Every tutorial of docs/ does what it says: its files are written, its commands run, in order."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sluice.loop.ledger import read_groups
from sluice.loop.report import read_metrics
from tests.tutorials import BLOCK, FILE, PAGES, ROOT, follow

ELSEWHERE = [
    ROOT / "tests" / "node" / "test_node_client.py",  # make test-node
    ROOT / "tests" / "compose" / "test_compose_tutorial.py",  # make test-compose
]


def rewards(run_dir: Path) -> list[float]:
    return [row["reward_mean"] for row in read_metrics(run_dir) if "reward_mean" in row]


def test_every_tutorial_is_followed() -> None:
    tests = [Path(__file__), *ELSEWHERE]
    followed = {
        name for test in tests for name in re.findall(r'follow\(\s*"(\w+)"', test.read_text())
    }
    assert {f"tutorial-{name}.md" for name in followed} == {page.name for page in PAGES}
    for page in PAGES:
        for language, text in BLOCK.findall(page.read_text()):
            assert language == "bash" or FILE.match(text), page


@pytest.mark.long
def test_own_environment(tmp_path: Path) -> None:
    output = follow("environment", tmp_path)
    assert "done" in output
    found = rewards(tmp_path / "runs" / "echo")
    assert len(found) == 40
    assert sum(found[:3]) / 3 < 0.3 and sum(found[-5:]) / 5 > 0.8
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in (tmp_path / "good.jsonl").read_text().splitlines()
    ]
    assert len(rows) > 100
    assert all(row["response"][:4] == 4 * row["prompt"][0] for row in rows)
    assert "<html" in (tmp_path / "runs" / "echo" / "report.html").read_text()


@pytest.mark.long
def test_own_loss(tmp_path: Path) -> None:
    output = follow("loss", tmp_path)
    assert "my_losses:Soft: keeps the contract" in output
    found = rewards(tmp_path / "runs" / "soft")
    assert sum(found[:3]) / 3 < 0.3 and sum(found[-3:]) / 3 > 0.6
    assert "my_losses:Soft" in (tmp_path / "runs" / "soft" / "report.html").read_text()


@pytest.mark.long
def test_agents_over_the_openai_port(tmp_path: Path) -> None:
    output = follow("agents", tmp_path)
    found = [float(text) for text in re.findall(r"^step \d+  reward (\S+)$", output, re.MULTILINE)]
    assert len(found) == 20
    assert found[0] < 0.3 and found[-1] > 0.5
    assert "services are down" in output


@pytest.mark.long  # what it does is tested in test_sft.py, test_status.py and test_training.py
def test_after_a_crash(tmp_path: Path) -> None:
    follow("recovery", tmp_path)
    run_dir = tmp_path / "runs" / "killed"
    assert " gone " in (tmp_path / "killed.log").read_text()
    assert " done" in (tmp_path / "resumed.log").read_text()
    assert [row["step"] for row in read_metrics(run_dir)] == list(range(1, 13))
    groups, damaged = read_groups(run_dir)
    consumed = Counter(group.consumed_step for group in groups if group.state == "consumed")
    assert (dict(consumed), damaged) == ({step: 4 for step in range(1, 13)}, 0)
