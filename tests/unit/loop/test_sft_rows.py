"""Rows of a conversation file: each once in an epoch, and refusals that name file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice.config import ConfigError
from sluice.loop.config import RowsConfig
from sluice.loop.row_files import PromptFileError
from sluice.loop.rows import ConversationRows
from sluice.samples.arrow import decode_group
from sluice.samples.tokenizer import TextTokenizer
from tests.unit.samples.test_conversations import make_tokenizer

ROWS: list[dict[str, Any]] = [{"prompt": f"{i}=", "answer": f"{i}{i}"} for i in range(7)]


def tool(name: str, argument: str) -> dict[str, Any]:
    properties = {argument: {"type": "integer"}}
    return {"name": name, "parameters": {"type": "object", "properties": properties}}


TOOLS = [tool("add", "number"), tool("write", "content")]
CALL: list[dict[str, Any]] = [
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"n": 2}}]},
    {"role": "tool", "content": "3", "name": "add"},
    {"role": "assistant", "content": "3"},
]
CALLING = (  # as templates of Llama (a key that is there) and of DeepSeek (a content that is none)
    "{% if tools is not none %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}:"
    "{% if 'tool_calls' in m %}{{ m.content is none }}{{ m.tool_calls | tojson }}"
    "{% else %}{{ m.content }}{% endif %};{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer(build_tiny_qwen3(tmp_path_factory.mktemp("model"), 0))


def load(tokenizer: TextTokenizer, file: Path, seed: int = 0) -> ConversationRows:
    return ConversationRows(RowsConfig(file=file), tokenizer, rows_per_step=3, seed=seed)


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{% if quick %}9{% endif %}={% endif %}"
)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    model = build_tiny_qwen3(tmp_path_factory.mktemp("chatty"), 0)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return TextTokenizer(model)


def test_variables_of_the_template_are_those_of_the_configuration(
    chatty: TextTokenizer, tmp_path: Path
) -> None:
    chat = [{"role": "user", "content": "12"}, {"role": "assistant", "content": "9=12"}]
    file = write(tmp_path / "chat.jsonl", [{"messages": chat}])

    def prompt_length(template: dict[str, Any]) -> int:
        rows = ConversationRows(RowsConfig(file=file), chatty, 1, 0, template)
        (sample,) = decode_group(rows.step(0).data)
        return sample.prompt_length

    assert (prompt_length({"quick": True}), prompt_length({})) == (4, 2)
    with pytest.raises(ConfigError, match=r"template: .* no variable 'quik'; its own: quick"):
        prompt_length({"quik": True})
    plain = write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ConfigError, match="template: has no effect on rows without messages"):
        ConversationRows(RowsConfig(file=plain), chatty, 3, 0, {"quick": True})


@pytest.mark.parametrize("kind", ["prompt", "messages"])
def test_a_row_that_takes_gigabytes_to_tokenise_is_refused_before_it_is(
    tokenizer: TextTokenizer, tmp_path: Path, kind: str
) -> None:
    """Of a hundred million characters a tokenizer took 20 GB, and the machine ended the run."""
    text = "1" * (1 << 24)
    row = {
        "prompt": {"prompt": text, "answer": "1"},
        "messages": {
            "messages": [
                {"role": "user", "content": text},
                {"role": "assistant", "content": "1"},
            ]
        },
    }[kind]
    file = write(tmp_path / "rows.jsonl", [ROWS[0], row])
    with pytest.raises(PromptFileError, match=r"rows.jsonl:2: holds 16,777,2\d\d characters"):
        load(tokenizer, file)
    load(tokenizer, write(tmp_path / "other.jsonl", [{**ROWS[0], "meta": text}]))


@pytest.mark.parametrize("where", ["key", "numbers"])
def test_all_that_a_template_writes_out_of_a_row_is_counted(
    tokenizer: TextTokenizer, tmp_path: Path, where: str
) -> None:
    tools = {"key": [{"1" * (1 << 24): 0}], "numbers": [10**255] * (1 << 16)}[where]
    file = write(tmp_path / "rows.jsonl", [{**ROWS[0], "tools": tools}])
    with pytest.raises(PromptFileError, match=r"rows.jsonl:1: holds 16,777,2\d\d characters"):
        load(tokenizer, file)


def test_every_epoch_has_each_row_once(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    rows = load(tokenizer, write(tmp_path / "rows.jsonl", ROWS))
    assert rows.steps_per_epoch == 3
    for epoch in range(2):
        steps = [rows.step(3 * epoch + part).row_indices for part in range(3)]
        assert sorted(index for step in steps for index in step) == list(range(7))
    assert rows.step(0).row_indices != rows.step(3).row_indices


def test_epochs_are_told_by_rows_and_not_by_steps(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    rows = load(tokenizer, write(tmp_path / "rows.jsonl", ROWS))  # seven, three a step
    told = [rows.epochs(steps) for steps in range(8)]
    assert told == [0, 3 / 7, 6 / 7, 1, 1 + 3 / 7, 1 + 6 / 7, 2, 2 + 3 / 7]


def test_steps_depend_on_seed_and_file_alone(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", ROWS)
    first, again = load(tokenizer, file), load(tokenizer, file)
    assert first.step(4).digest == again.step(4).digest
    assert first.step(4).digest != load(tokenizer, file, seed=1).step(4).digest
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    assert load(tokenizer, tmp_path / "rows.parquet").step(4).digest == first.step(4).digest


def test_a_conversation_of_parquet_says_what_it_says_in_jsonl(tmp_path: Path) -> None:
    """Each struct of Parquet has the keys of all others, null where it lacks one."""
    tokenizer = make_tokenizer(tmp_path, CALLING)
    rows = [{"messages": CALL, "tools": TOOLS}, {"messages": CALL[:1] + CALL[3:], "tools": []}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    wanted = load(tokenizer, write(tmp_path / "rows.jsonl", rows)).step(0)
    assert load(tokenizer, tmp_path / "rows.parquet").step(0).digest == wanted.digest


def test_samples_are_valid_rows_of_a_blob(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    rows = load(tokenizer, write(tmp_path / "rows.jsonl", ROWS)).step(1)
    samples = decode_group(rows.data)
    assert len(samples) == rows.sample_count == 3
    assert rows.trained_tokens == 9
    for sample, index in zip(samples, rows.row_indices, strict=True):
        assert sample.token_ids.tolist() == [index, 10, index, index, 11]
        assert sample.prompt_length == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], "must be an object"),
        ({"prompt": "1="}, "give `messages`, or `prompt` and `answer`"),
        ({"messages": "hello"}, "must be a list"),
        ({"messages": CALL, "tools": json.dumps(TOOLS)}, "tools must be a list of objects"),
        ({"messages": CALL, "tools": TOOLS[0]}, "tools must be a list of objects"),
        ({"messages": [{"content": "1"}]}, r"messages\[0\] needs a role"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] needs a content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "must be one text"),
        ({"prompt": "1", "answer": "2", "images": ["a.png"]}, "images: .* of text alone"),
        ({"messages": [{"role": "user", "content": "1"}]}, "no message is the assistant's"),
        ({"messages": [{"role": "assistant", "content": "1"}]}, "nothing before it"),
        ({"prompt": "", "answer": "2"}, "the prompt has no tokens"),
    ],
)
def test_a_malformed_row_is_named(
    tokenizer: TextTokenizer, tmp_path: Path, row: Any, message: str
) -> None:
    file = write(tmp_path / "rows.jsonl", [ROWS[0], row])
    with pytest.raises(PromptFileError, match=rf"rows\.jsonl:2: .*{message}"):
        load(tokenizer, file)


def test_a_row_that_only_the_tokenizer_can_judge_is_named(
    tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "1"}]
    rows = load(tokenizer, write(tmp_path / "rows.jsonl", [{"messages": chat}]))
    with pytest.raises(PromptFileError, match=r"rows\.jsonl:1: .*no chat template"):
        rows.step(0)
