"""What memory a process holds, and how much more its host and its control groups let it have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from sluice.host_memory import HeldMemory, free_memory, peak_memory
from tests.apart import apart

PLENTY = 1 << 40
UNIFIED = {
    "proc/self/cgroup": "0::/a/b\n",
    "sys/fs/cgroup/a/b/memory.max": "max\n",
    "sys/fs/cgroup/a/b/memory.current": "700\n",
    "sys/fs/cgroup/a/memory.max": "1000\n",
    "sys/fs/cgroup/a/memory.current": "800\n",
    "sys/fs/cgroup/a/memory.stat": "anon 600\ninactive_file 150\nactive_file 50\n",
}
FORMER = {
    "proc/self/cgroup": "4:cpu,memory:/pod\n0::/\n",
    "sys/fs/cgroup/memory/pod/memory.limit_in_bytes": "1000\n",
    "sys/fs/cgroup/memory/pod/memory.usage_in_bytes": "900\n",
    "sys/fs/cgroup/memory/pod/memory.stat": "total_inactive_file 20\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "5000\n",
}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, PLENTY),
        (UNIFIED, 350),
        (FORMER, 120),
        ({**UNIFIED, "sys/fs/cgroup/a/memory.current": "2000\n"}, 0),
        ({**UNIFIED, "sys/fs/cgroup/a/memory.max": "damaged\n"}, PLENTY),
    ],
)
def test_the_narrowest_limit_counts_and_files_that_can_go_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], free: int
) -> None:
    host = psutil.virtual_memory()._replace(available=PLENTY)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_memory(tmp_path) == free


def test_what_is_held_grows_and_falls_with_what_is_allocated() -> None:
    apart(allocate_and_free)


def allocate_and_free() -> None:
    before = HeldMemory.now()
    block = bytearray(64 << 20)
    assert 64 << 20 <= before.growth() < 80 << 20
    del block
    assert before.growth() < 16 << 20


def test_the_most_that_a_process_has_had_is_not_what_its_parent_has() -> None:
    apart(start_with_much_memory)


def start_with_much_memory() -> None:
    block = bytearray(b"x") * (256 << 20)
    assert peak_memory() > len(block)
    code = "from sluice.host_memory import peak_memory; print(peak_memory())"
    own = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert 4 << 20 < int(own.stdout) < len(block) // 2
    del block
    assert peak_memory() > 256 << 20
