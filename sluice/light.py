"""Dataclasses that are made by the thousand: frozen to who checks types, at a third of the cost.

The guard of a frozen dataclass stands in the way of its own `__init__`, too, once for each field.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    from dataclasses import dataclass as light_dataclass
else:

    def light_dataclass(*, frozen: bool, kw_only: bool) -> Callable[[type[T]], type[T]]:
        """Takes no heed of `frozen`, which mypy does."""
        assert frozen
        return dataclass(kw_only=kw_only)
