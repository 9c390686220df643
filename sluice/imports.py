"""Imports of large libraries.

torch and transformers make a million objects that stay. Looking through them for garbage, again and
again while they are made, is a sixth of the work of a start.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def uncollected() -> Iterator[None]:
    """Collects no garbage meanwhile."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_named(name: str) -> Any:
    """Imports what `module:attribute` names, as registries of heavy things do."""
    module, _, attribute = name.partition(":")
    with uncollected():
        return getattr(importlib.import_module(module), attribute)


def keep_loaded() -> None:
    """To be called by a process that has started: what it has now is looked through no more.

    That is a third of all work of an engine, and most of what its end costs.
    """
    gc.collect()
    gc.freeze()
