"""The micro-batch planner beside first-fit, first-fit-decreasing and Karmarkar-Karp.

Every method gets the same rows, cap and ranks. Counts are padded to the same number on every
rank, as is the lower bound (Martello and Toth's L2). Over several seeds count/bound is the
ratio of the sums, every other figure the worst. Seconds are of the CPU: planning takes one
core, and a busy machine measures the same.
Rank balance is measured on groups whose siblings are of similar length, prompts not shared:
with the planner of the trainer, beside groups kept whole and the published rules of verl
(Karmarkar-Karp over rows, equal counts, by tokens) and slime (first-fit, then Karmarkar-Karp
over micro-batches, equal counts, by cost).

Exits with 1 when the planner needs more micro-batches than the better first-fit, breaks the
cap, loses a row, or takes a second for 16,384 rows in 256 parts.
"""

from __future__ import annotations

import heapq
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from services.trainer.controller.planning import BareRow, Packing, Planner, describe_bare
from sluice.balance.planner import (
    PlanLimits,
    PlanRows,
    TransformerShape,
    assign_owners,
    plan_micro_batches,
    row_costs,
)
from sluice.balance.planner_packing import RowCosts, first_fit, min_bin_count

# Qwen2.5-7B
SHAPE = TransformerShape(
    hidden_size=3584,
    layer_count=28,
    head_count=28,
    kv_head_count=4,
    head_size=128,
    feed_forward_size=18944,
    vocabulary_size=152064,
)
LONGEST = 8192
SECONDS_ALLOWED = 1.0

Ranks = Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Case:
    """`parts` set: the cap is chosen so that the rows just need that many micro-batches."""

    row_count: int
    data_size: int
    multiple: int
    cap: int
    seeds: int
    parts: int | None = None


CASES = (
    Case(16384, 8, 1, 0, 1, parts=256),
    Case(16384, 256, 1, 0, 1, parts=256),
    Case(16384, 1, 1, 16384, 1),
    Case(1024, 16, 2, 16384, 5),
    Case(256, 8, 4, 8192, 20),
    Case(128, 8, 1, 8192, 20),
    Case(128, 1, 1, 8192, 20),
)


def lognormal(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.lognormal(np.log(1200), 0.9, count)


def uniform(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.uniform(100, LONGEST, count)


def bimodal(rng: np.random.Generator, count: int) -> np.ndarray:
    short, long = rng.normal(500, 120, count), rng.normal(7200, 500, count)
    return np.where(rng.random(count) < 0.85, short, long)


LAWS: tuple[Callable[[np.random.Generator, int], np.ndarray], ...] = (lognormal, uniform, bimodal)


@dataclass(frozen=True)
class Problem:
    tokens: list[int]
    costs: list[float]
    limits: PlanLimits

    @property
    def step(self) -> int:
        """Micro-batches come in multiples of this over all ranks."""
        return self.limits.data_size * self.limits.micro_batch_multiple

    @property
    def lower_bound(self) -> int:
        return self.padded(min_bin_count(self.tokens, self.limits.cap))

    def padded(self, count: int) -> int:
        return max(1, -(-count // self.step)) * self.step


@dataclass(frozen=True)
class Score:
    count: int  # micro-batches over all ranks
    bound: int
    imbalance: float  # largest by mean cost of a rank
    lockstep: float  # the same when ranks wait for each other after every micro-batch
    over_cap: int
    seconds: float

    @property
    def ratio(self) -> float:
        return self.count / self.bound

    def joined(self, other: Score) -> Score:
        return Score(
            count=self.count + other.count,
            bound=self.bound + other.bound,
            imbalance=max(self.imbalance, other.imbalance),
            lockstep=max(self.lockstep, other.lockstep),
            over_cap=self.over_cap + other.over_cap,
            seconds=max(self.seconds, other.seconds),
        )


def by_first_fit(problem: Problem) -> Ranks:
    return dealt(problem, fitted(problem, range(len(problem.tokens))))


def by_first_fit_decreasing(problem: Problem) -> Ranks:
    order = sorted(range(len(problem.tokens)), key=lambda row: -problem.tokens[row])
    return dealt(problem, fitted(problem, order))


def by_karmarkar_karp(problem: Problem) -> Ranks:
    """Largest differencing into the count of the better first-fit; knows no cap."""
    order = sorted(range(len(problem.tokens)), key=lambda row: -problem.tokens[row])
    fewest = min(len(fitted(problem, rows)) for rows in (order, range(len(order))))
    return dealt(problem, karmarkar_karp(problem.costs, problem.padded(fewest)))


def by_planner(problem: Problem) -> Ranks:
    rows = PlanRows(lengths=problem.tokens, costs=problem.costs)
    return plan_micro_batches(rows, problem.limits).ranks


METHODS = {
    "first-fit": by_first_fit,
    "first-fit-decreasing": by_first_fit_decreasing,
    "karmarkar-karp": by_karmarkar_karp,
    "planner": by_planner,
}


def fitted(problem: Problem, order: Sequence[int]) -> list[list[int]]:
    nothing = np.zeros(len(problem.tokens), dtype=np.int64)
    table = RowCosts(
        tokens=np.array(problem.tokens),
        costs=np.array(problem.costs),
        groups=np.arange(len(nothing)),
        prompt_tokens=nothing,
        prompt_costs=nothing,
    )
    return first_fit(table, order, problem.limits.cap)


def dealt(problem: Problem, bins: list[list[int]]) -> Ranks:
    """Bins to ranks in turn, padded with empty ones."""
    bins = bins + [[]] * (problem.padded(len(bins)) - len(bins))
    return [bins[rank :: problem.limits.data_size] for rank in range(problem.limits.data_size)]


def karmarkar_karp(
    costs: Sequence[float], part_count: int, *, equal_size: bool = False
) -> list[list[int]]:
    """The k-way largest differencing method (Karmarkar and Karp 1982).

    A state is `part_count` sums in falling order; the two of the largest spread merge, the
    largest sum of one with the smallest of the other. equal_size: every state begins with one
    item a part, so that all parts have as many.
    """
    order = sorted(range(len(costs)), key=lambda item: -costs[item])
    width = part_count if equal_size else 1
    assert len(order) % width == 0
    leaves = [order[start : start + width] for start in range(0, len(order), width)]
    sums = [np.zeros(part_count) for _ in leaves]
    merges: list[tuple[int, int, np.ndarray] | None] = [None] * len(leaves)
    for leaf, items in enumerate(leaves):
        sums[leaf][:width] = [costs[item] for item in items]
    heap = [(-(each[0] - each[-1]), leaf) for leaf, each in enumerate(sums)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, left), (_, right) = heapq.heappop(heap), heapq.heappop(heap)
        total = sums[left] + sums[right][::-1]
        falling = np.argsort(-total, kind="stable")
        sums.append(total[falling])
        merges.append((left, right, falling))
        heapq.heappush(heap, (-(sums[-1][0] - sums[-1][-1]), len(sums) - 1))
    parts: list[list[int]] = [[] for _ in range(part_count)]
    stack = [(len(sums) - 1, np.arange(part_count))]
    while stack:  # unwind: where each slot of a state ended up
        state, place = stack.pop()
        merge = merges[state]
        if merge is None:
            for slot, item in enumerate(leaves[state]):
                parts[place[slot]].append(item)
            continue
        left, right, falling = merge
        of_left, of_right = np.empty_like(place), np.empty_like(place)
        of_left[falling], of_right[part_count - 1 - falling] = place, place
        stack += [(left, of_left), (right, of_right)]
    return parts


GROUPS, SIBLINGS, BALANCE_CAP = 64, 16, 16384
BALANCE_SIZES = (4, 8, 32)
BALANCE_SEEDS = 5


def sibling_problem(law: Callable[..., np.ndarray], seed: int, data_size: int) -> Problem:
    """Groups one behind the other, rows of one within a tenth of the length of its prompt."""
    rng = np.random.default_rng(seed)
    lengths = np.repeat(law(rng, GROUPS), SIBLINGS) * rng.uniform(0.9, 1.1, GROUPS * SIBLINGS)
    tokens = lengths.clip(32, LONGEST).astype(int).tolist()
    costs, _ = row_costs(SHAPE, tokens, [])
    return Problem(tokens, costs, PlanLimits(token_cap=BALANCE_CAP, data_size=data_size))


def by_whole_groups(problem: Problem) -> Sequence[Sequence[int]]:
    totals = np.reshape(problem.costs, (GROUPS, SIBLINGS)).sum(axis=1)
    owners = np.repeat(assign_owners(totals, problem.limits.data_size), SIBLINGS)
    return [np.flatnonzero(owners == rank).tolist() for rank in range(problem.limits.data_size)]


def by_verl(problem: Problem) -> Sequence[Sequence[int]]:
    return karmarkar_karp(problem.tokens, problem.limits.data_size, equal_size=True)


def by_slime(problem: Problem) -> Sequence[Sequence[int]]:
    bins = fitted(problem, range(len(problem.tokens)))
    while len(bins) % problem.limits.data_size:  # the largest of several rows is cut in two
        bins.sort(key=lambda rows: (len(rows) > 1, sum(problem.tokens[row] for row in rows)))
        rows = sorted(bins.pop(), key=lambda row: -problem.tokens[row])
        bins += [rows[::2], rows[1::2]]
    loads = [sum(problem.costs[row] for row in rows) for rows in bins]
    ranks = karmarkar_karp(loads, problem.limits.data_size, equal_size=True)
    return [[row for place in rank for row in bins[place]] for rank in ranks]


def by_trainer(problem: Problem) -> Sequence[Sequence[int]]:
    """The planner that a trainer has, from the facts about its rows."""
    bare = [
        BareRow(length, min(64, length), row // SIBLINGS)
        for row, length in enumerate(problem.tokens)
    ]
    planner = Planner(SHAPE, problem.limits, Packing(shares_prompts=False))
    facts = describe_bare(bare)
    plan = planner.solve(facts, planner.own(facts), np.arange(len(bare)), problem.limits)
    return [[row for part in rank for row in part] for rank in plan.ranks]


RULES: Mapping[str, Callable[[Problem], Sequence[Sequence[int]]]] = {
    "whole groups": by_whole_groups,
    "verl": by_verl,
    "slime": by_slime,
    "trainer": by_trainer,
}


def rank_balance(problem: Problem, ranks: Sequence[Sequence[int]]) -> float:
    """Largest by mean cost of a rank."""
    assert sorted(row for rank in ranks for row in rank) == list(range(len(problem.tokens)))
    loads = [sum(problem.costs[row] for row in rank) for rank in ranks]
    return max(loads) / (sum(loads) / len(loads))


def measure_balance() -> dict[int, float]:
    """Print the worst balance of each rule; returns that of the trainer by ranks."""
    ours: dict[int, float] = {}
    print(f"{'lengths':>9} {'ranks':>6} " + " ".join(f"{rule:>13}" for rule in RULES))
    for law in LAWS:
        for size in BALANCE_SIZES:
            worst = dict.fromkeys(RULES, 0.0)
            for seed in range(BALANCE_SEEDS):
                problem = sibling_problem(law, seed, size)
                for name, rule in RULES.items():
                    worst[name] = max(worst[name], rank_balance(problem, rule(problem)))
            columns = " ".join(f"{value:>13.4f}" for value in worst.values())
            print(f"{law.__name__:>9} {size:>6} {columns}")
            ours[size] = max(ours.get(size, 0.0), worst["trainer"])
    return ours


def score(problem: Problem, ranks: Ranks, seconds: float) -> Score:
    tokens, costs = problem.tokens, problem.costs
    assert sorted(row for rank in ranks for part in rank for row in part) == list(
        range(len(tokens))
    ), "a row is lost or doubled"
    loads = np.array([[sum(costs[row] for row in part) for part in rank] for rank in ranks])
    mean = loads.sum(axis=1).mean()
    return Score(
        count=loads.size,
        bound=problem.lower_bound,
        imbalance=float(loads.sum(axis=1).max() / mean),
        lockstep=float(loads.max(axis=0).sum() / mean),
        over_cap=sum(
            sum(tokens[row] for row in part) > problem.limits.cap for rank in ranks for part in rank
        ),
        seconds=seconds,
    )


def create_problem(case: Case, law: Callable[..., np.ndarray], seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    tokens = law(rng, case.row_count).clip(32, LONGEST).astype(int).tolist()
    costs, _ = row_costs(SHAPE, tokens, [])
    cap = case.cap if case.parts is None else -(-sum(tokens) * 51 // (case.parts * 50))
    limits = PlanLimits(token_cap=cap, data_size=case.data_size, micro_batch_multiple=case.multiple)
    return Problem(tokens, costs, limits)


def run_case(case: Case, law: Callable[..., np.ndarray]) -> tuple[dict[str, Score], list[str]]:
    """Scores by method, and what the planner did wrong."""
    scores: dict[str, Score] = {}
    broken: list[str] = []
    for seed in range(case.seeds):
        problem = create_problem(case, law, seed)
        results: dict[str, Score] = {}
        for name, method in METHODS.items():
            start = time.process_time()
            ranks = method(problem)
            results[name] = score(problem, ranks, time.process_time() - start)
        broken += [f"{law.__name__} seed {seed} {case}: {x}" for x in faults(case, results)]
        scores = {
            name: scores[name].joined(result) if name in scores else result
            for name, result in results.items()
        }
    return scores, broken


def faults(case: Case, results: dict[str, Score]) -> list[str]:
    ours = results["planner"]
    found = []
    if ours.count > min(results[name].count for name in ("first-fit", "first-fit-decreasing")):
        found.append("more micro-batches than first-fit")
    if ours.over_cap:
        found.append("micro-batches over the cap")
    if case.parts and ours.seconds >= SECONDS_ALLOWED:
        found.append(f"{ours.seconds:.2f} s for {case.row_count} rows")
    return found


def main() -> int:
    print(
        f"{'lengths':>9} {'rows':>6} {'ranks':>6} {'multiple':>9} {'method':>20} "
        f"{'count/bound':>12} {'imbalance':>10} {'lockstep':>9} {'over cap':>9} {'seconds':>8}"
    )
    broken: list[str] = []
    ours: list[Score] = []
    for case in CASES:
        for law in LAWS:
            scores, found = run_case(case, law)
            broken += found
            ours.append(scores["planner"])
            for name, result in scores.items():
                print(
                    f"{law.__name__:>9} {case.row_count:>6} {case.data_size:>6} "
                    f"{case.multiple:>9} {name:>20} {result.ratio:>12.4f} "
                    f"{result.imbalance:>10.4f} {result.lockstep:>9.4f} "
                    f"{result.over_cap:>9} {result.seconds:>8.3f}"
                )
    balance = measure_balance()
    for fault in broken:
        print(f"FAILED {fault}", file=sys.stderr)
    print(
        f"planner: microbatches/lower_bound={max(result.ratio for result in ours):.4f} "
        f"imbalance={max(result.imbalance for result in ours):.4f} "
        f"seconds={max(result.seconds for result in ours):.3f} "
        + " ".join(f"rank_balance_dp{size}={value:.4f}" for size, value in balance.items())
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
