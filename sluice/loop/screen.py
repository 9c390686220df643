"""What commands show on a terminal, where texts of models, data sets and hosts cannot do harm."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sluice.loop.report import duration_text

NONE = "-"
SHOWN_WAITS = 6  # of a service
_BARS = "▁▂▃▄▅▆▇█"
_STATE_STYLES = {
    "running": "green",
    "done": "green",
    "serving": "green",
    "active": "green",
    "stopped": "yellow",
    "starting": "yellow",
    "unknown": "yellow",
    "not serving": "yellow",
    "failed": "bold red",
    "gone": "bold red",
    "no answer": "bold red",
}


def plain_text(text: str, longest: int = 200) -> str:
    """One line that moves no cursor and turns no writing direction, cut to `longest` characters.

    Line ends and tabs are written as escapes, other control and format characters as U+FFFD.
    """
    cut = text if len(text) <= longest else text[: longest - 1] + "…"
    named = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return "".join(
        named.get(c) or ("\ufffd" if unicodedata.category(c) in ("Cc", "Cf", "Cs") else c)
        for c in cut
    )


def curve(values: Sequence[float | None], width: int = 40) -> str:
    """The last values as bars of eight heights; a gap where one is missing or not finite."""
    shown = [
        v if isinstance(v, int | float) and math.isfinite(v) else None for v in values[-width:]
    ]
    known = [value for value in shown if value is not None]
    if not known:
        return ""
    low, span = min(known), (max(known) - min(known)) or 1.0
    return "".join(" " if v is None else _BARS[int((v - low) / span * 7.999)] for v in shown)


def number_text(value: object, digits: int = 3) -> str:
    """A number for people; a dash where there is none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return NONE
    if not math.isfinite(value):
        return str(value)
    if isinstance(value, int) or (abs(value) >= 1000 and value == round(value)):
        return f"{value:,.0f}"
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}f}"


def status_screen(status: dict[str, Any]) -> RenderableType:
    """The screen of `sluice status`, of what `--json` prints."""
    parts: list[RenderableType] = []
    if status["run"] is not None:
        parts += _run(status["run"])
    if status["services"]:
        parts.append(_services(status["services"]))
    if status["engines"]:
        parts.append(_engines(status["engines"]))
    if any(service["waits"] for service in status["services"]):
        parts.append(_waits(status["services"]))
    if status["run"] is not None and status["run"]["notes"]:
        notes = Table("last notes", "step", "ago", box=None, padding=(0, 2, 0, 0))
        for note in status["run"]["notes"]:
            ago = NONE
            if isinstance(note["time"], int | float):
                ago = duration_text(max(0.0, status["time"] - note["time"]))
            notes.add_row(Text(plain_text(note["text"])), number_text(note["step"]), ago)
        parts.append(notes)
    return Group(*parts)


def _state(word: str) -> Text:
    return Text(word, style=_STATE_STYLES.get(word, ""))


def _run(run: dict[str, Any]) -> list[RenderableType]:
    head = Text.assemble((plain_text(run["run_dir"]), "bold"), "  ", _state(run["state"]))
    if run["detail"]:
        head.append("  " + plain_text(run["detail"], 1000))  # with the file, say
    steps, left = run["steps"], run["seconds_left"]
    bar = Table.grid(padding=(0, 2, 0, 0))
    told = f"step {run['step']} of {steps}" if steps else f"step {run['step']}"
    end = f"ends in {duration_text(left)} at this pace" if left else ""
    bar.add_row(told, ProgressBar(total=steps or 1, completed=run["step"], width=40), end)
    figures = Table.grid(padding=(0, 2, 0, 0))
    last, seconds = run["last"], run["last"].get("step_seconds")
    phases = ", ".join(
        f"{name} {number_text(last.get(f'{name}_seconds'), 2)}"
        for name in ("rollout", "train", "publish")
        if last.get(f"{name}_seconds") is not None
    )
    for name, text in (
        ("reward", f"{number_text(last.get('reward_mean'))}  {curve(run['rewards'])}"),
        ("loss", number_text(last.get("loss"))),
        ("tokens/s", number_text(run["tokens_per_second"], 0)),
        ("step", f"{number_text(seconds, 2)} s" + (f": {phases} s" if phases else "")),
        ("length", number_text(last.get("response_length_mean"), 1)),
        ("mismatch", number_text(last.get("rollout_mismatch"))),
        ("staleness", number_text(last.get("staleness_max"))),
        ("weights", f"version {number_text(last.get('weight_version'))}"),
        ("skipped steps", number_text(run["skipped_steps"])),
    ):
        if not text.startswith((NONE, f"version {NONE}")):
            figures.add_row(Text(name, style="dim"), text)
    for name, score in run["scores"].items():
        told = f"{number_text(score['score'])} at step {score['step']}"
        figures.add_row(Text(plain_text(name, 64), style="dim"), told)
    return [head, bar, figures]


def _services(services: list[dict[str, Any]]) -> Table:
    table = Table("service", "kind", "address", "health", "", box=None, padding=(0, 2, 0, 0))
    for service in services:
        table.add_row(
            Text(plain_text(service["name"], 64)),
            Text(plain_text(service["kind"], 64)),
            Text(plain_text(service["address"], 64)),
            _state(service["health"]),
            Text(plain_text(service["detail"])),
        )
    return table


def _engines(engines: list[dict[str, Any]]) -> Table:
    table = Table("engine", "state", "weights", "behind", "running", "pace", box=None)
    table.padding = (0, 2, 0, 0)
    for engine in engines:
        room = f" of {engine['capacity']}" if engine["capacity"] else ""
        table.add_row(
            Text(plain_text(engine["id"], 64)),
            _state(engine["state"]),
            number_text(engine["weight_version"]),
            number_text(engine["versions_behind"]),
            f"{engine['leased']}{room}",
            f"{engine['slowdown']:.2f}x" if engine["slowdown"] else NONE,
        )
    return table


def _waits(services: list[dict[str, Any]]) -> Table:
    table = Table("who waits", "for", "on", "since", "why", box=None, padding=(0, 2, 0, 0))
    for service in services:
        for wait in service["waits"][:SHOWN_WAITS]:
            table.add_row(
                Text(plain_text(service["name"], 64)),
                Text(plain_text(wait["what"], 80)),
                Text(plain_text(", ".join(wait["on"]), 120)),
                duration_text(max(0.0, wait["seconds"])),
                Text(plain_text(wait["explanation"])),
            )
        if (more := len(service["waits"]) - SHOWN_WAITS) > 0:
            table.add_row(Text(plain_text(service["name"], 64)), f"{more} more")
    return table
