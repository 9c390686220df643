"""Declarations of metrics: those read when scraped, and the closed sets of labels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.metrics import MetricWrapperBase

M = TypeVar("M", bound=MetricWrapperBase)
Family = CounterMetricFamily | GaugeMetricFamily


@dataclass(frozen=True)
class Reading:
    """A value that a collector reads when scraped; a counter where the name ends in `_total`.

    Declared at the top of a `metrics.py`, as counted metrics are, so that docs find it there.
    """

    name: str
    text: str
    labels: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return "counter" if self.name.endswith("_total") else "gauge"

    def family(self) -> Family:
        """An empty family for `add_metric`, one value per set of labels."""
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        return kind(self.name.removesuffix("_total"), self.text, labels=self.labels)

    def of(self, value: float) -> Metric:
        """The family with its one value."""
        family = self.family()
        family.add_metric((), value)
        return family


def with_values(metric: M, *sets: Iterable[str]) -> M:
    """`metric` with a series at 0 for every combination of its labels' closed sets.

    Without it a scrape shows a series only after the first event, and a rate over it misses
    that event.
    """
    for values in product(*(tuple(names) for names in sets)):
        metric.labels(*values)
    return metric
