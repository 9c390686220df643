"""A client's leases: what it asks for, holds and gives back, and the engines they are on."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import grpc

from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.balance.routing.types import NO_VERSION, Needs

T = TypeVar("T")
Place = tuple[str, str, int]  # engine id, address, dp rank

_EARLY_LIMIT = 65_536
_SHUN_SECONDS = 30.0  # an engine that could not be reached
_REMEMBERED_EPOCHS = 16
_OUTCOMES = {
    grpc.StatusCode.OK: pb.OUTCOME_OK,
    grpc.StatusCode.UNAVAILABLE: pb.OUTCOME_CONNECT_ERROR,
    grpc.StatusCode.INTERNAL: pb.OUTCOME_SERVER_ERROR,
    grpc.StatusCode.DATA_LOSS: pb.OUTCOME_SERVER_ERROR,
    grpc.StatusCode.UNKNOWN: pb.OUTCOME_SERVER_ERROR,
    grpc.StatusCode.DEADLINE_EXCEEDED: pb.OUTCOME_TIMEOUT,
    grpc.StatusCode.CANCELLED: pb.OUTCOME_ABORTED,
    grpc.StatusCode.ABORTED: pb.OUTCOME_ABORTED,
}


def outcome_of(code: grpc.StatusCode) -> pb.Outcome:
    """Returns what a call to an engine that ended with `code` says about the engine."""
    return _OUTCOMES.get(code, pb.OUTCOME_CLIENT_ERROR)


class Lease(NamedTuple):
    """The right to run one sample on a data-parallel rank of an engine."""

    lease_id: int
    engine_id: str
    address: str
    dp_rank: int


@dataclass(kw_only=True, slots=True)  # not frozen, which makes each at three times the cost
class LeaseDemand:
    """Says which leases to ask for. Columns have one entry per lease, or are empty.

    groups: (group id, number of consecutive leases), summing to count.
    expected_tokens: of output, 0 unknown. sessions: "" for none; cached_tokens: what a
    session's target has in its cache of the next prompt. excluded_engines: ids of engines to
    keep off, as long as there is a free one beside them.
    """

    count: int
    min_version: int | None = None
    exact_version: int | None = None
    groups: Sequence[tuple[str, int]] = ()
    expected_tokens: Sequence[float] = ()
    sessions: Sequence[str] = ()
    cached_tokens: Sequence[int] = ()
    excluded_engines: Sequence[str] = ()

    @property
    def needs(self) -> Needs:
        return Needs(self.min_version or 0, self.exact_version)

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for leases that one call can ask for."""
        return self.min_version, self.exact_version, *self.excluded_engines

    def to_proto(self) -> pb.AcquireLeasesRequest:
        """Encodes the columns; those that say nothing are left out."""
        request = pb.AcquireLeasesRequest()
        request.count = self.count
        if self.min_version is not None:
            request.min_version = self.min_version
        if self.exact_version is not None:
            request.exact_version = self.exact_version
        for name, size in self.groups:
            request.group_ids.append(name)
            request.group_sizes.append(size)
        if self.expected_tokens:
            request.expected_token_counts.extend(self.expected_tokens)
        if self.sessions:
            request.session_ids.extend(self.sessions)
        if self.cached_tokens:
            request.cached_token_counts.extend(self.cached_tokens)
        if self.excluded_engines:
            request.excluded_engine_ids.extend(self.excluded_engines)
        return request

    def singles(self) -> list[LeaseDemand]:
        """Returns one demand for each of the leases; those that are alike share one."""
        if self.count == 1:
            return [self]
        names = [name for name, size in self.groups for _ in range(size)]
        columns = (names, self.expected_tokens, self.sessions, self.cached_tokens)
        kinds = list(zip(*(column or [None] * self.count for column in columns), strict=True))
        singles = {kind: self._single(*kind) for kind in dict.fromkeys(kinds)}
        return [singles[kind] for kind in kinds]

    def _single(
        self,
        group: str | None,
        expected_tokens: float | None,
        session: str | None,
        cached_tokens: int | None,
    ) -> LeaseDemand:
        return replace(
            self,
            count=1,
            groups=() if group is None else [(group, 1)],
            expected_tokens=() if expected_tokens is None else [expected_tokens],
            sessions=() if session is None else [session],
            cached_tokens=() if cached_tokens is None else [cached_tokens],
        )


def join(demands: Sequence[LeaseDemand]) -> LeaseDemand:
    """Joins demands of the same kind in one."""
    if len(demands) == 1:
        return demands[0]
    groups: list[tuple[str, int]] = []
    for demand in demands:
        for name, size in demand.groups or [("", demand.count)]:
            if groups and groups[-1][0] == name:
                size += groups.pop()[1]
            groups.append((name, size))
    counts = [demand.count for demand in demands]
    return replace(
        demands[0],
        count=sum(counts),
        groups=groups if any(name for name, _ in groups) else (),
        expected_tokens=_column(counts, [demand.expected_tokens for demand in demands], 0.0),
        sessions=_column(counts, [demand.sessions for demand in demands], ""),
        cached_tokens=_column(counts, [demand.cached_tokens for demand in demands], 0),
    )


def _column(counts: Sequence[int], columns: Sequence[Sequence[T]], missing: T) -> Sequence[T]:
    """Joins columns, each of a demand's count or empty; empty where all are."""
    if not any(columns):
        return ()
    joined: list[T] = []
    for count, column in zip(counts, columns, strict=True):
        joined += column or [missing] * count
    return joined


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """Describes an engine as last heard of; version is of its weights then."""

    name: str
    address: str
    dp_size: int
    version: int


class FleetView:
    """Shows a client the engines of its pool: what target indices mean, and local picks.

    Tables are kept by epoch, so that an answer is read with the table it was written by; none is
    changed once it is made.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._tables: OrderedDict[int, dict[int, Place]] = OrderedDict()
        self._layout: list[tuple[int, int, str, str]] = []  # what the newest table is made of
        self._table: dict[int, Place] = {}  # one for all epochs that differ in weights and loads
        self._engines: list[EngineEntry] = []
        self._shunned: dict[str, float] = {}  # until when, by engine id
        self.epoch = 0  # the newest

    def learn(self, epoch: int, engines: Sequence[pb.Engine], *, is_now: bool = False) -> None:
        """Take the engines of an epoch; `is_now` though it is below the newest, as where a router
        was started anew while its clock was behind."""
        layout = [(e.first_target_index, e.dp_size, e.engine_id, e.address) for e in engines]
        if layout != self._layout:
            self._layout = layout
            self._table = {
                first + rank: (name, address, rank)
                for first, ranks, name, address in layout
                for rank in range(ranks)
            }
        self._tables[epoch] = self._table
        while len(self._tables) > _REMEMBERED_EPOCHS:
            self._tables.popitem(last=False)
        if epoch < self.epoch and not is_now:
            return
        self.epoch = epoch
        self._engines = [
            EngineEntry(
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

    def places(self, epoch: int) -> Mapping[int, Place]:
        """Returns what the target indices of an epoch mean; none of one that was never heard."""
        return self._tables.get(epoch, {})

    def shun(self, engine_id: str) -> None:
        """Keep off an engine for a while: what fails at once always looks the least used."""
        self._shunned[engine_id] = time.monotonic() + _SHUN_SECONDS

    def pick(
        self, in_use: Iterable[tuple[str, int]], wanted: Sequence[LeaseDemand]
    ) -> list[Place] | None:
        """Picks a place for each single lease, without the router; None if one has none.

        `in_use`: (engine id, dp rank) of the client's leases.
        """
        counts, now = Counter(in_use), time.monotonic()
        self._shunned = {name: until for name, until in self._shunned.items() if until > now}
        places: list[Place] = []
        for single in wanted:
            avoided = {*self._shunned, *single.excluded_engines}
            choice = pick_locally(self._engines, counts, single.needs, self._rng, avoided)
            if choice is None:
                return None
            engine, rank = choice
            counts[engine.name, rank] += 1
            places.append((engine.name, engine.address, rank))
        return places


def pick_locally(
    engines: Sequence[EngineEntry],
    in_use: Counter[tuple[str, int]],
    needs: Needs,
    rng: random.Random,
    avoided: Set[str] = frozenset(),
) -> tuple[EngineEntry, int] | None:
    """Picks an engine and a dp rank: the less used by this client of two drawn at random.

    `in_use` counts the client's leases by (engine name, dp rank); `avoided` engines are taken only
    where no other will do. None: no engine will do.
    """
    able = [engine for engine in engines if _serves(engine, needs)]
    able = [engine for engine in able if engine.name not in avoided] or able
    if not able:
        return None

    def draw() -> tuple[EngineEntry, int]:
        engine = rng.choices(able, weights=[engine.dp_size for engine in able])[0]
        return engine, rng.randrange(engine.dp_size)

    first, second = draw(), draw()
    one, other = in_use[first[0].name, first[1]], in_use[second[0].name, second[1]]
    return first if one <= other else second


def _serves(engine: EngineEntry, needs: Needs) -> bool:
    if needs.exact is not None:
        return engine.version == needs.exact
    return engine.version >= needs.minimum


@dataclass(eq=False, slots=True)
class Ticket:
    """Waits for one lease; `wanted` is asked for again should the router forget it."""

    wanted: LeaseDemand
    future: asyncio.Future[Lease]


@dataclass
class PendingReleases:
    """Collects leases to give back with the next call."""

    ids: list[int] = field(default_factory=list)
    outcomes: list[pb.Outcome] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add_all(self, tokens: Mapping[int, int], outcome: pb.Outcome) -> None:
        """Add leases that ended alike; tokens: of each by its id, -1 where nothing is known."""
        self.ids += tokens
        self.outcomes += [outcome] * len(tokens)
        self.tokens += tokens.values()

    def move_to(self, request: pb.AcquireLeasesRequest) -> None:
        """Have a request give them back, in columns; those that say nothing are left out."""
        if not self.ids:
            return
        released = request.released
        released.lease_ids.extend(self.ids)
        if self.outcomes.count(pb.OUTCOME_OK) < len(self.ids):
            released.outcomes.extend(self.outcomes)
        if max(self.tokens) >= 0:
            released.token_counts.extend(self.tokens)
        self.ids, self.outcomes, self.tokens = [], [], []

    def take_back(self, request: pb.AcquireLeasesRequest) -> None:
        """Keep what a failed call was to give back for the next one."""
        ids = request.released.lease_ids
        self.ids += ids
        self.outcomes += request.released.outcomes or [pb.OUTCOME_OK] * len(ids)
        self.tokens += request.released.token_counts or [-1] * len(ids)


def renewal(leases: Iterable[Lease], waiting: Sequence[int]) -> pb.RenewLeasesRequest:
    """Lists all that a client holds and waits for, in columns."""
    leases = list(leases)
    engines: dict[str, int] = {}
    request = pb.RenewLeasesRequest(
        lease_ids=[*(lease.lease_id for lease in leases), *waiting],
        dp_ranks=[*(lease.dp_rank for lease in leases), *(-1 for _ in waiting)],
        engine_indices=[
            *(engines.setdefault(lease.engine_id, len(engines)) for lease in leases),
            *(-1 for _ in waiting),
        ],
    )
    request.engine_ids.extend(engines)
    return request


class LeaseBook:
    """Keeps leases by id: every one is in use, waits, or has been given to `give_back`."""

    def __init__(self, fleet: FleetView, give_back: Callable[[int, pb.Outcome], None]) -> None:
        self.leases: dict[int, Lease] = {}
        self.waiting: dict[int, Ticket] = {}
        self.has_waiting = asyncio.Event()
        self._fleet, self._give_back = fleet, give_back
        self._early: OrderedDict[int, Place] = OrderedDict()  # of tickets still on their way
        self._local_id = -(random.SystemRandom().getrandbits(38) << 24)

    def take(self, response: pb.AcquireLeasesResponse, tickets: Sequence[Ticket]) -> None:
        """Resolve what got a target, keep the rest; tickets are of the new leases, in order."""
        epoch, first = response.epoch, response.first_lease_id
        if not self._fleet.knows(epoch):
            self._fleet.learn(epoch, response.engines)
        places, early = self._fleet.places(epoch), self._early
        for lease_id, target in enumerate(response.target_indices[:], first):  # as a list: cheaper
            ticket = tickets[lease_id - first]
            place = places.get(target)  # -1 is no target
            if place is None and early:
                place = early.pop(lease_id, None)
            if place is None:
                self._keep(lease_id, ticket)
            else:
                self._resolve(lease_id, ticket, place)
        if response.bound_lease_ids:
            self.bind(epoch, response.bound_lease_ids, response.bound_target_indices)

    def bind(self, epoch: int, lease_ids: Sequence[int], targets: Sequence[int]) -> None:
        """Resolve leases that had waited."""
        places = self._fleet.places(epoch)
        for lease_id, target in zip(lease_ids, targets, strict=True):
            place = places.get(target)
            if place is None:
                continue  # of an epoch long gone; the next renewal tells again
            ticket = self.waiting.pop(lease_id, None)
            if ticket is not None:
                self._resolve(lease_id, ticket, place)
            else:
                self._early[lease_id] = place
                while len(self._early) > _EARLY_LIMIT:
                    self._early.popitem(last=False)

    def pick(self, tickets: Sequence[Ticket]) -> bool:
        """Bind tickets without the router; False when no known engine will do."""
        open_ = [ticket for ticket in tickets if not ticket.future.done()]
        in_use = ((lease.engine_id, lease.dp_rank) for lease in self.leases.values())
        places = self._fleet.pick(in_use, [ticket.wanted for ticket in open_])
        for ticket, place in zip(open_, places or (), strict=False):
            self._local_id -= 1
            self._resolve(self._local_id, ticket, place)
        return places is not None

    def pick_waiting(self) -> None:
        """Bind what waits without the router, and give its own leases back.

        It may only have been out of reach, and its queue go on.
        """
        self.pick(list(self.waiting.values()))

    def close(self) -> None:
        """Give everything back."""
        for ticket in self.waiting.values():
            ticket.future.cancel()
        for lease_id in (*self.leases, *self.waiting):
            self._give_back(lease_id, pb.OUTCOME_ABORTED)
        self.leases.clear()
        self.waiting.clear()

    def _keep(self, lease_id: int, ticket: Ticket) -> None:
        if ticket.future.done():
            self._give_back(lease_id, pb.OUTCOME_ABORTED)
            return
        self.waiting[lease_id] = ticket
        self.has_waiting.set()
        ticket.future.add_done_callback(lambda _: self._wait_no_more(lease_id))

    def _wait_no_more(self, lease_id: int) -> None:
        """Give back a lease whose ticket is done, but which the router still has queued."""
        if self.waiting.pop(lease_id, None) is not None:
            self._give_back(lease_id, pb.OUTCOME_ABORTED)

    def _resolve(self, lease_id: int, ticket: Ticket, place: Place) -> None:
        if ticket.future.done():  # given up in the meantime
            self._give_back(lease_id, pb.OUTCOME_ABORTED)
            return
        lease = Lease(lease_id, *place)
        self.leases[lease_id] = lease
        ticket.future.set_result(lease)
