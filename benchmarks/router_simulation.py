"""Makespan of simulated fleets under this router's rules and under the rules others use.

    python -m benchmarks.router_simulation [--quick]

Every rule runs through `sluice.balance.routing.Pool`: ours with its defaults, the others as the
policy of that name with immediate dispatch. Engine speed is measured, not known: reports come
every REPORT_SECONDS, are LAG_SECONDS old and carry NOISE.

Scenarios: `healthy` (all groups at once), `capped` (a rank runs a quarter of its share at a
time), `slow` (one engine in eight at 0.6 of the speed, half of the groups in flight),
`capped+slow`, `multi-turn` (conversations of about ten turns with tools). "history" adds the
mean length of a group with log-normal noise of sigma 0.35.

Exits with 1 when a target is missed: never more than 2 % behind the best other rule; at least
20 % ahead on `capped` with history and on `multi-turn`, 10 % with a slow engine.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

import numpy as np

from benchmarks.router_loads import (
    SIBLINGS,
    UNCAPPED,
    bound_of_samples,
    bound_of_talks,
    make_fleet,
    make_samples,
    make_talks,
)
from benchmarks.router_runs import MAINSTREAM, OURS, RANKS, WITH_HISTORY, run_samples, run_talks

BEHIND, AHEAD_CAPPED, AHEAD_TALKS, AHEAD_SLOW = 1.02, 0.80, 0.80, 0.90
SCENARIOS = ("healthy", "capped", "slow", "capped+slow", "multi-turn")
MEAN_TURNS = 10.0


@dataclass(frozen=True, kw_only=True)
class Size:
    """A fleet, and how much it is given: samples and conversations per rank (0: none)."""

    engines: int
    samples: int
    talks: int
    seeds: int


FULL = (
    Size(engines=8, samples=64, talks=24, seeds=4),
    Size(engines=32, samples=48, talks=24, seeds=2),
    Size(engines=256, samples=24, talks=12, seeds=1),
)
QUICK = (
    Size(engines=8, samples=64, talks=24, seeds=1),
    Size(engines=32, samples=32, talks=0, seeds=1),
)


@dataclass(frozen=True)
class Row:
    """Mean makespans, by rule, and the mean lower bound."""

    size: Size
    scenario: str
    bound: float
    seconds: dict[str, float]

    @property
    def best(self) -> float:
        return min(self.seconds[rule] for rule in MAINSTREAM)

    def against_best(self, rule: str) -> float:
        return self.seconds[rule] / self.best


def simulate(size: Size, scenario: str) -> Row:
    """All rules on the same fleets and loads."""
    rules = [*MAINSTREAM, OURS] + ([] if scenario == "multi-turn" else [WITH_HISTORY])
    seconds: dict[str, list[float]] = {rule: [] for rule in rules}
    bounds = []
    for seed in range(size.seeds):
        rng = np.random.default_rng(1000 + seed)
        slow, capped = "slow" in scenario, "capped" in scenario
        capacity = size.samples // 4 if capped else UNCAPPED
        fleet = make_fleet(size.engines, slow=slow, capacity=capacity)
        if scenario == "multi-turn":
            talks = make_talks(rng, size.talks * size.engines * RANKS, MEAN_TURNS)
            bounds.append(bound_of_talks(fleet, talks))
            for rule in rules:
                seconds[rule].append(run_talks(rule, fleet, talks, seed))
            continue
        groups = size.samples * size.engines * RANKS // SIBLINGS
        samples = make_samples(rng, groups, stream=scenario == "slow")
        bounds.append(bound_of_samples(fleet, samples))
        for rule in rules:
            seconds[rule].append(run_samples(rule, fleet, samples, seed))
    means = {rule: float(np.mean(values)) for rule, values in seconds.items()}
    return Row(size, scenario, float(np.mean(bounds)), means)


def missed_targets(rows: list[Row]) -> list[str]:
    """A line per target that a row misses."""
    missed = []

    def expect(row: Row, rule: str, limit: float) -> None:
        ratio = row.against_best(rule)
        if ratio > limit:
            missed.append(
                f"{row.size.engines} engines, {row.scenario}: {rule} takes {ratio:.3f} of the best "
                f"other rule's time, target {limit:.2f}"
            )

    for row in rows:
        for rule in row.seconds.keys() & {OURS, WITH_HISTORY}:
            expect(row, rule, BEHIND)
        if row.scenario == "capped":
            expect(row, WITH_HISTORY, AHEAD_CAPPED)
        if row.scenario == "multi-turn":
            expect(row, OURS, AHEAD_TALKS)
        if "slow" in row.scenario:
            expect(row, OURS, AHEAD_SLOW)
    return missed


def show(row: Row) -> None:
    rules = (*MAINSTREAM, OURS, WITH_HISTORY)
    cells = "".join(
        f"{row.seconds[rule]:>17.0f}" if rule in row.seconds else f"{'-':>17}" for rule in rules
    )
    print(f"{row.size.engines:>7} {row.scenario:<12}{row.bound:>7.0f}{cells}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Makespan of simulated fleets, by routing rule.")
    parser.add_argument("--quick", action="store_true", help="two small fleets, under a minute")
    sizes = QUICK if parser.parse_args().quick else FULL
    started = time.process_time()
    header = "".join(f"{rule:>17}" for rule in (*MAINSTREAM, OURS, WITH_HISTORY))
    print(f"{'engines':>7} {'scenario':<12}{'bound':>7}{header}")
    rows = []
    for size in sizes:
        for scenario in SCENARIOS[: None if size.talks else -1]:
            rows.append(simulate(size, scenario))
            show(rows[-1])
    missed = missed_targets(rows)
    for line in missed:
        print(f"missed: {line}")
    ours = [row.against_best(OURS) for row in rows]
    capped = max(r.against_best(WITH_HISTORY) for r in rows if r.scenario == "capped")
    talks = max(row.against_best(OURS) for row in rows if row.scenario == "multi-turn")
    slow = max(row.against_best(OURS) for row in rows if "slow" in row.scenario)
    print(
        f"router_simulation: worst_of_best={max(ours):.3f} capped_with_history={capped:.3f} "
        f"multi_turn={talks:.3f} slow={slow:.3f} cpu_seconds={time.process_time() - started:.0f}"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
