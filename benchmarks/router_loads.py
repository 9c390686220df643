"""What the simulated fleets are asked to do."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from benchmarks.router_fleet import (
    PREFILL_RATE,
    RANKS,
    STEP_BASE,
    STEP_REQUEST,
)

SIBLINGS = 8
PROMPT = 1024
LONGEST = 32_768
SYSTEM_PROMPT = 4096
TOOL_TOKENS = 600
TOOL_SECONDS = 3.0
SLOW = 1 / 0.6
UNCAPPED = 1 << 30
PRIOR_NOISE = 0.35


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """speeds float64[engines]: step time over a healthy engine's; capacity per rank."""

    speeds: np.ndarray
    capacity: int

    @property
    def size(self) -> int:
        return len(self.speeds)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Groups of SIBLINGS samples. tokens int64[groups, SIBLINGS]; prior float64[groups]: what
    history says of a group's mean; window: groups in flight at once."""

    tokens: np.ndarray
    prior: np.ndarray
    window: int


@dataclass(frozen=True, kw_only=True)
class Talks:
    """Sessions; turns[i] int64[n_i]: tokens of each turn."""

    turns: list[np.ndarray]


def make_fleet(engines: int, *, slow: bool, capacity: int) -> Fleet:
    """One engine in eight runs at 0.6 of the speed where `slow`."""
    speeds = np.ones(engines)
    if slow:
        speeds[:: max(engines // max(engines // 8, 1), 1)] = SLOW
    return Fleet(speeds=speeds, capacity=capacity)


def make_samples(rng: np.random.Generator, groups: int, *, stream: bool) -> Samples:
    """Lengths: log-normal by group (sigma 0.8) and sample (0.5), median 3000, cut at LONGEST."""
    mean = 3000 * np.exp(0.8 * rng.standard_normal((groups, 1)))
    tokens = mean * np.exp(0.5 * rng.standard_normal((groups, SIBLINGS)))
    tokens = np.clip(tokens, 16, LONGEST).astype(np.int64)
    prior = tokens.mean(axis=1) * np.exp(PRIOR_NOISE * rng.standard_normal(groups))
    return Samples(tokens=tokens, prior=prior, window=groups // 2 if stream else groups)


def make_talks(rng: np.random.Generator, sessions: int, mean_turns: float) -> Talks:
    """Turn counts geometric, turn lengths log-normal with median 600, sigma 0.8."""
    counts = np.minimum(rng.geometric(1 / mean_turns, sessions), int(3 * mean_turns))
    turns = [
        np.clip(600 * np.exp(0.8 * rng.standard_normal(count)), 16, 8192).astype(np.int64)
        for count in counts
    ]
    return Talks(turns=turns)


def bound_of_samples(fleet: Fleet, load: Samples) -> float:
    """No schedule is shorter: the longest sample alone on the fastest engine, or all of them at
    the fleet's best throughput, whichever is longer. Caches and KV costs are free here."""
    per_rank = min(math.ceil(load.tokens.size / (fleet.size * RANKS)), fleet.capacity)
    step = STEP_BASE + STEP_REQUEST * per_rank
    rate = float((RANKS * per_rank / (fleet.speeds * step)).sum())
    longest = float(load.tokens.max()) * (STEP_BASE + STEP_REQUEST) * float(fleet.speeds.min())
    return max(longest + PROMPT / PREFILL_RATE, float(load.tokens.sum()) / rate)


def bound_of_talks(fleet: Fleet, load: Talks) -> float:
    """Likewise: the longest conversation alone, or all turns at the best throughput."""
    per_rank = math.ceil(len(load.turns) / (fleet.size * RANKS))
    rate = fleet.size * RANKS * per_rank / (STEP_BASE + STEP_REQUEST * per_rank)
    alone = max(
        turns.sum() * (STEP_BASE + STEP_REQUEST) + TOOL_SECONDS * (len(turns) - 1)
        for turns in load.turns
    )
    return max(float(alone), sum(int(turns.sum()) for turns in load.turns) / rate)
