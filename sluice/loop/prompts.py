"""Tasks in a reproducible order: group number i of a run always is the same task."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash

from sluice.config import ConfigError
from sluice.loop.config import EnvironmentConfig, PromptsConfig

Task = int | Mapping[str, Any]  # index into a generated data set, or a row of a file


class PromptFileError(ConfigError):
    """A line of a prompt file is malformed; the message names file and line."""


@lru_cache(maxsize=4)
def epoch_order(count: int, shuffle: bool, seed: int, epoch: int) -> Sequence[int]:
    """Returns the indices of an epoch, each once; the same in every run with this seed."""
    order = list(range(count))
    if shuffle:
        random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


class PromptSource:
    """An endless sequence of tasks, reshuffled every epoch from the seed."""

    def __init__(self, tasks: Sequence[Task], shuffle: bool, seed: int, content: str = "") -> None:
        """`content` is a digest of what the tasks stand for."""
        self._tasks, self._shuffle, self._seed = tasks, shuffle, seed
        self.count = len(tasks)
        text = f"{self.count}/{shuffle}/{seed}/{content}"
        self.digest = xxhash.xxh3_64_hexdigest(text.encode())

    def task(self, position: int) -> Task:
        """Returns the task of group number `position`, from 0."""
        epoch, offset = divmod(position, self.count)
        return self._tasks[epoch_order(self.count, self._shuffle, self._seed, epoch)[offset]]


def load_prompts(
    config: PromptsConfig, seed: int, environment: EnvironmentConfig | None = None
) -> PromptSource:
    """Open the source of the tasks of an environment, whose settings name the keys of its rows.

    Raises ConfigError for a missing, PromptFileError for a malformed file.
    """
    if config.index_count is not None:
        return PromptSource(range(config.index_count), config.shuffle, seed)
    assert config.file is not None
    settings = environment.settings if environment else {}
    keys = [str(settings.get(f"{name}_key", name)) for name in ("prompt", "messages")]
    rows = []
    for where, row in read_rows(config.file, "prompts.file"):
        if not any(row.get(key) for key in keys):
            raise PromptFileError(f"{where}: a row needs {' or '.join(f'`{key}`' for key in keys)}")
        rows.append(row)
    content = xxhash.xxh3_128_hexdigest(config.file.read_bytes())
    return PromptSource(rows, config.shuffle, seed, content)


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


def _read_jsonl(path: Path) -> list[tuple[str, Any]]:
    rows = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                rows.append((f"{path}:{number}", json.loads(line)))
            except ValueError as error:  # neither JSON nor UTF-8
                raise PromptFileError(f"{path}:{number}: not JSON: {error}") from None
    return rows


def _read_parquet(path: Path) -> list[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise PromptFileError(f"{path}: not Parquet: {error}") from None
    return [(f"{path}: row {number}", row) for number, row in enumerate(rows, 1)]


def sample_seed(run_seed: int, group_id: str, index: int) -> int:
    """A non-negative 63-bit seed, the same in every run with this seed."""
    return xxhash.xxh3_64_intdigest(f"{run_seed}/{group_id}/{index}".encode()) >> 1
