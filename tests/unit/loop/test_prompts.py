import datetime
import json
import random

import pyarrow
import pyarrow.parquet
import pytest
from google.protobuf import json_format

from sluice.api.rollout.v1.engine_service_pb2 import VersionBounds
from sluice.api.rollout.v1.rollout_service_pb2 import RolloutRequest
from sluice.config import ConfigError, parse_config
from sluice.loop.config import EnvironmentConfig, PromptsConfig, RunConfig
from sluice.loop.row_files import PromptFileError
from sluice.loop.workers import build_request, load_prompts

RUN = {
    "run_dir": "run",
    "services": "services.json",
    "prompts": {"file": "prompts.jsonl"},
    "environment": {"name": "prompts"},
    "sampling": {"max_new_tokens": 4},
    "algorithm": {},
}
ROWS = [{"prompt": f"p{i}", "answer": str(i)} for i in range(10)]


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    return path


def tasks(path, count, seed=0, **settings):
    source = load_prompts(PromptsConfig(file=path, **settings), seed)
    return [source.task(i) for i in range(count)]


def test_every_epoch_holds_every_row_once_in_another_order(jsonl):
    epochs = [tasks(jsonl, 30)[a : a + 10] for a in (0, 10, 20)]
    for epoch in epochs:
        assert sorted(epoch, key=lambda row: row["prompt"]) == ROWS
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_position_is_the_same_task_in_every_run(jsonl):
    assert tasks(jsonl, 25, seed=3) == tasks(jsonl, 25, seed=3)
    assert tasks(jsonl, 25, seed=3) != tasks(jsonl, 25, seed=4)
    assert tasks(jsonl, 10, shuffle=False) == ROWS


def test_parquet_gives_the_same_rows(tmp_path, jsonl):
    path = tmp_path / "prompts.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert tasks(path, 10) == tasks(jsonl, 10)


def test_indices_need_no_file():
    source = load_prompts(PromptsConfig(index_count=5), 0)
    assert sorted(source.task(i) for i in range(5)) == [0, 1, 2, 3, 4]


def test_a_source_is_shuffled_once_an_epoch_however_many_there_are(monkeypatch):
    """A mixture asks all of them in turn."""
    shuffled = []
    shuffle = random.Random.shuffle
    monkeypatch.setattr(
        random.Random, "shuffle", lambda self, order: shuffle(self, shuffled.append(1) or order)
    )
    sources = [load_prompts(PromptsConfig(index_count=count), 0) for count in range(20, 32)]
    for position in range(15, 25):
        for source in sources:
            source.task(position)
            source.task(position + 5)  # at the end of an epoch some are of the next
    assert len(shuffled) <= 2 * len(sources)


def test_an_order_that_is_none_takes_no_memory():
    source = load_prompts(PromptsConfig(index_count=10**15, shuffle=False), 0)
    assert [source.task(position) for position in (0, 7, 10**15 - 1, 10**15)] == [
        0,
        7,
        10**15 - 1,
        0,
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": ', r"prompts\.jsonl:2: not JSON"),
        ('{"prompt": "a"}\n[1]', r"prompts\.jsonl:2: a row must be an object"),
        (
            '{"question": "q", "answer": "a"}',
            r"prompts\.jsonl:1: a row needs `prompt` or `messages`, and has `question`, `answer`; "
            "settings .* prompt_key",
        ),
        ('{"prompt": "", "answer": "a"}', r"prompts\.jsonl:1: `prompt` is empty"),
        ("\n", "has no rows"),
        ('{"prompt": "a", "x": ' + "[" * 100_000, r"prompts\.jsonl:1: not JSON"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, text, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(PromptFileError, match=message):
        load_prompts(PromptsConfig(file=path), 0)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.jsonl does not exist"):
        load_prompts(PromptsConfig(file=tmp_path / "absent.jsonl"), 0)


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    path = tmp_path / "prompts.parquet"
    path.write_text("no")
    with pytest.raises(PromptFileError, match="not Parquet"):
        load_prompts(PromptsConfig(file=path), 0)


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip"])
def test_no_flipped_bit_of_a_parquet_file_changes_a_prompt(tmp_path, compression):
    path = tmp_path / "prompts.parquet"
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, path, compression=compression, write_page_checksum=True)
    data, refused = path.read_bytes(), 0
    (end,) = [
        column.total_compressed_size + (column.dictionary_page_offset or column.data_page_offset)
        for column in [pyarrow.parquet.read_metadata(path).row_group(0).column(1)]
    ]
    for position in range(4, end):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x80]) + data[position + 1 :])
        try:
            assert tasks(path, 10, shuffle=False) == ROWS, position
        except PromptFileError:
            refused += 1
    assert refused > (end - 4) / 2


@pytest.mark.parametrize("key", ["prompt_key", "messages_key"])
def test_rows_have_the_keys_that_the_environment_reads(tmp_path, key):
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"question": "1 + 1", "answer": "2"}) + "\n")
    config = PromptsConfig(file=path)
    environment = EnvironmentConfig(name="prompts", settings={key: "question"})
    assert load_prompts(config, 0, environment).task(0)["question"] == "1 + 1"
    mistyped = EnvironmentConfig(name="prompts", settings={key: "qestion"})
    with pytest.raises(PromptFileError, match=r"questions\.jsonl:1: a row needs .*`qestion`"):
        load_prompts(config, 0, mistyped)


def nested(depth):
    return json.loads("[" * depth + "]" * depth)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (2**53 + 1, "'answer': 9007199254740993 would arrive as 9007199254740992; give it as text"),
        ({"ids": [1, -(2**53) - 1]}, "-9007199254740993 would arrive as -9007199254740992"),
        (10**400, "a whole number that is too large"),
        ("\ud800", "half a surrogate pair"),
        ({"\udfff": 1}, "half a surrogate pair"),
        (nested(25), "nested more than 24 deep"),
    ],
)
def test_a_value_that_no_call_carries_is_named_before_the_run(tmp_path, value, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in [ROWS[0], {**ROWS[1], "answer": value}]))
    with pytest.raises(PromptFileError, match=message) as refusal:
        load_prompts(PromptsConfig(file=path), 0)
    assert "prompts.jsonl:2: " in str(refusal.value)


def test_a_type_of_parquet_that_no_call_carries_is_named(tmp_path):
    path = tmp_path / "prompts.parquet"
    rows = [{"prompt": "a", "when": datetime.datetime(2026, 1, 1)}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(PromptFileError, match=r"row 1: 'when': a datetime is no value of JSON"):
        load_prompts(PromptsConfig(file=path), 0)


@pytest.mark.parametrize(
    "value",
    [2**53, -(10**22), 1e300, 0.5, True, None, "\U0001f600", nested(24), {"a": [{"b": "\0"}]}],
)
def test_a_value_that_is_taken_reaches_the_worker_as_it_stands(tmp_path, value):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "a", "answer": value}))
    task = load_prompts(PromptsConfig(file=path), 0).task(0)
    assert isinstance(task, dict)
    config = parse_config(RunConfig, RUN)
    request = build_request(config, config.shares[""], [("g", task)], VersionBounds(), 0)
    received = RolloutRequest.FromString(request.SerializeToString())
    assert json_format.MessageToDict(received.groups[0].row)["answer"] == value
