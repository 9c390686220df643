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


_closed: dict[MetricWrapperBase, tuple[tuple[str, ...] | None, ...]] = {}


def with_values(metric: M, *sets: Iterable[str] | None) -> M:
    """`metric` with a series at 0 for every combination of its labels' closed sets.

    Without it a scrape shows a series only after the first event, and a rate over it misses
    that event. None, for the first label, stands for values that come with the fleet: `show`.
    """
    closed = _closed[metric] = tuple(None if names is None else tuple(names) for names in sets)
    if closed[0] is not None:
        show(metric, *closed[0])
    return metric


def show(metric: MetricWrapperBase, *values: str) -> None:
    """Show these values of the first label from 0 on."""
    rest = [names or () for names in _closed[metric][1:]]
    for combination in product(values, *rest):
        metric.labels(*combination)


def closed_sets(metric: MetricWrapperBase) -> dict[str, tuple[str, ...]]:
    """The labels of `metric` whose values are known to the code."""
    sets = zip(metric._labelnames, _closed.get(metric, ()), strict=False)
    return {label: names for label, names in sets if names is not None}
