"""`sluice reward-model` over a trainer of its own, and what it publishes as the reward of a run."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice.loop.report import read_metrics
from sluice.samples.arrow import decode_group
from sluice.samples.blob_store import BlobStore
from sluice.weights.store import WeightStore
from tests.e2e.conftest import start_stack, stop_stack
from tests.e2e.test_dpo import write
from tests.e2e.test_sft import STEPS, TEMPLATE, published, run

HEAD = {"head": "reward"}
SETTINGS: dict[str, Any] = {
    "kind": "reward-model",
    "preference": {"centering": 0.01},
    "rows_per_step": 16,
    "more": HEAD,
}


def pair(rng: random.Random, wrong: float = 0.0) -> dict[str, Any]:
    """Chosen is of small digits, rejected of large; of a share `wrong` it is the other way."""
    begin = [{"role": "user", "content": rng.choice("0123456789")}]
    answers = []
    for digits in ("01234", "56789"):
        said = "".join(rng.choices(digits, k=rng.randint(1, 3)))
        answers.append([*begin, {"role": "assistant", "content": said}])
    if rng.random() < wrong:
        answers.reverse()
    return dict(zip(("chosen", "rejected"), answers, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model that can chat, and what is to be scored higher."""
    folder, rng = tmp_path_factory.mktemp("reward"), random.Random(0)
    build_tiny_qwen3(folder / "model", 0)
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    write(folder / "rows.jsonl", [pair(rng) for _ in range(4 * 16 - 5)])  # a short last step
    write(folder / "held_out.jsonl", [pair(rng) for _ in range(40)])
    return folder


def weights_of(folder: Path, name: str) -> Path:
    """Beside those of policies, which engines take."""
    weights = folder / name / "store" / "critics" / "trainer" / "weights"
    directory = WeightStore(weights).latest().directory
    assert directory == weights / "versions" / "00000001"
    return directory


@pytest.fixture(scope="module")
def whole(folder: Path) -> str:
    """A run that nothing happened to."""
    held_out = {"file": str(folder / "held_out.jsonl"), "every_steps": 6}
    done = run(folder, "whole", held_out=held_out, **SETTINGS)
    assert done.returncode == 0, done.stderr
    assert "held out, step 0: loss 0.6931, accuracy 0.0000" in done.stderr  # a new head
    return published(folder, "whole")


def test_it_comes_to_prefer_what_was_chosen(folder: Path, whole: str) -> None:
    rows = read_metrics(folder / "whole" / "run")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["rows"] for row in rows] == [16, 16, 16, 11] * (STEPS // 4)
    assert rows[0]["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert rows[-1]["held_out_accuracy"] == 1.0
    assert rows[-1]["held_out_loss"] < 0.25
    assert not {"policy_loss", "reward_mean"} & rows[-1].keys()


def test_held_out_pairs_have_the_loss_that_transformers_find(folder: Path, whole: str) -> None:
    """Of the published directory, as it is."""
    directory = weights_of(folder, "whole")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    losses, right = [], []
    for line in (folder / "held_out.jsonl").read_text().splitlines():
        row, rewards = json.loads(line), []
        for key in ("chosen", "rejected"):
            text = tokenizer.apply_chat_template(row[key], tokenize=False)
            with torch.no_grad():
                rewards.append(model(**tokenizer(text, return_tensors="pt")).logits[0, 0].double())
        good, bad = rewards
        loss = -torch.nn.functional.logsigmoid(good - bad) + 0.01 * (good + bad) ** 2
        losses.append(loss.item())
        right.append(float(good > bad))
    last = read_metrics(folder / "whole" / "run")[-1]
    assert last["held_out_loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert last["held_out_accuracy"] == np.mean(right)


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
    refused = run(folder, "killed", resume=True, **{**SETTINGS, "preference": {}})
    assert refused.returncode == 2
    assert "preference: not as in the run to resume" in refused.stderr
    resumed = run(folder, "killed", resume=True, **SETTINGS)
    assert resumed.returncode == 0, resumed.stderr
    assert [row["step"] for row in read_metrics(folder / "killed" / "run")] == [*range(1, 13)]
    assert published(folder, "killed") == whole  # to the bit


def test_a_trainer_of_another_head_and_a_text_that_is_too_long_are_refused(folder: Path) -> None:
    for name, head, kind in (("logits", "policy", "reward-model"), ("rewards", "reward", "dpo")):
        refused = run(folder, name, kind=kind, more={"head": head})
        assert refused.returncode == 2, refused.stderr
        said = " ".join(refused.stderr.split())
        assert f"has head: {head}, and `sluice {kind}` needs head: " in said
    good = {"prompt": "1=", "chosen": "11", "rejected": "2"}
    file = write(folder / "long.jsonl", [good, good, {**good, "rejected": "2" * 40}])
    more = {**HEAD, "max_tokens_per_micro_batch": 16}
    done = run(folder, "long", rows={"file": file}, **{**SETTINGS, "more": more})
    assert done.returncode == 2
    assert f"{file}:3: " in done.stderr
    assert "43 tokens, a micro-batch holds 16" in done.stderr


def test_it_is_the_reward_of_a_run(folder: Path, whole: str, tmp_path: Path) -> None:
    """Served from where it was published: every sample's reward is what transformers give it."""
    directory = weights_of(folder, "whole")
    service = {"kind": "reward_model", "config": {"model": str(directory), "name": "own"}}
    stack = start_stack(tmp_path / "stack", scores=service)
    try:
        url = f"{stack.run_dir}/services.json#scores"
        settings = {"reward": "reward_model", "reward_settings": {"url": url, "model": "own"}}
        training = stack.train(
            "scored", environment={"name": "prompts", "settings": settings}, steps=2
        )
        training.finish()
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(directory)
        blobs, rewards = BlobStore(stack.run_dir / "store", sync=False), set()
        for group in training.groups("consumed"):
            assert group.blob is not None
            for sample in decode_group(blobs.get(group.blob)):
                text = tokenizer.decode(sample.token_ids, skip_special_tokens=True)
                inputs = tokenizer(text.replace(" ", ""), return_tensors="pt")
                with torch.no_grad():
                    alone = model(**inputs).logits[0, 0].item()
                assert sample.columns["reward"] == pytest.approx(alone, abs=1e-5)
                rewards.add(round(alone, 4))
        assert len(rewards) > 4, "or one number would do"
    finally:
        stop_stack(stack)
