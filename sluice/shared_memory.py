"""What a process tells another one of its host to open memory by: who it is, and a handle."""

from __future__ import annotations

import base64
import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil


class SharedMemoryError(RuntimeError):
    """Memory of another process cannot be opened here; the message says why."""


@dataclass(frozen=True)
class ProcessIdentity:
    """A process of one life of a host: no other one, before or after it, is the same."""

    host: str  # an id of this start of the host
    process: int
    started: float

    @classmethod
    def own(cls) -> ProcessIdentity:
        own = psutil.Process()
        return cls(_host_id(), own.pid, own.create_time())

    def check(self) -> None:
        """Raise SharedMemoryError unless it lives, on this host."""
        if self.host != _host_id():
            raise SharedMemoryError(f"process {self.process} is of another host")
        try:
            found = psutil.Process(self.process)
            if found.status() == psutil.STATUS_ZOMBIE:
                raise SharedMemoryError(f"process {self.process} has ended")
            started = found.create_time()
        except psutil.NoSuchProcess:
            raise SharedMemoryError(f"process {self.process} has ended") from None
        if started != self.started:
            raise SharedMemoryError(f"process {self.process} is another one by now")


@dataclass(frozen=True)
class MemoryHandle:
    """By which a process of the same host opens memory of `owner`, as long as that lives.

    parts: what the device's own library needs, numbers and bytes.
    """

    owner: ProcessIdentity
    device_type: str
    device_id: str
    size: int
    parts: tuple[int | bool | bytes, ...]

    def encode(self) -> bytes:
        """Return it as JSON."""
        owner = self.owner
        parts = [
            base64.b64encode(part).decode() if isinstance(part, bytes) else part
            for part in self.parts
        ]
        return json.dumps(
            {
                "owner": [owner.host, owner.process, owner.started],
                "device": [self.device_type, self.device_id],
                "size": self.size,
                "parts": parts,
            }
        ).encode()

    @classmethod
    def decode(cls, data: bytes) -> MemoryHandle:
        """Read it. Raises SharedMemoryError for anything else."""
        try:
            document = json.loads(data)
            host, process, started = document["owner"]
            device_type, device_id = map(str, document["device"])
            parts = tuple(
                base64.b64decode(part, validate=True) if isinstance(part, str) else _number(part)
                for part in document["parts"]
            )
            owner = ProcessIdentity(str(host), int(process), float(started))
            handle = cls(owner, device_type, device_id, int(document["size"]), parts)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise SharedMemoryError(f"no handle of memory: {error!r}") from None
        if handle.size <= 0 or owner.process <= 0:
            raise SharedMemoryError("no handle of memory: it is of nothing")
        return handle


def _number(value: object) -> int | bool:
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is no number")
    return value


@cache
def _host_id() -> str:
    """An id of this start of this host; processes of other hosts have others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{os.uname().nodename} {psutil.boot_time():.0f}"
