"""`accelerator.json`, `accelerator.md` and the last line, from the results of the steps."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tools.accelerator_check.runner import CheckResult
from tools.accelerator_check.work import number

GOALS = {  # on a GPU; the figure must be at most, or at least, so much
    "parity_fp32": ("<=", 1e-4),
    "parity_bf16": ("<=", 0.05),
    "vs_bare": (">=", 0.95),
    "mfu_1_5b": (">=", 0.40),
    "sync/copy": (">=", 0.6),
    "pause_ms": ("<=", 50.0),
}


@dataclass(frozen=True)
class CheckReport:
    """What a whole check came to."""

    device: str
    form: str
    command: str
    results: Sequence[CheckResult]

    @property
    def done(self) -> int:
        return sum(result.status == "ok" for result in self.results)

    @property
    def headline(self) -> dict[str, float]:
        """The figures of the last line; nan for one that no step has found."""
        return {
            "parity_fp32": self._over(max, "parity-reference/fp32", "parity-megatron/fp32"),
            "parity_bf16": self._over(max, "parity-reference/bf16", "parity-megatron/bf16"),
            "mfu_0_5b": self._figure("training-0.5b/mfu"),
            "mfu_1_5b": self._figure("training-1.5b/mfu"),
            "vs_bare": self._over(min, "training-0.5b/vs_bare", "training-1.5b/vs_bare"),
            "engine/generate": self._figure("engine/vs_generate"),
            "sync_gbs": self._figure("sync/gbs"),
            "sync/copy": self._figure("sync/vs_copy"),
            "pause_ms": self._figure("sync/pause_ms"),
        }

    @property
    def line(self) -> str:
        figures = " ".join(f"{name}={value:.4g}" for name, value in self.headline.items())
        device = self.device.replace(" ", "_")
        return f"accelerator: device={device} steps={self.done} of={len(self.results)} {figures}"

    def write(self, out: Path) -> None:
        """Both files, into the folder `out`."""
        data = {
            "device": self.device,
            "form": self.form,
            "command": self.command,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "steps": self.done,
            "of": len(self.results),
            "figures": self.headline,
            "goals": {name: f"{sign} {value:g}" for name, (sign, value) in GOALS.items()},
            "results": [asdict(result) for result in self.results],
        }
        text = json.dumps(_plain(data), indent=1, allow_nan=False)
        (out / "accelerator.json").write_text(text + "\n")
        (out / "accelerator.md").write_text(self._page(data["date"]))

    def _page(self, date: object) -> str:
        lines = [
            f"# Check of {self.device}",
            "",
            f"{date}, {self.form} form: {self.done} of {len(self.results)} steps.",
            f"`{self.command}`",
            *([] if self.form == "full" else ["", "Small sizes: the figures say that it runs."]),
            "",
            "| figure | found | goal on a GPU |",
            "|---|---|---|",
        ]
        for name, value in self.headline.items():
            sign, goal = GOALS.get(name, ("", math.nan))
            wanted = f"{sign} {goal:g}" if sign else ""
            lines.append(f"| {name} | {value:.4g} | {wanted} |")
        lines += ["", "| step | | seconds | |", "|---|---|---|---|"]
        lines += [
            f"| {r.name} | {r.status} | {r.seconds:.1f} | {r.reason.replace('|', '/')} |"
            for r in self.results
        ]
        for result in self.results:
            lines += ["", f"## {result.name}", ""]
            lines += [f"- {name}: {_text(value)}" for name, value in result.figures.items()]
            lines += [f"- {note}" for note in result.notes]
        return "\n".join(lines) + "\n"

    def _figure(self, path: str) -> float:
        step, _, name = path.partition("/")
        found = [number(r.figures, name) for r in self.results if r.name == step]
        return found[0] if found else math.nan

    def _over(self, choose: Any, *paths: str) -> float:
        known = [value for path in paths if not math.isnan(value := self._figure(path))]
        return float(choose(known)) if known else math.nan


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    """JSON knows no nan."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
