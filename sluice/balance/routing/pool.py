"""One pool of engines that serve the same model, and the leases on them.

Pure: time is passed in (seconds from any origin, never falling), randomness is a seeded
generator. At every moment the charges of a target equal the live leases bound to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sluice.balance.routing.groups import NO_GROUP
from sluice.balance.routing.health import RankReport
from sluice.balance.routing.leases import QUEUED, ClientRow
from sluice.balance.routing.placement import SessionTargets, TargetSelector
from sluice.balance.routing.settling import Settling
from sluice.balance.routing.tables import Tables
from sluice.balance.routing.targets import EngineRow
from sluice.balance.routing.types import (
    EngineSpec,
    EngineView,
    FloatArray,
    Grant,
    IntArray,
    LeaseClaims,
    LeaseRefusedError,
    LeaseRequest,
    Outcome,
    PoolConfig,
    Refusal,
    Renewal,
    any_true,
    full_of,
)
from sluice.balance.routing.waiting import MOST_NEEDS, PendingQueues

_UNKNOWN = int(Outcome.UNKNOWN)
_FIRST_FAILURE, _LAST_FAILURE = int(Outcome.CONNECT_ERROR), int(Outcome.TIMEOUT)
_FORGET_AFTER = 10  # engine TTLs without a heartbeat


@dataclass(frozen=True, kw_only=True)
class Expired:
    """Lists what `Pool.expire` ended; clients: those whose leases it ended."""

    lease_count: int = 0
    clients: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    session_count: int = 0


class Pool:
    """Leases the targets of its engines; `first_lease_id` exceeds all ids of earlier processes."""

    def __init__(
        self, config: PoolConfig, rng: np.random.Generator, *, first_lease_id: int = 1
    ) -> None:
        self.config = config
        self.tables = Tables(config, first_lease_id)
        self._placement = TargetSelector(self.tables, rng)
        self.waiting = PendingQueues(self.tables, self._placement)
        self._settling = Settling(config.client_ttl, first_epoch=self.epoch)

    @property
    def epoch(self) -> int:
        """Rises whenever clients should look at the engines again."""
        return self.tables.targets.epoch

    # Engines

    def has_engine(self, name: str) -> bool:
        return self.tables.targets.find(name) is not None

    def located(self, target: int) -> tuple[EngineView, int] | None:
        """Returns engine and dp rank of a target; None where no engine is (QUEUED, FREE)."""
        engine = self.tables.targets.engine_at(target) if target >= 0 else None
        if engine is None:
            return None
        return self.tables.targets.view(engine), target - engine.first

    def register(self, spec: EngineSpec, now: float, *, known_epoch: int = 0) -> EngineView:
        """Add an engine, or take its heartbeat and news. Leases of an earlier process end.

        known_epoch: the last one its process was told, by this router or another; 0 for none.
        """
        targets = self.tables.targets
        former = targets.find(spec.name)
        if former is None:
            self._settling.add_engine(spec.name, known_epoch, self.epoch, now)
        elif former.replaced_by(spec):
            self._void(former, now)
        engine = targets.register(spec, now)
        self.tables.sessions.widen(len(targets))
        self._bind_waiting(now)
        return targets.view(engine)

    def holder(self, spec: EngineSpec, known_epoch: int) -> EngineSpec | None:
        """Return the live process that took the name of one that had registered here before it.

        None where there is none. `known_epoch` as for `register`.
        """
        engine = self.tables.targets.find(spec.name)
        if engine is None or engine.lost or engine.spec.instance == spec.instance:
            return None
        return engine.spec if self._settling.is_own(known_epoch, self.epoch) else None

    def drain(self, name: str, draining: bool, now: float) -> EngineView | None:
        """Stop or resume giving leases on an engine; None if unknown."""
        engine = self.tables.targets.find(name)
        if engine is None:
            return None
        self.tables.targets.drain(engine, draining)
        self.waiting.dispatch(now)
        return self.tables.targets.view(engine)

    def remove(self, name: str, now: float) -> bool:
        """Forget an engine and end its leases; False if unknown."""
        engine = self.tables.targets.find(name)
        if engine is None:
            return False
        self._void(engine, now)
        self.tables.targets.remove(engine)
        self._settling.remove_engine(name)
        return True

    def report_load(
        self,
        name: str,
        ranks: Sequence[RankReport],
        now: float,
        *,
        seconds_per_token: float = 0.0,
        age: float = 0.0,
    ) -> bool:
        """Take what an engine measured `age` seconds ago; False if unknown."""
        engine = self.tables.targets.find(name)
        if engine is None:
            return False
        self.tables.targets.snapshot(now)
        self.tables.targets.report(engine, ranks, seconds_per_token, now - age, now)
        charged = self.tables.targets.charges[engine.first : engine.stop].tolist()
        self._settling.note_report(
            name,
            unexplained=any(
                rank.running_count + rank.waiting_count > count
                for rank, count in zip(ranks, charged, strict=False)
            ),
        )
        self._bind_waiting(now)
        return True

    def engines(self) -> list[EngineView]:
        return [self.tables.targets.view(engine) for engine in self.tables.targets.engines]

    def is_closed(self, name: str) -> bool:
        """Whether the engine waits for what clients hold of an earlier router."""
        return name in self.tables.targets.closed

    # Leases

    def greet(self, client: str, known_epoch: int, now: float) -> None:
        """Note that a client called which last heard of `known_epoch`, 0 for none."""
        if client not in self.tables.clients:
            self._settling.add_client(client, known_epoch, self.epoch, now)
            self._open_settled(now)
        self.tables.clients.touch(client, now)

    def acquire(self, client: str, request: LeaseRequest, now: float) -> Grant:
        """Lease `request.count` targets. Raises LeaseRefusedError; nothing is charged then."""
        if request.count and self._settling.owes(client, now):
            raise LeaseRefusedError(Refusal.RENEW_FIRST, f"{client} knew another router", 0.1)
        row = self.tables.clients.touch(client, now)
        if request.count == 1 and (grant := self._acquire_one(row, request, now)) is not None:
            return grant
        groups, all_new = self._group_slots(request, now)
        expected = self._placement.expected(request, groups, all_new)
        sticky = self._placement.sticky(request, expected, now)
        targets = sticky.targets
        followed = int((targets != QUEUED).sum()) if request.sessions else 0
        try:
            admit(self.tables, self.waiting, row, request, request.count - followed)
        except LeaseRefusedError:
            self.tables.groups.forget_unused(groups)
            self.tables.sessions.forget_unused(sticky.sessions)
            raise
        if followed:
            self.tables.charge(targets, groups, now)
        if self._goes_at_once(request, request.count - followed):
            self._place(request, sticky, groups, expected, now)
        first = self.tables.leases.grant(row.slot, targets, sticky.sessions, groups)
        self.tables.sessions.hold(sticky.sessions)
        self.tables.groups.hold(groups)
        queued_count = int(np.count_nonzero(targets == QUEUED))
        if queued_count:
            wait = np.flatnonzero(targets == QUEUED)
            lengths = np.full(len(wait), np.nan) if expected is None else expected[wait]
            self.waiting.add(row, first + wait, groups[wait], lengths, request.needs, now)
            self.waiting.dispatch(now)
            queued_count -= self._take_news(row, first, targets)
        return Grant(
            first_id=first, targets=targets, session_count=followed, queued_count=queued_count
        )

    def _acquire_one(self, row: ClientRow, request: LeaseRequest, now: float) -> Grant | None:
        """`acquire` of one lease that a rank is free for, without vectors; None for any other."""
        tables, needs = self.tables, request.needs
        if request.sessions or request.excluded or self._placement.goes_by_key:
            return None
        if tables.leases.live_count >= self.config.max_leases or (
            tables.leases.count_of(row.slot) >= self.config.max_leases_per_client
        ):
            return None
        fleet = tables.targets.fleet(needs)
        free_count = fleet.free_count if fleet.is_even else tables.targets.prompt_free_count(needs)
        if not free_count or self.waiting.has(needs):
            return None
        group = NO_GROUP
        for name, size in request.groups:
            if size and name:
                group = tables.groups.slot(name, now)
        if request.expected_tokens is not None and group != NO_GROUP:
            tables.groups.expect_of(group, float(request.expected_tokens[0]))
        target = self._placement.pick(fleet, group)
        tables.charge_one(target, group, now)
        first = tables.leases.grant_one(row.slot, target, group)
        if group != NO_GROUP:
            tables.groups.live[group] += 1
        return Grant(first_id=first, targets=np.array([target]))

    def release(
        self,
        client: str,
        ids: IntArray | Sequence[int],
        now: float,
        *,
        outcomes: IntArray | Sequence[int] | None = None,
        output_tokens: IntArray | Sequence[int] | None = None,
    ) -> int:
        """Give leases back, queued ones included; returns how many were live.

        outcomes int[n]: Outcome per id; output_tokens int[n]: -1 unknown. An id that is not a
        live lease of the client changes nothing.
        """
        row = self.tables.clients.touch(client, now)
        if row.returning:
            self.tables.released_ids.add(map(int, ids))
        if len(ids) == 1:
            one = self.tables.leases.release_one(row.slot, int(ids[0]))
            if one is not None:
                outcome = _UNKNOWN if outcomes is None else int(outcomes[0])
                tokens = -1 if output_tokens is None else int(output_tokens[0])
                self._give_back_one(one, row, now, outcome, tokens)
                return 1
        ids = np.asarray(ids, dtype=np.int64)
        outcomes = None if outcomes is None else np.asarray(outcomes)
        output_tokens = None if output_tokens is None else np.asarray(output_tokens)
        released, live = self.tables.leases.release(row.slot, ids)
        if live is not None:
            strange = ~live | (ids < self.tables.leases.first_id)
            self.tables.released_ids.add(ids[strange].tolist())
            outcomes = None if outcomes is None else outcomes[live]
            output_tokens = None if output_tokens is None else output_tokens[live]
        if outcomes is not None:
            self._record(released.targets, outcomes, now)
        self.tables.give_back(released, row, now, output_tokens)
        if output_tokens is not None:
            self.waiting.lengths_changed(released.groups)
        self.waiting.dispatch(now)
        return len(released)

    def _give_back_one(
        self,
        lease: tuple[int, int, int],
        row: ClientRow,
        now: float,
        outcome: int,
        tokens: int,
    ) -> None:
        """Give back one lease (target, session, group) that is just released, without vectors."""
        self._record_one(lease[0], outcome, now)
        self.tables.give_back_one(lease, row, now, tokens)
        if tokens >= 0:
            self.waiting.length_changed(lease[2])
        self.waiting.dispatch(now)

    def renew(
        self, client: str, claims: LeaseClaims, now: float, *, known_epoch: int = 0
    ) -> Renewal:
        """Take a client's heartbeat with all it holds, and bring the table in line with that.

        Ids granted by an earlier router, or before the client had expired, are charged again;
        leases granted here that are absent from two renewals in a row, some time apart, were
        never received.
        """
        self.greet(client, known_epoch, now)
        row = self.tables.clients.touch(client, now)
        renewal = self.tables.renew(row, claims, now)
        self._settling.note_renewal(client, renewal.awaited, now, held_before=renewal.held_before)
        self._bind_waiting(now)
        return renewal

    def heartbeat(self, client: str, now: float) -> None:
        """Note a sign of life."""
        self.tables.clients.touch(client, now)

    def waits(self, client: str) -> bool:
        """Whether a lease of the client waits for a target."""
        row = self.tables.clients.find(client)
        return row is not None and row.queued > 0

    def targets_of(self, ids: IntArray) -> IntArray:
        """int64[n]: target of each lease, QUEUED, or FREE."""
        return np.asarray([self.tables.leases.target_of(lease) for lease in ids.tolist()], np.int64)

    def end_sessions(self, keys: Sequence[str]) -> int:
        """End sessions; returns how many were known."""
        return sum(self.tables.sessions.end(key) for key in keys)

    def collect(self, client: str) -> list[tuple[int, int]]:
        """Returns (lease, target) of queued leases that got their target since the last call."""
        row = self.tables.clients.find(client)
        if row is None:
            return []
        self.waiting.woken.discard(client)
        if not row.bound:
            return []
        bound, row.bound = row.bound, []
        target_of = self.tables.leases.target_of
        return [(lease, target) for lease, target in bound if target_of(lease) == target]

    def expire(self, now: float) -> Expired:
        """End what is overdue; to be called about once a second."""
        tables = self.tables
        gone = tables.clients.expired(now)
        count, clients = 0, []
        for row in gone:
            released = self._end_leases(row, now)
            count += released
            if released:
                clients.append(row.name)
        lost = self._expire_engines(now)
        tables.targets.probe_breakers(now)
        tables.targets.snapshot(now)
        self.tables.released_ids.turn(now)
        tables.groups.expire(now)
        ended = tables.sessions.expire(now)
        self.waiting.sweep()
        self._bind_waiting(now)
        return Expired(
            lease_count=count,
            clients=tuple(clients),
            engines=tuple(lost),
            session_count=ended,
        )

    def end_client(self, client: str, now: float) -> int:
        """End the leases of a client whose process is gone, those that wait too; returns how many.

        One that lives all the same is charged again for what it holds, as after it had expired.
        """
        row = self.tables.clients.find(client)
        if row is None:
            return 0
        self.tables.clients.expire(row)
        count = self._end_leases(row, now)
        self.waiting.sweep()
        self._bind_waiting(now)
        return count

    def _end_leases(self, row: ClientRow, now: float) -> int:
        self._settling.remove_client(row.name)
        released = self.tables.leases.release_client(row.slot)
        self.tables.give_back(released, row, now)
        return len(released)

    def resume(self, now: float) -> None:
        """Settle as after a restart: nobody could reach this pool for a while, and clients may have
        picked places without it."""
        self._settling.resume([view.spec.name for view in self.engines()], now)
        self.tables.targets.tell_again()
        self._open_settled(now)

    def _open_settled(self, now: float) -> None:
        self.tables.targets.close(self._settling.closed(now))

    def _bind_waiting(self, now: float) -> None:
        """Give waiting leases what has come free."""
        self._open_settled(now)
        self.waiting.dispatch(now)

    def _expire_engines(self, now: float) -> list[str]:
        lost = []
        for engine in self.tables.targets.engines:
            silent = now - engine.last_seen
            if silent > self.config.engine_ttl and not engine.lost:
                self.tables.targets.lose(engine)
                lost.append(engine.spec.name)
            if silent > self.config.engine_ttl * _FORGET_AFTER:
                self.remove(engine.spec.name, now)
        return lost

    def _group_slots(self, request: LeaseRequest, now: float) -> tuple[IntArray, bool]:
        """int64[count]: group slots or NO_GROUP; and whether nothing is known of any."""
        if not request.groups or not request.count:
            return full_of(NO_GROUP, request.count), True
        keys, sizes = zip(*[(key, size) for key, size in request.groups if size], strict=True)
        slots, all_new = self.tables.groups.slots(keys, now)
        if request.expected_tokens is not None:
            all_new = False
            firsts = np.cumsum(sizes) - sizes
            self.tables.groups.expect(slots, request.expected_tokens[firsts])
        if len(sizes) == 1:
            return full_of(int(slots[0]), request.count), all_new
        return np.repeat(slots, sizes), all_new

    def _goes_at_once(self, request: LeaseRequest, count: int) -> bool:
        """Whether `count` leases need no queue: none waits before them and all have a slot."""
        if not request.may_wait:
            return True
        if self.waiting.has(request.needs):
            return False
        return count <= self.tables.targets.prompt_free_count(request.needs)

    def _take_news(self, row: ClientRow, first: int, targets: IntArray) -> int:
        """Put what the queue bound of the newest request into its answer; returns how many."""
        count = len(row.bound)
        for lease, target in row.bound:
            if lease >= first:
                targets[lease - first] = target
        row.bound = [news for news in row.bound if news[0] < first]
        return count - len(row.bound)

    def _place(
        self,
        request: LeaseRequest,
        sticky: SessionTargets,
        groups: IntArray,
        expected: FloatArray | None,
        now: float,
    ) -> None:
        """Fill in sticky.targets as far as there are free slots, charging them."""
        targets = sticky.targets
        if sticky.fresh:
            fleet = self.tables.targets.fleet_without(request.needs, request.excluded)
            chosen = self._placement.open_sessions(fleet, list(sticky.fresh))
            for leases, target in zip(sticky.fresh.values(), chosen.tolist(), strict=False):
                targets[leases] = target
                self.tables.charge(targets[leases], groups[leases], now)
        rest: IntArray | slice = slice(None)
        if request.sessions:
            rest = np.flatnonzero((targets == QUEUED) & (sticky.sessions < 0))
        groups = groups[rest]
        if len(groups):
            fleet = self.tables.targets.fleet_without(request.needs, request.excluded)
            keys = self._placement.affinity(request, rest)
            lengths = None if expected is None else expected[rest]
            chosen = targets[rest] = self._placement.spread(fleet, groups, lengths, keys)
            self.tables.charge(chosen, groups, now)

    def _record(self, targets: IntArray, outcomes: IntArray, now: float) -> None:
        """Tell breakers; successes only where one would change something."""
        table = self.tables.targets
        if not table.watched and not any_true(outcomes >= _FIRST_FAILURE):
            return
        for target, outcome in zip(targets.tolist(), outcomes.tolist(), strict=True):
            self._record_one(target, outcome, now)

    def _record_one(self, target: int, outcome: int, now: float) -> None:
        """`_record` of one."""
        table, failed = self.tables.targets, _FIRST_FAILURE <= outcome <= _LAST_FAILURE
        if target < 0 or outcome == _UNKNOWN or not (failed or table.watched):
            return
        engine = table.engine_at(target)
        if engine is not None and (failed or engine.row in table.watched):
            table.record(engine, Outcome(outcome), now)

    def _void(self, engine: EngineRow, now: float) -> None:
        """End the leases of an engine whose process is gone; its sessions lose their cache."""
        ids, clients = self.tables.leases.bound_within(engine.first, engine.stop)
        for slot in np.unique(clients).tolist():
            released, _ = self.tables.leases.release(slot, ids[clients == slot])
            self.tables.give_back(released, self.tables.clients.at(slot), now)
        self.tables.sessions.clear_target(engine.first, engine.stop)


def admit(
    tables: Tables, waiting: PendingQueues, row: ClientRow, request: LeaseRequest, unbound: int
) -> None:
    """Raise LeaseRefusedError unless the pool can take `request`, `unbound` leases of which need a
    target."""
    config, leases = tables.config, tables.leases
    if leases.live_count + request.count > config.max_leases:
        raise LeaseRefusedError(Refusal.TOO_MANY_LEASES, f"{config.max_leases} leases are out", 1.0)
    if leases.count_of(row.slot) + request.count > config.max_leases_per_client:
        raise LeaseRefusedError(
            Refusal.TOO_MANY_LEASES_OF_CLIENT,
            f"{row.name} may hold {config.max_leases_per_client} leases",
            1.0,
        )
    if not unbound:
        return
    if not request.may_wait and not tables.targets.able(request.needs).any():
        if tables.targets.any_usable():
            raise LeaseRefusedError(
                Refusal.NO_ENGINE_WITH_VERSION, f"no engine serves {request.needs}", 1.0
            )
        raise LeaseRefusedError(Refusal.NO_ENGINE, "no engine takes requests", 1.0)
    missing = unbound
    if not waiting.has(request.needs):
        missing -= tables.targets.fleet(request.needs).free_count
    if missing > 0 and not request.may_wait:
        if tables.targets.is_closed(request.needs):
            raise LeaseRefusedError(
                Refusal.SETTLING, "the clients of an earlier router are awaited", 0.5
            )
        raise LeaseRefusedError(Refusal.NO_CREDIT, f"{missing} leases exceed the credits", 0.5)
    if missing > 0 and waiting.count + missing > config.max_queued:
        raise LeaseRefusedError(Refusal.QUEUE_FULL, f"{config.max_queued} leases wait", 1.0)
    if missing > 0 and not waiting.takes(row.name, request.needs):
        raise LeaseRefusedError(
            Refusal.QUEUE_FULL, f"{row.name} waits for {MOST_NEEDS} versions already", 1.0
        )
