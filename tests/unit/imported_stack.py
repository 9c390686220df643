"""Runs importers, and loads what they made as every process would that reads a part of it."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import pytest

from services.rollout.config import RolloutConfig
from services.trainer.config import TrainerConfig
from sluice import cli
from sluice.config import parse_config
from sluice.loop.config import RunConfig
from sluice.stack import UpConfig


def assert_loads(run: dict[str, Any], services: dict[str, Any], model: Path) -> None:
    """`model`: a directory that stands for the script's, which is not there."""
    parse_config(RunConfig, run)
    parse_config(UpConfig, services)
    for name, entry in services["services"].items():
        config = entry.get("config", {})
        if entry["kind"] == "trainer":
            there = {"model": str(model)}  # a trainer looks at its model first
            parse_config(TrainerConfig, {"store": "x", "name": name, **config, **there})
        if entry["kind"] == "rollout":
            more = {"store": "x", "router": "a:1", "engine_id": "e"}
            parse_config(RolloutConfig, {**more, **config})


def run_command(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `sluice` with these arguments."""
    out, error = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(error),
    ):
        patch.setattr(sys, "argv", ["sluice", *map(str, arguments)])
        code = cli.main()
    return code, out.getvalue(), error.getvalue()
