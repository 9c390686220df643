"""Several things at once that succeed or end together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Every result, in order. The first failure, or a cancellation, ends the others as well."""
    tasks = [asyncio.create_task(part) for part in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
