"""How much memory of the host this process holds, and how much more it may have."""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_LIBC = ctypes.CDLL(None)
_MALLINFO = getattr(_LIBC, "mallinfo2", None)  # of glibc, as the next
_MALLOC_TRIM = getattr(_LIBC, "malloc_trim", None)
_GROUPS = Path("sys/fs/cgroup")
_LIMITS = {
    True: ("memory.max", "memory.current"),
    False: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}


class _Allocated(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


if _MALLINFO is not None:
    _MALLINFO.restype = _Allocated


@dataclass(frozen=True)
class HeldMemory:
    """Bytes of this process that are in memory, and that it has allocated (0: nobody counts).

    What is allocated may come of what was freed before, and what is in memory may be free.
    """

    resident: int
    allocated: int

    @classmethod
    def now(cls) -> HeldMemory:
        allocated = 0
        if _MALLINFO is not None:
            found = _MALLINFO()
            allocated = found.uordblks + found.hblkhd
        return cls(psutil.Process().memory_info().rss, allocated)

    def growth(self) -> int:
        """Bytes that are held more by now, by whichever count grew more."""
        now = HeldMemory.now()
        return max(0, now.resident - self.resident, now.allocated - self.allocated)


def peak_memory() -> int:
    """The most bytes that this process has had in memory at a time."""
    for line in lines_of(Path("/proc/self/status")):
        name, _, size = line.partition(":")
        if name == "VmHWM":  # of Linux, where getrusage tells what the parent had, if more
            return int(size.split()[0]) << 10
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may yet have: of the host, and of its control groups."""
    found = [psutil.virtual_memory().available]
    for own, is_unified in memory_groups(root):
        top = root / _GROUPS
        for group in (own, *own.parents):
            if group == top.parent:
                break
            limit, used = (_number_in(group / name) for name in _LIMITS[is_unified])
            if limit is not None and used is not None:
                found.append(max(0, limit - used + _cached(group)))
    return min(found)


def give_back() -> None:
    """To the host, what this process has freed: glibc keeps what lies below what is in use."""
    if _MALLOC_TRIM is not None:
        _MALLOC_TRIM(0)


def memory_groups(root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """Directories of the control groups that count this process's memory, the nearest last; whether
    each is of the unified generation."""
    for line in lines_of(root / "proc/self/cgroup"):
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers:
            yield root / _GROUPS / path[1:], True
        elif "memory" in controllers.split(","):
            yield root / _GROUPS / "memory" / path[1:], False


def lines_of(path: Path) -> list[str]:
    """Of a file of the kernel; none where there is none."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _cached(group: Path) -> int:
    """Bytes of files that the kernel would give up."""
    for line in lines_of(group / "memory.stat"):
        name, _, number = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and number.isdecimal():
            return int(number)
    return 0


def _number_in(path: Path) -> int | None:
    """None for "max", too."""
    text = "".join(lines_of(path)).strip()
    return int(text) if text.isdecimal() else None
