"""One step in its own process: `python -m tools.accelerator_check.work STEP OUT FORM`.

What the step finds is written as it is found, so that a step that dies leaves what it had.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tools.accelerator_check.steps import PACKAGE, STEPS, CheckStep

Form = Literal["small", "full"]
Figure = float | int | str


@dataclass
class StepWork:
    """Where a step works, and what it has found. `small`: sizes that a CPU does in seconds."""

    step: CheckStep
    out: Path
    form: Form
    figures: dict[str, Figure] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def small(self) -> bool:
        return self.form == "small"

    @property
    def directory(self) -> Path:
        """This step's own, made when first asked for."""
        path = self.out / "work" / self.step.name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def record(self, **figures: Figure) -> None:
        """Keep figures by name; nan is a figure that there is none of here."""
        self.figures |= figures
        self._write()

    def note(self, text: str) -> None:
        """Say something that a reader of the figures must know."""
        self.notes.append(text)
        self._write()

    def fail(self, reason: str) -> None:
        """A check that did not hold; the step goes on, and counts as failed in the end."""
        self.failures.append(reason)
        self._write()

    def part(self, *command: str, seconds: float, **environment: str) -> None:
        """Run a module of this check in a process of its own. Raises CalledProcessError."""
        subprocess.run(
            [sys.executable, "-m", *command],
            check=True,
            timeout=seconds,
            env={**os.environ, **environment},
        )

    def _write(self) -> None:
        found = {"figures": self.figures, "notes": self.notes, "failures": self.failures}
        path = found_path(self.out, self.step.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(found))
        partial.rename(path)


def found_path(out: Path, name: str) -> Path:
    """What a step has found so far."""
    return out / "work" / f"{name}.found.json"


def number(figures: dict[str, Figure], name: str) -> float:
    """A figure; nan where there is none."""
    value = figures.get(name)
    return math.nan if value is None or isinstance(value, str) else float(value)


def main() -> int:
    name, out, form = sys.argv[1:4]
    step = next(step for step in STEPS if step.name == name)
    work = StepWork(step, Path(out), "small" if form == "small" else "full")
    importlib.import_module(f"{PACKAGE}.{step.module}").run(work, *step.arguments)
    work.record()
    return 1 if work.failures else 0


if __name__ == "__main__":
    sys.exit(main())
