"""`sluice sft` over a trainer of its own: it learns, and a killed run goes on where it was cut."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice import faults
from sluice.loop.ledger import Ledger
from sluice.loop.report import read_metrics
from sluice.samples.conversations import mask_conversation
from sluice.samples.tokenizer import TextTokenizer
from sluice.weights.store import WeightStore
from tests.patience import PATIENCE

STEPS = 12
TEMPLATE = (  # `1 turn =` of the user, then the assistant's, which ends
    "{% for message in messages %}{{ message.content }}"
    "{{ '=' if message.role == 'user' else '<end>' }}{% endfor %}"
)


def conversation(rng: random.Random) -> dict[str, Any]:
    """Two turns; the assistant says the user's digit twice."""
    messages = []
    for _ in range(2):
        digit = rng.choice("0123456789")
        messages += [
            {"role": "user", "content": digit},
            {"role": "assistant", "content": digit * 2},
        ]
    return {"messages": messages}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can chat, and what it is to learn."""
    folder = tmp_path_factory.mktemp("sft")
    build_tiny_qwen3(folder / "model", 0)
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    rng = random.Random(0)
    lines = [json.dumps(conversation(rng)) for _ in range(4 * 32 - 5)]  # a short last step
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder


def run(
    folder: Path,
    name: str,
    fault: str = "",
    more: dict[str, Any] | None = None,
    kind: str = "sft",
    **changes: Any,
) -> subprocess.CompletedProcess:
    """`sluice sft --up`, in a directory by name, ended (-9) where `fault` is armed.

    more: settings of the trainer. kind: another command on rows.
    """
    directory = folder / name
    directory.mkdir(exist_ok=True)
    trainer = {"model": str(folder / "model"), "optim": {"learning_rate": 5e-3}}
    trainer |= more or {}
    services = {"trainer": {"kind": "trainer", "config": trainer}}
    up = {"run_dir": str(directory), "services": services}
    (directory / "services.yaml").write_text(yaml.safe_dump(up))
    config = {
        "run_dir": str(directory / "run"),
        "services": str(directory / "services.json"),
        "tokenizer": str(folder / "model"),
        "rows": {"file": str(folder / "rows.jsonl")},
        "rows_per_step": 32,
        "epochs": STEPS // 4,
        "checkpoint_every": 4,
        **changes,
    }
    (directory / "run.yaml").write_text(yaml.safe_dump(config))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if fault:
        environment[faults.VARIABLE] = str(directory / "faults")
        faults.arm(directory / "faults", fault, passing=6)
    command = [sys.executable, "-m", "sluice.cli", kind, str(directory / "run.yaml")]
    return subprocess.run(
        [*command, "--up", str(directory / "services.yaml")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def published(folder: Path, name: str) -> str:
    """Digest of the weights published after the last step."""
    ledger = Ledger(folder / name / "run" / "ledger.sqlite")
    try:
        return ledger.digest_of_step(STEPS)
    finally:
        ledger.close()


@pytest.fixture(scope="module")
def whole(folder: Path) -> str:
    """A run that nothing happened to."""
    done = run(folder, "whole", held_out={"file": str(folder / "rows.jsonl"), "every_steps": 8})
    assert done.returncode == 0, done.stderr
    assert "held out, step 0: loss " in done.stderr
    assert "published weight version" in done.stderr
    return published(folder, "whole")


def test_the_loss_falls(folder: Path, whole: str) -> None:
    rows = read_metrics(folder / "whole" / "run")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["rows"] for row in rows] == [32, 32, 32, 27] * (STEPS // 4)
    assert [row["tokens"] for row in rows] == [row["rows"] * 6 for row in rows]
    assert rows[0]["loss"] > 2.0
    assert rows[-1]["loss"] < 0.6 * rows[0]["loss"]


def test_held_out_rows_have_the_loss_that_transformers_find(folder: Path, whole: str) -> None:
    """Of the weights after the step: a mean over all trained tokens of the file."""
    rows = read_metrics(folder / "whole" / "run")
    assert [row["step"] for row in rows if "held_out_loss" in row] == [8, 12]
    directory = WeightStore(folder / "whole" / "store" / "weights").latest().directory
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    tokenizer, losses = TextTokenizer(folder / "model"), []
    for line in (folder / "rows.jsonl").read_text().splitlines():
        (sequence,) = mask_conversation(tokenizer, json.loads(line)["messages"])
        tokens = torch.from_numpy(sequence.token_ids.astype(np.int64))
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        own = -logprobs.gather(1, tokens[1:, None])[sequence.prompt_length - 1 :, 0]
        losses += own[torch.from_numpy(sequence.loss_mask)].tolist()
    assert rows[-1]["held_out_loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_a_killed_run_goes_on_and_trains_on_no_row_twice(folder: Path, whole: str) -> None:
    killed = run(folder, "killed", fault="consumed")
    assert killed.returncode == -signal.SIGKILL
    assert len(read_metrics(folder / "killed" / "run")) == 5
    resumed = run(folder, "killed", resume=True)
    assert resumed.returncode == 0, resumed.stderr
    rows = read_metrics(folder / "killed" / "run")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert published(folder, "killed") == whole  # to the bit


def test_a_finished_run_starts_no_services_again(folder: Path, whole: str) -> None:
    held_out = {"file": str(folder / "rows.jsonl"), "every_steps": 8}
    again = run(folder, "whole", resume=True, held_out=held_out)
    assert again.returncode == 0, again.stderr
    assert f"the run is finished, at step {STEPS}, and nothing is done again" in again.stderr
    assert "published weight version" not in again.stderr


def test_other_rows_are_no_continuation(folder: Path, whole: str) -> None:
    again = run(folder, "whole", resume=True, rows_per_step=16)
    assert again.returncode == 2
    assert "rows_per_step: not as in the run to resume" in again.stderr
    again = run(folder, "whole", resume=True, loss={"name": "sft", "aggregation": "sample_mean"})
    assert again.returncode == 2
    assert "loss: not as in the run to resume" in again.stderr


def test_a_tokenizer_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    other = build_tiny_qwen3(tmp_path / "other", 0)
    document = json.loads((other / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary["0"], vocabulary["1"] = vocabulary["1"], vocabulary["0"]
    (other / "tokenizer.json").write_text(json.dumps(document))
    (other / "chat_template.jinja").write_text(TEMPLATE)
    refused = run(folder, "other-tokens", tokenizer=str(other))
    assert refused.returncode == 2, refused.stderr
    assert "has another vocabulary than the trainer's model" in " ".join(refused.stderr.split())
    assert not read_metrics(folder / "other-tokens" / "run")


def test_a_row_that_is_too_long_is_named_by_its_place(folder: Path) -> None:
    row = {"prompt": "1=", "answer": "11"}
    rows = [row, row, {**row, "answer": "1" * 40}, row]
    file = folder / "long.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    more = {"max_tokens_per_micro_batch": 16}
    done = run(folder, "long", more=more, rows={"file": str(file)})
    assert done.returncode == 2
    assert f"{file}:3: " in done.stderr
    assert "43 tokens, a micro-batch holds 16" in done.stderr
    assert "oversize_policy: truncate, or alone" in done.stderr


def test_adapters_learn_and_another_run_begins_at_them(folder: Path, whole: str) -> None:
    rank = {"rank": 8}
    first = run(folder, "adapters", more={"lora": rank})
    assert first.returncode == 0, first.stderr
    rows = read_metrics(folder / "adapters" / "run")
    plain = read_metrics(folder / "whole" / "run")
    assert rows[0]["loss"] == pytest.approx(plain[0]["loss"], rel=1e-5)  # they begin at nothing
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.02
    store = WeightStore(folder / "adapters" / "store" / "weights")
    adapter = store.latest()
    assert adapter.adapter is not None and adapter.digest == published(folder, "adapters")
    second = run(folder, "adapted", more={"lora": {**rank, "start": str(adapter.directory)}})
    assert second.returncode == 0, second.stderr
    begun = read_metrics(folder / "adapted" / "run")
    assert begun[0]["loss"] < rows[0]["loss"] - 0.02
    assert begun[-1]["loss"] < rows[-1]["loss"]
