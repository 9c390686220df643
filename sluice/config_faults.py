"""Every fault of a configuration: loading one ends with the first kind of fault that it has.

A wrong key hides what checks of the whole would say, and each of those what the next would.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from pydantic import ValidationError
from pydantic_settings.exceptions import SettingsError

from sluice.config import (
    ConfigError,
    ProcessConfig,
    build,
    check_environment,
    faults_of,
    read_yaml,
    sources_of,
    values_alone,
)

C = TypeVar("C", bound=ProcessConfig)
Builder = Callable[[Any, Mapping[str, Any]], Any]  # of a class and the values of its file
_UNKNOWN = "extra_forbidden"  # pydantic's name of a key that is none
_ATTEMPTS = 64  # wrong values in each other


@dataclass(frozen=True)
class Examined(Generic[C]):
    """A configuration, and all that is wrong with it, in the words of `load_config`.

    config: as if what is wrong were not there; None where it is then no configuration.
    """

    config: C | None
    faults: list[str] = field(default_factory=list)


def examine_file(cls: type[C], path: str, flags: Sequence[str], usage: str) -> Examined[C]:
    """Examine what `load_config` would make of a file, the environment and flags."""
    try:
        values = read_yaml(path)
        check_environment(cls, os.environ)
    except ConfigError as error:
        return Examined(None, [str(error)])

    def builder(given: Sequence[str]) -> Builder:
        return lambda kind, kept: build(kind, sources_of(kind, kept, given, usage))

    found = _examine(cls, values, builder(flags), os.environ)
    if found.config is not None or not flags:
        return found
    again = _examine(cls, values, builder(()), os.environ)  # a flag may have hidden all else
    return Examined(again.config, [*dict.fromkeys(found.faults + again.faults)])


def examine_values(cls: type[C], values: Mapping[str, Any]) -> Examined[C]:
    """Examine what `parse_config` would make of values."""
    return _examine(cls, values, lambda kind, kept: build(kind, values_alone, kept), {})


def _examine(
    cls: type[C], values: Mapping[str, Any], builder: Builder, environment: Mapping[str, str]
) -> Examined[C]:
    unchecked, kept = _unchecked(cls), deepcopy(dict(values))
    faults = list[str]()
    is_whole = True  # but for keys that are none
    for attempt in range(_ATTEMPTS):
        try:
            built = builder(unchecked, kept)
        except ValidationError as error:
            if not attempt:
                faults += faults_of(error, cls, cls.former_keys, environment)
            found = error.errors()
            is_whole &= all(item["type"] == _UNKNOWN for item in found)
            if not any([_drop(kept, item["loc"]) for item in found]):  # each of them
                return Examined(None, faults)
            continue
        except (SettingsError, ConfigError) as error:
            return Examined(None, [*faults, str(error)])
        settings = {name: getattr(built, name) for name in cls.model_fields}
        config = cast(C, cls.model_construct(built.model_fields_set, **settings))
        return Examined(config, faults + (list(_checks(cls, config)) if is_whole else []))
    return Examined(None, faults)


def _drop(values: Any, path: Sequence[str | int]) -> bool:
    """Removes what stands at a path, or the last of what is above it; False where nothing does."""
    for index, part in enumerate(path):
        if isinstance(values, dict) and part in values:
            inner = values[part]
            if not isinstance(inner, dict | list) or index + 1 == len(path):
                del values[part]
                return True
            if _drop(inner, path[index + 1 :]):
                return True
            del values[part]
            return True
        if isinstance(values, list) and isinstance(part, int) and part < len(values):
            if not _drop(values[part], path[index + 1 :]):
                del values[part]
            return True
    return False  # parts that are no keys are passed over: tags of a union


@functools.cache
def _unchecked(cls: Any) -> Any:
    """A `cls` whose settings are not held against each other."""
    checks = {name: _pass for name in _names_of_checks(cls)}
    return type(cls)(cls.__name__, (cls,), {"__module__": cls.__module__, **checks})


def _pass(config: Any) -> Any:
    return config


def _names_of_checks(cls: type[ProcessConfig]) -> list[str]:
    """Those that look at a whole configuration, in their order."""
    found = cls.__pydantic_decorators__.model_validators
    return [name for name, check in found.items() if check.info.mode == "after"]


def _checks(cls: type[C], config: C) -> Iterator[str]:
    """What each says. One that is made for settings that one before refuses may fail otherwise."""
    is_sound = True
    for name in _names_of_checks(cls):
        try:
            getattr(cls, name)(config)
        except ValueError as error:
            is_sound = False
            yield str(error)
        except (AttributeError, LookupError, OSError, TypeError):
            if is_sound:
                raise
