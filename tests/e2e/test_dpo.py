"""`sluice dpo` over a trainer of its own: it learns preferences, and goes on where it was cut."""

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice.loop.report import read_metrics
from tests.e2e.test_sft import STEPS, TEMPLATE, published, run

SETTINGS: dict[str, Any] = {"kind": "dpo", "preference": {"beta": 0.5}, "rows_per_step": 16}


def pair(rng: random.Random, wrong: float = 0.0) -> dict[str, Any]:
    """Chosen repeats the user's digit, rejected another; of a share `wrong` it is the other way."""
    digit, other = rng.sample("0123456789", 2)
    begin = [{"role": "user", "content": digit}]
    answers = [
        [*begin, {"role": "assistant", "content": said * rng.randint(1, 3)}]
        for said in (digit, other)
    ]
    if rng.random() < wrong:
        answers.reverse()
    return dict(zip(("chosen", "rejected"), answers, strict=True))


def write(path: Path, pairs: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, pairs)))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can chat, and what it is to prefer."""
    folder, rng = tmp_path_factory.mktemp("dpo"), random.Random(0)
    build_tiny_qwen3(folder / "model", 0)
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    write(folder / "rows.jsonl", [pair(rng) for _ in range(4 * 16 - 5)])  # a short last step
    write(folder / "held_out.jsonl", [pair(rng) for _ in range(40)])
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> str:
    """A run that nothing happened to."""
    held_out = {"file": str(folder / "held_out.jsonl"), "every_steps": 6}
    done = run(folder, "whole", held_out=held_out, **SETTINGS)
    assert done.returncode == 0, done.stderr
    assert "held out, step 0: loss 0.6931, accuracy 0.0000" in done.stderr
    return published(folder, "whole")


def test_it_comes_to_prefer_what_was_chosen(folder: Path, whole: str) -> None:
    rows = read_metrics(folder / "whole" / "run")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["rows"] for row in rows] == [16, 16, 16, 11] * (STEPS // 4)
    assert rows[0]["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert rows[-1]["accuracy"] > 0.9  # of the weights before the last step
    assert rows[-1]["held_out_accuracy"] == 1.0
    assert rows[-1]["held_out_loss"] < 0.25
    assert [row["step"] for row in rows if "held_out_loss" in row] == [6, 12]
    assert not {"policy_loss", "reward_mean"} & rows[-1].keys()


def test_labels_by_lot_teach_it_nothing(folder: Path) -> None:
    rng = random.Random(1)
    file = write(folder / "lots.jsonl", [pair(rng, wrong=0.5) for _ in range(4 * 16)])
    held_out = {"file": str(folder / "held_out.jsonl")}
    done = run(folder, "lots", rows={"file": file}, held_out=held_out, **SETTINGS)
    assert done.returncode == 0, done.stderr
    last = read_metrics(folder / "lots" / "run")[-1]
    assert last["held_out_loss"] > 0.6
    assert last["held_out_accuracy"] < 0.8


@pytest.mark.long  # tests/e2e/test_sft.py kills the same loop
def test_a_killed_run_goes_on_and_trains_on_no_pair_twice(folder: Path, whole: str) -> None:
    killed = run(folder, "killed", fault="consumed", **SETTINGS)
    assert killed.returncode == -signal.SIGKILL
    assert len(read_metrics(folder / "killed" / "run")) == 5
    refused = run(folder, "killed", resume=True, **{**SETTINGS, "preference": {"beta": 0.4}})
    assert refused.returncode == 2
    assert "preference: not as in the run to resume" in refused.stderr
    resumed = run(folder, "killed", resume=True, **SETTINGS)
    assert resumed.returncode == 0, resumed.stderr
    rows = read_metrics(folder / "killed" / "run")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert published(folder, "killed") == whole  # to the bit


def test_an_answer_that_is_too_long_is_named_by_its_place(folder: Path) -> None:
    good = {"prompt": "1=", "chosen": "11", "rejected": "2"}
    file = write(folder / "long.jsonl", [good, good, {**good, "rejected": "2" * 40}, good])
    more = {"max_tokens_per_micro_batch": 16}
    done = run(folder, "long", more=more, rows={"file": file}, **SETTINGS)
    assert done.returncode == 2
    assert f"{file}:3: " in done.stderr
    assert "43 tokens, a micro-batch holds 16" in done.stderr
