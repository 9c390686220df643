"""Writes docs/metrics.md from the metrics that the services declare; `--check` only compares."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase

from sluice.runtime.metrics import Reading, closed_sets

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "metrics.md"
MODULES = {  # by the service that exposes them; "" is every service
    "": ("sluice.runtime.interceptors", "sluice.runtime.waits"),
    **{
        path.parent.name: (f"services.{path.parent.name}.metrics",)
        for path in sorted(ROOT.glob("services/*/metrics.py"))
    },
    "loop": ("sluice.loop.training",),
}
HEAD = """# Metrics

Each service, and the loop of a run, exposes these at `/metrics` of its metrics port, behind the
same TLS and token as its gRPC port. Base units; counters end in `_total`; labels come from closed
sets, of which `method` and `code` are given by gRPC, and `pool`, `engine` and `rank` by the fleet.
`process_*` and `python_*` of the Prometheus client come on top. Generated from the code by
`make docs`.

How far engines are behind the trainer, in weight versions:
`scalar(max(sluice_trainer_weight_version)) - sluice_rollout_weight_version`.
"""


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


def _in_module(module: str) -> Iterator[Declared]:
    for value in vars(importlib.import_module(module)).values():
        if isinstance(value, Reading):
            yield Declared(value.name, value.kind, value.text, value.labels, {})
        elif isinstance(value, MetricWrapperBase):
            suffix = "_total" if value._type == "counter" else ""
            yield Declared(
                value._name + suffix,
                str(value._type),
                value._documentation,
                tuple(value._labelnames),
                closed_sets(value),
            )


def _row(metric: Declared) -> str:
    labels = []
    for label in metric.labels:
        values = metric.values.get(label, ())
        known = f" ({', '.join(values)})" if 0 < len(values) <= 4 else ""
        labels.append(f"{label}{known}")
    return f"| `{metric.name}` | {metric.kind} | {'; '.join(labels) or '–'} | {metric.text} |"  # noqa: RUF001


def page() -> str:
    lines = [HEAD]
    for service in MODULES:
        lines += [f"## {service.capitalize() or 'Every service'}", ""]
        lines += ["| metric | type | labels | what |", "|---|---|---|---|"]
        lines += [_row(metric) for metric in declared(service)]
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    text = page()
    if "--check" not in sys.argv:
        PAGE.write_text(text)
        return 0
    if not PAGE.exists() or PAGE.read_text() != text:
        print("docs/metrics.md is not what the code declares; run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
