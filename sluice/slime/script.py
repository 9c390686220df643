"""Reads a run script of slime: the arguments of its training command, without running anything."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from sluice.config import ConfigError

LARGEST_BYTES = 1 << 20

Values = list[str]

_ASSIGNMENT = re.compile(
    r"^([ \t]*)(?:export[ \t]+)?([A-Za-z_]\w*)="
    r"""("[^"\n]*"|'[^'\n]*'|[^\s#;(][^\s;]*|)[ \t]*(?:\#.*)?$""",
    re.MULTILINE,
)
_ARRAY = re.compile(
    r"^([ \t]*)([A-Za-z_]\w*)(\+?)=\((?![^\n]*\)\s*$)(.*?)^\s*\)", re.MULTILINE | re.DOTALL
)
_ONE_LINE_ARRAY = re.compile(r"^([ \t]*)([A-Za-z_]\w*)(\+?)=\(([^()\n]*)\)\s*$", re.MULTILINE)
_REFERENCE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
_EXPANSION = re.compile(r"\$\{(\w+)\[@\]\}")
_TRAIN = re.compile(r"\btrain(_async)?\.py\b[\"']?")
_SOURCED = re.compile(r"^[ \t]*(?:source|\.)[ \t]+(\S[^\n]*?)[ \t]*$", re.MULTILINE)
_OUTSIDE = re.compile(r"\d*>.*|&>.*|<.*|&&?|\|\|?|;")  # what follows is no argument
_QUOTED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*\"""")
_SIGNS = {ord(sign): 0xE000 + place for place, sign in enumerate("<>&|;")}  # where quoted, text
_TEXTS = {place: sign for sign, place in _SIGNS.items()}
DEPTH = 3  # of files that are put in for one another


def read_script(text: str, environment: Mapping[str, str]) -> list[tuple[str, Values]]:
    """Flags and their values as the training command would get them. Raises ConfigError.

    Arrays are put in where the command names them, and variables that the script sets, gives a
    default, or that `environment` has are replaced; nothing is run. What stands in a branch counts
    as well: arrays of several add up, and a variable of `environment` stays as it is.
    """
    plain = text.replace("\\\n", " ")
    variables = dict(environment)

    def replaced(words: str) -> str:
        for _ in range(4):
            after = _REFERENCE.sub(lambda m: _value(m, variables), words)
            if after == words:
                break
            words = after
        return words

    for indent, name, value in _ASSIGNMENT.findall(plain):
        known = replaced(value.strip("\"'"))
        if "$" not in known and "`" not in known and not (indent and environment.get(name)):
            variables[name] = known
    arrays: dict[str, str] = {}
    for found in sorted(
        (*_ONE_LINE_ARRAY.finditer(text), *_ARRAY.finditer(text)), key=lambda found: found.start()
    ):
        before = arrays.get(found[2], "") if found[1] or found[3] else ""
        arrays[found[2]] = f"{before}\n{found[4]}"
    command = training_command(plain)
    if command is None:
        words = [word for array in arrays.values() for word in _words(replaced(array))]
    else:
        words = []
        line = _QUOTED.sub(lambda quoted: quoted[0].translate(_SIGNS), replaced(command[0]))
        for word in _words(line):
            if _OUTSIDE.fullmatch(word):
                break
            word = word.translate(_TEXTS)
            if match := _EXPANSION.fullmatch(word):
                words += _words(replaced(arrays.get(match[1], "")))
            else:
                words.append(word)
    if not any(word.startswith("--") for word in words):
        raise ConfigError("import-slime: the script has no command train.py and no arguments")
    flags: list[tuple[str, Values]] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            flags.append((name, [value] if equals else []))
        elif flags:
            flags[-1][1].append(word)
    return flags


def training_command(plain: str) -> tuple[str, bool] | None:
    """What stands behind the name of the program, and whether that is train_async.py."""
    for line in plain.splitlines():
        if (found := _TRAIN.search(line)) and not line.lstrip().startswith("#"):
            return line[found.end() :], bool(found[1])
    return None


def _value(match: re.Match[str], variables: Mapping[str, str]) -> str:
    value = variables.get(match[1] or match[3], "")
    if value:
        return value
    return match[0] if match[2] is None else match[2].strip("\"'")


def _words(text: str) -> list[str]:
    """The words of a shell; a substitution such as `$(seq 2)` is one."""
    try:
        cut = shlex.split(text, comments=True)
    except ValueError as error:
        raise ConfigError(f"import-slime: the script is no text of a shell: {error}") from None
    words: list[str] = []
    for word in cut:
        if words and "$(" in words[-1] and words[-1].count("(") > words[-1].count(")"):
            words[-1] += f" {word}"
        else:
            words.append(word)
    return words


def with_sourced(
    text: str, folder: Path, environment: Mapping[str, str], depth: int = DEPTH
) -> tuple[str, list[str]]:
    """The script with the files that it takes in, and those that are not there, a line each.

    A variable of their names that `environment` has not is taken for the folder of the script.
    """
    left: list[str] = []

    def taken_in(match: re.Match[str]) -> str:
        name = match[1].strip("\"'")
        place = re.sub(r"^\$\(.*\)", str(folder), name)
        place = _REFERENCE.sub(lambda m: environment.get(m[1] or m[3]) or str(folder), place)
        path = folder / place
        if "\0" in place or depth == 0 or not os.path.isfile(path):
            left.append(f"source {name}: is not there; what it says is not carried")
            return ""
        inner, more = with_sourced(read_file(path), path.parent, environment, depth - 1)
        left.extend(more)
        return inner

    return _SOURCED.sub(taken_in, text), left


def read_file(script: Path) -> str:
    try:
        with script.open("rb") as file:
            data = file.read(LARGEST_BYTES + 1)
        if len(data) > LARGEST_BYTES:
            raise ValueError("too large")
        return data.decode()
    except OSError as error:
        raise ConfigError(f"import-slime: {str(script)[:200]}: {error.strerror}") from None
    except ValueError:  # a name with NUL, bytes that are no text, too many of them
        raise ConfigError(f"import-slime: {str(script)[:200]!r} is no script") from None
