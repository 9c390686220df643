"""Rows of JSONL and Parquet files, and whether a call carries one as it stands."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from sluice.config import ConfigError
from sluice.json_values import plain_number
from sluice.samples.messages import data_url

TEXTS = ("prompt", "chosen", "rejected", "answer")  # columns that are never an image
FOREIGN = {  # what a file that is no JSONL begins with
    b"\x1f\x8b": "is compressed by gzip: unpack it",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd: unpack it",
    b"PAR1": "is Parquet: have its name end in .parquet",
    b"\xff\xfe": "is UTF-16: write it as UTF-8",
    b"\xfe\xff": "is UTF-16: write it as UTF-8",
}
DEEPEST = 24  # lists and objects in each other: a message that holds them ends at 100 of its own


class PromptFileError(ConfigError):
    """A line of a prompt file is malformed; the message names file and line."""


def read_rows(path: Path, key: str) -> list[tuple[str, dict[str, Any]]]:
    """Rows of a JSONL or Parquet file, and where each stands; `key` is the setting of the path.

    Raises ConfigError for a missing, PromptFileError for a malformed or empty file.
    """
    if not path.is_file():
        raise ConfigError(f"{key}: {path} {'is no file' if path.exists() else 'does not exist'}")
    rows = _read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path)
    if not rows:
        raise PromptFileError(f"{key}: {path} has no rows")
    for where, row in rows:
        if not isinstance(row, dict):
            raise PromptFileError(f"{where}: a row must be an object, not {type(row).__name__}")
    return rows


def digest_of_rows(path: Path) -> str:
    """xxh3-128 of a file of rows, which may be larger than what is to be in memory twice."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _read_jsonl(path: Path) -> list[tuple[str, Any]]:
    rows = []
    with path.open("rb") as lines:
        begin = lines.peek(max(map(len, FOREIGN)))
        for mark, what in FOREIGN.items():
            if begin.startswith(mark):
                raise PromptFileError(f"{path} {what}")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                text = line.decode(json.detect_encoding(line), "surrogatepass")  # as json.loads
                rows.append((f"{path}:{number}", _ROW.decode(text)))
            except _TwiceError as error:
                raise PromptFileError(f"{path}:{number}: {error}") from None
            except (ValueError, RecursionError) as error:  # neither JSON nor UTF-8
                raise PromptFileError(f"{path}:{number}: not JSON: {error}") from None
    return rows


class _TwiceError(ValueError):
    """A key that stands twice in an object: which one is meant nobody can tell."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise _TwiceError(f"{twice[:80]!r} stands more than once in an object")
    return found


_ROW = json.JSONDecoder(object_pairs_hook=_once)  # made once, and not for each row


def _read_parquet(path: Path) -> list[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path, page_checksum_verification=True).to_pylist()
    # what is damaged may also be no text, or no date
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise PromptFileError(f"{path}: not Parquet: {error}") from None
    for key in TEXTS:  # a column has one type; bytes would be learned as the data URL they become
        if any(isinstance(row.get(key), bytes) for row in rows):
            raise PromptFileError(f"{path}: column {key!r} is of bytes; write it as strings")
    return [
        (f"{path}: row {number}", {key: _as_json(value) for key, value in row.items()})
        for number, row in enumerate(rows, 1)
    ]


def _as_json(value: Any) -> Any:
    """A value of Parquet as calls carry it: bytes, such as images, as data URLs."""
    if isinstance(value, bytes):
        return data_url(value)
    if isinstance(value, dict):
        return {key: _as_json(each) for key, each in value.items() if _is_there(value, key)}
    return [_as_json(each) for each in value] if isinstance(value, list) else value


def _is_there(struct: Mapping[str, Any], key: str) -> bool:
    """Every struct has the keys of all its column's, null where it lacks one.

    Chat templates would write those, or take a message for a call. A message's content is there.
    """
    is_content = key == "content" and isinstance(struct.get("role"), str)
    return struct[key] is not None or is_content


def check_carried(where: str, row: Mapping[str, Any]) -> None:
    """Raises PromptFileError for a row that would not reach an episode worker as it stands."""
    for key, value in row.items():
        if problem := _change(key) or _change(value):
            raise PromptFileError(f"{where}: {str(key)[:80]!r}: {problem}")


def _change(value: Any, depth: int = 0) -> str:
    """What becomes of a value on its way; empty where nothing does."""
    if isinstance(value, str):
        if value.isascii():
            return ""
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return f"holds half a surrogate pair, {value[error.start]!a}, which is no character"
    elif isinstance(value, int):
        try:
            carried = plain_number(float(value))  # as JSON's numbers are, to calls
        except OverflowError:
            return "a whole number that is too large; give it as text"
        if isinstance(carried, float) or carried != value:
            return f"{value} would arrive as {carried}; give it as text"
    elif isinstance(value, dict | list):
        if depth == DEEPEST:
            return f"lists and objects are nested more than {DEEPEST} deep"
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return next((found for part in parts if (found := _change(part, depth + 1))), "")
    elif value is not None and not isinstance(value, float):
        return f"a {type(value).__name__} is no value of JSON; give it as text"
    return ""
