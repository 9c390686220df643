"""The metrics that services and the loop declare, as they are scraped."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase

from sluice.runtime.metrics import Reading, closed_sets

ROOT = Path(__file__).parent.parent
MODULES = {  # by the service that exposes them; "" is every service
    "": ("sluice.runtime.interceptors", "sluice.runtime.waits", "sluice.runtime.host"),
    **{
        path.parent.name: (".".join(path.relative_to(ROOT).with_suffix("").parts),)
        for path in sorted(ROOT.glob("services/**/metrics.py"), key=lambda path: path.parent.name)
    },
    "loop": ("sluice.loop.metrics",),
}


@dataclass(frozen=True)
class Declared:
    """A metric as it is scraped. `values` are the closed sets of labels that code fixes."""

    name: str
    kind: str
    text: str
    labels: tuple[str, ...]
    values: dict[str, tuple[str, ...]]


def declared(service: str) -> list[Declared]:
    """What the modules of a service declare, by name."""
    found = [metric for module in MODULES[service] for metric in _in_module(module)]
    return sorted(found, key=lambda metric: metric.name)


def declare(metric: Reading | MetricWrapperBase) -> Declared:
    """What a declaration in the code says."""
    if isinstance(metric, Reading):
        return Declared(metric.name, metric.kind, metric.text, metric.labels, {})
    suffix = "_total" if metric._type == "counter" else ""
    return Declared(
        metric._name + suffix,
        str(metric._type),
        metric._documentation,
        tuple(metric._labelnames),
        closed_sets(metric),
    )


def _in_module(module: str) -> Iterator[Declared]:
    for value in vars(importlib.import_module(module)).values():
        if isinstance(value, Reading | MetricWrapperBase):
            yield declare(value)
