"""Context and vocabulary parallel runs over four gloo processes, started once."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE

RANKS = Path(__file__).parent / "ranks"
SOURCES = "".join((RANKS / name).read_text() for name in ("parity.py", "sequence.py"))
NAMES = re.findall(r"^def check_(\w+)\(", SOURCES, flags=re.MULTILINE)
RANK = (sys.executable, "-m", "tests.unit.algo.ranks.run")
WORLD = 4


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    results = [folder / f"{rank}.json" for rank in range(WORLD)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*RANK, str(rank), str(folder / "rendezvous"), str(result)],
            env=environment,
        )
        for rank, result in enumerate(results)
    ]
    try:
        for process in ranks:
            process.wait(timeout=2 * PATIENCE)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [json.loads(result.read_text()) for result in results]


@pytest.mark.parametrize("name", NAMES)
def test_on_four_ranks(answers, name):
    for rank, answer in enumerate(answers):
        assert answer.get(name) == "", f"rank {rank}: {answer.get(name, 'did not get here')}"
