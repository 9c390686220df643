"""What a look at a run finds, gathered: one thing that is wrong does not hide the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sluice.config import ConfigError
from sluice.durable import DirectoryError
from sluice.finding import OK, WARNING, WRONG, Finding
from sluice.loop.run_directory import RunDirectoryError

REFUSALS = (ConfigError, DirectoryError, RunDirectoryError)  # in which a run says that it ends
# what code of users raises as it is imported, and what settings that contradict each other lead to
UNTYPED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


class Findings:
    """All of them, in the order in which they were made; each is told once."""

    def __init__(self) -> None:
        self.found: list[Finding] = []

    def ok(self, subject: str, text: str) -> None:
        self._add(Finding(subject, OK, text))

    def warn(self, subject: str, text: str, remedy: str = "") -> None:
        self._add(Finding(subject, WARNING, text, remedy))

    def wrong(self, subject: str, text: str, remedy: str = "") -> None:
        self._add(Finding(subject, WRONG, text, remedy))

    def add(self, findings: Iterator[Finding]) -> None:
        for finding in findings:
            self._add(finding)

    def _add(self, finding: Finding) -> None:
        if finding not in self.found:
            self.found.append(finding)

    @contextmanager
    def expecting(self, subject: str) -> Iterator[None]:
        """Takes what would end a run in the block for a finding."""
        try:
            yield
        except REFUSALS as error:
            self.wrong(subject, str(error))
        except OSError as error:
            self.wrong(subject, f"{error.filename or subject}: {error.strerror or error}")

    @contextmanager
    def calling(self, subject: str) -> Iterator[None]:
        """As `expecting`, of code of users besides: whatever that raises would end a run too."""
        try:
            with self.expecting(subject):
                yield
        except UNTYPED as error:
            self.wrong(subject, f"{subject}: {type(error).__name__}: {error}")
