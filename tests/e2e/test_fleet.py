"""The simulated fleet at its smallest: the real router, controller and loop, and stand-ins."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.patience import PATIENCE

LAST = (
    r"fleet: accelerators=16 step_overhead_s=-?[\d.]+ router_cpu_s=([\d.]+) "
    r"controller_cpu_s=([\d.]+) loop_cpu_s=([\d.]+) peak_mib=(\d+) scaling_exponent=nan"
)


def test_sixteen_accelerators_train_and_lose_a_rank() -> None:
    """It ends with 1 where a step takes too much, and by a trace where the loss is not noted."""
    command = ["-m", "benchmarks.fleet", "--accelerators", "16", "--steps", "2"]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    *details, last = done.stdout.splitlines()
    found = re.fullmatch(LAST, last)
    assert found is not None, last
    assert all(0 < float(cpu) < 2 for cpu in found.groups()[:3])
    assert re.search(r"tokens=\d{6}; a rank's death: wall_s=[\d.]+ router=", "\n".join(details))
