"""Tensor-parallel ranks publish deltas, send what each owns to an engine, and write it behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.behind_run import check_run
from tests.megatron.test_service import SETTINGS
from tests.service.weights.harness import check_delta


@pytest.mark.fast
def test_a_run_survives_a_rank_lost_while_it_writes_behind(tmp_path: Path) -> None:
    check_run(tmp_path, {"backend": "megatron", "megatron": SETTINGS["megatron"]})


async def test_an_engine_receives_what_the_ranks_published_as_deltas(tmp_path: Path) -> None:
    await check_delta(tmp_path, SETTINGS)
