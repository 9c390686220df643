"""Folders of which the whole suite runs only where it is asked for by name."""

from __future__ import annotations

from pathlib import Path

import pytest


def keep_fast_part(here: Path, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is below `here` and not marked `fast`, unless `here` is asked for."""
    if any(
        Path(argument.split("::")[0]).resolve().is_relative_to(here) for argument in config.args
    ):
        return
    slow = [i for i in items if i.path.is_relative_to(here) and "fast" not in i.keywords]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]
