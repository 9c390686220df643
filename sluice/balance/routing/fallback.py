"""Picks targets without a router: power of two choices over what one client knows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass

from sluice.balance.routing.types import Needs


@dataclass(frozen=True, slots=True)
class KnownEngine:
    """An engine as last heard of; version is of its weights then."""

    name: str
    address: str
    dp_size: int
    version: int


def pick_locally(
    engines: Sequence[KnownEngine],
    held: Counter[tuple[str, int]],
    needs: Needs,
    rng: random.Random,
    avoided: Set[str] = frozenset(),
) -> tuple[KnownEngine, int] | None:
    """An engine and a dp rank: the less used by this client of two drawn at random.

    `held` counts the client's leases by (engine name, dp rank); `avoided` engines are taken only
    where no other will do. None: no engine will do.
    """
    able = [engine for engine in engines if _serves(engine, needs)]
    able = [engine for engine in able if engine.name not in avoided] or able
    if not able:
        return None

    def draw() -> tuple[KnownEngine, int]:
        engine = rng.choices(able, weights=[engine.dp_size for engine in able])[0]
        return engine, rng.randrange(engine.dp_size)

    first, second = draw(), draw()
    one, other = held[first[0].name, first[1]], held[second[0].name, second[1]]
    return first if one <= other else second


def _serves(engine: KnownEngine, needs: Needs) -> bool:
    if needs.exact is not None:
        return engine.version == needs.exact
    return engine.version >= needs.minimum
