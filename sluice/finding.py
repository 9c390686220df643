"""What a command found out by looking: how it is, and what to do if that is not well."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from sluice.loop.screen import plain_text

OK, WARNING, WRONG = "ok", "warning", "wrong"
LONGEST_TEXT = 1000
_STYLES = {OK: "green", WARNING: "yellow", WRONG: "bold red"}


class UnfitError(Exception):
    """Something that a run needs is missing or wrong; what, was said before."""


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it is, and what to do if that is not ok."""

    subject: str
    state: str
    text: str
    remedy: str = ""


def show(findings: Iterable[Finding], *, width: int = 12) -> list[str]:
    """Print a line each, as they come; returns the subjects that are wrong, each once.

    width: of subjects, in characters.
    """
    console, wrong = Console(), list[str]()
    for finding in findings:
        line = Text.assemble(
            (f"{finding.state:8}", _STYLES[finding.state]),
            f" {finding.subject:{width}} {plain_text(finding.text, LONGEST_TEXT)}",
        )
        console.print(line, soft_wrap=True)
        if finding.remedy and finding.state != OK:
            console.print(Text(f"{'':{width + 10}}-> {finding.remedy}"), soft_wrap=True)
        if finding.state == WRONG and finding.subject not in wrong:
            wrong.append(finding.subject)
    return wrong
