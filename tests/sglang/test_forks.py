"""Without an accelerator SGLang's processes are forks of its first, which imports once for all."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.patience import PATIENCE
from tests.sglang_servers import PYTHON

ASKED = """
import multiprocessing
multiprocessing.set_start_method("spawn", force=True)  # as SGLang does
print(multiprocessing.get_start_method())
"""


@pytest.mark.fast
@pytest.mark.parametrize(("on_cpu", "method"), [("1", "fork"), ("0", "spawn")])
def test_processes_begin_with_what_the_first_has_imported(on_cpu: str, method: str) -> None:
    done = subprocess.run(
        [str(PYTHON), "-c", ASKED],
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": on_cpu},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert done.stdout.split() == [method]
