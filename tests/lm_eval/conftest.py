"""The process that the harness asks."""

from __future__ import annotations

from tests.service.openai.conftest import model, process, store

__all__ = ["model", "process", "store"]
