"""The engines of a pool as a client knows them: what target indices mean, and local picks."""

from __future__ import annotations

import random
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.balance.routing.types import NO_VERSION, Needs
from sluice.router_client.types import Wanted

_SHUN_SECONDS = 30.0  # an engine that could not be reached
_REMEMBERED_EPOCHS = 16

Place = tuple[str, str, int]  # engine id, address, dp rank


class KnownEngines:
    """Tables by epoch, so that an answer is read with the table it was written by."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._tables: OrderedDict[int, dict[int, Place]] = OrderedDict()
        self._engines: list[KnownEngine] = []
        self._shunned: dict[str, float] = {}  # until when, by engine id
        self.epoch = 0  # the newest

    def learn(self, epoch: int, engines: Sequence[pb.Engine], *, is_now: bool = False) -> None:
        """Take the engines of an epoch; `is_now` though it is below the newest, as where a router
        was started anew while its clock was behind."""
        self._tables[epoch] = {
            engine.first_target_index + rank: (engine.engine_id, engine.address, rank)
            for engine in engines
            for rank in range(engine.dp_size)
        }
        while len(self._tables) > _REMEMBERED_EPOCHS:
            self._tables.popitem(last=False)
        if epoch < self.epoch and not is_now:
            return
        self.epoch = epoch
        self._engines = [
            KnownEngine(
                name=engine.engine_id,
                address=engine.address,
                dp_size=engine.dp_size,
                version=engine.weights.version if engine.HasField("weights") else NO_VERSION,
            )
            for engine in engines
            if engine.state == pb.ENGINE_STATE_ACTIVE
        ]

    def knows(self, epoch: int) -> bool:
        return epoch in self._tables

    def place(self, epoch: int, target: int) -> Place | None:
        """What a target index of an epoch means; None if that was never heard."""
        return self._tables.get(epoch, {}).get(target)

    def shun(self, engine_id: str) -> None:
        """Keep off an engine for a while: what fails at once always looks the least used."""
        self._shunned[engine_id] = time.monotonic() + _SHUN_SECONDS

    def pick(self, held: Iterable[tuple[str, int]], wanted: Sequence[Wanted]) -> list[Place] | None:
        """One place per single lease wanted, without the router; None if one has none.

        `held`: (engine id, dp rank) of the client's leases.
        """
        counts, now = Counter(held), time.monotonic()
        self._shunned = {name: until for name, until in self._shunned.items() if until > now}
        places: list[Place] = []
        for single in wanted:
            avoided = {*self._shunned, *single.excluded_engines}
            found = pick_locally(self._engines, counts, single.needs, self._rng, avoided)
            if found is None:
                return None
            engine, rank = found
            counts[engine.name, rank] += 1
            places.append((engine.name, engine.address, rank))
        return places


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
