"""What the grader of programs finds right, and that a program cannot forge its verdict."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.environments.environment import (
    Placement,
    Response,
    Reward,
    SettingError,
    Task,
    TaskError,
    TaskRequest,
)
from services.rollout.environments.graders.code import find_program, read_tests, read_values
from services.rollout.environments.graders.grader import check_task, create_grader, place_grader
from services.rollout.environments.prompts import PromptsEnvironment, PromptsSettings
from tests.patience import PATIENCE, growing

pytestmark = pytest.mark.isolation
TESTS = "assert double(2) == 4\nassert double('ab') == 'abab'\nassert 0 == double(0)"
RIGHT = "def double(x):\n    return x + x"


def graded(tests: str, *programs: str, **values: Any) -> list[Reward]:
    values = {"seconds": PATIENCE, "group_seconds": 6 * PATIENCE, "parallel": 2} | values
    grader = create_grader("code", values)
    rewards = grader.grade(Task(answer=tests), [Response(text=text) for text in programs])
    assert isinstance(rewards, list)
    return rewards


def rewarded(tests: str, *programs: str, **values: Any) -> list[float]:
    return [reward.reward for reward in graded(tests, *programs, **values)]


def test_a_program_earns_its_share_of_the_tests() -> None:
    half = "def double(x):\n    return x * 2 if x else None"
    talk = f"Here:\n```python\nno python\n```\nbetter:\n```python\n{RIGHT}\n```\nDone."
    found = graded(TESTS, RIGHT, half, talk, "no python", "")
    assert [reward.reward for reward in found] == [1, pytest.approx(2 / 3), 1, 0, 0]
    assert [reward.raw_reward for reward in found] == [1, 0, 1, 0, 0]
    assert rewarded(TESTS, RIGHT, half, all_tests=True) == [1, 0]


def test_values_of_all_plain_kinds_are_compared_as_python_does() -> None:
    kinds = [None, True, 2**400, -1.5, 1e308, 2j, "\ud800\n", b"\x00\xff", [1, (2, {3: {4}})], {}]
    tests = "\n".join(f"assert f({number}) == {kind!r}" for number, kind in enumerate(kinds))
    program = f"kinds = {kinds!r}\ndef f(number):\n    return kinds[number]"
    assert rewarded(tests, program) == [1]
    near = "assert f() == [1, 2]\nassert f() is None\nassert f()\nassert not f()"
    assert rewarded(near, "def f(): return (1, 2)", "def f(): return [1, 2]") == [0.25, 0.5]


def test_closeness_is_decided_outside() -> None:
    tests = "import math\nassert math.isclose(f(), 0.5, abs_tol=0.1)"
    cheat = "import math\nmath.isclose = lambda *a, **k: True\ndef f(): return 9.0"
    programs = ["def f(): return 0.55", "def f(): return 0.65", cheat, "def f(): return 10**400"]
    assert rewarded(tests, *programs) == [1, 0, 0, 0]


def test_an_input_must_give_its_output() -> None:
    tests = json.dumps([{"input": "1 2\n", "output": "3"}, {"input": "4 5", "output": "9\n"}])
    right = "print(sum(map(int, input().split())), ' ')"
    program_of_one = "print(3)"
    fails = f"{right}\nraise SystemExit(1)"
    assert rewarded(tests, right, program_of_one, fails) == [1, 0.5, 0]


FORGERIES = {
    "ends early": "import os\nos._exit(0)",
    "leaves": "raise SystemExit",
    "says so": 'print(\'[0, ["int", "0x4"]]\')',
    "writes to all descriptors": """
import os
for number in range(64):
    for text in (b'{"exit": 0}\\n', b'[0, true]\\n[1, true]\\n', b'OK 3 passed\\n'):
        try: os.write(number, text)
        except OSError: pass
""",
    "equal to all": """
class Equal:
    __eq__ = lambda self, other: True
    __hash__ = lambda self: 1
    __bool__ = lambda self: True
def double(x): return Equal()
""",
    "an equal int": """
class Equal(int):
    __eq__ = lambda self, other: True
    __hash__ = int.__hash__
def double(x): return Equal(77)
""",
    "other builtins": """
import builtins
builtins.repr = builtins.bool = lambda value: True
def double(x): return 77
""",
    "reads what it is asked": """
import gc, os, sys
seen = repr([sys.argv, dict(os.environ), sys._getframe(1).f_globals, gc.get_objects()])
for name in os.listdir('.'):
    seen += open(name).read()
for number in range(64):
    try:
        os.lseek(number, 0, 0)
        seen += os.read(number, 1 << 20).decode()
    except OSError: pass
def double(x):
    number = int('31337') ** 2
    return number if str(number) in seen else 0
""",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_verdict_cannot_be_forged(name: str) -> None:
    tests = f"assert double(7) == {31337 * 31337}\nassert double(8) == 16"
    (reward,) = graded(tests, FORGERIES[name])
    assert reward.reward == 0
    assert not reward.raw_reward


def test_in_one_process_with_its_tests_a_forgery_passes() -> None:
    """What the test above would miss, were verdicts made where the program is."""
    for name in ("equal to all", "an equal int"):
        names: dict[str, Any] = {}
        exec(FORGERIES[name], names)
        assert eval(f"double(7) == {31337 * 31337}", names)


def test_a_program_that_takes_too_long_is_told_from_a_wrong_one() -> None:
    loop = "while True: pass"
    late, wrong = graded(TESTS, loop, "1 / 0", cpu_seconds=1)
    assert (late.reward, late.scores["timed_out"]) == (0, 1)
    assert (wrong.reward, wrong.scores["timed_out"]) == (0, 0)


def test_a_group_has_its_time_whatever_its_size() -> None:
    """Eight that sleep, one at a time: each has an eighth of what the group has."""
    sleeps = "import time\ntime.sleep(3600)"
    found = graded(TESTS, *[sleeps] * 8, seconds=3600, group_seconds=2, parallel=1)
    assert [reward.scores["timed_out"] for reward in found] == [1] * 8


def test_inputs_after_the_end_of_the_time_are_not_passed() -> None:
    tests = json.dumps([{"input": str(number), "output": "1"} for number in range(20)])
    program = "import time\nif int(input()): time.sleep(3600)\nprint(1)"
    for seconds in growing(1.0):
        (found,) = graded(tests, program, seconds=seconds)
        if found.reward:  # the first input was passed in that time
            break
    assert (found.reward, found.scores["timed_out"]) == (1 / 20, 1)


def test_a_tolerance_below_nought_is_never_met_and_fails_no_group() -> None:
    (found,) = graded("import math\nassert math.isclose(f(), 1, abs_tol=-1)", "def f(): return 1")
    assert found.reward == 0


@pytest.mark.parametrize(
    "tests",
    [
        "", "x = 1", "assert", "assert f(1) == f(2)", "assert f(1) < 3", "assert 1 == 1",
        "assert x", "[]", "[1]", '[{"input": "1"}]', '[{"input": "1", "output": 2}]',
        '[{"input": "1", "output": "2", "more": 1}]', "[" * 100_000, "(" * 5000, "a\0b",
        "assert math.isclose(f(), g())\nassert f() in (1, 2)",
        f"assert f(1) == {'9' * 400} + 1j",
    ],
)  # fmt: skip
def test_tests_that_cannot_be_judged_are_refused_before_anything_is_sampled(tests: str) -> None:
    settings = PromptsSettings(reward="code")
    request = TaskRequest(index=0, row={"prompt": "p", "answer": tests})
    with pytest.raises(TaskError) as raised:
        PromptsEnvironment.check(settings, request)
    assert raised.value.key == "row.answer"
    with pytest.raises(TaskError):
        check_task("code", Task(answer=tests))


@pytest.mark.parametrize(
    "values",
    [{"seconds": 0}, {"seconds": math.nan}, {"memory_mib": -1}, {"processes": 1 << 40},
     {"output_bytes": 0}, {"group_seconds": 0}, {"parallel": 0}, {"more": 1}],
)  # fmt: skip
def test_settings_out_of_bounds_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        create_grader("code", values)


def test_it_runs_in_a_process_of_its_own() -> None:
    assert place_grader("code") is Placement.PROCESS


@given(st.binary(max_size=200) | st.text(max_size=60).map(str.encode))
@settings(max_examples=200)
def test_what_a_program_writes_never_breaks_the_reader(output: bytes) -> None:
    assert len(read_values(output, 3)) == 3


@pytest.mark.parametrize(
    "line",
    ["[0," * 50_000, '[0, ["int", "0x' + "f" * 10_000 + '"]]', '[0, ["dict", [[], 1]]]',
     '[0, ["set", [["list", []]]]]', "[1e999, 1]", "[0, 1e999]", '[0, ["complex", [1]]]', "[0]",
     '[0, ["bytes", "zz"]]', '{"0": 1}', "[true, 1]", "[0, [1, 2]]"],
)  # fmt: skip
def test_hostile_lines_are_no_values_or_plain_ones(line: str) -> None:
    (value,) = read_values(line.encode(), 1)
    assert value.__class__ in (object, int, float, complex)


@pytest.mark.parametrize("kind", ["set", "frozenset", "dict"])
def test_members_of_one_hash_are_no_value(kind: str) -> None:
    """A program may say 30,000 of them in its output: minutes of comparisons outside its walls."""

    def said(count: int) -> bytes:
        members = [["int", hex((2**61 - 1) * (one + 1))] for one in range(count)]
        held = [part for one in members for part in (one, 1)] if kind == "dict" else members
        return json.dumps([0, [kind, held]]).encode()

    assert len(read_values(said(60), 1)[0]) == 60
    assert read_values(said(2000), 1)[0].__class__ is object


def test_an_assertion_that_would_not_count_is_refused() -> None:
    tests = "assert f(1) == 1\nfor i in range(3):\n    assert f(i) == i"
    with pytest.raises(TaskError, match="line 3: an assertion inside") as caught:
        read_tests([tests])
    assert "no Python" not in str(caught.value)
    with pytest.raises(TaskError) as caught:
        read_tests(["assert f(1) == f(2)"])
    assert "no Python" not in str(caught.value)


def test_the_last_block_of_python_is_found_in_one_pass() -> None:
    def seconds(count: int) -> float:
        begun = time.process_time()
        find_program("```python\n" * count)
        return time.process_time() - begun

    assert seconds(320_000) < 100 * seconds(20_000)  # quadratic: 256 times


def test_the_last_block_of_python_is_the_program() -> None:
    assert find_program("a\n```py\n1\n```\n```\nno\n```") == "1\n"
    assert find_program("```python\n1\n") == "```python\n1\n"
    assert find_program("1") == "1"
    assert read_tests(["assert f(1) == 2"]).wanted
