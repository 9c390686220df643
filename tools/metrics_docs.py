"""Writes docs/metrics.md from the metrics that the services declare; `--check` only compares."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from prometheus_client import REGISTRY
from prometheus_client.metrics import MetricWrapperBase

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "metrics.md"
MODULES = {
    "Every service": "sluice.runtime.interceptors",
    "Trainer": "services.trainer.metrics",
    "Rollout": "services.rollout.metrics",
    "Router": "services.router.metrics",
}
HEAD = """# Metrics

Each service exposes these at `/metrics` of its metrics port, behind the same TLS and token as its gRPC port. Base units; counters
end in `_total`; labels come from closed sets. `process_*` and `python_*` of the Prometheus client come on top.
Generated from the code by `make docs`.
"""


def declared() -> dict[str, MetricWrapperBase]:
    """Metrics of the default registry by exposed name."""
    collectors = REGISTRY._collector_to_names
    found = {}
    for collector in collectors:
        if isinstance(collector, MetricWrapperBase):
            suffix = "_total" if collector._type == "counter" else ""
            found[collector._name + suffix] = collector
    return found


def page() -> str:
    lines, seen = [HEAD], set(declared())
    for title, module in MODULES.items():
        importlib.import_module(module)
        fresh = {name: metric for name, metric in declared().items() if name not in seen}
        seen |= fresh.keys()
        lines += [f"## {title}", "", "| metric | type | labels | what |", "|---|---|---|---|"]
        for name, metric in sorted(fresh.items()):
            labels = ", ".join(metric._labelnames) or "–"
            lines.append(f"| `{name}` | {metric._type} | {labels} | {metric._documentation} |")
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
