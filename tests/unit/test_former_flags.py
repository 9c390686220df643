"""Processes are started as before: flags of the release before are taken, or name the new one.

`data/former_flags.txt`: the flags that commit 7c3d425 had, by class of configuration.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from services.converter.servicer import ConverterConfig
from services.rollout.config import RolloutConfig
from services.router.config import RouterConfig
from services.trainer.config import TrainerConfig
from services.trainer.rank.__main__ import parse_flags
from sluice.config import ConfigError, ProcessConfig, load_config, models_of, parse_config
from sluice.loop.config import RunConfig, SftConfig
from sluice.stack import UpConfig

FORMER = Path(__file__).parent / "data" / "former_flags.txt"
PROCESSES: tuple[type[ProcessConfig], ...] = (
    ConverterConfig,
    RolloutConfig,
    RouterConfig,
    RunConfig,
    SftConfig,
    TrainerConfig,
    UpConfig,
)


def former_flags() -> dict[str, list[str]]:
    flags = defaultdict(list)
    for line in FORMER.read_text().splitlines():
        process, flag = line.split()
        flags[process].append(flag)
    return flags


def test_every_process_of_before_is_there() -> None:
    assert former_flags().keys() == {process.__name__ for process in PROCESSES}


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.__name__)
def test_former_flags_are_taken_or_name_the_new_one(
    process: type[ProcessConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load_config(process, ["--help"])
    known = set(capsys.readouterr().out.replace(",", " ").split())
    for flag in former_flags()[process.__name__]:
        if flag in known:
            continue
        new = process.former_keys[flag.removeprefix("--")]
        assert f"--{new}" in known
        with pytest.raises(ConfigError, match=f"^{flag} is now --{new}$"):
            load_config(process, [flag, "x"])


def test_a_former_key_names_the_new_one_in_a_file_and_in_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = {"store": "s", "roles": ["engine"], "engine": {"sglang": {"staging": "/fast"}}}
    with pytest.raises(ConfigError, match=r"^engine\.sglang\.staging: is now weights_cache$"):
        parse_config(RolloutConfig, values)
    monkeypatch.setenv("SLUICE_ENGINE__SGLANG__STAGING", "/fast")
    with pytest.raises(ConfigError, match=r"STAGING is now SLUICE_WEIGHTS_CACHE$"):
        load_config(RolloutConfig, [])


def test_a_rank_is_started_by_the_names_of_before_and_of_now() -> None:
    start = ["--config", "c.json", "--parent", "7"]
    former = parse_flags([*start, "--front", "host:1", "--generation", "3"])
    assert former == parse_flags([*start, "--controller", "host:1", "--incarnation", "3"])
    assert (former.controller, former.incarnation, former.parent) == ("host:1", 3, 7)


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.__name__)
def test_choices_are_shown_as_files_take_them(process: type[ProcessConfig]) -> None:
    """Of an enumeration `--help` would show the names, and files take the values."""
    seen, left = set[type[BaseModel]](), list[type[BaseModel]]([process])
    while left:
        model = left.pop()
        if model in seen:
            continue
        seen.add(model)
        for name, field in model.model_fields.items():
            assert not list(_enumerations(field.annotation)), f"{model.__name__}.{name}"
            left += models_of(field.annotation)


def _enumerations(annotation: Any) -> Iterator[type[Enum]]:
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        yield annotation
    for argument in get_args(annotation):
        yield from _enumerations(argument)
