"""Writes deploy/observability/: Grafana's dashboards and Prometheus's alert rules, from the code.

Queries are made of the declarations of metrics, never of their names: a metric that is renamed
takes its panels along, and `--check` fails until `make docs` is run again. Every metric of a
service has a panel on the dashboard of that service.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.metrics import MetricWrapperBase

from services.converter import metrics as converter
from services.rollout import metrics as rollout
from services.router import metrics as router
from services.trainer import metrics as trainer
from sluice.loop import metrics as loop
from sluice.runtime import host, interceptors, waits
from sluice.runtime.metrics import Reading
from tools.declared_metrics import Declared, declare, declared

ROOT = Path(__file__).parent.parent
DIRECTORY = ROOT / "deploy" / "observability"
RULES = DIRECTORY / "rules" / "sluice.yml"
WINDOW = "$__rate_interval"  # Grafana's: four scrapes at least
SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT, COLUMNS = 8, 7, 3
MARK = "Written by `make docs` from the code."
UNITS = {  # by the end of a name
    "seconds": "s",
    "bytes": "bytes",
    "ratio": "percentunit",
    "tokens": "short",
    "timestamp_seconds": "dateTimeFromNow",
}
NODE = {  # of Prometheus's node exporter 1.x, by their labels
    "node_cpu_seconds_total": ("cpu", "mode"),
    "node_load1": (),
    "node_memory_MemAvailable_bytes": (),
    "node_memory_MemTotal_bytes": (),
    "node_filesystem_avail_bytes": ("device", "fstype", "mountpoint"),
    "node_filesystem_size_bytes": ("device", "fstype", "mountpoint"),
    "node_disk_read_bytes_total": ("device",),
    "node_disk_written_bytes_total": ("device",),
    "node_network_receive_bytes_total": ("device",),
    "node_network_transmit_bytes_total": ("device",),
}
PROCESS = {  # of the Prometheus client
    "process_resident_memory_bytes": (),
    "process_cpu_seconds_total": (),
    "process_open_fds": (),
    "process_max_fds": (),
}
PROMETHEUS = {"up": ()}

Metric = Reading | MetricWrapperBase


@dataclass(frozen=True)
class Query:
    """A PromQL expression, and how its series are called."""

    expr: str
    legend: str = "{{instance}}"


@dataclass(frozen=True)
class Panel:
    """One graph."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    text: str = ""


@dataclass(frozen=True)
class Dashboard:
    """Panels below headings."""

    name: str
    title: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]

    @property
    def panels(self) -> list[Panel]:
        return [panel for _, panels in self.rows for panel in panels]


def selector(name: str, *conditions: str) -> str:
    """The series of a metric, of the chosen instances."""
    chosen = ", ".join(('instance=~"$instance"', *conditions))
    return f"{name}{{{chosen}}}"


def gauge(metric: Metric, *conditions: str) -> str:
    return selector(declare(metric).name, *conditions)


def rate(metric: Metric, *conditions: str) -> str:
    """A counter's growth a second."""
    return f"rate({selector(declare(metric).name, *conditions)}[{WINDOW}])"


def quantile(metric: Declared, share: float) -> str:
    """A quantile of what a histogram saw, by its labels and instance."""
    by = ", ".join(("le", "instance", *metric.labels))
    buckets = f"rate({selector(metric.name + '_bucket')}[{WINDOW}])"
    return f"histogram_quantile({share}, sum by ({by}) ({buckets}))"


def standard(metric: Declared) -> Panel:
    """The panel of a metric by its type: values, growth a second, or quantiles."""
    legend = " ".join(f"{{{{{label}}}}}" for label in ("instance", *metric.labels))
    unit = _unit(metric.name.removesuffix("_total"))
    if metric.kind == "counter":
        of_seconds = {"bytes": "Bps"}.get(unit, "cps" if unit == "short" else unit)
        query = Query(f"rate({selector(metric.name)}[{WINDOW}])", legend)
        return Panel(_title(metric), (query,), of_seconds, metric.text)
    if metric.kind == "histogram":
        shares = (("median", 0.5), ("95 %", 0.95))
        queries = tuple(Query(quantile(metric, share), f"{legend} {n}") for n, share in shares)
        return Panel(_title(metric), queries, unit, metric.text)
    scale = " * 1000" if unit == "dateTimeFromNow" else ""  # Grafana's times are milliseconds
    return Panel(_title(metric), (Query(selector(metric.name) + scale, legend),), unit, metric.text)


def _unit(name: str) -> str:
    ends = [end for end in UNITS if name.endswith(end)]
    return UNITS[max(ends, key=len)] if ends else "short"


def _title(metric: Declared) -> str:
    """The words of a name without the service and the unit."""
    name = metric.name.removesuffix("_total").removeprefix("sluice_")
    words = name.removeprefix("reward_model_").split("_")
    if words[0] in ("rollout", "router", "trainer", "converter", "loop"):
        words = words[1:]
    if words[-1] in UNITS and len(words) > 1:
        words = words[:-1]
    if words[-1] == "timestamp":
        words = words[:-1]
    return " ".join(words).capitalize()


def _standard(service: str, *names: Metric) -> tuple[Panel, ...]:
    """Panels of these metrics, or of all of a service."""
    chosen = [declare(metric) for metric in names] or declared(service)
    return tuple(standard(metric) for metric in chosen)


def _of(name: str, conditions: str = "") -> str:
    """The series of a foreign metric of the chosen instances."""
    assert name in NODE or name in PROCESS, name
    return selector(name, *([conditions] if conditions else []))


def dashboards() -> list[Dashboard]:
    """All of them: an overview of a run, each service, and what they run on."""
    lag = (
        f"scalar(max({gauge(trainer.WEIGHT_VERSION)})) - ({gauge(rollout.WEIGHT_VERSION)})",
        f"{gauge(router.LAG)}",
    )
    progress = Panel(
        "Progress",
        (Query(f"{gauge(loop.STEP)} / {gauge(loop.PLANNED_STEPS)}"),),
        "percentunit",
        "Steps that are done of those that are planned.",
    )
    left = Panel(
        "Time left",
        (
            Query(
                f"({gauge(loop.PLANNED_STEPS)} - {gauge(loop.STEP)})"
                f" / (deriv({gauge(loop.STEP)}[15m]) > 0)"
            ),
        ),
        "s",
        "At the pace of the last 15 minutes; less where a reward or a score may end the run.",
    )
    behind = Panel(
        "Engines behind the trainer",
        (Query(lag[0]), Query(lag[1], "{{engine}} as the router hears")),
        "short",
        "Weight versions.",
    )
    phases = Panel(
        "Where the time of steps goes",
        tuple(
            Query(
                f"rate({selector(f'{_name(loop.PHASE_SECONDS)}_sum', f'kind={kind!r}')}[{WINDOW}])",
                kind,
            )
            for kind in loop.PHASES
        ),
        "percentunit",
        "Share of the time that a run waits for groups, trains and publishes.",
    )
    trained = Panel(
        "Tokens a second",
        (
            Query(rate(loop.TOKENS), "trained"),
            Query(f"sum({rate(rollout.DECODED)})", "sampled"),
            Query(f"sum({rate(rollout.PREFILLED)})", "prompts read"),
        ),
        "short",
        "Trained by the run; sampled and read by all engines.",
    )
    hidden = {declare(metric).name for metric in (loop.STEP, loop.PLANNED_STEPS, loop.TOKENS)}
    others = [metric for metric in declared("loop") if metric.name not in hidden]
    services = Panel("Services that answer", (Query("up"),), "bool", "1 where a scrape succeeds.")
    return [
        Dashboard(
            "run",
            "Sluice: run",
            (
                ("Where it is", (progress, left, trained, phases, behind, services)),
                ("Steps", tuple(standard(metric) for metric in others)),
                ("Is what is learned sound?", _standard("", trainer.MISMATCH, trainer.LOSS)),
                ("Every service", _standard("", waits.WAITS, waits.OLDEST_WAIT)),
                ("Calls", _standard("", interceptors.RPC_SECONDS, interceptors.RPCS_RUNNING)),
            ),
        ),
        Dashboard("trainer", "Sluice: trainer", (("Trainer", _standard("trainer")),)),
        Dashboard("engines", "Sluice: engines", (("Episodes and engines", _standard("rollout")),)),
        Dashboard("router", "Sluice: router", (("Router", _standard("router")),)),
        Dashboard("reward-model", "Sluice: reward model", (("Scores", _standard("reward_model")),)),
        Dashboard("converter", "Sluice: converter", (("Converter", _standard("converter")),)),
        Dashboard("gateway", "Sluice: gateway", (("Gateway", _standard("gateway")),)),
        Dashboard(
            "host",
            "Sluice: host",
            (
                ("What runs hang on", _host_panels()),
                ("Processes", _process_panels()),
                ("Machine", _node_panels()),
            ),
        ),
    ]


def _host_panels() -> tuple[Panel, ...]:
    share = Panel(
        "Room on disks",
        (Query(f"{gauge(host.DISK_FREE)} / {gauge(host.DISK_SIZE)}", "{{instance}} {{use}}"),),
        "percentunit",
        "Share of the file system that is free.",
    )
    return (share, *_standard("", host.DISK_FREE, host.DISK_SIZE, host.CERTIFICATE_END))


def _process_panels() -> tuple[Panel, ...]:
    cpu = _of("process_cpu_seconds_total")
    files = f"{_of('process_open_fds')} / {_of('process_max_fds')}"
    return (
        Panel("Memory of processes", (Query(_of("process_resident_memory_bytes")),), "bytes"),
        Panel("Processors of processes", (Query(f"rate({cpu}[{WINDOW}])"),)),
        Panel("Open files of those allowed", (Query(files),), "percentunit"),
    )


def _node_panels() -> tuple[Panel, ...]:
    waiting = 'mode="idle"'
    idle = f"rate({_of('node_cpu_seconds_total', waiting)}[{WINDOW}])"
    memory = f"1 - {_of('node_memory_MemAvailable_bytes')} / {_of('node_memory_MemTotal_bytes')}"
    real = 'fstype!~"tmpfs|ramfs|overlay|squashfs"'
    room = f"{_of('node_filesystem_avail_bytes', real)} / {_of('node_filesystem_size_bytes', real)}"
    physical = 'device!="lo"'

    def both(first: tuple[str, str], second: tuple[str, str], condition: str) -> tuple[Query, ...]:
        return tuple(
            Query(f"rate({_of(name, condition)}[{WINDOW}])", f"{{{{instance}}}} {{{{device}}}} {w}")
            for name, w in (first, second)
        )

    disks = both(
        ("node_disk_read_bytes_total", "read"), ("node_disk_written_bytes_total", "written"), ""
    )
    network = both(
        ("node_network_receive_bytes_total", "in"),
        ("node_network_transmit_bytes_total", "out"),
        physical,
    )
    return (
        Panel(
            "Processors in use",
            (Query(f"1 - avg by (instance) ({idle})"),),
            "percentunit",
            "Of the node exporter, as all in this row.",
        ),
        Panel("Load", (Query(_of("node_load1")),)),
        Panel("Memory in use", (Query(memory),), "percentunit"),
        Panel("Room on file systems", (Query(room, "{{instance}} {{mountpoint}}"),), "percentunit"),
        Panel("Disks", disks, "Bps"),
        Panel("Network", network, "Bps"),
    )


@dataclass(frozen=True)
class Alert:
    """A rule: fires once `expr` has had a result for so long."""

    name: str
    expr: str
    lasting: str
    severity: str
    summary: str
    remedy: str


def _name(metric: Metric) -> str:
    return declare(metric).name


def alerts() -> list[Alert]:
    """What somebody has to look at, with what to do about it."""
    free, size = _name(host.DISK_FREE), _name(host.DISK_SIZE)
    lag = _name(router.LAG)
    damaged = " or ".join(
        f"increase({name}[15m]) > 0"
        for name in (
            _name(rollout.DIGEST_FAILURES),
            _name(converter.DIGEST_FAILURES),
        )
    )
    return [
        Alert(
            "SluiceServiceDown",
            'up{job="sluice"} == 0',
            "2m",
            "critical",
            "{{ $labels.instance }} does not answer",
            "its log says why it ended; a supervisor starts it again up to `restarts` times",
        ),
        Alert(
            "SluiceEngineStale",
            f"{lag} > 2 or {lag} == -1",
            "10m",
            "warning",
            "engine {{ $labels.engine }} is {{ $value }} weight versions behind (-1: has none)",
            "`sluice waits` on the engine; it catches up from the store on its own once it can",
        ),
        Alert(
            "SluiceMismatchHigh",
            f"{_name(trainer.MISMATCH)} > 0.05",
            "10m",
            "warning",
            "trainer and engines are {{ printf `%.3g` $value }} nats a token apart",
            "compare temperature, weights and dtype of both ends; docs/algorithms.md, Corrections",
        ),
        Alert(
            "SluiceStepsSkipped",
            f"{_name(trainer.SKIPS_IN_A_ROW)} >= 3",
            "0m",
            "critical",
            "{{ $value }} optimizer steps in a row were skipped",
            "gradients are not finite: `sluice status` has the reason; lower the learning rate",
        ),
        Alert(
            "SluiceNoProgress",
            f"changes({_name(loop.STEP)}[10m]) == 0"
            f" and {_name(loop.STEP)} < {_name(loop.PLANNED_STEPS)}",
            "20m",
            "critical",
            "no step of the run at {{ $labels.instance }} for half an hour",
            "`sluice status RUN` says what waits on whom",
        ),
        Alert(
            "SluiceDiskNearlyFull",
            f"{free} / {size} < 0.1",
            "5m",
            "critical",
            "{{ $value | humanizePercentage }} left where {{ $labels.instance }} writes"
            " ({{ $labels.use }})",
            "`retention` and `keep_versions` bound what is kept; what is full stops the run",
        ),
        Alert(
            "SluiceCertificateEnds",
            f"{_name(host.CERTIFICATE_END)} - time() < 14 * 86400",
            "0m",
            "warning",
            "{{ $labels.use }} of {{ $labels.instance }} ends in {{ $value | humanizeDuration }}",
            "renew the files and restart the service: it reads them when it starts",
        ),
        Alert(
            "SluiceRanksRestart",
            f"increase({_name(trainer.RESTARTS)}[30m]) > 2",
            "0m",
            "warning",
            "ranks of {{ $labels.instance }} were started again {{ printf `%.0f` $value }} times",
            "the trainer's log names the rank and why it ended",
        ),
        Alert(
            "SluiceBytesDamaged",
            damaged,
            "0m",
            "critical",
            "{{ $labels.instance }} read bytes that are not those once written",
            "look at disk and network of the store; what was damaged has not been used",
        ),
        Alert(
            "SluiceTwoRouters",
            f"{_name(router.SECOND_ROUTER)} == 1",
            "1m",
            "critical",
            "engines hear {{ $labels.instance }} and another router",
            "stop one: leases of both go to the same engines",
        ),
    ]


def rules_text() -> str:
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expr,
            "for": alert.lasting,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "remedy": alert.remedy},
        }
        for alert in alerts()
    ]
    groups = {"groups": [{"name": "sluice", "rules": rules}]}
    return f"# {MARK}\n" + yaml.safe_dump(groups, sort_keys=False, width=100)


def dashboard_json(dashboard: Dashboard) -> dict[str, Any]:
    """A dashboard as Grafana 10 and later import it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in dashboard.rows:
        place = {"x": 0, "y": top, "w": WIDTH * COLUMNS, "h": 1}
        panels.append({"type": "row", "title": title, "gridPos": place, "panels": []})
        top += 1
        for index, panel in enumerate(row):
            x, y = WIDTH * (index % COLUMNS), top + HEIGHT * (index // COLUMNS)
            panels.append(_panel_json(panel, {"x": x, "y": y, "w": WIDTH, "h": HEIGHT}))
        top += HEIGHT * -(-len(row) // COLUMNS)
    for number, each in enumerate(panels, 1):
        each["id"] = number
    return {
        "uid": f"sluice-{dashboard.name}",
        "title": dashboard.title,
        "description": MARK,
        "tags": ["sluice"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "graphTooltip": 1,
        "links": [
            {"type": "dashboards", "tags": ["sluice"], "title": "Sluice", "asDropdown": False}
        ],
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    everything = {"selected": True, "text": "All", "value": "$__all"}
    return [
        {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {
            "name": "instance",
            "label": "Instance",
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": "label_values(up, instance)", "refId": "instances"},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".+",
            "current": everything,
        },
    ]


def _panel_json(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "gridPos": place,
        "datasource": SOURCE,
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "custom": {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never"},
            },
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + i), "expr": query.expr, "legendFormat": query.legend}
            | {"datasource": SOURCE}
            for i, query in enumerate(panel.queries)
        ],
    }


def files() -> dict[Path, str]:
    """Everything that is written, by path."""
    written = {
        DIRECTORY / "dashboards" / f"{each.name}.json": json.dumps(dashboard_json(each), indent=1)
        + "\n"
        for each in dashboards()
    }
    return {**written, RULES: rules_text()}


def main(arguments: Sequence[str] | None = None) -> int:
    wanted = files()
    if "--check" not in (sys.argv[1:] if arguments is None else arguments):
        for path, text in wanted.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return 0
    there = {*DIRECTORY.glob("dashboards/*"), *DIRECTORY.glob("rules/*")}
    wrong = [p for p, text in wanted.items() if not p.exists() or p.read_text() != text]
    for path in sorted([*wrong, *(there - wanted.keys())]):
        text = f"{path.relative_to(ROOT)} is not what the code declares; run `make docs`"
        print(text, file=sys.stderr)
    return 1 if wrong or there - wanted.keys() else 0


if __name__ == "__main__":
    sys.exit(main())
