"""Pages about importers name keys of ours: each is one of today's configuration."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from services.rollout.config import RolloutConfig
from services.rollout.environments.prompts import PromptsSettings
from services.rollout.openai.verifiers.environment import VerifiersSettings
from services.trainer.config import TrainerConfig
from sluice.config import models_of
from sluice.loop.config import RunConfig

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {
    name: (DOCS / name).read_text()
    for name in ("from-slime.md", "from-verl.md", "from-prime-rl.md")
}
MODELS: dict[str, type[BaseModel]] = {
    "run": RunConfig,
    "trainer": TrainerConfig,
    "rollout": RolloutConfig,
}
KEY = r"[a-z][\w.<>]*"
OPEN = (".engine.sglang.server_args.", ".environment.settings.")  # whose names are of others


def named_keys(page: str) -> list[tuple[str, str]]:
    """(which file, dotted key) of all that a page speaks of."""
    found = list[tuple[str, str]]()
    for row in (line for line in page.splitlines() if line.startswith("|")):
        spans = " ; ".join(re.findall(r"`([^`]+)`", row))
        for name, keys in re.findall(rf"(run|trainer|rollout): ((?:{KEY}(?:, )?)+)", spans):
            found += [(name, key) for key in keys.split(", ") if key]
        found += re.findall(rf"\b(trainer|rollout)\.config\.({KEY})", row)
        found += [("run", key) for key in re.findall(rf"\brun\.yaml ({KEY})", row)]
    return sorted({(name, key.rstrip(".")) for name, key in found})


def is_key(model: type[BaseModel], key: str) -> bool:
    models = [model]
    for part in key.split("."):
        if part == "<name>":
            continue
        fields = [m.model_fields[part] for m in models if part in m.model_fields]
        if not fields:
            return False
        models = [inner for field in fields for inner in models_of(field.annotation)]
    return True


@pytest.mark.parametrize("page", PAGES.values(), ids=list(PAGES))
def test_every_key_of_ours_that_the_page_names_is_there(page: str) -> None:
    named = named_keys(page)
    assert {name for name, _ in named} == set(MODELS)
    assert len(named) > 60
    open_keys = [key for _, key in named if any(start in f".{key}" for start in OPEN)]
    wrong = [
        f"{name}: {key}"
        for name, key in named
        if key not in open_keys and not is_key(MODELS[name], key)
    ]
    assert wrong == []
    settings = [key.rpartition(".")[2] for key in open_keys if OPEN[1] in f".{key}"]
    fields = PromptsSettings.model_fields.keys() | VerifiersSettings.model_fields.keys()
    assert {"prompt_key", "arguments"} & set(settings)
    assert [name for name in settings if name not in fields] == []


@pytest.mark.parametrize("key", ["stepz", "algorithm.loss.clip", "algorithm.lossy.name"])
def test_a_key_that_is_not_there_is_seen(key: str) -> None:
    assert not is_key(RunConfig, key)
