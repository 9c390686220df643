"""What importers have in common: two documents, and how one flag or key adds to them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from sluice.config import ConfigError, parse_config
from sluice.config_faults import examine_values
from sluice.importers.shell import read_script_file, with_sourced
from sluice.imports import import_named
from sluice.init import write_new
from sluice.loop.config import RunConfig
from sluice.stack import CONFIGS, Kind, UpConfig
from sluice.yaml_values import load_yaml

Values = list[str]
UNKNOWN = "REPLACE-ME"
REFUSED = ": is refused by "
NO_MODEL = "is no model directory"
IMPORTED: dict[
    Kind, dict[str, Any]
] = {  # kinds that are written, and what `sluice up` adds to each
    "trainer": {"store": "store"},
    "rollout": {"store": "store", "router": "127.0.0.1:1", "engine_id": "engine"},
}
MOST_DEVICES = 1024  # of one host
Put = Callable[["Imported", Values], None]


@dataclass(frozen=True)
class Flag:
    """`ours`: the key it becomes; empty where `why` says what to do, or why there is nothing."""

    ours: str = ""
    why: str = ""
    put: Put | None = None


LONG_PROMPTS = (
    "a longer prompt is neither left out nor cut here, and leaves less to its answer: leave such "
    "rows out of the file"
)


class NotCarriedError(Exception):
    """A value has no counterpart; the message says what to do."""


@dataclass
class Imported:
    """The two documents as they grow."""

    run: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    rollout: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # of several flags together
    left: list[str] = field(default_factory=list)  # what could not be carried, for people
    said: list[tuple[str, str]] = field(default_factory=list)  # what a flag becomes, and itself

    def note(self, flag: Flag, said: str) -> None:
        """Remember of which words of the script a key came."""
        self.said.append((flag.ours, said))

    def document(self, name: str) -> dict[str, Any]:
        return {"run": self.run, "trainer": self.trainer, "rollout": self.rollout}[name]


def set_at(tree: dict[str, Any], path: str, value: Any) -> None:
    *above, last = path.split(".")
    for name in above:
        tree = tree.setdefault(name, {})
    tree[last] = value


def only(values: Values) -> str:
    if len(values) != 1:
        raise NotCarriedError(f"takes one value, has {len(values)}")
    return values[0]


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise NotCarriedError(f"{text!r} is no whole number") from None


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise NotCarriedError(f"{text!r} is no number") from None
    if not math.isfinite(value):
        raise NotCarriedError(f"{text!r} is not finite")
    return value


def share(text: str) -> float:
    value = number(text)
    if not 0 <= value <= 1:
        raise NotCarriedError(f"{text!r} is not from 0 to 1")
    return value


def plain_text(text: str) -> str:
    if "$" in text:
        raise NotCarriedError(f"{text!r} is known to the shell alone")
    return text


def key_of(document: str, path: str, read: Callable[[str], Any], why: str = "") -> Flag:
    def put(into: Imported, values: Values) -> None:
        set_at(into.document(document), path, read(only(values)))

    return Flag(f"{document}: {path}", why, put)


def set_true(document: str, path: str) -> Flag:
    def put(into: Imported, _: Values) -> None:
        set_at(into.document(document), path, True)

    return Flag(f"{document}: {path}", "", put)


def fact(name: str, read: Callable[[str], Any], ours: str, why: str = "") -> Flag:
    def put(into: Imported, values: Values) -> None:
        into.facts[name] = read(only(values))

    return Flag(ours, why, put)


def switch(name: str, ours: str, why: str = "") -> Flag:
    def put(into: Imported, values: Values) -> None:
        if values:
            raise NotCarriedError("takes no value")
        into.facts[name] = True

    return Flag(ours, why, put)


def choice(name: str, known: Mapping[str, Any], ours: str) -> Flag:
    def put(into: Imported, values: Values) -> None:
        value = only(values)
        if value not in known:
            raise NotCarriedError(f"{value!r} is not there; known: {', '.join(known)}")
        into.facts[name] = known[value]

    return Flag(ours, f"{', '.join(known)}", put)


def unneeded(why: str) -> Flag:
    return Flag("", f"not needed: {why}")


def absent(why: str) -> Flag:
    return Flag("", f"not there: {why}")


def by_hand(why: str) -> Flag:
    return Flag("", f"by hand: {why}")


def only_zero(why: str) -> Flag:
    """What is not needed at 0, and not there otherwise."""

    def put(_: Imported, values: Values) -> None:
        if any(map(number, values)):
            raise NotCarriedError(f"{', '.join(values)}: {why}")

    return Flag("", f"not needed at 0: {why}", put)


def untaken(why: str) -> Flag:
    """A switch or a value that is not there, of a family that is not needed."""

    def put(_: Imported, values: Values) -> None:
        raise NotCarriedError(why)

    return Flag("", f"not there: {why}", put)


def plain_value(text: str) -> Any:
    """A number or a truth where the text is one."""
    value = read_yaml(text)
    return value if isinstance(value, bool | int | float) else text


def read_yaml(text: str) -> Any:
    """What a text is in YAML; itself where it is none, has no end, or names a day that is none."""
    try:
        return load_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def of_critic(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """A trainer's settings without those that a critic has no use of: no engine serves it, it
    predicts no tokens, and is compared with nothing."""
    critic = {n: v for n, v in trainer.items() if n not in ("lora", "publish", "reference_model")}
    if "megatron" in critic:
        own = critic["megatron"].items()
        critic["megatron"] = {n: v for n, v in own if n != "mtp_loss_scaling_factor"}
    return critic


def give_devices(
    into: Imported, entries: dict[str, Any], trained: int, engines: int, *, is_shared: bool
) -> None:
    """Give trainers the first devices of one host, and engines the same or those behind."""
    if max(trained, engines) > MOST_DEVICES:
        into.left.append(f"devices: by hand: one host has no more than {MOST_DEVICES}")
        return
    for name in ("trainer", "critic"):
        if name in entries:
            entries[name]["devices"] = list(range(trained))
    first = 0 if is_shared else trained
    entries["rollout"]["devices"] = list(range(first, first + engines))


def check_documents(into: Imported, services: dict[str, Any]) -> None:
    """Say what keeps the files from loading, and what their services would refuse."""
    try:
        parse_config(UpConfig, services)
        parse_config(RunConfig, into.run)
    except ConfigError as error:
        into.left.append(f"the files do not load as they are: {error}")
    told = set[str]()  # once for a trainer and its critic
    for name, entry in services["services"].items():
        for fault in _faults(entry["kind"], entry.get("config", {})):
            if fault not in told:
                told.add(fault)
                into.left.append(f"{_said_of(into, fault, name)}{REFUSED}{name}: {fault}")


def _faults(kind: Kind, config: Mapping[str, Any]) -> list[str]:
    """What a service says of its settings; but for models, which may be on another machine."""
    if kind not in IMPORTED:
        return []
    try:
        faults = examine_values(import_named(CONFIGS[kind]), {**IMPORTED[kind], **config}).faults
    except OSError:
        return []  # of a model that is not here
    return [fault for fault in faults if NO_MODEL not in fault]


def _said_of(into: Imported, fault: str, name: str) -> str:
    """The flags that a refused key came of, as the script has them."""
    key = re.sub(r"(\.\d+)+$", "", fault.partition(":")[0])  # of a list the flag is the whole
    found = [said for ours, said in into.said if re.search(rf"(?<![\w.]){re.escape(key)}\b", ours)]
    return ", ".join(found) or f"{name} in services.yaml"


class _Plain(yaml.SafeDumper):
    """Writes what stands in two places twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def with_line(told: str, script: str, text: str) -> str:
    """What is refused, behind the line of the script that has it; of a sourced one, as it is."""
    name, is_refused, _ = told.partition(REFUSED)
    word = re.split(r"[ =]", name)[0]
    for number, line in enumerate(text.splitlines() if is_refused else (), 1):
        is_code = not line.lstrip().startswith("#")
        if is_code and re.search(rf"(?<![\w.-]){re.escape(word)}(?![\w.-])", line):
            return f"{script}:{number}: {told}"
    return told


Importer = Callable[
    [str, Path, Mapping[str, str], Path], tuple[dict[str, Any], dict[str, Any], list[str]]
]


def write_imported(command: str, importer: Importer, arguments: Sequence[str]) -> None:
    """Write run.yaml and services.yaml of a script; list what could not be carried.

    Raises ConfigError.
    """
    from sluice.run_commands import leading, take_value

    rest = list(arguments)
    output = Path(take_value(rest, "-o") or ".")
    places, flags = leading(rest)
    if len(places) != 1 or flags:
        usage = f"sluice {command} SCRIPT.sh [-o DIR]"
        raise ConfigError(f"{command} takes one SCRIPT.sh: {usage}")
    script = Path(places[0])
    own = read_script_file(script, command)
    text, missing = with_sourced(own, script.parent, os.environ, command)
    run, services, left = importer(text, Path("runs") / script.stem, os.environ, script.parent)
    left = [*missing, *(with_line(line, script.name, own) for line in left)]
    write_documents(command, script.name, output, (run, services), left)


def write_documents(
    command: str,
    source: str,
    output: Path,
    documents: tuple[dict[str, Any], dict[str, Any]],
    left: Sequence[str],
) -> None:
    """Write run.yaml and services.yaml, below what is left to do, and print that.

    Raises ConfigError.
    """
    from sluice.run_commands import plain_lines

    run, services = documents
    head = f"# From {plain_lines(source)} by `sluice {command}`; what is left to do:\n"
    head += "".join(f"#   {plain_lines(line)}\n" for line in left)
    files = {"services.yaml": services, "run.yaml": run}
    write_new(
        output,
        {
            name: head + yaml.dump(each, Dumper=_Plain, sort_keys=False)
            for name, each in files.items()
        },
    )
    told = [*left, f"wrote {output / 'services.yaml'} and {output / 'run.yaml'}"]
    Console().print(plain_lines("\n".join(told)), highlight=False, markup=False, soft_wrap=True)
