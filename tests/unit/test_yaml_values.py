"""A few lines of YAML whose aliases stand for gigabytes are refused wherever users give YAML."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sluice.importers.documents import plain_value
from sluice.ports import read_ports
from sluice.yaml_values import MOST_ALIASED, load_yaml
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]


def lists(levels: int, each: int = 10) -> str:
    lines = ["a0: &a0 [x]"]
    for level in range(1, levels):
        inner = ", ".join([f"*a{level - 1}"] * each)
        lines.append(f"a{level}: &a{level} [{inner}]")
    return "\n".join(lines)


def merged(levels: int) -> str:
    """Keys that are merged: they grow while the text is read."""
    lines = ["a0: &a0 {k0: 1}"]
    for level in range(1, levels):
        inner = ", ".join([f"*a{level - 1}"] * 10)
        lines.append(f"a{level}: &a{level} {{<<: [{inner}], k{level}: 1}}")
    return "\n".join(lines)


BOMBS = {
    "lists": lists(12),
    "merged keys": merged(12),
    "texts": f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 1000)}]",
    "keys": lists(9) + "\nb: {? *a8 : 1}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_would_grow_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """In time, and in a process that has little memory."""
    path = tmp_path / "run.yaml"
    path.write_text(BOMBS[name])
    text = """
import resource, sys
from sluice.config import ConfigError, read_yaml
from sluice.loop.config import RunConfig
from sluice.config import parse_config
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
try:
    parse_config(RunConfig, {"environment": read_yaml(sys.argv[1])})
except ConfigError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", text, str(path)], capture_output=True, text=True, timeout=PATIENCE
    )
    told = f"its aliases stand for more than {MOST_ALIASED} characters and values"
    assert done.stdout.strip() == f"{path} is not valid YAML: {told}", done.stderr[-2000:]


def test_a_script_that_is_imported_has_such_a_text_as_a_text() -> None:
    for text in BOMBS.values():
        assert plain_value(text) == text


def test_ports_of_such_a_file_are_not_known(tmp_path: Path) -> None:
    (tmp_path / "ports.json").write_text("damaged")
    (tmp_path / "bad.yaml").write_text(BOMBS["merged keys"])
    (tmp_path / "good.yaml").write_text("server: {port: 7, metrics_port: 8}")
    known = {"bad": {}, "good": {"port": 7, "metrics_port": 8}}
    assert read_ports(tmp_path / "ports.json") == known


def test_aliases_that_stand_for_little_are_read_as_ever() -> None:
    rng = random.Random(5)
    for _ in range(200):
        names = [f"n{index}" for index in range(rng.randint(1, 6))]
        lines = []
        for index, name in enumerate(names):
            known = [f"*{each}" for each in names[:index]] or ["plain"]
            inner = ", ".join(rng.choice([*known, "1", "text"]) for _ in range(rng.randint(0, 4)))
            lines.append(f"{name}: &{name} [{inner}]")
        text = "\n".join(lines)
        assert load_yaml(text) == yaml.safe_load(text)
    large = f"a: &a {'x' * (MOST_ALIASED - 9)}\nb: *a"
    assert len(load_yaml(large)["b"]) == MOST_ALIASED - 9
    assert load_yaml("a: &a [1, *a]")["a"][0] == 1  # who checks the value finds that


def test_nobody_else_reads_yaml() -> None:
    """Of what is shipped."""
    found = [
        str(path.relative_to(ROOT))
        for folder in ("sluice", "services")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if re.search(r"yaml\.(safe_|full_|unsafe_)?load", path.read_text())
    ]
    assert found == ["sluice/config.py", "sluice/yaml_values.py"]
