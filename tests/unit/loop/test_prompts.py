import datetime
import gzip
import json
import random
import tempfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from google.protobuf.struct_pb2 import Struct
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.episodes.rollouts import groups_from_proto, values_from_proto
from sluice.api.rollout.v1.engine_service_pb2 import VersionBounds
from sluice.api.rollout.v1.rollout_service_pb2 import RolloutRequest
from sluice.config import ConfigError, parse_config
from sluice.loop.config import EnvironmentConfig, PromptsConfig, RunConfig
from sluice.loop.prompts import load_prompts
from sluice.loop.row_files import PromptFileError
from sluice.loop.workers import build_request
from sluice.runtime.errors import InvalidFieldError

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


def tasks(path, count, seed=0, **chosen):
    source = load_prompts(PromptsConfig(file=path, **chosen), seed)
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


KINDS = st.sampled_from(["math", "code", "1", 1, 1.0, 2, 2.5, True, False, None])
SOURCES = st.lists(
    st.fixed_dictionaries(
        {"prompt": st.just("p")},
        optional={
            "source": KINDS,
            "extra": st.fixed_dictionaries({}, optional={"split": KINDS}) | KINDS,
            "extra.split": KINDS,
        },
    ),
    min_size=1,
    max_size=12,
)
WANTED = st.sampled_from(["math", "code", "1", 1, 2.5, True, ["math", 2], [False, "code"], [1]])


@settings(max_examples=200, deadline=None)
@given(SOURCES, st.dictionaries(st.sampled_from(["source", "extra.split"]), WANTED, min_size=1))
def test_an_environment_takes_the_rows_of_a_file_that_are_its_own(rows, where):
    """By hand: the JSON text of a value says what it is, but for 1 and 1.0."""

    def text(value):
        same = isinstance(value, float) and value.is_integer()
        return json.dumps(int(value) if same else value)

    def at(row, key):
        if key == "source" or key in row:
            return row.get(key)
        return row["extra"].get("split") if isinstance(row.get("extra"), dict) else None

    kept = [
        number
        for number, row in enumerate(rows, 1)
        if all(
            text(at(row, key))
            in [text(one) for one in (each if isinstance(each, list) else [each])]
            for key, each in where.items()
        )
    ]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "rows.jsonl")
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))  # every other is empty
        config = PromptsConfig(file=path, where=where, shuffle=False)
        if not kept:
            with pytest.raises(ConfigError, match=r"prompts\.where: no row has "):
                load_prompts(config, 0)
            return
        source = load_prompts(config, 0)
        assert source.tasks == [rows[number - 1] for number in kept]
        places = [source.place(position) for position in range(2 * len(kept))]
    assert places == [f"{path}:{2 * number - 1}" for number in kept * 2]


def test_rows_of_others_may_be_what_this_environment_could_not_ask(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"index": 3, "kind": "games"}\n{"prompt": "a", "kind": "sums"}\n')
    assert tasks(path, 1, where={"kind": "sums"}) == [{"prompt": "a", "kind": "sums"}]
    with pytest.raises(PromptFileError, match=":1: a row needs `prompt`"):
        tasks(path, 1)


def test_keys_of_rows_are_the_business_of_an_environment_of_users(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"Frage": "a", "n": 1}\n')
    own = EnvironmentConfig(name="my_games:Guess", settings={})
    source = load_prompts(PromptsConfig(file=path), 0, own)
    assert source.tasks == [{"Frage": "a", "n": 1}]
    with pytest.raises(PromptFileError, match=":1: a row needs `prompt` or `messages`"):
        load_prompts(PromptsConfig(file=path), 0, EnvironmentConfig(name="tools", settings={}))


def test_a_prompt_may_stand_in_an_object_of_its_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"extra": {"question": "a"}}\n{"extra": {"question": ""}}\n')
    environment = EnvironmentConfig(name="prompts", settings={"prompt_key": "extra.question"})
    with pytest.raises(PromptFileError, match=r":2: `extra\.question` is empty"):
        load_prompts(PromptsConfig(file=path), 0, environment)
    path.write_text('{"extra": {"question": "a"}}\n')
    source = load_prompts(PromptsConfig(file=path), 0, environment)
    assert source.tasks == [{"extra": {"question": "a"}}]


def test_other_rows_of_a_file_are_other_tasks(jsonl):
    """A run that is resumed must not go on with them; without `where` the digest is as before."""

    def digest(**chosen):
        return load_prompts(PromptsConfig(file=jsonl, **chosen), 0).digest

    even, odd = ([str(n) for n in range(first, 10, 2)] for first in (0, 1))
    assert len({digest(), digest(where={"answer": even}), digest(where={"answer": odd})}) == 3
    assert digest(where={}) == digest()


def test_rows_that_are_not_there_are_told_with_those_that_are(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "p", "level": n, "source": "x" * 5000} for n in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=r"no row has '3' at 'level'; there are 0, 1, .*, 7$"):
        tasks(path, 1, where={"level": "3"})
    with pytest.raises(ConfigError) as refused:
        tasks(path, 1, where={"source": "y" * 5000})
    assert len(str(refused.value)) < 300
    with pytest.raises(ConfigError) as refused:
        tasks(path, 1, where={"k" * 5000: 1})
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("wanted", [[], {"b": 1}, None, [None], [[1]], [{}]])
def test_what_no_row_can_be_asked_for_is_refused(wanted):
    with pytest.raises(ValueError, match=r"where\.level: must be a text, a number, true or false"):
        PromptsConfig(file=Path("rows.jsonl"), where={"level": wanted})


def test_generated_tasks_have_no_rows_to_choose():
    with pytest.raises(ValueError, match="where: has no effect without a file"):
        PromptsConfig(index_count=5, where={"level": 1})


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


def zstd(data: bytes) -> bytes:
    return pyarrow.compress(data, codec="zstd", asbytes=True)


@pytest.mark.parametrize(
    ("pack", "message"),
    [
        (gzip.compress, r"prompts\.jsonl is compressed by gzip: unpack it"),
        (zstd, r"prompts\.jsonl is compressed by zstd: unpack it"),
        (lambda data: data.decode().encode("utf-16"), r"prompts\.jsonl is UTF-16: write it as"),
        (lambda data: b"PAR1" + data, r"prompts\.jsonl is Parquet: have its name end in \.parquet"),
    ],
    ids=["gzip", "zstd", "utf-16", "parquet"],
)
def test_a_file_of_another_kind_is_told_by_its_kind(tmp_path, pack, message):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(pack(b'{"prompt": "a"}\n'))
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


@pytest.mark.parametrize("value", [5, 0.5, True, {"role": "user", "content": "a"}])
def test_a_prompt_that_is_no_text_is_named_before_the_run(tmp_path, value):
    """A number was shown to the model as a text that nobody wrote."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "a"}, {"messages": [], "asked": {"prompt": value}, "prompt": value}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, key in (("prompts", "prompt"), ("tools", "prompt")):
        with pytest.raises(PromptFileError, match=rf"prompts\.jsonl:2: `{key}` is .*, and must be"):
            load_prompts(PromptsConfig(file=path), 0, EnvironmentConfig(name=name))
    own = load_prompts(PromptsConfig(file=path), 0, EnvironmentConfig(name="own"))
    assert own.task(1)["prompt"] == value or own.task(0)["prompt"] == value, "it knows what it is"


def nested(depth):
    return json.loads("[" * depth + "]" * depth)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (2**53 + 1, "'answer': 9007199254740993 would arrive as 9007199254740992; give it as text"),
        ({"ids": [1, -(2**53) - 1]}, "-9007199254740993 would arrive as -9007199254740992"),
        (10**400, "a whole number that is too large"),
        (2**60, r"1152921504606846976 would arrive as 1\.152921504606847e\+18; give it as text"),
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


def test_a_text_of_bytes_in_a_parquet_file_is_named(tmp_path):
    """It would be asked, and learned, as the data URL that bytes become."""
    path = tmp_path / "prompts.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [None, b"1="]}), path)
    with pytest.raises(PromptFileError, match="column 'prompt' is of bytes; write it as strings"):
        load_prompts(PromptsConfig(file=path), seed=0)


def test_a_key_that_a_row_gives_twice_is_named(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "1="}\n{"prompt": "2=", "settings": {"a": 1, "a": 2}}\n')
    with pytest.raises(PromptFileError, match=r"prompts\.jsonl:2: 'a' stands more than once"):
        load_prompts(PromptsConfig(file=path), seed=0)


def test_a_type_of_parquet_that_no_call_carries_is_named(tmp_path):
    path = tmp_path / "prompts.parquet"
    rows = [{"prompt": "a", "when": datetime.datetime(2026, 1, 1)}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(PromptFileError, match=r"row 1: 'when': a datetime is no value of JSON"):
        load_prompts(PromptsConfig(file=path), 0)


@pytest.mark.parametrize(
    "value",
    [
        2**53,
        -(10**22),
        10**18,
        1e23,
        -1e300,
        0.5,
        True,
        None,
        "\U0001f600",
        nested(24),
        {"a": [{"b": "\0"}]},
    ],
)
def test_a_value_that_is_taken_reaches_the_worker_as_it_stands(tmp_path, value):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "a", "answer": value}))
    task = load_prompts(PromptsConfig(file=path), 0).task(0)
    assert isinstance(task, dict)
    config = parse_config(RunConfig, RUN)
    request = build_request(config, config.shares[""], [("g", task)], VersionBounds(), 0)
    (group,) = groups_from_proto(RolloutRequest.FromString(request.SerializeToString()))
    assert group.task.row is not None
    assert repr(group.task.row["answer"]) == repr(value), "the digits, too: answers are texts"


LEAVES = st.integers(-9, 9) | st.text("ab", max_size=2) | st.none()
NAMES = st.text("abcdefgh", min_size=1, max_size=3)
ORDERED = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=6),
    max_leaves=20,
)


def received(row, settings):
    """What a worker decodes of a task and of an environment's settings."""
    config = parse_config(RunConfig, RUN)
    environment = EnvironmentConfig(name="prompts", settings=settings)
    share = config.shares[""].model_copy(update={"environment": environment})
    sent = build_request(config, share, [("g", row)], VersionBounds(), 0).SerializeToString()
    request = RolloutRequest.FromString(sent)
    (group,) = groups_from_proto(request)
    spec = request.environment
    return group.task.row, values_from_proto(spec.settings, spec.settings_order, "settings")


@given(st.dictionaries(NAMES, ORDERED, max_size=6), st.dictionaries(NAMES, ORDERED, max_size=6))
def test_keys_arrive_in_the_order_in_which_they_stand(row, settings):
    """Templates write tools, and the arguments of calls, in this order: prompts are made of it."""
    assert [json.dumps(each) for each in received(row, settings)] == [
        json.dumps(row),
        json.dumps(settings),
    ]


def test_keys_of_a_caller_that_tells_no_order_arrive_by_name():
    settings = Struct()
    settings.update({name: {"z": 1, "y": [{"x": 2, "w": 3}]} for name in "hcagbdfe"})
    values = values_from_proto(settings, b"", "settings")
    assert json.dumps(values) == json.dumps(values, sort_keys=True)
    some = values_from_proto(settings, b'{"d":0,"none":0,"b":{"z":0,"y":[7]}}', "settings")
    assert list(some) == ["d", "b", "a", "c", "e", "f", "g", "h"]
    assert list(some["b"]) == ["z", "y"] and some == values
    with pytest.raises(InvalidFieldError, match="settings: is not JSON"):
        values_from_proto(settings, b"[", "settings")
