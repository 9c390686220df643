"""Metrics of the loop of a run, and the keys of the rows it leaves in metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from sluice.runtime.metrics import with_values

MINUTES = (0.1, 0.5, 1, 5, 10, 30, 60, 300, 600, 1800, 3600)
PHASES = ("rollout", "train", "publish")

STEP = Gauge("sluice_loop_step", "Steps of the run that are done.")
PLANNED_STEPS = Gauge("sluice_loop_planned_steps", "Steps after which the run ends at the latest.")
TRAINER_LOST = Counter(
    "sluice_loop_trainer_lost_total", "Times the trainer was lost and the run went back."
)
STEP_SECONDS = Histogram(
    "sluice_loop_step_duration_seconds", "Steps of the run, whole.", buckets=MINUTES
)
PHASE_SECONDS = with_values(
    Histogram(
        "sluice_loop_phase_duration_seconds",
        "Parts of a step: the wait for groups, training on them, publication.",
        ["kind"],
        buckets=MINUTES,
    ),
    PHASES,
)
TOKENS = Counter("sluice_loop_tokens_total", "Tokens that losses were of.")
REWARD = Gauge("sluice_loop_reward_mean", "Mean reward of the last step.")
LENGTH = Gauge("sluice_loop_response_length_tokens", "Mean response of the last step.")
STALENESS = Gauge(
    "sluice_loop_staleness_steps", "Steps since the oldest weights that sampled the last step."
)
SCORE = Gauge("sluice_loop_score", "Last score on a data set of held-out tasks.", ["dataset"])

REWARD.set(math.nan)  # until a step tells: none of them is 0
LENGTH.set(math.nan)
STALENESS.set(math.nan)


def show_step(row: Mapping[str, Any]) -> None:
    """Show a row of a training step, as far as it tells; numbers that are none are left out."""
    STEP.set(row["step"])
    if (seconds := _number(row, "step_seconds")) is not None:
        STEP_SECONDS.observe(seconds)
    for phase in PHASES:
        if (seconds := _number(row, f"{phase}_seconds")) is not None:
            PHASE_SECONDS.labels(phase).observe(seconds)
    TOKENS.inc(_number(row, "tokens") or 0)
    for gauge, key in (
        (REWARD, "reward_mean"),
        (LENGTH, "response_length_mean"),
        (STALENESS, "staleness_max"),
    ):
        if (value := _number(row, key)) is not None:
            gauge.set(value)


def _number(row: Mapping[str, Any], key: str) -> float | None:
    value = row.get(key)
    return value if isinstance(value, int | float) and math.isfinite(value) else None
