"""Writes what docs say of the code: docs/metrics.md, and the ports in docs/security.md.

`--check` only compares.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

from sluice.loop.metrics import ROW_KEYS
from tools.dashboards import files
from tools.declared_metrics import MODULES, Declared, declared

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "metrics.md"
HEAD = """# Metrics

Each service, and the loop of a run, exposes these at `/metrics` of its metrics port, behind the
same TLS and token as its gRPC port. Base units; counters end in `_total`; labels come from closed
sets, of which `method` and `code` are given by gRPC, `pool`, `engine` and `rank` by the fleet, and
`dataset` by the run.
`process_*` and `python_*` of the Prometheus client come on top. Generated from the code by
`make docs`.

How far engines are behind the trainer, in weight versions:
`scalar(max(sluice_trainer_weight_version)) - sluice_rollout_weight_version`.
"""


KEYS_HEAD = """## Rows of a run

Keys of `RUN_DIR/metrics.jsonl`, a row a step, and of trackers ([trackers.md](trackers.md)). Which
of them a run has depends on its algorithm. Evaluations are rows of their own in the file, with
`evaluation` and `dataset`; there their keys have no `eval/<data set>/`. What is a token's own
(`ratio`, `entropy`, shares of tokens) is a mean over the tokens that were computed, in all
mini-batches and epochs: rows whose advantages are all 0 are not, unless the loss has a KL or an
entropy term.
"""


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
        lines += [f"## {service.capitalize().replace('_', ' ') or 'Every service'}", ""]
        lines += ["| metric | type | labels | what |", "|---|---|---|---|"]
        lines += [_row(metric) for metric in declared(service)]
        lines.append("")
    lines += [KEYS_HEAD, "| key | what |", "|---|---|"]
    lines += [f"| `{key}` | {text} |" for key, text in ROW_KEYS.items()]
    return "\n".join(lines) + "\n"


SECURITY = ROOT / "docs" / "security.md"
BEGIN, END = "<!-- ports: written by `make docs` -->\n", "<!-- end of ports -->\n"
OPENING = {  # calls that open a port; `bind` alone does not, nor does a client of a store
    "add_insecure_port",
    "add_secure_port",
    "create_server",
    "HTTPServer",
    "TCPSite",
    "TCPStore",
    "ThreadingHTTPServer",
    "ThreadingWSGIServer",
    "free_port",
    "init_process_group",
    "listen",
    "make_server",
    "open_port",
    "start_server",
    "unix_server",
}
PASSED_ON = {  # (module, call): the port is the row of another module
    ("services.rollout.process", "create_server"),
    ("sluice.runtime.http", "TCPSite"),
    ("sluice.runtime.metrics", "ThreadingWSGIServer"),
}


def opening_calls() -> dict[str, set[str]]:
    """The calls that open a port, by module of services and library."""
    found: dict[str, set[str]] = {}
    for path in sorted((*ROOT.glob("services/**/*.py"), *ROOT.glob("sluice/**/*.py"))):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        text = path.read_text()
        if not any(name in text for name in OPENING):
            continue
        for node in ast.walk(ast.parse(text)):
            called = node.func if isinstance(node, ast.Call) else None
            bases = node.bases if isinstance(node, ast.ClassDef) else []
            for part in (called, *bases):
                name = getattr(part, "attr", getattr(part, "id", ""))
                if name in OPENING and (module, name) not in PASSED_ON:
                    found.setdefault(module, set()).add(name)
    return found


def ports_table() -> str:
    """Rows that the modules that open ports declare. Raises AttributeError where one does not."""
    rows = ["| port | listens on | asks for |", "|---|---|---|"]
    for module in sorted(opening_calls(), key=lambda name: ("runtime" not in name, name)):
        rows += [f"| {' | '.join(row)} |" for row in importlib.import_module(module).OPEN_PORTS]
    return "\n".join(rows) + "\n"


def security_page() -> str:
    text = SECURITY.read_text()
    head, _, rest = text.partition(BEGIN)
    return head + BEGIN + ports_table() + END + rest.partition(END)[2]


def main() -> int:
    pages = {PAGE: page(), SECURITY: security_page(), **files()}
    if "--check" not in sys.argv:
        for path, text in pages.items():
            path.write_text(text)
        return 0
    wrong = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    for path in wrong:
        text = f"{path.relative_to(ROOT)} is not what the code declares; run `make docs`"
        print(text, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
