"""Whom the kernel killed for want of memory: as each generation of control groups counts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.runtime import processes
from sluice.runtime.processes import describe_end, memory_kills


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


VMSTAT = {"proc/vmstat": "pgfault 7\noom_kill 40\nswap_ra 2\n"}
EVENTS = "low 0\nhigh 0\nmax 12\noom 4\noom_kill 3\noom_group_kill 0\n"


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({}, 0),
        (VMSTAT, 40),
        ({**VMSTAT, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.events": EVENTS}, 3),
        ({**VMSTAT, "proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.events": EVENTS}, 3),
        (
            {
                **VMSTAT,
                "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/pod/x:y\n0::/\n",
                "sys/fs/cgroup/memory/pod/x:y/memory.oom_control": "under_oom 0\noom_kill 2\n",
            },
            2,
        ),
        ({**VMSTAT, "proc/self/cgroup": "damaged\n0::/gone\n"}, 40),
        ({"proc/vmstat": "oom_kill many\n"}, 0),
    ],
)
def test_the_nearest_count_is_read(tmp_path: Path, files: dict[str, str], count: int) -> None:
    assert memory_kills(write(tmp_path, files)) == count


def test_an_end_is_told_by_its_cause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path, VMSTAT)
    monkeypatch.setattr(processes, "memory_kills", lambda: memory_kills(tmp_path))
    assert describe_end(3, kills=40) == ("exited with 3", False)
    assert describe_end(-9, kills=40) == ("was killed by SIGKILL", False)
    assert describe_end(-9, kills=39) == (
        "was killed by SIGKILL: the kernel had no memory left",
        True,
    )
    assert describe_end(-15, kills=39) == ("was killed by SIGTERM", False)
    assert describe_end(-40, kills=39) == ("was killed by signal 40", False), "it has no name"
