"""An agent of three turns with a tool: what it is to answer, it learns of the tool alone.

The first answer is to call the tool, by a digit from 1 to 9; anything else is no call and gets
zeros. The tool then gives one digit a turn, which the next answer is to repeat. The prompt is the
same in every task, so that an agent which does not read the tool's answers stays at chance.
"""

from __future__ import annotations

import random

import verifiers as vf
from datasets import Dataset

TURNS = 3


def look_up(number: int, call: str, answer: str) -> str:
    """The tool: the digit for this turn, to who has called it."""
    return answer[number] if call[:1] in set("123456789") else "0"


class ThreeTurns(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **_):
        said = [message["content"] or "" for message in messages if message["role"] == "assistant"]
        return [{"role": "user", "content": look_up(len(said) - 1, said[0], state["answer"])}]


def reads_tool(completion, answer, **_) -> float:
    """The share of the tool's answers that the next turn repeats, and no more than them."""
    said = [message["content"] or "" for message in completion if message["role"] == "assistant"]
    pairs = zip(said[1:], answer, strict=False)
    right = [float(text[:1] == digit) / max(1, len(text)) for text, digit in pairs]
    return sum(right) / (TURNS - 1)


def load_environment(size: int = 5000, seed: int = 0) -> vf.Environment:
    draw = random.Random(seed)
    rows = [
        {"question": "0", "answer": "".join(draw.choice("123456789") for _ in range(TURNS - 1))}
        for _ in range(size)
    ]
    rubric = vf.Rubric(funcs=[reads_tool])
    return ThreeTurns(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=TURNS)
