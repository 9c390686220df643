"""What a loop holds in memory is the same after ten times as many steps."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sluice.loop.config import RunConfig
from sluice.loop.ledger import Ledger, LedgerGroup
from sluice.loop.report import RunReport
from sluice.loop.run import TrainingRun
from sluice.loop.training import StepReport

FEW = 200  # steps, by which what is remembered of the latest is there
BYTES = 2000  # that may come and go: a number kept of each step is tens of thousands


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    with ledger.transaction():  # one for all: a disk would be waited for thousands of times
        yield ledger
    ledger.close()


def held_bytes() -> int:
    """What code of the loop has allocated and not let go."""
    own = tracemalloc.Filter(True, "*/sluice/loop/*")
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([own]).traces)


def growth(step: Callable[[int], None]) -> int:
    """Bytes held more after 10 times FEW steps than after FEW."""
    tracemalloc.start()
    try:
        for number in range(FEW):
            step(number)
        few = held_bytes()
        for number in range(FEW, 10 * FEW):
            step(number)
        return held_bytes() - few
    finally:
        tracemalloc.stop()


def group_of(step: int) -> LedgerGroup:
    return LedgerGroup(
        position=step,
        group_id=f"g{step:07}",
        state="consumed",
        issue_step=step,
        sample_count=2,
        reward_mean=step / 7,
        response_tokens=10,
        oldest_step=step,
        newest_step=step,
    )


def test_the_ledger_holds_no_more_of_versions_that_groups_were_of(ledger: Ledger) -> None:
    def step(number: int) -> None:
        version = 1000 + number
        ledger.record_version(version, f"{version:032x}", number)
        assert ledger.step_of_version(version) == number
        assert ledger.step_of_version(max(1000, version - 100)) == max(0, number - 100)

    assert growth(step) < BYTES


async def test_a_run_holds_no_more_of_steps_that_it_reported(tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {
            "run_dir": str(tmp_path / "run"),
            "store": str(tmp_path),
            "router": "127.0.0.1:9",
            "trainer": "127.0.0.1:9",
            "prompts": {"index_count": 4},
            "environment": {"name": "prompts"},
            "sampling": {"max_new_tokens": 8},
            "groups_per_step": 1,
            "samples_per_group": 2,
            "steps": 10 * FEW,
            "stop_at_reward": 100.0,
            "stop_window": 10,
        }
    )
    with RunReport(config.run_dir, config.steps) as report:
        run = TrainingRun(config, report)

        def step(number: int) -> None:
            run.step = number + 1
            run._report_step([group_of(number)], StepReport(optimizer_step=run.step), {})
            mean = (number - 4.5) / 7  # of the last ten
            assert run._is_done() is ((number >= 9 and mean > 100) or run.step == config.steps)

        assert growth(step) < BYTES
        await run.close()
