"""How much slower than its peers an engine steps, from reported inter-token latencies."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

UNIT = 20  # slowdown is counted in twentieths, so that searches over step times are integers
_CLAMP = (0.25, 8.0)
_LARGEST_SHARE = 0.35  # of one report, however long the one before is ago: it may be noise


class SpeedTable:
    """One row per engine.

    A reported latency is divided by the step time predicted for the reported batch, so engines
    compare at equal batch; slowdown is that ratio over the median engine's. Noise is kept out
    by smoothing over `smoothing_seconds` and by `hysteresis`: a slowdown is published when it
    has moved by that factor, and within that factor of 1 it is exactly 1.
    """

    def __init__(
        self,
        step_base: float,
        step_per_request: float,
        smoothing_seconds: float = 3.0,
        hysteresis: float = 1.15,
    ) -> None:
        self._base = step_base
        self._per_request = step_per_request
        self._smoothing = smoothing_seconds
        self._hysteresis = hysteresis
        self._ratio = np.zeros(0)  # float64[engine]: smoothed log ratio, NaN unknown
        self._time = np.zeros(0)
        self.slowdown: NDArray[np.int64] = np.zeros(0, dtype=np.int64)  # in 1/UNIT
        self.is_even = True  # all engines are as fast as each other

    def add_engine(self) -> None:
        self._ratio = np.append(self._ratio, np.nan)
        self._time = np.append(self._time, 0.0)
        self.slowdown = np.append(self.slowdown, UNIT)
        self._look()

    def forget(self, engine: int) -> None:
        """A restarted or removed engine starts as an average one."""
        self._ratio[engine] = np.nan
        self.slowdown[engine] = UNIT
        self._look()

    def report(self, engine: int, latency: float, running: float, now: float) -> None:
        """Take seconds per token, seen with `running` requests on the engine's fullest rank."""
        if not (latency > 0 and math.isfinite(latency)):
            return
        value = math.log(latency / (self._base + self._per_request * running))
        if math.isnan(self._ratio[engine]):
            self._ratio[engine] = value
        else:
            share = -math.expm1(-max(now - self._time[engine], 0.0) / self._smoothing)
            share = min(share, _LARGEST_SHARE)
            self._ratio[engine] += share * (value - self._ratio[engine])
        self._time[engine] = now
        self._publish()

    def _publish(self) -> None:
        known = ~np.isnan(self._ratio)
        ratio = np.exp(self._ratio[known] - _median(self._ratio[known]))
        ratio = np.clip(ratio, *_CLAMP)
        ratio[(ratio < self._hysteresis) & (ratio > 1 / self._hysteresis)] = 1.0
        wanted = np.maximum(np.rint(ratio * UNIT).astype(np.int64), 1)
        current = self.slowdown[known]
        change = wanted / current
        moved = (change >= self._hysteresis) | (change <= 1 / self._hysteresis) | (wanted == UNIT)
        self.slowdown[known] = np.where(moved, wanted, current)
        self._look()

    def _look(self) -> None:
        self.is_even = bool((self.slowdown == self.slowdown[0]).all())


def _median(values: NDArray[np.float64]) -> float:
    """np.median of one or more values, several times cheaper."""
    ordered, middle = np.sort(values), len(values) // 2
    return float(ordered[middle] + ordered[~middle]) / 2
