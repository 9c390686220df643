"""A conversion written out before it starts: every file, and what goes where in it.

Because all places are known first, groups of tensors are written in any order, by several
threads, and after a crash the ones that are there need not be written again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sluice.weights.convert.pieces import Content


@dataclass(frozen=True)
class Task:
    """A tensor, or a part of one, that goes to `offset` of file `file`. Names are unique."""

    name: str
    content: Content
    file: str
    offset: int


@dataclass(frozen=True)
class Group:
    """Tensors that are made of the same tensors: the unit of work and of the journal."""

    name: str
    tasks: tuple[Task, ...]

    @property
    def size(self) -> int:
        """Bytes that it writes."""
        return sum(task.content.size for task in self.tasks)

    @property
    def working_bytes(self) -> int:
        """Memory that it needs beyond a buffer."""
        return max((task.content.working_bytes for task in self.tasks), default=0)


@dataclass(frozen=True)
class Check:
    """Bytes of the source whose digest is known."""

    name: str
    content: Content
    digest: str


@dataclass(frozen=True)
class OutputFile:
    """A file of known size; `frames` are the bytes at offsets that are no tensor."""

    name: str
    size: int
    frames: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True)
class Report:
    """What became of the tensors of a conversion, by HF name.

    `converted` came through the rules, `copied` from the origin, `skipped` were left out with
    the reason, `conflicting` are in both and differ: the converted one was kept.
    """

    converted: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    conflicting: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """All of a conversion. `texts` are further small files, written last; `checks` are made first
    or on the way."""

    files: tuple[OutputFile, ...]
    groups: tuple[Group, ...]
    texts: Mapping[str, bytes]
    report: Report
    checks: tuple[Check, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of tensors."""
        return sum(group.size for group in self.groups)

    @property
    def largest_group(self) -> int:
        return max((group.size for group in self.groups), default=0)
