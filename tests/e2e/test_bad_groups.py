"""Prompts that nothing can be made of, and graders that always fail, in a real run."""

import json
import re
import sqlite3
from typing import Any

from tests.e2e.conftest import Stack
from tests.patience import PATIENCE


def test_bad_prompts_are_dropped_with_their_reason_and_the_others_trained_on(stack: Stack) -> None:
    rows = [{"prompt": f"{i:04d}=", "answer": f"{i:04d}"} for i in range(10)]
    rows[3] = {"prompt": "1" * 80, "answer": "1"}
    image = [{"type": "image", "image": "x.png"}]
    rows[5] = {"messages": [{"role": "user", "content": image}], "answer": "1"}
    rows[6] = {"prompt": "0006=", "answer": {"text": "0006"}}
    file = stack.run_dir / "some_bad.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    training = stack.train("bad-prompts", steps=2, prompts={"file": str(file), "shuffle": False})
    training.finish()
    assert [g.position for g in training.groups("consumed")] == [0, 1, 2, 4, 7, 8, 9, 10]
    assert [g.position for g in training.groups("dropped")] == [3, 5, 6]
    assert not training.groups("issued")
    rows = [json.loads(line) for line in (training.run_dir / "metrics.jsonl").open()]
    assert sum(row.get("dropped_groups", 0) for row in rows) == 3
    journal = [json.loads(line) for line in (training.run_dir / "journal.jsonl").open()]
    notes = [line["text"] for line in journal if line["event"] == "note"]
    (note,) = (text for text in notes if "groups dropped" in text)  # further ones are counted
    assert note.startswith("step 1: ") and re.search(rf"{re.escape(str(file))}:[467]: ", note)
    ledger = sqlite3.connect(training.run_dir / "ledger.sqlite")
    query = "SELECT position, reason FROM groups WHERE state = 'dropped'"
    reasons = dict(ledger.execute(query).fetchall())
    ledger.close()
    assert "does not fit" in reasons[3] or "tokens" in reasons[3]
    assert "reads text only" in reasons[5]
    assert f"{file}:7: " in reasons[6]
    assert "row.answer: must be a text or a number, not dict" in reasons[6]


def output_of_failed(stack: Stack, deed: str, **settings: Any) -> str:
    """What a run says whose graders all do this; it fails, and has trained on nothing."""
    file = stack.run_dir / f"{deed}.jsonl"
    file.write_text(json.dumps({"prompt": "12=", "answer": "1", "deed": deed}) + "\n")
    training = stack.train(
        deed,
        prompts={"file": str(file)},
        environment={"name": "grim"},
        groups_per_step=2,
        **settings,
    )
    output, _ = training.process.communicate(timeout=PATIENCE)
    assert training.process.returncode == 2
    assert not training.groups("consumed")
    return output.replace("\n", " ")


def test_graders_that_all_crash_end_the_run_with_their_error(stack: Stack) -> None:
    output = output_of_failed(stack, "raise", group_attempts=1, max_dropped_in_a_row=3)
    assert "3 groups in a row were dropped (max_dropped_in_a_row)" in output
    assert "ZeroDivisionError: no mercy" in output


def test_graders_that_all_stall_end_the_run_after_the_time_of_its_groups(stack: Stack) -> None:
    output = output_of_failed(
        stack, "stall", group_attempts=2, group_timeout_seconds=2, max_dropped_in_a_row=2
    )
    assert "2 groups in a row were dropped" in output
    assert "failed 2 times" in output
    assert "took longer than 2 s" in output
