"""Rows of preferences: what their prompt is, what is learned, and refusals by file and line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice.loop.config import RowsConfig
from sluice.loop.pairs import PairRows, ScoredPairRows
from sluice.loop.row_files import PromptFileError
from sluice.samples.arrow import decode_group
from sluice.samples.sample import Sample
from sluice.samples.tokenizer import TextTokenizer
from tests.unit.samples.test_conversations import make_tokenizer

CHAT = (
    "{% for m in messages %}{{ m.content }}{{ '=' if m.role == 'user' else '<end>' }}{% endfor %}"
)
GOOD = {"prompt": "1=", "chosen": "11", "rejected": "2"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    model = build_tiny_qwen3(tmp_path_factory.mktemp("model"), 0)
    (model / "chat_template.jinja").write_text(CHAT)
    return TextTokenizer(model)


def load(tokenizer: TextTokenizer, folder: Path, *rows: Any) -> PairRows:
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PairRows(RowsConfig(file=file, shuffle=False), tokenizer, rows_per_step=8, seed=0)


def pair(tokenizer: TextTokenizer, folder: Path, row: Any) -> list[Sample]:
    return decode_group(load(tokenizer, folder, row).step(0).data)


def said(tokenizer: TextTokenizer, sample: Sample) -> tuple[str, str]:
    """What stands before the first token that is learned, and what is learned."""
    mask = np.asarray(sample.columns["loss_mask"])
    before, behind = np.split(sample.token_ids, [sample.prompt_length])
    return spell(tokenizer, before), spell(tokenizer, behind[mask])


def spell(tokenizer: TextTokenizer, ids: np.ndarray) -> str:
    known = {tokenizer.encode(text, special=False)[0]: text for text in (*"0123456789=", "<end>")}
    return "".join(known[token] for token in ids.tolist())


@pytest.mark.parametrize(
    ("row", "before", "chosen", "rejected"),
    [
        (GOOD, "1=", "11<end>", "2<end>"),
        ({"prompt": "1", "chosen": [assistant("11")], "rejected": [assistant("2")]},
         "1=", "11<end>", "2<end>"),
        ({"prompt": [user("1")], "chosen": [assistant("11")], "rejected": [assistant("2")]},
         "1=", "11<end>", "2<end>"),
        ({"chosen": [user("1"), assistant("11")], "rejected": [user("1"), assistant("2")]},
         "1=", "11<end>", "2<end>"),
        ({"prompt": "1", "chosen": [user("1"), assistant("11")],
          "rejected": [user("1"), assistant("2")]}, "1=", "11<end>", "2<end>"),
        ({"prompt": [user("1")], "chosen": [user("1"), assistant("11")],
          "rejected": [user("1"), assistant("2")]}, "1=", "11<end>", "2<end>"),
        ({"prompt": [user("1")], "chosen": [user("1"), assistant("11")],
          "rejected": [assistant("2")]}, "1=", "11<end>", "2<end>"),
        ({"prompt": "1", "chosen": [assistant("11")],
          "rejected": [user("1"), assistant("2")]}, "1=", "11<end>", "2<end>"),
        ({"chosen": [user("1"), assistant("1"), user("3"), assistant("33")],
          "rejected": [user("1"), assistant("1"), user("3"), assistant("4")]},
         "1=1<end>3=", "33<end>", "4<end>"),
        ({"chosen": [user("1"), assistant("1"), user("3"), assistant("33")],
          "rejected": [user("1"), assistant("4")]}, "1=", "1<end>33<end>", "4<end>"),
    ],
)  # fmt: skip
def test_a_pair_is_two_episodes_of_a_group(
    tokenizer: TextTokenizer, tmp_path: Path, row: Any, before: str, chosen: str, rejected: str
) -> None:
    good, bad = pair(tokenizer, tmp_path, row)
    assert said(tokenizer, good) == (before, chosen)
    assert said(tokenizer, bad) == (before, rejected)
    assert good.group_id == bad.group_id
    numbers = [(each.columns["reward"], each.columns["episode"]) for each in (good, bad)]
    assert numbers == [(1.0, 0.0), (0.0, 1.0)]


def test_texts_without_a_prompt_part_before_a_word(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, CHAT)
    rows = [{"chosen": "say it: yesterday", "rejected": "say it: yes"}]
    given = [{"prompt": "say it:", "chosen": " yesterday", "rejected": " yes"}]
    implicit, explicit = (load(tokenizer, tmp_path, *some).step(0) for some in (rows, given))
    assert implicit.digest == explicit.digest


def test_parquet_says_what_jsonl_says(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    rows = [
        {"prompt": [user("1")], "chosen": [assistant("11")], "rejected": [assistant("2")]},
        {"prompt": None,
         "chosen": [user("1"), assistant("3")], "rejected": [user("1"), assistant("4")]},
    ]  # fmt: skip
    wanted = load(tokenizer, tmp_path, *rows).step(0)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    config = RowsConfig(file=tmp_path / "pairs.parquet", shuffle=False)
    assert PairRows(config, tokenizer, 8, 0).step(0).digest == wanted.digest


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], "must be an object"),
        ({}, "give `chosen` and `rejected`"),
        ({**GOOD, "rejected": None}, "give `chosen` and `rejected`, both as texts or both"),
        ({**GOOD, "rejected": [assistant("2")]}, "both as texts or both as messages"),
        ({**GOOD, "chosen": 3}, "both as texts or both as messages"),
        ({**GOOD, "chosen": ""}, "chosen is empty"),
        ({**GOOD, "rejected": " \n"}, "rejected is empty"),
        ({**GOOD, "rejected": "11"}, "are the same: none is preferred"),
        ({**GOOD, "prompt": ""}, "prompt is empty; left out"),
        ({**GOOD, "prompt": [user("1")]}, "prompt must be a text, as chosen and rejected"),
        ({**GOOD, "prompt": 3}, "prompt must be a text"),
        ({"chosen": "11", "rejected": "2"}, "begin differently; give their `prompt`"),
        ({"chosen": "1= 1", "rejected": "1="}, "begin differently|has nothing behind"),
        ({**GOOD, "images": ["a.png"]}, "images: .* of text alone"),
        ({**GOOD, "tools": "[]"}, "tools must be a list of objects"),
        ({**GOOD, "chosen": "1\ud800"}, "'chosen': holds half a surrogate pair"),
        ({"chosen": [], "rejected": [assistant("2")]}, "chosen is empty"),
        ({"chosen": [assistant("1")], "rejected": [assistant("2")]}, "begin differently"),
        ({"chosen": [user("1"), assistant("1")], "rejected": [user("1"), {"role": "assistant"}]},
         r"rejected\[1\] needs a content"),
        ({"chosen": [user("1"), assistant("1")], "rejected": [user("1"), {"content": "1"}]},
         r"rejected\[1\] needs a role"),
        ({"chosen": [user("1"), assistant("1")], "rejected": [user("1"), assistant("")]},
         "an answer of rejected is empty"),
        ({"chosen": [user("1"), assistant("1")], "rejected": [user("1"), user("2")]},
         "no message of rejected is an answer"),
        ({"chosen": [user("1"), assistant("1")], "rejected": [user("1")]},
         "no message of rejected is an answer"),
        ({"prompt": [{"role": "user", "content": ["1"]}], "chosen": [assistant("1")],
          "rejected": [assistant("2")]}, r"prompt\[0\]: content must be one text"),
    ],
)  # fmt: skip
def test_a_malformed_row_is_named(
    tokenizer: TextTokenizer, tmp_path: Path, row: Any, message: str
) -> None:
    with pytest.raises(PromptFileError, match=rf"pairs\.jsonl:2: .*({message})"):
        load(tokenizer, tmp_path, GOOD, row)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "\0" * 9, "chosen": "1\0", "rejected": "2" * 5000},
        {"prompt": "x" * 5000, "chosen": "\0", "rejected": "1"},
    ],
)
def test_odd_texts_are_taken_or_named(tokenizer: TextTokenizer, tmp_path: Path, row: Any) -> None:
    """Of a tokenizer that knows digits alone; what it makes nothing of is named by the row."""
    rows = load(tokenizer, tmp_path, GOOD, row)
    try:
        assert rows.step(0).sample_count == 4
    except PromptFileError as error:
        assert "pairs.jsonl:2: " in str(error)
        assert len(str(error)) < 400


def test_texts_that_the_tokenizer_cannot_tell_apart_are_named(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(
        tmp_path, "{% for m in messages %}{{ m.content | trim }};{% endfor %}"
    )
    row = {"prompt": "1", "chosen": [assistant("2")], "rejected": [assistant(" 2")]}
    with pytest.raises(PromptFileError, match=r"pairs\.jsonl:1: .* are the same tokens"):
        load(tokenizer, tmp_path, row).step(0)


def score(tokenizer: TextTokenizer, folder: Path, *rows: Any) -> list[Sample]:
    file = folder / "scored.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RowsConfig(file=file, shuffle=False)
    return decode_group(ScoredPairRows(config, tokenizer, rows_per_step=8, seed=0).step(0).data)


@pytest.mark.parametrize(
    ("row", "chosen", "rejected", "margin"),
    [
        (GOOD, "1=11", "1=2", 0.0),
        ({**GOOD, "margin": -0.5}, "1=11", "1=2", -0.5),
        ({**GOOD, "margin": None}, "1=11", "1=2", 0.0),
        ({"prompt": "1", "chosen": [assistant("11")], "rejected": [assistant("2")], "margin": 3},
         "1=11<end>", "1=2<end>", 3.0),
        ({"chosen": [user("1"), assistant("1"), user("3"), assistant("33")],
          "rejected": [user("1"), assistant("4")]}, "1=1<end>3=33<end>", "1=4<end>", 0.0),
    ],
)  # fmt: skip
def test_a_reward_model_reads_whole_texts_and_is_trained_behind_them(
    tokenizer: TextTokenizer, tmp_path: Path, row: Any, chosen: str, rejected: str, margin: float
) -> None:
    samples = score(tokenizer, tmp_path, row)
    for sample, text, episode in zip(samples, (chosen, rejected), (0, 1), strict=True):
        assert spell(tokenizer, sample.token_ids[: sample.prompt_length]) == text
        assert sample.response_length == 1
        numbers = {"reward": 1.0 - episode, "episode": float(episode), "margin": margin}
        assert dict(sample.columns) == {**numbers, "loss_mask": np.array([True])}


@pytest.mark.parametrize(
    "margin", [math.nan, math.inf, -math.inf, 1e31, 10**400, "1", True, [1], {}], ids=str
)
def test_a_margin_that_is_no_number_is_named(
    tokenizer: TextTokenizer, tmp_path: Path, margin: Any
) -> None:
    with pytest.raises(PromptFileError, match=r"scored\.jsonl:2: margin must be a number"):
        score(tokenizer, tmp_path, GOOD, {**GOOD, "margin": margin})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1"}, "give `chosen` and `rejected`"),
        ({**GOOD, "chosen": ""}, "chosen is empty"),
        ({**GOOD, "rejected": "11"}, "are the same: none is preferred"),
    ],
)
def test_what_is_no_pair_is_named_to_a_reward_model_too(
    tokenizer: TextTokenizer, tmp_path: Path, row: Any, message: str
) -> None:
    with pytest.raises(PromptFileError, match=rf"scored\.jsonl:2: .*{message}"):
        score(tokenizer, tmp_path, GOOD, row)


def test_texts_that_a_reward_model_cannot_tell_apart_are_named(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(
        tmp_path, "{% for m in messages %}{{ m.content | trim }};{% endfor %}"
    )
    row = {"prompt": "1", "chosen": [assistant("2")], "rejected": [assistant(" 2")]}
    with pytest.raises(PromptFileError, match=r"scored\.jsonl:1: .* are the same tokens"):
        score(tokenizer, tmp_path, row)
