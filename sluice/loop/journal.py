"""What happened to a run besides its steps: starts, notes, going back, ends. `journal.jsonl`."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from sluice.runtime.processes import own_identity

logger = logging.getLogger(__name__)

JOURNAL = "journal.jsonl"
LAST_TIME = 253_402_300_800.0  # the year 10000, in seconds since 1970
START, NOTE, BACK, END = "start", "note", "back", "end"
_SECRET = re.compile(r"(key|token|secret|password)$", re.IGNORECASE)
_PASSWORD = re.compile(r"(\w://[^/?#\s:@]*):[^/?#\s]*@")  # of a URL
_VERSIONED = ("sluice", "torch", "transformers", "megatron-core", "grpcio", "numpy", "pyarrow")


class RunJournal:
    """Appends to the journal of a run. What the disk refuses is left out: the run goes on.

    A line that a crash or a full disk cut off takes no other with it.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / JOURNAL

    def write(self, event: str, **facts: Any) -> None:
        """A line: `event`, the time in seconds since 1970, and facts that JSON has words for."""
        line = json.dumps({"event": event, "time": round(time.time(), 3), **facts}, default=str)
        try:
            with self._path.open("a+b", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                is_torn = size and os.pread(file.fileno(), 1, size - 1) != b"\n"
                file.write(b"\n" * is_torn + line.encode() + b"\n")
        except OSError as error:
            logger.warning("%s: %s", self._path, error)

    def start(self, kind: str, steps: int, config: Mapping[str, Any]) -> None:
        """The beginning of a process that trains: its settings, and what it runs on."""
        self.write(
            START,
            kind=kind,
            steps=steps,
            **own_identity(),
            cores=os.cpu_count(),
            versions=installed_versions(),
            config=without_secrets(config),
        )


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers depend on, as far as they are here."""
    found = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def without_secrets(value: Any, within: str = "") -> Any:
    """Settings as others may see them: values of keys that hold secrets are left out, and
    passwords of URLs. `within`: the key that the settings are of."""
    if isinstance(value, Mapping):
        return {
            key: "(left out)"
            if isinstance(inner, str) and inner and _is_secret(within, str(key))
            else without_secrets(inner, str(key))
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_secrets(inner) for inner in value]
    return _PASSWORD.sub(r"\1:(left out)@", value) if isinstance(value, str) else value


def _is_secret(within: str, key: str) -> bool:
    return bool(_SECRET.search(key)) and (within, key) != ("tls", "key")  # which names a file


def read_journal(run_dir: Path) -> list[dict[str, Any]]:
    """Events in their order; none where there is no journal. Damaged lines are left out."""
    try:
        lines = (run_dir / JOURNAL).read_bytes().split(b"\n")
    except OSError:
        return []
    return [event for line in lines if (event := _event(line)) is not None]


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    known = isinstance(event, dict) and isinstance(event.get("event"), str)
    time = event.get("time") if known else None
    return event if isinstance(time, int | float) and not abs(time) >= LAST_TIME else None
