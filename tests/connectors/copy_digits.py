"""An environment of the `verifiers` package as its authors write them: repeat two digits.

It knows nothing of this project and imports nothing of it.
"""

from __future__ import annotations

import random

import verifiers as vf
from datasets import Dataset


def place_reward(completion, answer, **_) -> float:
    """The share of characters that stand at their place."""
    text = completion[-1]["content"] if completion else ""
    right = sum(a == b for a, b in zip(text, answer, strict=False))
    return right / max(len(text), len(answer))


def is_whole(completion, answer, **_) -> float:
    return float(bool(completion) and completion[-1]["content"] == answer)


def load_environment(digits: int = 2, size: int = 5000, seed: int = 0) -> vf.Environment:
    draw = random.Random(seed)
    numbers = ["".join(draw.choice("0123456789") for _ in range(digits)) for _ in range(size)]
    rows = [{"question": number, "answer": number} for number in numbers]
    rubric = vf.Rubric(funcs=[place_reward, is_whole], weights=[1.0, 0.0])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric)
