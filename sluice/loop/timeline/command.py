"""`sluice trace`."""

from __future__ import annotations

from pathlib import Path

from sluice.config import ConfigError
from sluice.loop.timeline.page import render
from sluice.loop.timeline.spans import NoTraceError, load
from sluice.loop.timeline.summary import summarise

NAMED_SHARES = 5


def write_page(run_dir: Path, output: Path | None, steps: str | None) -> list[str]:
    """Write the page, by default run_dir/trace.html; what to say about it.

    Raises ConfigError for steps that are not FIRST-LAST, or where there is no trace.
    """
    first, last = _range(steps)
    try:
        trace = load(run_dir, first, last)
    except NoTraceError as error:
        raise ConfigError(str(error)) from None
    path = output or run_dir / "trace.html"
    try:
        path.write_text(render(trace, f"Run {run_dir.resolve().name}"))
    except OSError as error:
        raise ConfigError(f"-o: {error}") from None
    summary = summarise(trace)
    return [
        f"samples: {_shares(summary.samples)}",
        f"steps: {_shares(summary.steps)}",
        f"{path}: steps {trace.steps[0]}-{trace.steps[1]}, {summary.sample_count} samples",
    ]


def _range(steps: str | None) -> tuple[int | None, int | None]:
    if steps is None:
        return None, None
    first, dash, last = steps.partition("-")
    try:
        return int(first), int(last) if dash else int(first)
    except ValueError:
        raise ConfigError(f"--steps: {steps!r} is not FIRST-LAST") from None


def _shares(seconds: dict[str, float]) -> str:
    total = sum(seconds.values()) or 1.0
    named = list(seconds.items())[:NAMED_SHARES]
    return ", ".join(f"{name} {value / total:.0%}" for name, value in named)
