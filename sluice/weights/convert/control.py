"""What the caller of a conversion watches and says."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field


@dataclass
class Progress:
    """How far a conversion is; written by its threads, read by anyone."""

    total_bytes: int = 0
    total_tensors: int = 0
    done_bytes: int = 0
    done_tensors: int = 0
    resumed_bytes: int = 0  # of done_bytes: found written by an earlier run
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds_left(self) -> float | None:
        """At the rate so far; None before there is one."""
        made = self.done_bytes - self.resumed_bytes
        if made <= 0:
            return None
        return (time.monotonic() - self.started) * (self.total_bytes - self.done_bytes) / made


@dataclass(frozen=True)
class Control:
    """What the caller watches and says. `stop` ends the work before the next piece.

    With `keep` set as well, what is written stays for a later run to go on from.
    """

    progress: Progress = field(default_factory=Progress)
    stop: threading.Event = field(default_factory=threading.Event)
    keep: threading.Event = field(default_factory=threading.Event)
