"""The joint table of targets (engine, dp rank): who may get leases, and how many each holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sluice.balance.routing.health import (
    NO_LIMIT,
    UNIT,
    Breaker,
    BreakerState,
    LoadReports,
    RankReport,
    SpeedTable,
)
from sluice.balance.routing.types import (
    BoolArray,
    EngineSpec,
    EngineState,
    EngineView,
    IntArray,
    Needs,
    Outcome,
    PoolConfig,
)
from sluice.balance.routing.waterfill import Fleet

_SLOW = 1.1
_MOST_FLEETS = 64  # kept at once; each is brought in line with every charge


@dataclass
class EngineRow:
    """One engine: targets [first, first + spec.dp_size)."""

    spec: EngineSpec
    row: int
    first: int
    breaker: Breaker
    last_seen: float
    draining: bool = False
    lost: bool = False
    probing: bool = False  # half-open, and its one trial lease is out

    def replaced_by(self, spec: EngineSpec) -> bool:
        """Whether `spec` is another process under the same name."""
        return self.spec.instance != spec.instance or self.spec.dp_size != spec.dp_size

    @property
    def stop(self) -> int:
        return self.first + self.spec.dp_size

    @property
    def state(self) -> EngineState:
        if self.lost:
            return EngineState.LOST
        if self.draining:
            return EngineState.DRAINING
        if self.breaker.state is BreakerState.OPEN:
            return EngineState.BROKEN
        return EngineState.ACTIVE


@dataclass(frozen=True)
class SlowFleet:
    """Slots of slow engines; running_elsewhere: leases on the others."""

    fleet: Fleet
    slowdown: float
    running_elsewhere: int


class TargetTable:
    """Says who may get leases; `epoch` rises when clients should look again. Rows never move."""

    def __init__(self, config: PoolConfig, first_epoch: int = 1) -> None:
        self._config = config
        self.epoch = first_epoch
        self.charges: IntArray  # live leases per target
        self.charged_ever: IntArray
        self._cells: tuple[memoryview, memoryview]  # of both, for one target
        self._adopt_charges(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
        self.engine_of: IntArray = np.zeros(0, dtype=np.int64)
        self.starts: IntArray = np.zeros(0, dtype=np.int64)
        self.speed = SpeedTable(config.step_base, config.step_per_request)
        self.load_reports = LoadReports()
        self._rows: list[EngineRow | None] = []
        self._vacant: set[int] = set()  # rows of engines that were removed
        self._by_name: dict[str, EngineRow] = {}
        self._sizes: list[int] = []
        self._usable = np.zeros(0, dtype=bool)  # may get leases now, version aside
        self.closed: set[str] = set()  # engines without credit until they have settled
        self._version = np.zeros(0, dtype=np.int64)
        self._credit = np.zeros(0, dtype=np.int64)
        self._half_open: set[int] = set()
        self.watched: set[int] = set()  # rows whose breaker would heed a success
        self._fleets: dict[tuple[Needs, bool], Fleet] = {}  # until charges change
        # Until rows or reports change:
        self._limits: dict[tuple[Needs, bool], IntArray] = {}
        self._prompt: dict[Needs, BoolArray] = {}  # bool[m]: not of a slow engine

    def __len__(self) -> int:
        return len(self.charges)

    @property
    def engines(self) -> list[EngineRow]:
        return list(self._by_name.values())

    def find(self, name: str) -> EngineRow | None:
        return self._by_name.get(name)

    def engine_at(self, target: int) -> EngineRow | None:
        return self._rows[int(self.engine_of[target])]

    def view(self, engine: EngineRow) -> EngineView:
        return EngineView(
            spec=engine.spec,
            state=engine.state,
            first_target=engine.first,
            lease_counts=tuple(self.charges[engine.first : engine.stop].tolist()),
            slowdown=float(self.speed.slowdown[engine.row]) / UNIT,
            last_seen=engine.last_seen,
        )

    def register(self, spec: EngineSpec, now: float) -> EngineRow:
        """Add an engine or renew it. The caller voids the leases of a replaced one first."""
        engine = self._by_name.get(spec.name)
        if engine is None:
            return self._add(spec, now)
        engine.last_seen = now
        if engine.spec == spec and not engine.lost:
            return engine  # a heartbeat
        restarted = engine.spec.instance != spec.instance
        if engine.spec.dp_size != spec.dp_size:
            self.remove(engine)
            return self._add(spec, now)
        if engine.lost or restarted:
            engine.breaker.registered_again()
        engine.spec, engine.lost = spec, False
        if restarted:
            engine.draining = False
            self._start_over(engine)
        self.refresh(engine)
        return engine

    def remove(self, engine: EngineRow) -> None:
        """Forget an engine; its rows are used again once nothing is charged to them."""
        del self._by_name[engine.spec.name]
        self._rows[engine.row] = None
        self._vacant.add(engine.row)
        self._usable[engine.row] = False
        self._half_open.discard(engine.row)
        self.watched.discard(engine.row)
        self.speed.forget(engine.row)  # the others are not measured by it
        self._forget_fleets()
        self.epoch += 1

    def drain(self, engine: EngineRow, draining: bool) -> None:
        """Stop (or resume) giving leases on an engine."""
        if engine.draining != draining:
            engine.draining = draining
            self.refresh(engine)

    def close(self, names: set[str]) -> None:
        """Give these engines no credit until the next call, and all others theirs."""
        if names != self.closed:
            self.closed = names
            self._forget_fleets()

    def tell_again(self) -> None:
        """Have clients look at the engines again, though nothing has changed."""
        self.epoch += 1

    def lose(self, engine: EngineRow) -> None:
        """Give an engine no leases: its heartbeat is overdue."""
        engine.lost = True
        self.refresh(engine)

    def record(self, engine: EngineRow, outcome: Outcome, now: float) -> None:
        """Tell its breaker how a request ended."""
        if engine.breaker.record(outcome, now):
            self.refresh(engine)
        heeds = engine.breaker.counts_successes
        (self.watched.add if heeds else self.watched.discard)(engine.row)

    def probe_breakers(self, now: float) -> None:
        """Half-open the breakers whose time has come."""
        for engine in self._by_name.values():
            if engine.breaker.probe(now):
                self.refresh(engine)

    def report(
        self,
        engine: EngineRow,
        ranks: Sequence[RankReport],
        latency: float,
        taken: float,
        now: float,
    ) -> None:
        """Take an engine's loads (rank by rank) and seconds per token (0 unknown)."""
        credit, current = int(self._credit[engine.row]), (self.charges, self.charged_ever)
        for rank, report in enumerate(ranks[: engine.spec.dp_size]):
            self.load_reports.report(engine.first + rank, report, taken, now, current, credit)
        running = max((rank.running_count for rank in ranks), default=0)
        if running:
            self.speed.report(engine.row, latency, running, now)
        self._forget_fleets()

    def charge(self, targets: IntArray) -> None:
        """Count one lease on each of `targets` (repeats count)."""
        if len(targets) == 1:
            self.charge_one(int(targets[0]))
        if len(targets) < 2:
            return
        added = np.bincount(targets, minlength=len(self.charges))
        self.charges += added
        self.charged_ever += added
        self._fleets.clear()
        for row in self._half_open:
            engine = self._rows[row]
            if engine is not None and added[engine.first : engine.stop].any():
                engine.probing = True

    def uncharge(self, targets: IntArray) -> None:
        """Take leases off; repeats count."""
        if len(targets) == 1:
            self.uncharge_one(int(targets[0]))
        if len(targets) < 2:
            return
        removed = np.bincount(targets, minlength=len(self.charges))
        self.charges -= removed
        self._fleets.clear()
        for row in self._half_open:
            engine = self._rows[row]
            if engine is not None and removed[engine.first : engine.stop].any():
                engine.probing = False

    def charge_one(self, target: int) -> None:
        """Count one lease, without vectors."""
        self._cells[1][target] += 1
        self._count_one(target, 1)

    def uncharge_one(self, target: int) -> None:
        """Take one lease off, without vectors."""
        self._count_one(target, -1)

    def _adopt_charges(self, charges: IntArray, charged_ever: IntArray) -> None:
        self.charges, self.charged_ever = charges, charged_ever
        self._cells = charges.data, charged_ever.data

    def _count_one(self, target: int, change: int) -> None:
        """Change the charge of a target, and the fleets with it."""
        self._cells[0][target] += change
        if self._half_open:
            self._fleets.clear()
            engine = self.engine_at(target)
            if engine is not None and engine.row in self._half_open:
                engine.probing = change > 0
            return
        for key, fleet in self._fleets.items():
            if fleet.load is not self.charges:
                charge = int(self.charges[target])
                load = self.load_reports.load_of(target, charge, int(self.charged_ever[target]))
                fleet.load[target] = load
                fleet.limit[target] = self._limits[key][target] - max(charge - load, 0)
            fleet.recount(target, change)

    def snapshot(self, now: float) -> None:
        """Remember the charges of now, for reports that will be as old as this."""
        self.load_reports.snapshot(self.charges, self.charged_ever, now)

    def load(self) -> IntArray:
        """int64[m]: charges corrected by what engines reported."""
        return self.load_reports.load(self.charges, self.charged_ever)

    def fleet(self, needs: Needs, *, unlimited: bool = False) -> Fleet:
        """Returns what a policy may choose from; `unlimited` ignores credits alone."""
        cached = self._fleets.get((needs, unlimited))
        if cached is not None:
            return cached
        load = self.load()
        limit = own_limit = self._limit(needs, unlimited)
        if load is not self.charges:  # a place is taken by its lease, whether it runs yet or not
            limit = limit - np.maximum(self.charges - load, 0)
        if self._half_open:
            limit = limit.copy()
            for row in self._half_open:
                self._allow_one(limit, load, row)
        speed = self.speed
        fleet = Fleet.create(
            load, limit, self.engine_of, self.starts, speed.slowdown, speed.is_even
        )
        if len(self._fleets) >= _MOST_FLEETS:  # as many different versions were asked for
            self._forget_fleets()
        self._fleets[needs, unlimited] = fleet
        self._limits[needs, unlimited] = own_limit
        return fleet

    def fleet_without(self, needs: Needs, excluded: frozenset[str]) -> Fleet:
        """Returns the fleet without these engines, or with them where no other has a free slot."""
        fleet = self.fleet(needs)
        rows = [engine for name in excluded if (engine := self._by_name.get(name))]
        if not rows:
            return fleet
        limit = fleet.limit.copy()
        for engine in rows:
            limit[engine.first : engine.stop] = 0
        rest = Fleet.create(fleet.load, limit, fleet.engine_of, fleet.starts, fleet.slowdown)
        return rest if rest.free_count else fleet

    def prompt_free_count(self, needs: Needs) -> int:
        """Free slots, those of slow engines left out unless every engine is slow."""
        fleet = self.fleet(needs)
        if fleet.is_even:
            return fleet.free_count
        prompt = self._prompt.get(needs)
        if prompt is None:
            prompt = self._prompt[needs] = ~self._slow(needs)[fleet.engine_of]
        return int(np.add.reduce(fleet.room[prompt]))

    def slow_fleet(self, needs: Needs) -> SlowFleet | None:
        """Slow engines alone, the fastest of them with a free slot; None if there is none."""
        fleet = self.fleet(needs)
        if fleet.is_even:
            return None
        slow = self._slow(needs)[fleet.engine_of]
        open_ = slow & (fleet.room > 0)
        if not open_.any():
            return None
        speed = fleet.slowdown[fleet.engine_of]
        best = int(speed[open_].min())
        limit = np.where(open_ & (speed == best), fleet.limit, 0)
        chosen = Fleet.create(fleet.load, limit, fleet.engine_of, fleet.starts, fleet.slowdown)
        able = self.able(needs)[fleet.engine_of]
        usual = _usual(fleet.slowdown[self.able(needs)])
        return SlowFleet(chosen, best / usual, int(fleet.load[able & ~slow].sum()))

    def _slow(self, needs: Needs) -> BoolArray:
        """bool[e]: engines noticeably slower than the usual able one."""
        slowdown, able = self.speed.slowdown, self.able(needs)
        if not able.any():
            return able
        return slowdown > _SLOW * _usual(slowdown[able])

    def _limit(self, needs: Needs, unlimited: bool) -> IntArray:
        limit = self._limits.get((needs, unlimited))
        if limit is None:
            able = self.able(needs)
            if unlimited or not self._config.late_binding:
                limit = np.where(able, NO_LIMIT, 0)[self.engine_of]
            else:
                credit = np.where(able, self._credit, 0)[self.engine_of]
                limit = np.minimum(credit, self.load_reports.kv_limit)
            for engine in filter(None, map(self._by_name.get, self.closed)):
                limit[engine.first : engine.stop] = 0
            self._limits[needs, unlimited] = limit
        return limit

    def _forget_fleets(self) -> None:
        self._fleets.clear()
        self._limits.clear()
        self._prompt.clear()

    def able(self, needs: Needs) -> BoolArray:
        """bool[e]: engines that may get leases with these needs."""
        if needs.exact is not None:
            return self._usable & (self._version == needs.exact)
        return self._usable & (self._version >= needs.minimum)

    def is_closed(self, needs: Needs) -> bool:
        """Whether an engine that would do waits for the clients of an earlier router."""
        able = self.able(needs)
        return any(able[row.row] for row in filter(None, map(self._by_name.get, self.closed)))

    def any_usable(self) -> bool:
        return bool(self._usable.any())

    def refresh(self, engine: EngineRow) -> None:
        """Bring the columns in line with the engine's row."""
        row, spec = engine.row, engine.spec
        self._usable[row] = engine.state is EngineState.ACTIVE
        self._version[row] = spec.version
        factor = self._config.credit_factor
        self._credit[row] = max(int(spec.max_running * factor), 1) if spec.max_running else NO_LIMIT
        half_open = engine.breaker.state is BreakerState.HALF_OPEN
        (self._half_open.add if half_open else self._half_open.discard)(row)
        if half_open:
            self.watched.add(row)
        engine.probing = engine.probing and half_open
        self._forget_fleets()
        self.epoch += 1

    def _allow_one(self, limit: IntArray, load: IntArray, row: int) -> None:
        engine = self._rows[row]
        if engine is None:
            return
        where = slice(engine.first, engine.stop)
        open_ = bool((limit[where] > 0).any())
        limit[where] = 0
        if open_ and not engine.probing:
            least = engine.first + int(load[where].argmin())
            limit[least] = load[least] + 1

    def _start_over(self, engine: EngineRow) -> None:
        engine.probing = False
        self.speed.forget(engine.row)
        self.load_reports.forget(engine.first, engine.stop, self.charged_ever)

    def _add(self, spec: EngineSpec, now: float) -> EngineRow:
        row = self._vacant_row(spec.dp_size)
        if row is None:
            row = self._append_row(spec.dp_size)
        self._vacant.discard(row)
        first = int(self.starts[row])
        engine = EngineRow(spec, row, first, Breaker(self._config.breaker), now)
        self._rows[row] = self._by_name[spec.name] = engine
        self._start_over(engine)
        self.refresh(engine)
        return engine

    def _vacant_row(self, dp_size: int) -> int | None:
        for row in self._vacant:
            if self._sizes[row] == dp_size:
                first = int(self.starts[row])
                if not self.charges[first : first + dp_size].any():
                    return row
        return None

    def _append_row(self, dp_size: int) -> int:
        row, count = len(self._rows), len(self.charges)
        none = np.zeros(dp_size, dtype=np.int64)
        charges = np.concatenate([self.charges, none])
        self._adopt_charges(charges, np.concatenate([self.charged_ever, none]))
        self.engine_of = np.concatenate([self.engine_of, none + row])
        self.starts = np.append(self.starts, count)
        self.speed.add_engine()
        self.load_reports.widen(count + dp_size)
        self._rows.append(None)
        self._sizes.append(dp_size)
        self._usable = np.append(self._usable, False)
        self._version = np.append(self._version, 0)
        self._credit = np.append(self._credit, 0)
        return row


def _usual(slowdown: IntArray) -> int:
    """The lower median: one fast engine makes no slow ones of the others."""
    return int(np.sort(slowdown)[(len(slowdown) - 1) // 2])
