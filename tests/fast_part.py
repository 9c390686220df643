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
    slow = [i for i in items_below(here, items) if "fast" not in i.keywords]
    config.hook.pytest_deselected(items=slow)
    left_out = set(map(id, slow))
    items[:] = [item for item in items if id(item) not in left_out]


def items_below(here: Path, items: list[pytest.Item]) -> list[pytest.Item]:
    """Each file is looked at once: thousands of tests have hundreds of them."""
    inside = {path: path.is_relative_to(here) for path in {item.path for item in items}}
    return [item for item in items if inside[item.path]]
