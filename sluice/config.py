"""One frozen pydantic tree per process, filled from YAML, then environment, then flags."""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar, cast, get_args

import yaml
from pydantic import BaseModel, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, CliSettingsSource, PydanticBaseSettingsSource
from pydantic_settings.exceptions import SettingsError
from pydantic_settings.main import SettingsConfigDict

from sluice.yaml_values import BoundLoader

ENV_PREFIX = "SLUICE_"
# not settings of one process
RESERVED_ENV = frozenset(
    {"SLUICE_DEVICE", "SLUICE_FAULT", "SLUICE_FUSED_OPS", "SLUICE_SIDE_STREAMS"}
)
MAX_CONFIG_BYTES = 16 << 20  # somebody meant another file
LONGEST_PATH, LONGEST_NAME = 4095, 255  # bytes
LONGEST_SHOWN = 200  # characters of a value, or of a key, in an error
MOST_FAULTS = 40  # told of at once
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # owner/model
PLAIN_NAME_RULE = "a name has letters, digits, '_', '.' and '-', none of the last two first"


Sources = Callable[[type[BaseSettings], Any, Any], tuple[Any, ...]]
_sources: ContextVar[Sources] = ContextVar("sources")  # of the configuration that is built


class ConfigError(ValueError):
    """A setting is unknown, missing or of the wrong type; the message names it."""


class WhatIsMeant(BaseModel):
    """True is no number, nothing no path: pydantic would take them for 1 and for where one is."""

    @field_validator("*", mode="before")
    @classmethod
    def _is_meant(cls, value: Any, info: ValidationInfo) -> Any:
        wanted = cls.model_fields[str(info.field_name)].annotation
        if _takes_path(wanted):
            for each in value if isinstance(value, list | tuple) else [value]:
                _refuse_no_path(each)
        return _refuse_truth(wanted, value)


class Config(WhatIsMeant, frozen=True, extra="forbid", allow_inf_nan=False):
    """Base of every part of a configuration. A number is finite: no time is without end."""


class ProcessConfig(WhatIsMeant, BaseSettings):
    """Base of a process's whole configuration.

    Defaults < `--config file.yaml` < `SLUICE_OPTIM__LR=x` < `--optim.lr x`. An empty variable
    is as none. `former_keys`: keys of the release before and their new names, which are told.
    `foreign_keys`: keys that other commands have and this one has no use for; variables of them
    may be there.
    """

    former_keys: ClassVar[Mapping[str, str]] = {}
    foreign_keys: ClassVar[Collection[str]] = ()

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
    )


def _refuse_truth(wanted: Any, value: Any) -> Any:
    """Raises ValueError where a number is asked for and true or false is given."""
    found = isinstance(value, bool) or (_holds_truth(value) and not any(models_of(wanted)))
    if found and not _takes_truth(wanted):
        raise ValueError("is true or false, as YAML reads yes, no, on and off too")
    return value


def _holds_truth(value: Any) -> bool:
    if isinstance(value, Mapping | list | tuple):
        return any(map(_holds_truth, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, bool)


def _takes_truth(annotation: Any) -> bool:
    annotation = getattr(annotation, "__value__", annotation)  # of a named type
    if annotation in (bool, Any, object) or isinstance(annotation, bool):
        return True
    return any(map(_takes_truth, get_args(annotation)))


def _refuse_no_path(value: Any) -> None:
    if value == "":
        raise ValueError("names no path; the working directory is '.'")
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else ""
    if not isinstance(text, str) or "://" in text:
        return
    if "\0" in text:
        raise ValueError("can be no path: it holds a NUL")
    data = text.encode(errors="surrogatepass")
    if len(data) > LONGEST_PATH or max(map(len, data.split(b"/"))) > LONGEST_NAME:
        raise ValueError("can be no path: it, or a name in it, is too long")


def _takes_path(annotation: Any) -> bool:
    return annotation is Path or any(map(_takes_path, get_args(annotation)))


class _YamlSource(PydanticBaseSettingsSource):
    """The values of a YAML file that was read before."""

    def __init__(self, settings: type[BaseSettings], values: dict[str, Any]) -> None:
        super().__init__(settings)
        self._values = values

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return self._values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return self._values


class FlagParser(argparse.ArgumentParser):
    """Says in one line what is wrong with a flag; the list of all is for `--help`."""

    former_keys: Mapping[str, str] = {}

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown == message:
            raise ConfigError(f"{message} (--help lists the flags)")
        flag = unknown.split()[0].partition("=")[0]
        if not flag.startswith("-"):
            raise ConfigError(f"unknown argument {flag}; settings are given as --key value")
        if new := self.former_keys.get(flag.removeprefix("--")):
            raise ConfigError(f"{flag} is now --{new}")
        known = [name for name in self._option_string_actions if not name.startswith("--no-")]
        raise _unknown_flag(flag, {*known, *flags_of(self.usage or "")})


def flags_of(usage: str) -> list[str]:
    """The flags that a usage names; they may be of no configuration."""
    return [name for name in re.findall(r"(?<=[\s[])--?[a-z][\w.-]*", usage) if name != "--key"]


def refuse_unknown_flags(arguments: Sequence[str], usage: str) -> None:
    """Raises ConfigError for a flag that the usage of a command without configuration has not."""
    known = flags_of(usage)
    for argument in arguments:
        if argument.startswith("-") and (flag := argument.partition("=")[0]) not in known:
            raise _unknown_flag(flag, known)


def _unknown_flag(flag: str, known: Collection[str]) -> ConfigError:
    if flag in known:
        return ConfigError(f"{flag} is given twice, or where it does not belong")
    return ConfigError(f"unknown flag {flag[:200]}{hint(flag, known)} (--help lists the flags)")


C = TypeVar("C", bound=ProcessConfig)


class _YamlLoader(BoundLoader):
    """Refuses keys that are given twice, of which the last would win, and what holds itself."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.deep_construct = True  # finds a value that holds itself

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[tuple[str, str]]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                what = f"the key {key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, what, key.start_mark)
            seen.add((key.tag, str(key.value)))
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML mapping. Raises ConfigError for a file that cannot be read, bad YAML or no mapping."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
        if len(data) > MAX_CONFIG_BYTES:
            raise ConfigError(f"config file {path}: holds more than {MAX_CONFIG_BYTES} bytes")
        values = yaml.load(data.decode(), _YamlLoader)
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist") from None
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is not valid YAML: it is nested too deep") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping, not a {type(values).__name__}")
    if strange := [key for key in values if not isinstance(key, str)]:
        raise ConfigError(f"{path}: {strange[0]!r} is no key of a setting, which is text")
    return values


def load_config(cls: type[C], argv: Sequence[str] | None = None, usage: str = "") -> C:
    """Build `cls` from a YAML file, the environment and flags; exits on `--help`.

    `usage` is the command as `--help` shows it. Raises ConfigError naming the key of every
    unknown, missing or wrong setting.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    values = read_yaml(_take_config_path(arguments))
    check_environment(cls, os.environ)
    return _build(cls, sources_of(cls, values, arguments, usage))


def sources_of(
    cls: type[ProcessConfig], values: Mapping[str, Any], arguments: Sequence[str], usage: str
) -> Sources:
    """Flags, then the environment, then the values of a file."""

    def sources(settings: type[BaseSettings], _: Any, environment: Any) -> tuple[Any, ...]:
        if not arguments:  # a parser of all flags takes a third of a second to make
            return environment, _YamlSource(settings, dict(values))
        flags: CliSettingsSource[Any] = CliSettingsSource(
            settings,
            cli_parse_args=list(arguments),
            cli_implicit_flags=True,
            cli_hide_none_type=True,
            root_parser=_flag_parser(cls, usage),
        )
        return flags, environment, _YamlSource(settings, dict(values))

    return sources


def values_alone(_: type[BaseSettings], initial: Any, environment: Any) -> tuple[Any, ...]:
    """The sources of `parse_config`."""
    return (initial,)


def parse_config(cls: type[C], values: Mapping[str, Any]) -> C:
    """Build `cls` from values alone, neither environment nor flags."""
    return _build(cls, values_alone, values)


def _build(cls: type[C], sources: Sources, values: Mapping[str, Any] | None = None) -> C:
    try:
        return build(cls, sources, values)
    except ValidationError as error:
        variables = os.environ if values is None else {}
        raise ConfigError(describe(error, cls, cls.former_keys, variables)) from None
    except UnicodeEncodeError as error:  # pydantic's, of what was to be said of a value
        raise ConfigError(f"no UTF-8: {_clipped(repr(error.object))}") from None
    except SettingsError as error:
        raise ConfigError(str(error)) from None


def build(cls: type[C], sources: Sources, values: Mapping[str, Any] | None = None) -> C:
    """Build `cls` from its sources: functions of the class, of `values` and of the environment.

    Raises ValidationError and SettingsError.
    """
    token = _sources.set(sources)
    try:
        built = _sourced(cls)(**(values or {}))
    finally:
        _sources.reset(token)
    settings = {name: getattr(built, name) for name in cls.model_fields}
    return cast(C, cls.model_construct(built.model_fields_set, **settings))


@functools.cache
def _sourced(cls: type[C]) -> type[C]:
    """A `cls` that takes the sources at hand; pydantic is long in making a class."""

    class Sourced(cls):  # type: ignore[misc,valid-type]
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            **_: Any,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return _sources.get()(settings_cls, init_settings, env_settings)

    Sourced.__name__, Sourced.__doc__ = cls.__name__, cls.__doc__
    return Sourced


def describe(
    error: ValidationError,
    cls: type[BaseModel],
    former_keys: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """What is wrong with each setting of a `cls`, by its dotted path, and by its variable."""
    return "; ".join(faults_of(error, cls, former_keys, environment))


def faults_of(
    error: ValidationError,
    cls: type[BaseModel],
    former_keys: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """What `describe` says, setting by setting, of the first few; what is wrong with one is often
    wrong with a thousand."""
    lines: list[str] = []
    shown = set[str]()  # lists of known keys, once each
    faults = error.errors()
    for item in faults[:MOST_FAULTS]:
        path = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if new := (former_keys or {}).get(path):
            message = f"is now {new}"
        elif item["type"] == "extra_forbidden":
            *above, name = item["loc"]
            near = hint(str(name), keys_at(cls, above))
            message = "unknown key" if near in shown else f"unknown key{near}"
            shown.add(near)
        elif item["type"] == "path_type" and isinstance(item["input"], Mapping | list):
            message = "is a path, not keys and values"
        elif item["type"] != "missing" and not isinstance(item["input"], Mapping | BaseModel):
            variable = ENV_PREFIX + path.upper().replace(".", "__")
            is_from_there = (environment or {}).get(variable) == item["input"]
            source = f" of the environment variable {variable}" if is_from_there else ""
            message += f" (got {_clipped(repr(item['input']))}{source})"
        lines.append(f"{_clipped(path)}: {message}" if path else message)
    if len(faults) > MOST_FAULTS:
        lines.append(f"and {len(faults) - MOST_FAULTS} more")
    return lines


def _clipped(text: str) -> str:
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def _flag_parser(cls: type[ProcessConfig], usage: str) -> FlagParser:
    module = sys.modules["__main__"].__spec__  # of `python -m services.router`
    command = f"python -m {module.parent}" if module and module.parent else Path(sys.argv[0]).name
    parser = FlagParser(
        usage=usage or f"{command} [--config FILE.yaml] [--key value ...]",
        description=cls.__doc__,
        epilog="Also from the environment: --a.b is SLUICE_A__B. Flags win over it, it over YAML.",
        allow_abbrev=False,
    )
    parser.former_keys = cls.former_keys
    return parser


def _take_config_path(arguments: list[str]) -> str | Path:
    """Remove `--config x` or `--config=x` from the arguments; /dev/null when absent."""
    for index, argument in enumerate(arguments):
        if argument == "--config":
            if index + 1 == len(arguments):
                raise ConfigError("--config needs a file")
            path = arguments[index + 1]
            del arguments[index : index + 2]
            return path
        if argument.startswith("--config="):
            return arguments.pop(index).removeprefix("--config=")
    return os.devnull


def check_environment(cls: type[ProcessConfig], environment: Mapping[str, str]) -> None:
    """Refuse a mistyped variable, which would be ignored in silence. Raises ConfigError."""
    for name, value in environment.items():
        if not name.startswith(ENV_PREFIX) or name in RESERVED_ENV or not value:
            continue
        path = name.removeprefix(ENV_PREFIX).lower().split("__")
        if path[0] in cls.foreign_keys:
            continue
        if new := cls.former_keys.get(".".join(path)):
            variable = ENV_PREFIX + new.upper().replace(".", "__")
            raise ConfigError(f"environment variable {name} is now {variable}")
        model: Any = cls
        for part in path:
            fields = getattr(model, "model_fields", {})
            if part not in fields:
                raise ConfigError(
                    f"environment variable {name}: {cls.__name__} has no {part!r}"
                    f"{hint(part, fields)}"
                )
            model = next(iter(models_of(fields[part].annotation)), None)


SHOWN = 12  # names of a short list, where none is near


def named_function(path: str, key: str, known: Collection[str] = ()) -> Callable[..., Any]:
    """Import `package.module:name`; `key` is the setting, `known` what it might name instead.

    Raises ConfigError.
    """
    module, _, name = path.partition(":")
    if not name:
        instead = f"; known: {', '.join(known)}, or" if known else "; give"
        raise ConfigError(f"{key}: {path!r} is unknown{instead} package.module:function")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except (ImportError, ValueError) as error:  # a name with dots in the wrong places
        raise ConfigError(f"{key}: {path}: {error}") from None
    if not callable(found):
        raise ConfigError(f"{key}: {path} names no function")
    return cast("Callable[..., Any]", found)


def hint(name: str, known: Collection[str]) -> str:
    """`; did you mean x?`, or what there is where that is little, or nothing."""
    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.6):
        return f"; did you mean {near[0]}?"
    if 0 < len(known) <= SHOWN:
        return f"; known: {', '.join(sorted(known))}"
    return ""


def no_model_text(model: str | Path) -> str:
    """What to say of a place that is no model directory; it may be meant as a name on a hub."""
    text = f"{str(model)[:200]} is no model directory: it has no config.json"
    if HUB_NAME.fullmatch(str(model)) and not Path(model).parent.exists():
        text += f"; nothing is downloaded here: `hf download {model} --local-dir DIR` does"
    return text


def keys_at(model: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """The keys that may stand below `path` of a configuration."""
    models: list[type[BaseModel]] = [model]
    for part in path:
        fields = [m.model_fields[str(part)] for m in models if str(part) in m.model_fields]
        if fields:  # else an index, a key of a mapping, or the tag of a union: one model further on
            models = [found for field in fields for found in models_of(field.annotation)]
    return list(dict.fromkeys(name for m in models for name in m.model_fields))


def models_of(annotation: Any) -> Iterable[type[BaseModel]]:
    """The pydantic models inside an annotation such as `dict[str, X] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_of(argument)
