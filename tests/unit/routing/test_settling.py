"""A restarted router gives no place away that a client may still hold of an earlier router."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.balance.routing import (
    EngineSpec,
    LeaseClaims,
    LeaseRefusedError,
    LeaseRequest,
    Pool,
    PoolConfig,
    RankReport,
    Refusal,
)
from sluice.balance.routing.settling import RECONNECT_SECONDS, Settling

CONFIG = PoolConfig(client_ttl=30.0, engine_ttl=15.0)
HEARTBEAT = 10.0
TICK = 0.5
SPAN = 1 << 20  # ids of one router
PLACES, RANKS = 2, 2

Place = tuple[str, int]


@dataclass
class Client:
    """Follows the protocol: renews when it is told to, when it comes back, and in time."""

    name: str
    known_epoch: int = 0
    back_at: float = 0.0  # it reaches the router from then on
    renewed: float = 0.0
    held: dict[int, Place] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    returned: list[int] = field(default_factory=list)  # to be given back with the next call


class World:
    """Routers one after another, engines that outlive them, clients that come back late."""

    def __init__(self, seed: int, *, delay: float, engines_tell: bool) -> None:
        self.rng = random.Random(seed)
        self.delay, self.engines_tell = delay, engines_tell
        self.now, self.routers, self.local = 0.0, 0, 0
        self.engines = [f"e{number}" for number in range(self.rng.randint(1, 3))]
        # Where engines say nothing, only clients that knew another router give a restart away.
        known = 0 if engines_tell else 1
        self.clients = [Client(f"c{at}", known) for at in range(self.rng.randint(1, 4))]
        self.epochs = dict.fromkeys(self.engines, 0)
        self.registers_at = dict.fromkeys(self.engines, 0.0)
        self.pool: Pool | None = None
        self.down_until = 0.0
        self.most_charged = self.granted = 0

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += TICK
            if self.pool is None and self.now >= self.down_until:
                self.start_router()
            if self.pool is not None:
                self.pool.expire(self.now)
                for name in self.engines:
                    self.engine_lives(name)
            for client in self.rng.sample(self.clients, len(self.clients)):
                self.client_lives(client)
                self.check()
            if self.pool is not None and self.rng.random() < 0.01:
                self.pool, self.down_until = None, self.now + self.rng.uniform(0, 3)

    def start_router(self) -> None:
        self.routers += 1
        self.pool = Pool(
            CONFIG, np.random.default_rng(self.routers), first_lease_id=self.routers * SPAN
        )
        for client in self.clients:
            client.back_at = self.now + self.rng.uniform(0, self.delay)
        for name in self.engines:
            self.registers_at[name] = self.now + self.rng.uniform(0, 5)
        if self.engines_tell and self.rng.random() < 0.3:
            self.clients.append(Client(f"c{len(self.clients)}", back_at=self.now))

    def engine_lives(self, name: str) -> None:
        assert self.pool is not None
        if self.now < self.registers_at[name]:
            return
        self.registers_at[name] = self.now + 1.0
        spec = EngineSpec(name=name, dp_size=RANKS, max_running=PLACES)
        known = self.epochs[name] if self.engines_tell else 0
        self.pool.register(spec, self.now, known_epoch=known)
        self.epochs[name] = self.pool.epoch
        if self.engines_tell:
            runs = Counter(place for client in self.clients for place in client.held.values())
            ranks = [RankReport(running_count=runs[name, rank]) for rank in range(RANKS)]
            self.pool.report_load(name, ranks, self.now)

    def client_lives(self, client: Client) -> None:
        for lease in [lease for lease in client.held if self.rng.random() < 0.05]:
            del client.held[lease]
            client.returned.append(lease)
        if not self.reaches(client):
            if self.pool is None and self.rng.random() < 0.02 and any(self.epochs.values()):
                self.local -= 1
                client.held[self.local] = self.rng.choice(self.engines), self.rng.randrange(RANKS)
            return
        pool = self.pool
        assert pool is not None
        first = pool.tables.targets.epoch if client.known_epoch < self.routers * SPAN else 0
        if first and self.rng.random() < 0.5:  # its stream of engines comes back first
            pool.greet(client.name, client.known_epoch, self.now)
            client.known_epoch = pool.epoch
        if client.returned or self.rng.random() < 0.3:
            self.ask(client, self.rng.randint(0, 3))
        if self.now >= client.renewed + (1.0 if first else HEARTBEAT):
            self.renew(client)

    def reaches(self, client: Client) -> bool:
        return self.pool is not None and self.now >= client.back_at

    def ask(self, client: Client, count: int) -> None:
        pool = self.pool
        assert pool is not None
        pool.greet(client.name, client.known_epoch, self.now)
        client.known_epoch = pool.epoch  # as an answer to any call, refused or not, may tell it
        pool.release(client.name, ids(*client.returned), self.now)
        client.returned.clear()
        wanted = LeaseRequest(count=count, may_wait=True)
        try:
            grant = pool.acquire(client.name, wanted, self.now)
        except LeaseRefusedError as refused:
            assert refused.reason is Refusal.RENEW_FIRST
            self.renew(client)
            grant = pool.acquire(client.name, wanted, self.now)
        for lease, target in enumerate(grant.targets.tolist(), grant.first_id):
            if target < 0:
                client.waiting.add(lease)
            else:
                self.hold(client, lease, target)
        for lease, target in pool.collect(client.name):
            if lease in client.waiting:
                client.waiting.remove(lease)
                self.hold(client, lease, target)

    def hold(self, client: Client, lease: int, target: int) -> None:
        located = self.pool.located(target)  # type: ignore[union-attr]
        assert located is not None
        client.held[lease] = located[0].spec.name, located[1]
        self.granted += 1

    def renew(self, client: Client) -> None:
        assert self.pool is not None
        mine = sorted(client.held) + sorted(client.waiting)
        places = [client.held.get(lease, ("", -1)) for lease in mine]
        index = {name: at for at, name in enumerate(self.engines)}
        held = LeaseClaims(
            ids=ids(*mine),
            names=self.engines,
            engines=ids(*(index.get(name, -1) for name, _ in places)),
            ranks=ids(*(rank for _, rank in places)),
        )
        unknown = set(
            self.pool.renew(
                client.name, held, self.now, known_epoch=client.known_epoch
            ).unknown.tolist()
        )
        client.waiting -= unknown
        client.known_epoch = self.pool.epoch
        client.renewed = self.now
        if unknown & client.held.keys():  # their engine is about to register
            client.renewed = self.now + self.rng.uniform(0, 1) - HEARTBEAT

    def check(self) -> None:
        """Of leases that routers gave no rank has more than its places, told or not."""
        given = Counter(
            place for client in self.clients for lease, place in client.held.items() if lease > 0
        )
        assert max(given.values(), default=0) <= PLACES
        if self.pool is not None:
            tables = self.pool.tables
            entries = tables.leases._old.items()
            local = Counter(entry[0] for lease, entry in entries if lease < 0)
            assert self.pool.tables.leases.local_count == local.total()
            for target, count in enumerate(tables.targets.charges.tolist()):
                self.most_charged = max(self.most_charged, count)
                assert count <= PLACES + local[target]


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.booleans())
def test_no_place_is_given_twice_however_often_the_router_restarts(seed, engines_tell):
    """Clients may take a heartbeat to come back where engines say what they run."""
    delay = HEARTBEAT - 2.0 if engines_tell else RECONNECT_SECONDS - 1.5
    World(seed, delay=delay, engines_tell=engines_tell).run(150.0)


def test_the_worlds_are_busy_and_without_settling_places_are_given_twice(monkeypatch):
    worlds = [World(seed, delay=3.0, engines_tell=True) for seed in range(5)]
    for world in worlds:
        world.run(150.0)
    assert sum(world.routers for world in worlds) > 10
    assert sum(world.granted for world in worlds) > 200
    assert any(world.local for world in worlds)
    assert max(world.most_charged for world in worlds) >= PLACES
    monkeypatch.setattr(Settling, "closed", lambda self, now: set())
    broken = 0
    for seed in range(5):
        with pytest.raises(AssertionError):
            World(seed, delay=3.0, engines_tell=True).run(600.0)
        broken += 1
    assert broken == 5


def restarted(**engine: object) -> Pool:
    """A pool of an earlier router's engine with one place, at time 0."""
    pool = Pool(CONFIG, np.random.default_rng(0), first_lease_id=SPAN)
    pool.register(EngineSpec(name="e", max_running=1), 0.0, **engine)  # type: ignore[arg-type]
    return pool


def asked(pool: Pool, client: str, now: float, known_epoch: int = 0) -> bool:
    """Whether a lease is given at once."""
    pool.greet(client, known_epoch, now)
    return bool(
        (pool.acquire(client, LeaseRequest(count=1, may_wait=True), now).targets >= 0).all()
    )


def told(pool: Pool, client: str, now: float, *leases: int) -> None:
    zeros = np.zeros(len(leases), dtype=np.int64)
    pool.renew(client, LeaseClaims(ids=ids(*leases), names=["e"], engines=zeros, ranks=zeros), now)


def test_a_fleet_that_starts_waits_for_nobody():
    assert asked(restarted(), "new", 0.0)


def test_a_client_that_knew_another_router_is_refused_until_it_has_said_what_it_holds():
    pool = restarted()
    with pytest.raises(LeaseRefusedError) as refused:
        asked(pool, "old", 0.1, known_epoch=5)
    assert refused.value.reason is Refusal.RENEW_FIRST
    assert not asked(pool, "new", 0.2), "the other one may hold the place"
    told(pool, "old", 0.3, 17)
    pool.expire(RECONNECT_SECONDS + 0.1)
    assert pool.engines()[0].lease_counts == (1,)
    assert pool.release("old", ids(17), RECONNECT_SECONDS + 0.2) == 1
    assert len(pool.collect("new")) == 1


def test_a_client_that_never_renews_is_waited_for_one_heartbeat_long():
    pool = restarted()
    pool.greet("old", 5, 0.1)
    assert not asked(pool, "new", 0.2)
    pool.expire(HEARTBEAT - 0.1)
    assert not pool.collect("new")
    pool.expire(HEARTBEAT + 0.2)
    assert pool.collect("new")
    assert asked(pool, "old", HEARTBEAT + 0.3) is False, "it is not refused any more"


def test_an_engine_that_was_leased_before_opens_when_its_requests_are_accounted_for():
    pool = restarted(known_epoch=5)
    told(pool, "one", 0.1)
    assert not asked(pool, "one", 0.2), "others may hold leases there"
    pool.report_load("e", [RankReport(running_count=1)], RECONNECT_SECONDS + 0.1)
    assert not pool.collect("one"), "of whom it runs a request"
    pool.report_load("e", [RankReport(running_count=0)], RECONNECT_SECONDS + 0.2)
    assert pool.collect("one")


def test_without_waiting_the_refusal_says_that_the_router_settles():
    pool = restarted(known_epoch=5)
    with pytest.raises(LeaseRefusedError) as refused:
        pool.acquire("c", LeaseRequest(count=1), 0.1)
    assert refused.value.reason is Refusal.SETTLING


def test_an_engine_named_before_it_came_stays_closed_until_it_is_named_again():
    pool = Pool(CONFIG, np.random.default_rng(0), first_lease_id=SPAN)
    told(pool, "old", 0.0, 17)
    pool.register(EngineSpec(name="e", max_running=1), 1.0)
    assert not asked(pool, "new", 1.0 + RECONNECT_SECONDS + 0.1)
    told(pool, "old", 1.0 + RECONNECT_SECONDS + 0.2, 17)
    assert pool.engines()[0].lease_counts == (1,)
    assert not pool.collect("new")


def test_a_fresh_engine_beside_a_long_settled_router_is_leased_at_once():
    pool = restarted(known_epoch=5)
    told(pool, "old", 0.1, 17)
    pool.register(EngineSpec(name="f", max_running=1), HEARTBEAT * 3)
    assert asked(pool, "old", HEARTBEAT * 3)


def test_leases_picked_locally_are_counted_apart():
    pool = restarted(known_epoch=5)
    told(pool, "c", 0.1, -3, -2, 17)
    assert pool.engines()[0].lease_counts == (3,)
    assert pool.tables.leases.local_count == 2
    pool.release("c", ids(-3, 17), 0.2)
    assert pool.tables.leases.local_count == 1
    pool.expire(100.0)
    assert pool.tables.leases.local_count == 0


@pytest.mark.parametrize("limits", [{"max_leases_per_client": 3}, {"max_leases": 3}], ids=str)
def test_a_client_that_returns_holds_no_more_than_it_may(limits: dict[str, int]):
    pool = Pool(CONFIG.model_copy(update=limits), np.random.default_rng(0), first_lease_id=SPAN)
    pool.register(EngineSpec(name="e0"), 0.0)

    def renewed(*held: int):
        claims = LeaseClaims(
            ids=ids(*held),
            names=["e0"],
            engines=np.zeros(len(held), int),
            ranks=np.zeros(len(held), int),
        )
        return pool.renew("c", claims, 1.0, known_epoch=5)

    first = renewed(-9, -8, -7, -6, -5)
    assert (first.adopted_count, sorted(first.unknown.tolist())) == (3, [-6, -5])
    again = renewed(-9, -8, -7, -4)  # what is charged already takes no more room
    assert (again.adopted_count, again.unknown.tolist()) == (0, [-4])
    assert pool.engines()[0].lease_counts == (3,)


def test_a_router_that_was_stopped_grants_nothing_until_it_knows_what_was_picked_meanwhile() -> (
    None
):
    pool = Pool(CONFIG, np.random.default_rng(0), first_lease_id=SPAN)
    spec = EngineSpec(name="e0", max_running=2)
    pool.register(spec, 0.0)
    for name in ("one", "two", "three"):
        pool.greet(name, 0, 0.0)
    pool.acquire("one", LeaseRequest(count=1), 0.0)
    epoch = pool.epoch

    pool.resume(1.0)
    assert pool.epoch > epoch  # all who watch look again
    with pytest.raises(LeaseRefusedError) as refused:
        pool.acquire("one", LeaseRequest(count=1), 1.0)
    assert refused.value.reason is Refusal.RENEW_FIRST
    first = LeaseClaims(
        ids=np.array([SPAN]), names=["e0"], engines=np.array([0]), ranks=np.array([0])
    )
    pool.renew("one", first, 1.5, known_epoch=epoch)
    pool.renew("three", LeaseClaims(ids=np.empty(0, np.int64)), 1.5, known_epoch=epoch)
    with pytest.raises(LeaseRefusedError) as refused:
        pool.acquire("three", LeaseRequest(count=1), 1.6)  # "two" has not been heard of
    assert refused.value.reason is Refusal.SETTLING
    local = LeaseClaims(
        ids=np.array([-7]), names=["e0"], engines=np.array([0]), ranks=np.array([0])
    )
    assert pool.renew("two", local, 2.0, known_epoch=epoch).adopted_count == 1
    pool.report_load(
        "e0", [RankReport(running_count=2, waiting_count=0, used_tokens=0, max_tokens=0)], 2.0
    )
    pool.expire(1.0 + RECONNECT_SECONDS + 0.1)
    with pytest.raises(LeaseRefusedError) as refused:
        pool.acquire("three", LeaseRequest(count=1), 1.0 + RECONNECT_SECONDS + 0.2)
    assert refused.value.reason is Refusal.NO_CREDIT  # open, and full
    pool.release("two", np.array([-7]), 6.0)
    assert pool.acquire("three", LeaseRequest(count=1), 6.0).targets.tolist() == [0]


def test_an_engine_that_comes_late_after_a_stop_is_closed_as_those_that_were_there():
    pool = restarted()
    pool.greet("c", 0, 0.0)
    pool.resume(1.0)
    told(pool, "c", 1.1)
    late = 1.0 + HEARTBEAT - 0.1
    pool.register(EngineSpec(name="f", max_running=1), late)  # which picks of the stop may be on
    assert pool.is_closed("f")
    pool.expire(late + RECONNECT_SECONDS + 0.1)
    assert not pool.is_closed("f")
    settled = 1.0 + HEARTBEAT + 0.1
    pool.register(EngineSpec(name="g", max_running=1), settled)
    assert not pool.is_closed("g")


def test_a_client_that_is_gone_is_waited_for_no_more():
    settling = Settling(3 * HEARTBEAT, SPAN)
    settling.add_client("old", known_epoch=5, epoch=SPAN, now=0.0)
    settling.add_engine("e", known_epoch=0, epoch=SPAN, now=RECONNECT_SECONDS)
    settling.note_report("e", unexplained=False)
    settled = 2 * RECONNECT_SECONDS + 0.1
    assert settling.closed(settled) == {"e"}, "the client has to renew"
    settling.remove_client("old")
    assert settling.closed(settled) == set()


def test_an_engine_named_in_vain_is_closed_for_one_heartbeat_and_only_while_its_client_is_there():
    settling = Settling(3 * HEARTBEAT, SPAN)
    for client, engine in (("here", "e"), ("gone", "f")):
        settling.note_renewal(client, [engine], 0.0, held_before=True)
    settling.remove_client("gone")
    for engine in ("e", "f"):
        settling.add_engine(engine, known_epoch=0, epoch=SPAN, now=1.0)
    assert settling.closed(1.0 + RECONNECT_SECONDS + 0.1) == {"e"}
    assert settling.closed(1.0 + HEARTBEAT - 0.1) == {"e"}
    assert settling.closed(1.0 + HEARTBEAT + 0.1) == set()


@pytest.mark.parametrize("seed", range(40))
def test_who_asks_again_and_again_is_told_the_same_as_who_asks_once(seed: int):
    rng, now = random.Random(seed), 0.0
    names, epoch = ["a", "b", "c"], 2 * SPAN
    asked_often, told = Settling(3 * HEARTBEAT, epoch), list[Callable[[Settling], None]]()
    registered = set[str]()
    closed_counts = Counter[int]()
    for _ in range(150):
        now += rng.choice([0.0, TICK, RECONNECT_SECONDS, HEARTBEAT / 3])
        name, client = rng.choice(names), rng.choice("xyz")
        known = rng.choice([0, 0, 0, SPAN])
        news: list[Callable[[Settling], None]] = [
            partial(Settling.note_report, name=name, unexplained=rng.random() < 0.5),
            partial(Settling.remove_client, name=client),
            partial(Settling.add_client, name=client, known_epoch=known, epoch=epoch, now=now),
            partial(
                Settling.note_renewal,
                name=client,
                awaited=rng.sample(names, rng.choice([0, 0, 1])),
                now=now,
                held_before=rng.random() < 0.1,
            ),
            partial(Settling.add_engine, name=name, known_epoch=known, epoch=epoch, now=now)
            if name not in registered
            else partial(Settling.remove_engine, name=name),
        ]
        if rng.random() < 0.02:
            news = [partial(Settling.resume, engines=sorted(registered), now=now)]
        chosen = rng.choice(news)
        if chosen.func in (Settling.add_engine, Settling.remove_engine):
            registered ^= {name}
        chosen(asked_often)
        told.append(chosen)
        asked_once = Settling(3 * HEARTBEAT, epoch)
        for each in told:
            each(asked_once)
        assert asked_often.closed(now) == asked_once.closed(now)
        closed_counts[len(asked_once.closed(now))] += 1
    assert len(closed_counts) > 1, "nothing was ever closed"
