"""Reads a shell script as far as the arguments of one command need it, without running anything."""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from sluice.config import ConfigError

LARGEST_BYTES = 1 << 20
LARGEST_NUMBER = 1 << 62  # of a shell's sums
LONGEST_SUM = 1000  # characters
LONGEST_VALUE = 1 << 16  # of a variable
LARGEST_GROWTH = 1 << 20  # characters of all values that are put in
DEPTH = 3  # of files that are put in for one another
MOST_FILES = 64

_INSIDE = r"(?:[^()\n]|\((?:[^()\n]|\([^()\n]*\))*\))*"  # of a sum, with two levels of its own
_SUM = re.compile(rf"\$\(\(({_INSIDE})\)\)")
_ASSIGNMENT = re.compile(
    r"^(?P<indent>[ \t]*)(?:(?:export|readonly|local|declare)[ \t]+(?:-\w+[ \t]+)*)?"
    r"(?P<name>[A-Za-z_]\w*)(?P<adds>\+?)="
    rf"""(?P<value>"[^"]*"|'[^']*'|\$\(\({_INSIDE}\)\)|[^\s#;(][^\s;]*|)[ \t]*(?:[#;].*)?$""",
    re.MULTILINE,
)
_DEFAULT = re.compile(
    r"^[ \t]*:[ \t]+[\"']?\$\{(?P<default>[A-Za-z_]\w*):?=(?P<value>[^{}\n]*)\}", re.MULTILINE
)
_COUNTED = re.compile(  # a variable gets a value that nothing here tells
    r"^[ \t]*(?:let[ \t]+[\"']?|unset[ \t]+|printf[ \t]+-v[ \t]+|for[ \t]+"
    r"|read[ \t]+(?:-\w+[ \t]+)*|\(\([ \t]*(?=\w+[ \t]*(?:[-+*/%]?=[^=]|\+\+|--)))"
    r"(?P<counted>[A-Za-z_]\w*)",
    re.MULTILINE,
)
_ASIDE = re.compile(  # behind something else in its line
    r"^[ \t]*[^\s#][^\n]*?(?:\bthen|\bdo|\belse|&&|\|\||;)[ \t]+(?:export[ \t]+)?"
    r"(?P<aside>[A-Za-z_]\w*)\+?=(?!\()",
    re.MULTILINE,
)
_SETTINGS = (_ASSIGNMENT, _DEFAULT, _COUNTED, _ASIDE)
_NAMED = ("name", "default", "counted", "aside")
_ARRAY = re.compile(
    r"(?:^|(?<=[;&|]))(?P<indent>[ \t]*(?:(?:then|do|else)[ \t]+)?)"
    r"(?:(?:export|readonly|local|declare)[ \t]+(?:-\w+[ \t]+)*)?"
    r"(?P<name>[A-Za-z_]\w*)(?P<adds>\+?)=\(",
    re.MULTILINE,
)
_PIECE = re.compile(  # of the body of an array
    r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|(?<![^\s(])\#[^\n]*|(?P<bracket>[()])|[^\\'"#()]+|.""",
    re.DOTALL,
)
_REFERENCE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
_EXPANSION = re.compile(r"\$\{(\w+)\[[@*]\]\}")
_OWN_ARGUMENTS = re.compile(r"\$(?:[@*]|\{[@*][^{}]*\})")  # of the script: none
_SOURCED = re.compile(r"^[ \t]*(?:source|\.)[ \t]+(\S[^\n]*)", re.MULTILINE)
_OUTSIDE = re.compile(r"\d*>.*|&>.*|<.*|&&?|\|\|?|;")  # what follows is no argument
_NAME = re.compile(r"[A-Za-z_]\w*")
_QUOTED = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*\"""")
_SIGNS = {ord(sign): 0xE000 + place for place, sign in enumerate("<>&|;")}  # where quoted, text
_TEXTS = {place: sign for sign, place in _SIGNS.items()}
_HASH = re.compile(  # within a word, where no comment begins; lines that go on end in none
    r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|(?<!\S)\#[^\n]*|(?P<inner>\#)|(?P<joint>\\\n)"""
)
_INNER = "\ue010"
_OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
}


class Shell:
    """Variables and arrays that a script sets, or gives a default, or that `environment` has.

    What stands in a branch counts as well: arrays of several add up, and a variable of
    `environment` stays as it is. Where another value is as likely, `doubts` of the words of a
    command say so. `command` is the importer's, of whose refusals it is a part; `until`, where the
    command whose words are asked for begins: what is set behind it counts for new names alone.
    Raises ConfigError for values that grow without end, here and when words are asked for.
    """

    def __init__(
        self, text: str, environment: Mapping[str, str], command: str, until: int | None = None
    ) -> None:
        self._command, self._environment = command, environment
        self._text = text
        self._grown = 0
        self._variables = dict(environment)
        self._set = set[str]()  # by the script
        self._used = set[str]()  # since it was emptied
        self._doubted = dict[str, str]()  # variables, and what is to be said of their values
        before, behind = text[:until], text[until:] if until is not None else ""
        self._arrays: dict[str, list[str]] = {}
        self._read(before)
        earlier = set(self._arrays), set(self._set)
        self._read(behind, *earlier)

    def _read(
        self, text: str, arrays: Collection[str] = (), variables: Collection[str] = ()
    ) -> None:
        """Take in what a part of the script sets, but for those names."""
        joined = text.replace("\\\n", "  ")  # as long, so that places are those of the text
        found = [(m.start(m.lastgroup or 0), m, "") for s in _SETTINGS for m in s.finditer(joined)]
        found += [(match.start(), match, body) for match, body in _read_arrays(text)]
        for _, match, body in sorted(found, key=lambda each: each[0]):
            names = match.groupdict()
            name = next(names[key] for key in _NAMED if names.get(key))
            if match.re is not _ARRAY:
                if name not in variables:
                    self._take(name, names)
            elif name not in arrays:
                is_aside = text.endswith((";", "&", "|"), 0, match.start())
                is_branch = bool(names["indent"]) or is_aside
                self._take_array(name, body, adds=bool(names["adds"]), is_branch=is_branch)

    def _take_array(self, name: str, body: str, *, adds: bool, is_branch: bool) -> None:
        """With the values that variables have where it stands, as a shell does."""
        more = re.sub(rf'"?\$\{{{name}\[[@*]\]\}}"?', "", body)  # A=("${A[@]}" b)
        adds = adds or more != body
        if not adds and not is_branch:
            self._arrays[name] = []
            self._doubted.pop(name, None)
        elif not adds and any(each.strip() for each in self._arrays.get(name, ())):
            self._doubted[name] = f"{name}: is set in several branches; all of them count here"
        self._used.clear()
        self._arrays.setdefault(name, []).append(self.replaced(more))
        if doubts := self.doubts:
            self._doubted.setdefault(name, doubts[0])

    def _take(self, name: str, names: Mapping[str, str | None]) -> None:
        if names.get("counted"):
            self._variables.pop(name, None)
            return
        if names.get("aside"):
            self._doubted[name] = (
                f"{name}: is set behind a condition or another command too, which is not read"
            )
            return
        if names.get("default") and self._variables.get(name):
            return
        self._used.clear()
        value = self.replaced((names["value"] or "").strip("\"'"))
        known = self._variables.get(name, "") + value if names.get("adds") else value
        if not _is_text(known, name) or (names.get("indent") and self._environment.get(name)):
            return
        doubts = {self._doubted[each] for each in self._used if each in self._doubted}
        if names.get("indent") and name in self._set and known != self._variables.get(name):
            doubts.add(f"{name}: is set in several branches; the last of them counts here")
        elif names.get("adds") and name in self._doubted:
            doubts.add(self._doubted[name])
        self._doubted.pop(name, None)
        if doubts:
            self._doubted[name] = min(doubts)
        self._variables[name] = known
        self._set.add(name)

    @property
    def doubts(self) -> list[str]:
        """What is to be said of the words that were asked for last, a line each."""
        return sorted({self._doubted[name] for name in self._used if name in self._doubted})

    def replaced(self, words: str) -> str:
        """The text with the values of the variables, and of the sums, that are known."""
        for _ in range(4):
            after = _SUM.sub(self._sum, _REFERENCE.sub(self._value, words))
            if after == words:
                break
            words = after
        return words

    def words(self, command: str) -> list[str]:
        """The arguments of a command, arrays put in, up to where another one begins."""
        words: list[str] = []
        self._used.clear()
        line = _QUOTED.sub(lambda quoted: quoted[0].translate(_SIGNS), self.replaced(command))
        line = line.replace(";", " ; ")
        for word in self._cut(line):
            if _OUTSIDE.fullmatch(word):
                break
            words += self._expanded(word.translate(_TEXTS))
        return words

    def _expanded(self, word: str, depth: int = DEPTH) -> list[str]:
        """A word, or those of the array that it stands for."""
        match = _EXPANSION.fullmatch(word)
        if match is None:
            return [] if _OWN_ARGUMENTS.fullmatch(word) else [word]
        name = match[1]
        self._used.add(name)
        if name not in self._arrays:
            if known := self._variables.get(name):
                return self._cut(known)
            self._arrays[name] = []
            if self._is_named(name):
                self._doubted[name] = f"{name}: is an array that is set in no way that is read here"
        if depth == 0:
            return [word]
        inner = self._cut(self._array(name))
        return [more for each in inner for more in self._expanded(each, depth - 1)]

    def _is_named(self, name: str) -> bool:
        """Whether the script names a variable otherwise than to read all of its array."""
        for found in re.finditer(rf"(?<!\{{)\b{name}\b(?!\[[@*])", self._text):
            line = self._text[self._text.rfind("\n", 0, found.start()) + 1 : found.start()]
            if not line.lstrip().startswith("#"):
                return True
        return False

    def array_words(self) -> Iterator[str]:
        """The words of all arrays, for a script without the command."""
        for name in self._arrays:
            yield from self._expanded(f"${{{name}[@]}}")

    def _array(self, name: str) -> str:
        array = "\n".join(self._arrays.get(name, ()))
        self._grow(array)
        return array

    def _grow(self, value: str) -> None:
        self._grown += len(value)
        if self._grown > LARGEST_GROWTH:
            raise ConfigError(
                f"{self._command}: the values of the script's variables grow too long"
            )

    def _value(self, match: re.Match[str]) -> str:
        name = match[1] or match[3]
        self._used.add(name)
        if value := self._variables.get(name, ""):
            self._grow(value)
            return value
        return match[0] if match[2] is None else match[2].strip("\"'")

    def _sum(self, match: re.Match[str]) -> str:
        """The value of a sum of whole numbers; itself where that is not known."""
        text = _NAME.sub(lambda name: self._variables.get(name[0], name[0]), match[1])
        if len(text) > LONGEST_SUM or "//" in text:
            return match[0]
        try:
            return str(_evaluate(ast.parse(text.strip().replace("/", "//"), mode="eval").body))
        except (ValueError, SyntaxError, ArithmeticError, RecursionError):
            return match[0]

    def _cut(self, text: str) -> list[str]:
        """The words of a shell; a substitution such as `$(seq 2)` is one."""
        try:
            plain = _HASH.sub(_plain, self.replaced(text))
            cut = shlex.split(plain, comments=True)
        except ValueError as error:
            detail = f"the script is no text of a shell: {error}"
            raise ConfigError(f"{self._command}: {detail}") from None
        words: list[list[str]] = []
        depth = 0  # of brackets of a substitution that are not closed yet
        for word in cut:
            if depth > 0:
                words[-1].append(word)
            else:
                words.append([word])
            if depth > 0 or "$(" in word:
                depth += word.count("(") - word.count(")")
            else:
                depth = 0
        return [" ".join(parts).replace(_INNER, "#") for parts in words]


def _plain(found: re.Match[str]) -> str:
    return _INNER if found["inner"] else "" if found["joint"] else found[0]


def _read_arrays(text: str) -> Iterator[tuple[re.Match[str], str]]:
    """Arrays in the order in which they begin, and their bodies; one without an end is the last."""
    place = 0
    while found := _ARRAY.search(text, place):
        place = found.end()
        line = text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
        if line.lstrip().startswith("#"):
            continue
        depth = 1
        for piece in _PIECE.finditer(text, place):
            depth += {"(": 1, ")": -1}.get(piece["bracket"] or "", 0)
            if depth == 0:
                yield found, text[place : piece.start()]
                place = piece.end()
                break
        else:
            return


def _is_text(value: str, name: str) -> bool:
    """Whether a value of a variable is one of text, with others in it at most."""
    others = {found[1] or found[3] for found in _REFERENCE.finditer(value)}
    return (
        len(value) <= LONGEST_VALUE
        and "$(" not in value
        and "`" not in value
        and name not in others
    )


def joined_lines(text: str) -> str:
    """The text with lines that a backslash goes on in one."""
    return text.replace("\\\n", " ")


def command_place(text: str, program: re.Pattern[str]) -> int | None:
    """Where a command stands in a script, None where it is in a function, a loop or a branch."""
    for found in program.finditer(text):
        line = text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
        if not line.lstrip().startswith("#"):
            return None if line[:1].isspace() else found.start()
    return None


def _evaluate(node: ast.AST) -> int:
    """Raises ValueError for more than sums of whole numbers, or for too large ones."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_evaluate(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    else:
        raise ValueError("no sum")
    if abs(value) > LARGEST_NUMBER:
        raise ValueError("too large")
    return value


def with_sourced(
    text: str,
    folder: Path,
    environment: Mapping[str, str],
    command: str,
    depth: int = DEPTH,
    taken: list[Path] | None = None,
) -> tuple[str, list[str]]:
    """The script with the files that it takes in, and those that are not there, a line each.

    A variable of their names that `environment` has not is taken for the folder of the script.
    Raises ConfigError for more than `MOST_FILES`, which `taken` counts.
    """
    left: list[str] = []
    taken = [] if taken is None else taken

    def taken_in(match: re.Match[str]) -> str:
        name = match[1].strip().strip("\"'")
        place = re.sub(r"^\$\(.*\)", str(folder), name)
        place = _REFERENCE.sub(lambda m: environment.get(m[1] or m[3]) or str(folder), place)
        path = folder / place
        if "\0" in place or depth == 0 or not os.path.isfile(path):
            left.append(f"source {name}: is not there; what it says is not carried")
            return ""
        taken.append(path)
        if len(taken) > MOST_FILES:
            raise ConfigError(f"{command}: the script takes in more than {MOST_FILES} files")
        inner, more = with_sourced(
            read_script_file(path, command), path.parent, environment, command, depth - 1, taken
        )
        left.extend(more)
        return inner

    return _SOURCED.sub(taken_in, text), left


def read_script_file(script: Path, command: str) -> str:
    """Raises ConfigError for what cannot be read, or is no text."""
    try:
        with script.open("rb") as file:
            data = file.read(LARGEST_BYTES + 1)
        if len(data) > LARGEST_BYTES:
            raise ValueError("too large")
        return data.decode()
    except OSError as error:
        raise ConfigError(f"{command}: {str(script)[:200]}: {error.strerror}") from None
    except ValueError:  # a name with NUL, bytes that are no text, too many of them
        raise ConfigError(f"{command}: {str(script)[:200]!r} is no script") from None
