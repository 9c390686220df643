"""Services while they are being started: what their supervisor tells others of them, in a file.

services.json is there once all of them are up. Until then `RUN_DIR/services/starting.json` says
which are awaited, and for what.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sluice.durable import replace_file
from sluice.runtime.processes import is_at_work, own_identity

logger = logging.getLogger(__name__)

FILE = Path("services", "starting.json")  # in a run directory
NOT_BEGUN = "not started yet: it comes after the services before it"
LATEST = 2**40  # seconds since 1970; a file that says more is damaged
NO_ADDRESS = "no address yet"


@dataclass(frozen=True)
class StartingService:
    """One of the services of a start. `reason`: what is awaited of it; empty once it is up."""

    name: str
    kind: str
    address: str = ""  # from when it has opened its port
    reason: str = NOT_BEGUN
    since: float = 0.0  # seconds since 1970, of `reason`'s beginning: of the start of its process

    @property
    def seconds(self) -> float:
        """For which it has been awaited."""
        return max(0.0, time.time() - self.since)


class StartBoard:
    """The file of a supervisor, written anew with every change until `clear`.

    It is written for those who ask in other directories too, as in that of the run which the start
    is for. A disk that takes no more is no reason for a start to fail.
    """

    def __init__(self, run_dir: Path, also: Iterable[Path] = ()) -> None:
        self._run_dirs = list({path.absolute(): path for path in (run_dir, *also)}.values())
        self._services: dict[str, StartingService] = {}

    def note(self, service: StartingService) -> None:
        """Tell what is awaited of a service now."""
        if self._services.get(service.name) == service:
            return
        self._services[service.name] = service
        told = {
            **own_identity(),
            "services": {each.name: asdict(each) for each in self._services.values()},
        }
        data = json.dumps(told, indent=1).encode()
        for run_dir in self._run_dirs:
            file = run_dir / FILE
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                replace_file(file, data, temporary=run_dir, sync=False)
            except OSError as error:
                logger.debug("%s: %s", file, error)

    def clear(self) -> None:
        """All are up, or ended."""
        self._services.clear()
        for run_dir in self._run_dirs:
            file = run_dir / FILE
            with suppress(OSError):
                file.unlink(missing_ok=True)
                file.parent.rmdir()  # of a run, where nothing else is in it


def read_starting(run_dir: Path) -> list[StartingService]:
    """Services that are being started there, in the order of the start; none where nobody does.

    What a supervisor left that was killed is nobody's; one on another host may be at work.
    """
    try:
        told = json.loads((run_dir / FILE).read_text())
        if is_at_work(told) is False:
            return []
        return [_service(each) for each in told["services"].values()]
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return []


def _service(told: Mapping[str, Any]) -> StartingService:
    """Raises LookupError or TypeError for what is none."""
    since = told["since"]
    if not isinstance(since, int | float) or not 0 <= since < LATEST:
        raise TypeError(f"since: {since!r}")
    texts = {key: str(told[key]) for key in ("name", "kind", "address", "reason")}
    return StartingService(**texts, since=since)
