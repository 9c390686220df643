"""A supervised run that is resumed: with what shaped it, or refused by the key that differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice.config import ConfigError, parse_config
from sluice.loop.config import SftConfig
from sluice.loop.journal import RunJournal
from sluice.loop.ledger import Ledger
from sluice.loop.rows_run import checked_settings, load_rows
from sluice.loop.run_directory import write_run_checkpoint
from tests.unit.loop.test_run_directory import RUN_CHECKPOINT

Check = Callable[..., dict[str, str]]


@pytest.fixture
def resumed(tmp_path: Path) -> Check:
    """Checks a changed configuration against a run that was trained with none of the changes."""
    model = build_tiny_qwen3(tmp_path / "model", 0)
    rows = [{"prompt": f"{digit}=", "answer": "1"} for digit in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def check(rows: dict[str, Any] | None = None, **changes: Any) -> dict[str, str]:
        values = {
            "run_dir": str(tmp_path / "run"),
            "trainer": "a:1",
            "tokenizer": str(model),
            "rows": {"file": str(tmp_path / "rows.jsonl"), **(rows or {})},
            "resume": True,
            **changes,
        }
        config = parse_config(SftConfig, values)
        return checked_settings(config, load_rows(config))

    Ledger(tmp_path / "run" / "ledger.sqlite").close()
    write_run_checkpoint(tmp_path / "run" / "cuts", replace(RUN_CHECKPOINT, settings=check()))
    return check


def test_blobs_of_rows_are_not_kept_for_a_replay_that_there_is_not(resumed: Check) -> None:
    with pytest.raises(ConfigError, match=r"retention\.keep_blobs: has no effect"):
        resumed(retention={"keep_blobs": True})
    assert resumed(retention={"keep_blobs": False, "cuts": 3})


def test_more_epochs_and_the_same_settings_written_out_are_a_continuation(
    resumed: Check, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes((tmp_path / "rows.jsonl").read_bytes())
    assert resumed() == resumed(
        epochs=7,
        rows_per_step=32,
        rows={"file": str(copy), "shuffle": True},
        loss={"name": "sft", "aggregation": "token_mean"},
    )


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("loss", {"loss": {"name": "sft", "aggregation": "sample_mean"}}),
        ("rows_per_step", {"rows_per_step": 16}),
        ("rows", {"rows": {"shuffle": False}}),
    ],
)
def test_what_shapes_a_run_is_refused_by_key_where_it_differs(
    resumed: Check, key: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}: not as in the run to resume"):
        resumed(**changes)


def test_what_shapes_a_run_is_refused_with_both_values(resumed: Check, tmp_path: Path) -> None:
    RunJournal(tmp_path / "run").start("sft", 1, {"rows_per_step": 32, "template": {}})
    with pytest.raises(ConfigError, match=r"\(rows_per_step: 32, now 16\); begin"):
        resumed(rows_per_step=16)


def test_other_rows_are_refused_though_those_trained_on_last_are_the_same(
    resumed: Check, tmp_path: Path
) -> None:
    with (tmp_path / "rows.jsonl").open("a") as rows:
        rows.write("\n" + json.dumps({"prompt": "9=", "answer": "9"}))
    with pytest.raises(ConfigError, match=r"^rows: not as in the run to resume"):
        resumed()


def test_a_run_checkpoint_of_before_settings_were_kept_is_taken(
    resumed: Check, tmp_path: Path
) -> None:
    write_run_checkpoint(tmp_path / "run" / "cuts", RUN_CHECKPOINT)
    resumed(loss={"name": "cross_entropy"})
