"""lm-evaluation-harness, unmodified, scores the model through the OpenAI-compatible port.

`make test-openai` sets up the harness in an environment of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from services.rollout.process import RolloutProcess
from sluice.samples.tokenizer import TextTokenizer
from tests.patience import PATIENCE

HARNESS = Path(os.environ.get("LM_EVAL", "build/lm-eval/bin/lm-eval"))
ROWS = [
    {"question": f"{a}{b}=", "choices": [f"{a}{b}", f"{b}{a}", "0"], "answer": 0}
    for a in range(1, 7)
    for b in range(7, 9)
]
CHOICE = {
    "task": "digits_choice",
    "dataset_path": "json",
    "output_type": "multiple_choice",
    "test_split": "test",
    "doc_to_text": "question",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}
COPY = {
    "task": "digits_copy",
    "dataset_path": "json",
    "output_type": "generate_until",
    "test_split": "test",
    "doc_to_text": "question",
    "doc_to_target": "{{choices[0]}}",
    "target_delimiter": "",
    "generation_kwargs": {"until": ["="], "max_gen_toks": 6, "temperature": 0},
    "metric_list": [{"metric": "exact_match"}],
}


async def evaluate(process: RolloutProcess, task: dict[str, Any], root: Path) -> list[dict]:
    """The samples that the harness logged."""
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = {"data_files": {"test": str(root / "rows.jsonl")}}
    (root / "task.yaml").write_text(yaml.safe_dump({**task, "dataset_kwargs": data}))
    assert process.openai is not None
    arguments = {
        "model": "policy",
        "base_url": process.openai.url + "/completions",
        "num_concurrent": 2,
        "max_length": 64,
    }
    command = [
        *("--model", "local-completions", "--tasks", task["task"]),
        *("--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())),
        *("--include_path", str(root), "--batch_size", "4"),
        *("--output_path", str(root / "out"), "--log_samples"),
    ]
    offline = {"HF_HOME": str(root / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    run = await asyncio.create_subprocess_exec(
        HARNESS,
        *command,
        env={**os.environ, **offline, "PYTHONPATH": ""},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(run.communicate(), PATIENCE)
    finally:
        if run.returncode is None:
            run.kill()
            await run.wait()
    assert run.returncode == 0, output.decode()[-3000:]
    (samples,) = (root / "out").rglob("samples_*.jsonl")
    return [json.loads(line) for line in samples.read_text().splitlines()]


async def test_log_likelihoods_are_those_of_the_model(
    process: RolloutProcess,
    model: Path,
    tmp_path: Path,
) -> None:
    samples = await evaluate(process, CHOICE, tmp_path)
    assert len(samples) == len(ROWS)
    tokenizer = TextTokenizer(model)
    module = AutoModelForCausalLM.from_pretrained(model)
    for sample in samples:
        question = tokenizer.encode(sample["doc"]["question"], special=False)
        for choice, answered in zip(
            sample["doc"]["choices"], sample["filtered_resps"], strict=True
        ):
            tokens = tokenizer.encode(choice, special=False)
            with torch.no_grad():
                logits = module(torch.tensor([[*question, *tokens]])).logits[0].double()
            table = logits.log_softmax(-1)[len(question) - 1 : -1]
            expected = table[range(len(tokens)), tokens]
            assert float(answered[0]) == pytest.approx(float(expected.sum()), abs=1e-3)
            is_greedy = table.argmax(-1).tolist() == tokens
            assert str(answered[1]) == str(is_greedy)


async def test_texts_are_generated_up_to_a_stop_string(
    process: RolloutProcess,
    tmp_path: Path,
) -> None:
    samples = await evaluate(process, COPY, tmp_path)
    assert len(samples) == len(ROWS)
    for sample in samples:
        (answer,) = sample["filtered_resps"]
        assert "=" not in answer
        assert len(answer) <= 6
