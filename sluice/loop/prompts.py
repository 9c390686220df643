"""The tasks of a run in their order: rows of a file, or indices of a generated data set."""

from __future__ import annotations

import json
import random
import reprlib
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import xxhash

from sluice.config import ConfigError
from sluice.json_values import find
from sluice.loop.config import EnvironmentConfig, PromptsConfig
from sluice.loop.row_files import PromptFileError, check_carried, digest_of_rows, read_rows

OF_TEXTS = ("prompts", "tools")  # environments of ours whose rows have a prompt to be shown
Task = int | Mapping[str, Any]  # index into a generated data set, or a row of a file


def epoch_order(count: int, shuffle: bool, seed: int, epoch: int) -> Sequence[int]:
    """Returns the indices of an epoch, each once; the same in every run with this seed."""
    if not shuffle:
        return range(count)
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


class PromptSource:
    """An endless sequence of tasks, reshuffled every epoch from the seed."""

    def __init__(
        self,
        tasks: Sequence[Task],
        shuffle: bool,
        seed: int,
        content: str = "",
        places: Sequence[str] = (),
    ) -> None:
        """`content` is a digest of what the tasks stand for; `places` say where each is from."""
        self.tasks, self._places, self.count = tasks, places, len(tasks)
        # Where one epoch ends and the next begins both are asked for in turn.
        self._order = lru_cache(maxsize=2)(partial(epoch_order, self.count, shuffle, seed))
        text = f"{self.count}/{shuffle}/{seed}/{content}"
        self.digest = xxhash.xxh3_64_hexdigest(text.encode())

    def task(self, position: int) -> Task:
        """Returns the task of group number `position`, from 0."""
        return self.tasks[self._index(position)]

    def place(self, position: int) -> str:
        """Says where the task of group number `position` is from: place in a file, or index."""
        return self.name(self._index(position))

    def name(self, index: int) -> str:
        """Says where a task of `tasks` is from."""
        return self._places[index] if self._places else f"task {index}"

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, self.count)
        return self._order(epoch)[offset]


def load_prompts(
    config: PromptsConfig,
    seed: int,
    environment: EnvironmentConfig | None = None,
    key: str = "prompts",
) -> PromptSource:
    """Open the source of the tasks of an environment, whose settings name the keys of its rows.

    `key` is the setting that gives `config`. What keys an environment of users' own reads it alone
    knows. Raises ConfigError for a missing, PromptFileError for a malformed file.
    """
    if config.index_count is not None:
        return PromptSource(range(config.index_count), config.shuffle, seed)
    assert config.file is not None
    settings = environment.settings if environment else {}
    keys = [str(settings.get(f"{name}_key", name)) for name in ("prompt", "messages")]
    is_ours = environment is None or environment.name in OF_TEXTS
    rows, places = [], []
    all_rows = read_rows(config.file, f"{key}.file")
    for where, row in all_rows:
        if not all(is_one_of(find(row, key), wanted) for key, wanted in config.where.items()):
            continue
        if is_ours and not any(find(row, key) for key in keys):
            if given := [key for key in keys if key in row or find(row, key) is not None]:
                raise PromptFileError(f"{where}: `{given[0][:40]}` is empty")
            needed, found = (
                separator.join(f"`{key[:40]}`" for key in some)
                for separator, some in ((" or ", keys), (", ", list(row)[:8]))
            )
            raise PromptFileError(
                f"{where}: a row needs {needed}, and has {found or 'nothing'}; settings of the "
                "environment name other columns: prompt_key, messages_key"
            )
        if environment is not None and environment.name in OF_TEXTS:
            _check_prompt(where, row, *keys)
        check_carried(where, row)
        rows.append(row)
        places.append(where)
    if not rows:
        why = _why_none(config.where, [row for _, row in all_rows])
        raise ConfigError(f"{key}.where: {why}")
    content = digest_of_rows(config.file)
    if config.where:
        content += f"/{json.dumps(config.where, sort_keys=True)}"
    return PromptSource(rows, config.shuffle, seed, content, places)


def _check_prompt(where: str, row: Mapping[str, Any], prompt: str, messages: str) -> None:
    """Raises PromptFileError for a prompt that would be shown as a text that nobody wrote."""
    found = find(row, prompt)
    if not find(row, messages) and not isinstance(found, str | list):
        raise PromptFileError(
            f"{where}: `{prompt[:40]}` is {reprlib.repr(found)}, and must be a text or a list of "
            "messages"
        )


def is_one_of(value: Any, wanted: Any) -> bool:
    """Whether a value is the wanted one, or one of a list; true is not 1, and "1" neither."""
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool)
        for each in (wanted if isinstance(wanted, list) else [wanted])
    )


def _why_none(where: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    for key, wanted in where.items():
        values = [find(row, key) for row in rows]
        if not any(is_one_of(value, wanted) for value in values):
            seen = ", ".join(list(dict.fromkeys(reprlib.repr(value) for value in values))[:8])
            return f"no row has {reprlib.repr(wanted)} at {reprlib.repr(key)}; there are {seen}"
    return f"no row has all of {reprlib.repr(where)}"
