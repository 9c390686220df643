"""Files of settings that a command of verl names, `--config-name`, as keys and their texts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sluice.config import ConfigError
from sluice.importers.shell import read_script_file
from sluice.yaml_values import load_yaml

COMMAND = "import-verl"
OWN = re.compile(
    r"(?:one_step_off_|fully_async_|transfer_queue_)?ppo(?:_megatron|_veomni)?_trainer"
)
PARTS = (  # of verl's own defaults, besides those that begin with dp_, megatron_ or veomni_
    *("fsdp", "megatron", "veomni", "rollout", "hf_model", "legacy_data", "profiler"),
    *("reward_manager", "rollout_correction", "null", "None"),
)
DEPTH = 4  # of files whose defaults name one another
_OPTIONS = {
    **dict.fromkeys(("--config-name", "-cn"), "name"),
    **dict.fromkeys(("--config-path", "-cp"), "path"),
}
_VARIABLE = re.compile(r"\$\{?\w+\}?|\$\([^()]*\)")


@dataclass
class ConfigFile:
    """What a file says. `is_megatron`: by its name, or by a default of it."""

    values: dict[str, str] = field(default_factory=dict)
    is_megatron: bool = False
    left: list[str] = field(default_factory=list)


def take_options(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """`name` and `path` of the file that a command names, and its other words."""
    found, rest = dict[str, str](), list[str]()
    remaining = iter(words)
    for word in remaining:
        option, equals, value = word.partition("=")
        if option in _OPTIONS:
            found[_OPTIONS[option]] = value if equals else next(remaining, "")
        else:
            rest.append(word)
    return found, rest


def read_config(options: Mapping[str, str], folder: Path | None) -> ConfigFile:
    """The file that `take_options` names, looked for from `folder`, the script's, upwards.

    verl's own are known, and are not read. Raises ConfigError for a file that is no YAML.
    """
    name = options.get("name", "").removesuffix(".yaml")
    told = ConfigFile(is_megatron="megatron" in name)
    path = options.get("path", "")
    is_own = OWN.fullmatch(name) and not path.startswith(("/", "$"))  # else beside verl's program
    if not name or is_own:
        return told
    place = None if folder is None else _find(name, path, folder)
    if place is not None:
        _read(place, told, DEPTH)
    elif not OWN.fullmatch(name):
        told.left.append(
            f"--config-name {name[:200]}: its file is not found from the script's folder upwards; "
            "what it says is not carried"
        )
    return told


def _find(name: str, path: str, folder: Path) -> Path | None:
    """Variables of a path stand for a folder above it."""
    known = _VARIABLE.sub("", path)
    parts = known if known.startswith("/") and path.startswith("/") else known.lstrip("/")
    if "$" in name:
        return None
    absolute = folder.absolute()
    above = (absolute, *absolute.parents)
    places = [base / more / parts for base in above for more in ("", "verl/trainer")]
    files = (each / f"{name}.yaml" for each in places)
    return next((file for file in files if os.path.isfile(file)), None)  # also of no name of a file


def _read(place: Path, into: ConfigFile, depth: int) -> None:
    text = read_script_file(place, COMMAND)
    try:
        document = load_yaml(text)
        own = dict(_flat(document)) if isinstance(document, dict) else {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{COMMAND}: {place} is no YAML: {reason}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{COMMAND}: {place} is no object")
    defaults = document.get("defaults", [])
    defaults = list(defaults) if isinstance(defaults, list) else []
    if "_self_" not in defaults:
        defaults.append("_self_")
    for entry in defaults:
        if entry == "_self_":
            into.values |= own
        else:
            _take_default(entry, place, into, depth)


def _take_default(entry: Any, place: Path, into: ConfigFile, depth: int) -> None:
    names = [str(name) for name in entry.values()] if isinstance(entry, dict) else [str(entry)]
    into.is_megatron |= any("megatron" in name for name in names)
    for name in names:
        beside = place.parent / f"{name.removesuffix('.yaml')}.yaml"
        if OWN.fullmatch(name) or name in PARTS or name.startswith(("dp_", "megatron_", "veomni_")):
            continue
        if isinstance(entry, dict) or depth == 0 or not os.path.isfile(beside):
            into.left.append(
                f"{place.name}: defaults: {name[:200]}: is not read; what it says is not carried"
            )
        else:
            _read(beside, into, depth - 1)


def _flat(tree: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Keys with points in them, as a command gives them, and their texts."""
    for key, value in tree.items():
        if str(key).startswith("_") or (not above and key in ("defaults", "hydra")):
            continue
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        elif isinstance(value, list):
            yield f"{above}{key}", json.dumps(value, default=str)
        else:
            yield f"{above}{key}", "null" if value is None else str(value)
