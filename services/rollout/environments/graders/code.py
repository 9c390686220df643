"""`code`: runs the program of an answer in a sandbox and judges what comes out, outside of it.

A program never holds what it is compared with: it is asked for values (`assert f(2) == 4` is the
question `f(2)`) or given an input, and 4 stays here. It may forge what it says, not the verdict.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import Field

from services.rollout.environments.environment import (
    Placement,
    Response,
    Reward,
    SettingError,
    Task,
    TaskError,
    TextTokenizer,
)
from services.rollout.environments.graders.grader import Grader, answers_of
from sluice.sandbox.programs import (
    Ending,
    SandboxLimits,
    SandboxUnavailableError,
    check_sandbox,
    run_program,
)

_FENCE = re.compile(r"```(?:python|py|python3)[ \t]*")
_SAME_HASH = 64  # members of a set or dict with one hash: each is compared with the others
_NO_ANSWER = object()
_COMPARISONS = {ast.Eq: operator.eq, ast.Is: operator.is_}


class CodeSettings(SandboxLimits):
    """Limits of a program; `seconds` are for all tests of an answer, the others for each run.

    `all_tests`: reward 1 for all tests and else 0. `parallel` programs run at a time; where a group
    would take more than `group_seconds` that way, each of its answers has less time.
    """

    seconds: float = Field(6.0, gt=0, le=3600)
    cpu_seconds: int = Field(4, ge=1, le=3600)
    all_tests: bool = False
    parallel: int = Field(4, ge=1, le=64)
    group_seconds: float = Field(20.0, gt=0, le=3600)


@dataclass(frozen=True)
class Wanted:
    """A literal, and what a value must be to it: equal, close, or the same of True and False."""

    value: Any
    compare: Callable[[Any, Any], bool]


@dataclass(frozen=True)
class ValueTests:
    """Statements and questions in order, and the value that each question must have."""

    steps: Sequence[Mapping[str, str]]
    wanted: Sequence[Wanted]


@dataclass(frozen=True)
class OutputTests:
    """Inputs, and the output that each must give, but for space at the ends of lines."""

    inputs: Sequence[str]
    wanted: Sequence[str]


@dataclass
class _Found:
    passed: int = 0
    endings: set[Ending] = field(default_factory=set)


class Code(Grader):
    """Rewards the share of a row's tests that a program passes."""

    settings_type = CodeSettings
    placement = Placement.PROCESS
    _settings: CodeSettings

    def __init__(self, settings: CodeSettings, tokenizer: TextTokenizer | None = None) -> None:
        """Raises SettingError where this machine cannot isolate programs."""
        super().__init__(settings)
        try:
            check_sandbox()
        except SandboxUnavailableError as error:
            raise SettingError("reward", f"code runs nothing in the open: {error}") from None

    @classmethod
    def check(cls, task: Task) -> None:
        read_tests(answers_of(task))

    def grade(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        """Raises TaskError for tests that cannot be read, SandboxUnavailableError."""
        tests = read_tests(answers_of(task))
        programs = [find_program(response.text) for response in responses]
        settings = self._settings
        rounds = -(-len(programs) // settings.parallel)
        seconds = min(settings.seconds, settings.group_seconds / max(rounds, 1))
        with ThreadPoolExecutor(settings.parallel) as threads:
            found = list(threads.map(partial(_judge, tests, settings, seconds), programs))
        return [self._reward(one, len(tests.wanted)) for one in found]

    def _reward(self, found: _Found, count: int) -> Reward:
        share, whole = found.passed / count, float(found.passed == count)
        return Reward(
            reward=whole if self._settings.all_tests else share,
            raw_reward=whole,
            scores={"tests_passed": share, "timed_out": float(Ending.TIME in found.endings)},
        )


def _judge(
    tests: ValueTests | OutputTests, limits: SandboxLimits, seconds: float, program: str
) -> _Found:
    if isinstance(tests, ValueTests):
        return _ask(tests, limits.model_copy(update={"seconds": seconds}), program)
    return _feed(tests, limits, seconds, program)


def _ask(tests: ValueTests, limits: SandboxLimits, program: str) -> _Found:
    files = {"program.py": program, "ask.py": _ASK}
    outcome = run_program(files, ["ask.py"], json.dumps(list(tests.steps)), limits)
    given = read_values(outcome.output, len(tests.wanted))
    passed = sum(_holds(value, wanted) for value, wanted in zip(given, tests.wanted, strict=True))
    return _Found(passed, {outcome.ending})


def _feed(tests: OutputTests, limits: SandboxLimits, seconds: float, program: str) -> _Found:
    """Runs the program once an input, until its time is over: the rest is not passed."""
    found, end = _Found(), time.monotonic() + seconds
    for given, wanted in zip(tests.inputs, tests.wanted, strict=True):
        left = end - time.monotonic()
        if left <= 0:
            found.endings.add(Ending.TIME)
            break
        limit = limits.model_copy(update={"seconds": left})
        outcome = run_program({"program.py": program}, ["program.py"], given, limit)
        found.endings.add(outcome.ending)
        is_whole = outcome.ending is Ending.EXIT and not outcome.code
        output = outcome.output.decode(errors="replace")
        found.passed += is_whole and _lines(output) == _lines(wanted)
    return found


def find_program(text: str) -> str:
    """Returns the last fenced block of Python in an answer, or all of it without one."""
    found = text
    block: list[str] | None = None
    for line in text.split("\n"):
        if block is None:
            block = [] if _FENCE.fullmatch(line) else None
        elif line.rstrip(" \t") == "```":
            found, block = "".join(f"{one}\n" for one in block), None
        else:
            block.append(line)
    return found


def read_tests(answers: Sequence[str]) -> ValueTests | OutputTests:
    """Reads a row's tests: Python with assertions, or JSON `[{"input": ..., "output": ...}]`.

    Raises TaskError for tests that are none, or that can only be judged where a program may cheat.
    """
    text = "\n".join(answers)
    if text.lstrip().startswith("["):
        return _read_outputs(text)
    try:
        tree = ast.parse(text)
        steps, wanted = [], []
        for statement in tree.body:
            if not isinstance(statement, ast.Assert):
                _check_counted(statement)
                steps.append({"run": ast.unparse(statement)})
                continue
            question, value = _split(statement)
            steps.append({"ask": question})
            wanted.append(value)
    except TaskError:
        raise
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise TaskError("row.answer", f"is no Python: {error}") from None
    if not wanted:
        raise TaskError("row.answer", "has no assertion")
    return ValueTests(steps, wanted)


def _read_outputs(text: str) -> OutputTests:
    try:
        pairs = json.loads(text)
        inputs, wanted = [pair["input"] for pair in pairs], [pair["output"] for pair in pairs]
        if any(set(pair) != {"input", "output"} for pair in pairs):
            raise ValueError("an object has other keys")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        message = f'is no list of {{"input": ..., "output": ...}}: {type(error).__name__} {error}'
        raise TaskError("row.answer", message) from None
    if not pairs or not all(isinstance(one, str) for one in (*inputs, *wanted)):
        raise TaskError("row.answer", "needs an input and an output at least, all of them texts")
    return OutputTests(inputs, wanted)


def _split(statement: ast.Assert) -> tuple[str, Wanted]:
    """Returns what to ask, and the value it must have."""
    test = statement.test
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        sides = (test.left, test.comparators[0])
        compare = _COMPARISONS.get(type(test.ops[0]))
        if compare is not None:
            for question, value in (sides, sides[::-1]):
                literal = _literal(value)
                if literal is not _NO_ANSWER and _literal(question) is _NO_ANSWER:
                    return ast.unparse(question), Wanted(literal, compare)
    if isinstance(test, ast.Call) and ast.unparse(test.func) in ("isclose", "math.isclose"):
        close = _closeness(test)
        if close is not None:
            return close
    is_negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    called = test.operand if isinstance(test, ast.UnaryOp) and is_negated else test
    if isinstance(called, ast.Call):
        return f"bool({ast.unparse(called)})", Wanted(not is_negated, operator.is_)
    raise TaskError(
        "row.answer",
        f"line {statement.lineno}: an assertion must compare with a literal (`assert f(2) == 4`) "
        "or be a call, with or without `not`: others can only be judged where the program cheats",
    )


def _check_counted(statement: ast.stmt) -> None:
    """Raises TaskError for an assertion in a loop, a function ...: it would judge nothing."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Assert):
            raise TaskError(
                "row.answer",
                f"line {node.lineno}: an assertion inside of another statement would not count: "
                "the program could pass it over; write it out at the margin",
            )


def _closeness(call: ast.Call) -> tuple[str, Wanted] | None:
    """Reads `math.isclose(f(2), 0.5, abs_tol=0.1)`, which is decided here; None for other forms."""
    tolerances = {keyword.arg or "": _literal(keyword.value) for keyword in call.keywords}
    if len(call.args) != 2 or not set(tolerances) <= {"rel_tol", "abs_tol"}:
        return None
    for question, value in (call.args, call.args[::-1]):
        literal = _literal(value)
        if _is_real(literal) and all(_is_real(one) and one >= 0 for one in tolerances.values()):
            return ast.unparse(question), Wanted(literal, partial(_is_close, tolerances))
    return None


def _is_close(tolerances: Mapping[str, float], value: Any, wanted: float) -> bool:
    return _is_real(value) and math.isclose(value, wanted, **tolerances)


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float)


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return _NO_ANSWER


def read_values(output: bytes, count: int) -> list[Any]:
    """Reads `[index, value]` lines of a program, the first for each; it may write anything."""
    found: dict[int, Any] = {}
    for line in output.split(b"\n"):
        try:
            index, value = json.loads(line)
            if type(index) is int and 0 <= index < count and index not in found:
                found[index] = _value(value)
        except (ValueError, TypeError, RecursionError, OverflowError):
            continue
    return [found.get(index, _NO_ANSWER) for index in range(count)]


def _value(coded: Any) -> Any:
    """Reads a value as _ASK writes it: only plain ones, whose comparison runs no foreign code."""
    if not isinstance(coded, list):
        return coded
    kind, held = coded
    if kind == "complex":
        return complex(*held)
    if kind == "bytes":
        return bytes.fromhex(held)
    if kind == "int":
        return int(held, 16)
    items: Iterator[Any] = map(_value, held)
    if kind == "dict":
        keys, values = zip(*zip(items, items, strict=True), strict=True) if held else ((), ())
        return dict(zip(_spread(keys), values, strict=True))
    if kind in ("set", "frozenset"):
        items = iter(_spread(list(items)))
    kinds: dict[Any, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    if kind not in kinds:
        raise ValueError(f"a value of kind {kind}")
    return kinds[kind](items)


def _spread(members: Sequence[Any]) -> Sequence[Any]:
    """Returns the members of a set; ValueError where they would take quadratic time to compare."""
    counts = Counter(map(hash, members))
    if counts and max(counts.values()) > _SAME_HASH:
        raise ValueError("members whose hashes are the same")
    return members


def _holds(value: Any, wanted: Wanted) -> bool:
    try:
        return value is not _NO_ANSWER and wanted.compare(value, wanted.value)
    except (RecursionError, OverflowError):  # nested too deeply; an int no float can be
        return False


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


_ASK = """
import json, os, sys

steps = json.loads(sys.stdin.read())
replies = os.dup(1)
nothing = os.open(os.devnull, os.O_WRONLY)
os.dup2(nothing, 1)


def code(value):
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return ["int", hex(value)]
    if isinstance(value, float):
        return float(value)
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, dict):
        return ["dict", [code(part) for pair in value.items() for part in pair]]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [code(item) for item in value]]
    raise TypeError("no plain value")


names = {"__name__": "program"}
with open("program.py", encoding="utf-8", errors="surrogatepass") as file:
    exec(compile(file.read(), "program.py", "exec"), names)
index = 0
for step in steps:
    try:
        if "run" in step:
            exec(step["run"], names)
            continue
        line = json.dumps([index, code(eval(step["ask"], names))]) + "\\n"
        rest = line.encode()
        while rest:
            rest = rest[os.write(replies, rest):]
    except Exception:
        pass
    index += "ask" in step
"""
