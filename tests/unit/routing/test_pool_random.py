"""Whatever happens in whatever order, charges equal live leases, and all of them end."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sluice.balance.routing import (
    QUEUED,
    EngineSpec,
    LeaseClaims,
    LeaseRefusedError,
    LeaseRequest,
    Needs,
    Outcome,
    Pool,
    PoolConfig,
    RankReport,
)

CLIENTS = ("ada", "bob", "cyd")
ENGINES = ("e0", "e1", "e2")
CONFIG = PoolConfig(client_ttl=10, engine_ttl=15, session_ttl=20, group_ttl=20, max_leases=500)
names = st.sampled_from(ENGINES)
clients = st.sampled_from(CLIENTS)


class PoolMachine(RuleBasedStateMachine):
    """Clients that hold leases, lose answers, fall silent; engines that come and go."""

    @initialize(late=st.booleans(), seed=st.integers(0, 3))
    def start(self, late: bool, seed: int) -> None:
        config = PoolConfig(**{**CONFIG.__dict__, "late_binding": late})
        self.pool = Pool(config, np.random.default_rng(seed), first_lease_id=1_000_000)
        self.now = 0.0
        self.instances = dict.fromkeys(ENGINES, 0)
        self.held: dict[str, dict[int, int]] = {client: {} for client in CLIENTS}
        self.heard = dict.fromkeys(CLIENTS, 0.0)
        self.returning: set[str] = set()  # had expired and not renewed since
        self.rng = np.random.default_rng(seed)
        self.pool.register(self.spec("e0"), self.now)

    def spec(self, name: str, dp_size: int = 2, version: int = 0) -> EngineSpec:
        return EngineSpec(
            name=name,
            instance=str(self.instances[name]),
            dp_size=dp_size,
            max_running=4,
            version=version,
        )

    @rule(name=names, version=st.integers(-1, 2))
    def register(self, name: str, version: int) -> None:
        self.pool.register(self.spec(name, version=version), self.now)

    @rule(name=names, dp_size=st.sampled_from([1, 2, 2, 3]))
    def restart(self, name: str, dp_size: int) -> None:
        self.instances[name] += 1
        self.pool.register(self.spec(name, dp_size), self.now)

    @rule(name=names, draining=st.booleans())
    def drain(self, name: str, draining: bool) -> None:
        self.pool.drain(name, draining, self.now)

    @rule(name=names)
    def remove(self, name: str) -> None:
        self.pool.remove(name, self.now)

    @rule(
        client=clients,
        count=st.integers(0, 12),
        wait=st.booleans(),
        group=st.sampled_from(["", "g", "h"]),
        session=st.sampled_from([None, "s", "t"]),
        minimum=st.integers(0, 2),
        answered=st.booleans(),
    )
    def acquire(self, client, count, wait, group, session, minimum, answered) -> None:
        request = LeaseRequest(
            count=count,
            groups=[(group, count)] if group else (),
            expected_tokens=np.where(self.rng.random(count) < 0.5, np.nan, 100.0),
            sessions=[session or ""] * count if session else (),
            prefix_tokens=np.full(count, 1000),
            needs=Needs(minimum),
            may_wait=wait,
        )
        self.heard[client] = self.now
        try:
            grant = self.pool.acquire(client, request, self.now)
        except LeaseRefusedError:
            return
        assert len(grant.targets) == count
        assert wait or (grant.targets != QUEUED).all()
        if answered:
            first = grant.first_id
            self.held[client] |= {first + i: int(t) for i, t in enumerate(grant.targets)}

    @rule(client=clients, share=st.floats(0, 1), outcome=st.sampled_from(list(Outcome)))
    def release(self, client, share, outcome) -> None:
        mine = [i for i in self.held[client] if self.rng.random() < share]
        for lease in mine:
            del self.held[client][lease]
        asked = np.array([*mine, *mine[:3], 7], dtype=np.int64)
        self.heard[client] = self.now
        self.pool.release(
            client,
            asked,
            self.now,
            outcomes=np.full(len(asked), outcome),
            output_tokens=np.full(len(asked), 50),
        )

    @rule(client=clients, outcome=st.sampled_from(list(Outcome)), tokens=st.integers(-1, 900))
    def release_one(self, client, outcome, tokens) -> None:
        if not self.held[client]:
            return
        lease = int(self.rng.choice(list(self.held[client])))
        del self.held[client][lease]
        self.heard[client] = self.now
        ids, outcomes = np.array([lease]), np.array([outcome])
        self.pool.release(
            client, ids, self.now, outcomes=outcomes, output_tokens=np.array([tokens])
        )

    @rule(client=clients)
    def renew(self, client) -> None:
        for lease, target in self.pool.collect(client):
            if lease in self.held[client]:
                self.held[client][lease] = target
        ids = np.array(sorted(self.held[client]), dtype=np.int64)
        held = self.as_held(ids, client)
        unknown = self.renewed(client, held)
        if client in self.returning:
            assert not (set(unknown) & set(ids[held.ranks >= 0].tolist())), "it runs them still"
        self.returning.discard(client)

    @rule(client=clients)
    def fall_silent_and_return(self, client) -> None:
        self.let_time_pass(CONFIG.client_ttl)
        self.renew(client)

    def renewed(self, client: str, held: LeaseClaims) -> list[int]:
        """What the router does not know, after which the client forgets it too."""
        unknown = self.pool.renew(client, held, self.now).unknown.tolist()
        self.heard[client] = self.now
        for lease in unknown:
            del self.held[client][lease]
        return unknown

    def as_held(self, ids: np.ndarray, client: str) -> LeaseClaims:
        """What the client says of its leases: engine and rank, or -1 for one that waits."""
        ranks, engines = [], []
        for lease in ids.tolist():
            target = self.held[client][lease]
            located = self.pool.located(target) if target >= 0 else None
            ranks.append(-1 if located is None else located[1])
            engines.append(-1 if located is None else ENGINES.index(located[0].spec.name))
        return LeaseClaims(
            ids=ids,
            names=ENGINES,
            engines=np.array(engines, dtype=np.int64),
            ranks=np.array(ranks, dtype=np.int64),
        )

    @rule(client=clients, number=st.integers(1, 30), name=names, rank=st.integers(0, 2))
    def bring_lease_of_an_earlier_router(self, client, number, name, rank) -> None:
        if any(number in held for held in self.held.values()):
            return
        ids = np.array([number, *sorted(self.held[client])], dtype=np.int64)
        self.held[client][number] = -1
        held = self.as_held(ids, client)
        held.engines[0], held.ranks[0] = ENGINES.index(name), rank
        self.renewed(client, held)
        self.returning.discard(client)

    @rule(name=names, running=st.integers(0, 20), waiting=st.integers(0, 3), age=st.floats(0, 3))
    def report(self, name, running, waiting, age) -> None:
        ranks = [
            RankReport(
                running_count=running, waiting_count=waiting, used_tokens=900, max_tokens=1000
            )
        ] * 2
        self.pool.report_load(name, ranks, self.now, seconds_per_token=0.03, age=age)

    @rule(seconds=st.sampled_from([0.1, 2.0, 6.0, 12.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds
        self.pool.expire(self.now)
        self.returning |= {
            client
            for client in CLIENTS
            if self.heard[client] <= self.now - CONFIG.client_ttl and self.held[client]
        }

    @rule(key=st.sampled_from(["s", "t", "u"]))
    def end_session(self, key: str) -> None:
        self.pool.end_sessions([key])

    @invariant()
    def charges_equal_live_leases(self) -> None:
        if not hasattr(self, "pool"):
            return
        tables = self.pool.tables
        targets = [t for _, t in self.live() if t >= 0]
        counted = np.bincount(np.array(targets, dtype=np.int64), minlength=len(tables.targets))
        assert (tables.targets.charges == counted).all()
        assert tables.leases.live_count == len(self.live())
        assert (tables.sessions.active >= 0).all()
        waiting = sum(1 for _, t in self.live() if t == QUEUED)
        assert sum(row.queued for row in tables.clients._rows.values()) == waiting
        assert self.pool.waiting.count == waiting
        load = tables.targets.load()
        assert (load >= 0).all()

    @invariant()
    def fleets_that_are_kept_equal_fresh_ones(self) -> None:
        if not hasattr(self, "pool"):
            return
        targets = self.pool.tables.targets
        kept, targets._fleets = targets._fleets, {}
        for (needs, unlimited), fleet in kept.items():
            fresh = targets.fleet(needs, unlimited=unlimited)
            assert fleet.load.tolist() == fresh.load.tolist()
            assert fleet.room.tolist() == fresh.room.tolist()
            assert fleet.free_count == fresh.free_count
            fast = targets.prompt_free_count(needs)
            targets._prompt.clear()
            assert fast == targets.prompt_free_count(needs)
        targets._fleets = kept

    @invariant()
    def nobody_waits_beside_a_free_slot(self) -> None:
        if not hasattr(self, "pool"):
            return
        for needs, lane in self.pool.waiting._lanes.items():
            queued = [i for i, t in self.live() if t == QUEUED]
            if lane.count and queued and len(self.pool.waiting._lanes) == 1:
                assert self.pool.tables.targets.fleet(needs).free_count == 0

    def live(self) -> list[tuple[int, int]]:
        """(id, target) of every live lease, counted the long way."""
        leases = self.pool.tables.leases
        recent = range(leases._base, leases.next_id)
        known = [(i, leases.target_of(i)) for i in (*leases._old, *recent)]
        return [(i, target) for i, target in known if target != -1]

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.now += 1000
        self.pool.expire(self.now)
        assert self.pool.tables.targets.charges.sum() == 0
        assert self.pool.tables.leases.live_count == 0
        self.pool.expire(self.now + 1000)
        assert (len(self.pool.tables.sessions), len(self.pool.tables.groups)) == (0, 0)


PoolMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=40)
test_pool_random = PoolMachine.TestCase
