"""Which teacher a task has, what a run with teachers may be, and whose weights engines keep."""

import json
from pathlib import Path

import pytest

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice.config import ConfigError, parse_config
from sluice.loop.config import PromptsConfig, RunConfig
from sluice.loop.prompts import load_prompts
from sluice.loop.workers import check_teachers, teacher_of
from sluice.samples.vocabulary import vocabulary_digest

DISTIL = {"algorithm": {"advantage": {"name": "distillation"}}}
TOP = {"algorithm": {"loss": {"name": "topk_jsd", "settings": {"top_count": 3}}}}
ONE = {"big": {"pool": "teacher"}}
TWO = {**ONE, "other": {"service": "other"}}
BASE = {"run_dir": "r", "trainer": "t:1", "router": "r:1", "sampling": {"max_new_tokens": 5}}
SOLO = {"prompts": {"index_count": 10}, "environment": {"name": "guess"}}


def parse(**values) -> RunConfig:
    return parse_config(RunConfig, {**BASE, **SOLO, **values})


def test_the_only_teacher_is_everybody_s():
    config = parse(**DISTIL, teachers=ONE)
    assert teacher_of(config, config.shares[""], 3) == "big"
    assert teacher_of(parse(), parse().shares[""], 3) == ""


def test_a_row_names_its_teacher_before_its_environment_and_that_before_the_run():
    share = {"prompts": SOLO["prompts"], "environment": SOLO["environment"]}
    config = parse_config(
        RunConfig,
        {
            **BASE,
            **DISTIL,
            "teachers": {**TWO, "third": {"address": "h:1"}},
            "teacher": "big",
            "environments": {"a": share, "b": {**share, "teacher": "other"}},
        },
    )
    a, b = config.shares["a"], config.shares["b"]
    assert teacher_of(config, a, 0) == "big" and teacher_of(config, b, 0) == "other"
    assert teacher_of(config, b, {"prompt": "x", "teacher": "third"}) == "third"
    with pytest.raises(ConfigError, match="names the teacher 'fourth'"):
        teacher_of(config, a, {"prompt": "x", "teacher": "fourth"})


def test_a_task_without_a_teacher_among_several_is_refused():
    config = parse(**DISTIL, teachers=TWO)
    with pytest.raises(ConfigError, match="names no teacher, and the run has several: big, other"):
        teacher_of(config, config.shares[""], 0)


def test_a_row_far_down_that_names_no_teacher_is_found_before_anything_runs(tmp_path: Path):
    rows = [{"prompt": "1=", "answer": "1"}] * 500
    path = tmp_path / "rows.jsonl"
    config = parse(**DISTIL, teachers=ONE)
    for last in ({}, {"teacher": None}, {"teacher": "bgi"}):
        written = [*rows, {**rows[0], **last}]
        path.write_text("".join(json.dumps(row) + "\n" for row in written))
        source = load_prompts(PromptsConfig(file=path), 0)
        if not last.get("teacher"):
            check_teachers(config, config.shares[""], source)
            continue
        with pytest.raises(ConfigError, match="names the teacher 'bgi'"):
            check_teachers(config, config.shares[""], source)
    generated = load_prompts(PromptsConfig(index_count=10**12, shuffle=False), 0)
    check_teachers(config, config.shares[""], generated)


@pytest.mark.parametrize(
    "values, said",
    [
        (DISTIL, r"teachers: algorithm\.advantage\.name learns from one"),
        (
            {"algorithm": {"advantage": {"name": "grpo", "teacher_coefficient": 0.1}}},
            r"teachers: algorithm\.advantage\.teacher_coefficient learns from one",
        ),
        ({"teachers": ONE}, "no part of the algorithm learns from one"),
        (TOP, r"teachers: algorithm\.loss\.name learns from one"),
        (
            {"algorithm": {**TOP["algorithm"], **DISTIL["algorithm"]}, "teachers": ONE},
            "advantage: has no effect with loss topk_jsd",
        ),
        ({**DISTIL, "teachers": {"big": {}}}, "give one of pool, service and address"),
        ({**DISTIL, "teachers": {"big": {"pool": "a", "service": "b"}}}, "give one of"),
        ({**DISTIL, "teachers": {"../b": {"pool": "a"}}}, "a name has letters"),
        ({**DISTIL, "teachers": {"b" * 5000: {"pool": "a"}}}, "a name has letters"),
        ({**DISTIL, "teachers": TWO, "teacher": "third"}, "'third' is none of teachers"),
        ({"teacher": "big"}, "'big' is none of teachers: none"),
        (
            {**DISTIL, "teachers": ONE, "sampling": {"max_new_tokens": 5, "temperature": 0.7}},
            r"teachers\.big\.pool: engines score at temperature 1",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(values, said):
    with pytest.raises(ConfigError, match=said):
        parse(**values)


@pytest.mark.parametrize("teacher", [{"pool": "a"}, {"service": "b"}, {"address": "h:1"}])
def test_either_kind_of_teacher_names_likeliest_tokens(teacher):
    config = parse(**TOP, teachers={"big": teacher})
    assert config.algorithm.teacher_top_count == 3


def test_a_vocabulary_is_its_tokens_and_no_template(tmp_path: Path):
    first, second = (build_tiny_qwen3(tmp_path / name, 0) for name in "ab")
    assert vocabulary_digest(first) == vocabulary_digest(second) != ""
    (second / "chat_template.jinja").write_text("{{ messages }}")
    tokenizer = json.loads((second / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (second / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert vocabulary_digest(first) == vocabulary_digest(second)
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["0"], vocabulary["1"] = vocabulary["1"], vocabulary["0"]
    (second / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert vocabulary_digest(first) != vocabulary_digest(second)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": {"vocab": 3}}', "\0" * 99])
def test_a_tokenizer_that_cannot_be_read_has_no_digest(tmp_path: Path, text: str):
    (tmp_path / "tokenizer.json").write_text(text)
    assert vocabulary_digest(tmp_path) == ""
    assert vocabulary_digest(tmp_path / "none") == ""


def test_pieces_of_a_unigram_model_count_by_place(tmp_path: Path):
    for name, pieces in (("a", [["x", -1.0], ["y", -2.0]]), ("b", [["x", -9.0], ["y", 0.0]])):
        (tmp_path / name).mkdir()
        text = json.dumps({"model": {"type": "Unigram", "vocab": pieces}})
        (tmp_path / name / "tokenizer.json").write_text(text)
    assert vocabulary_digest(tmp_path / "a") == vocabulary_digest(tmp_path / "b") != ""
