"""Files of a run that is sound, to be spoilt one way at a time."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice.finding import OK, WRONG, Finding
from sluice.preflight.command import preflight

ROWS = [{"prompt": f"{number}=", "answer": str(number)} for number in range(40)]


class Files:
    """run.yaml, services.yaml, prompts and a model in a directory of their own."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        shutil.copytree(model, self.model)
        self.write_rows("rows.jsonl", *ROWS)
        self.run: dict[str, Any] = {
            "run_dir": str(folder / "run"),
            "services": str(folder / "up" / "services.json"),
            "prompts": {"file": str(folder / "rows.jsonl")},
            "environment": {"name": "prompts"},
            "sampling": {"max_new_tokens": 4},
            "groups_per_step": 4,
            "samples_per_group": 4,
            "steps": 10,
        }
        self.services: dict[str, Any] = {
            "run_dir": str(folder / "up"),
            "services": {
                "router": {"kind": "router"},
                "trainer": {"kind": "trainer", "config": {"model": str(self.model)}},
                "rollout": {
                    "kind": "rollout",
                    "config": {
                        "tokenizer": str(self.model),
                        "engine": {"max_model_length": 16},
                    },
                },
            },
        }

    @property
    def trainer(self) -> dict[str, Any]:
        """The trainer's settings."""
        return self.services["services"]["trainer"]["config"]

    @property
    def rollout(self) -> dict[str, Any]:
        """The rollout's settings."""
        return self.services["services"]["rollout"]["config"]

    def write_rows(self, name: str, *rows: Any) -> Path:
        path = self.folder / name
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return path

    def set_model(self, **settings: Any) -> None:
        """Changes keys of config.json; None takes one out."""
        path = self.model / "config.json"
        values = json.loads(path.read_text()) | settings
        path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))

    def paths(self) -> tuple[str, str]:
        run, services = self.folder / "run.yaml", self.folder / "services.yaml"
        run.write_text(yaml.safe_dump(self.run))
        services.write_text(yaml.safe_dump(self.services))
        return str(run), str(services)

    def findings(
        self, *flags: str, up: bool = True, kind: str | None = None, rows: int = 200
    ) -> list[Finding]:
        run, services = self.paths()
        return asyncio.run(preflight(run, flags, services if up else None, kind, rows))

    def faults(self, *flags: str, **options: Any) -> list[str]:
        """All that is not ok, as `state subject: text`."""
        found = self.findings(*flags, **options)
        return [f"{f.state} {f.subject}: {f.text}" for f in found if f.state != OK]

    def wrong(self, *flags: str, **options: Any) -> list[str]:
        return [f.text for f in self.findings(*flags, **options) if f.state == WRONG]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen3(tmp_path_factory.mktemp("tiny") / "model", 0)


@pytest.fixture
def files(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    monkeypatch.chdir(tmp_path)
    return Files(tmp_path, tiny_model)
