"""Tasks in a reproducible order: group number i of a run always is the same task."""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from sluice.config import ConfigError
from sluice.loop.config import PromptsConfig

Task = int | Mapping[str, Any]  # index into a generated data set, or a row of a file


class PromptFileError(ConfigError):
    """A line of a prompt file is malformed; the message names file and line."""


class PromptSource(ABC):
    """An endless sequence of tasks, reshuffled every epoch from the seed."""

    def __init__(self, count: int, shuffle: bool, seed: int) -> None:
        self.count, self._shuffle, self._seed = count, shuffle, seed
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def task(self, position: int) -> Task:
        """The task of group number `position`, from 0."""
        epoch, offset = divmod(position, self.count)
        return self._row(self._order(epoch)[offset])

    def _epoch_order(self, epoch: int) -> list[int]:
        order = list(range(self.count))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order

    @abstractmethod
    def _row(self, index: int) -> Task: ...


class IndexSource(PromptSource):
    """Indices of a data set that the environment generates."""

    def _row(self, index: int) -> Task:
        return index


class FileSource(PromptSource):
    """Rows of a JSONL or Parquet file."""

    def __init__(self, rows: list[dict[str, Any]], shuffle: bool, seed: int) -> None:
        super().__init__(len(rows), shuffle, seed)
        self._rows = rows

    def _row(self, index: int) -> Task:
        return self._rows[index]


def load_prompts(config: PromptsConfig, seed: int) -> PromptSource:
    """Open the source. Raises ConfigError for a missing, PromptFileError for a malformed file."""
    if config.index_count is not None:
        return IndexSource(config.index_count, config.shuffle, seed)
    assert config.file is not None
    if not config.file.exists():
        raise ConfigError(f"prompts.file: {config.file} does not exist")
    parquet = config.file.suffix == ".parquet"
    rows = _read_parquet(config.file) if parquet else _read_jsonl(config.file)
    if not rows:
        raise PromptFileError(f"prompts.file: {config.file} has no rows")
    return FileSource(rows, config.shuffle, seed)


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise PromptFileError(f"{path}:{number}: not JSON: {error}") from None
            rows.append(_checked(row, f"{path}:{number}"))
    return rows


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise PromptFileError(f"{path}: not Parquet: {error}") from None
    return [_checked(row, f"{path}: row {number}") for number, row in enumerate(rows, 1)]


def _checked(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise PromptFileError(f"{where}: a row must be an object, not {type(row).__name__}")
    if not row.get("prompt") and not row.get("messages"):
        raise PromptFileError(f"{where}: a row needs `prompt` or `messages`")
    return row
