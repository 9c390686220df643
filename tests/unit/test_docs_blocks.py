"""What the pages show in blocks: Python that compiles, and keys that are settings."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from services.converter.servicer import ConverterConfig
from services.gateway.config import GatewayConfig
from services.rollout.config import RolloutConfig
from services.rollout.reward_model.config import RewardModelConfig
from services.router.config import RouterConfig
from services.trainer.config import TrainerConfig
from sluice.config import models_of, read_yaml
from sluice.loop.config import DpoConfig, RewardModelRunConfig, RunConfig, SftConfig
from sluice.stack import UpConfig

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
OURS = ("sluice", "services", "examples", "tools", "tests")
KINDS: dict[str, type[BaseModel]] = {
    "router": RouterConfig,
    "trainer": TrainerConfig,
    "rollout": RolloutConfig,
    "converter": ConverterConfig,
    "reward_model": RewardModelConfig,
    "gateway": GatewayConfig,
}
FILES = [RunConfig, SftConfig, DpoConfig, RewardModelRunConfig, UpConfig, *KINDS.values()]
FOREIGN = ("rule_files", "x-mine")  # Prometheus, compose


def blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(page.read_text()) if found == language]


def unknown_keys(models: Sequence[type[BaseModel]], value: Any) -> Iterator[str]:
    """Keys, at any depth, that none of the models has; without models anything may stand there."""
    if isinstance(value, list):
        for each in value:
            yield from unknown_keys(models, each)
    if not isinstance(value, Mapping) or not models:
        return
    for key, inside in value.items():
        fields = [m.model_fields[key] for m in models if key in m.model_fields]
        if not fields:
            yield str(key)
            continue
        inner = [found for field in fields for found in models_of(field.annotation)]
        named = any(re.search("dict|Mapping|Any", str(field.annotation)) for field in fields)
        if isinstance(inside, Mapping) and not inner and not named:
            yield str(key)
        elif named and isinstance(inside, Mapping):
            for each in inside.values():
                yield from unknown_keys(inner, each)
        else:
            yield from unknown_keys(inner, inside)


def unknown_of_file(value: Mapping[str, Any]) -> list[str]:
    """Each key by itself, of the kind of file that it fits best: a block may be of two."""
    found = list[str]()
    entries = value.get("services")
    for key, inside in value.items():
        found += min(([*unknown_keys([model], {key: inside})] for model in FILES), key=len)
    for entry in entries.values() if isinstance(entries, Mapping) else ():
        if isinstance(entry, Mapping) and entry.get("kind") in KINDS:
            found += unknown_keys([KINDS[entry["kind"]]], entry.get("config") or {})
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_compiles_and_imports_what_is_there(page: Path) -> None:
    missing = []
    for text in blocks(page, "python"):
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            if node.module.partition(".")[0] in OURS:
                module = importlib.import_module(node.module)
                missing += [n.name for n in node.names if not hasattr(module, n.name)]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_key_of_a_yaml_block_is_a_setting(page: Path, tmp_path: Path) -> None:
    wrong = []
    for text in blocks(page, "yaml"):
        file = tmp_path / "block.yaml"
        file.write_text(text)
        value = read_yaml(file)
        if not any(key in value for key in FOREIGN):
            wrong += unknown_of_file(value)
    assert wrong == []


@pytest.mark.parametrize(
    "text",
    [
        "sampling: {max_new_token: 4}",
        "services: {t: {kind: trainer, config: {optim: {lr: 1}}}}",
        "services: {t: {kind: trainer, replica: 2}}",
        "step: 5",
    ],
)
def test_a_key_that_is_none_is_noticed(text: str) -> None:
    assert len(unknown_of_file(yaml.safe_load(text))) == 1
