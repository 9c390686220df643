"""Reads the numbers that models answer, and computes what they ask of a calculator.

Nothing that a model writes raises, takes long, or counts as a number that is none.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence

from services.rollout.environments.environment import Response, Reward, Task

LONGEST = 200  # characters of a number or of a calculation
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?", re.ASCII)
_ANSWER = re.compile(r"<answer>([^<]{0,200})</answer>")
_OPERATIONS: Mapping[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS: Mapping[str, Callable[[float], float]] = {
    "sqrt": math.sqrt,
    "sin": lambda degrees: math.sin(math.radians(degrees)),
    "cos": lambda degrees: math.cos(math.radians(degrees)),
    "tan": lambda degrees: math.tan(math.radians(degrees)),
}
# LaTeX of data sets -> what the calculator reads
_LATEX = (
    (re.compile(r"\\(?:left|right|,|;|!| )|[$\s]"), ""),
    (re.compile(r"\^(?:\{\\circ\}|\\circ)|\\degree|°"), ""),
    (re.compile(r"\\d?t?frac\{([^{}]*)\}\{([^{}]*)\}"), r"((\1)/(\2))"),
    (re.compile(r"\\sqrt\{([^{}]*)\}"), r"sqrt(\1)"),
    (re.compile(r"\\d?t?frac\{([^{}]*)\}\{([^{}]*)\}"), r"((\1)/(\2))"),
    (re.compile(r"\\pi"), "pi"),
    (re.compile(r"\\(?:cdot|times)"), "*"),
    (re.compile(r"(?<=[\d)])(?=sqrt|pi|\()"), "*"),
)


class CalculationError(ValueError):
    """A text that is no calculation, or one without a finite result."""


def calculate(text: str) -> float:
    """Return what an expression of + - * / **, sqrt, sin, cos, tan (of degrees) and pi comes to.

    Raises CalculationError.
    """
    if len(text) > LONGEST:
        raise CalculationError(f"more than {LONGEST} characters")
    try:
        result = _value(ast.parse(text.strip(), mode="eval").body)
    except (
        SyntaxError,
        ValueError,
        ArithmeticError,
        RecursionError,
        MemoryError,
        TypeError,
    ) as error:
        raise CalculationError(str(error) or type(error).__name__) from None
    if isinstance(result, complex) or not math.isfinite(result):
        raise CalculationError("no finite number")
    return result


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)  # type: ignore[arg-type]  # of those two
    if isinstance(node, ast.Name) and node.id == "pi":
        return math.pi
    if isinstance(node, ast.BinOp) and (binary := _OPERATIONS.get(type(node.op))):
        return binary(_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and (unary := _OPERATIONS.get(type(node.op))):
        return unary(_value(node.operand))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = _FUNCTIONS.get(node.func.id)
        if function is not None and len(node.args) == 1:
            return function(_value(node.args[0]))
    raise CalculationError("only numbers, + - * / **, brackets, sqrt, sin, cos, tan and pi")


def read_number(text: str) -> float | None:
    """Return the finite number that a text is, None for any other text."""
    text = text.strip().removesuffix("°").rstrip()
    if len(text) > LONGEST or not _NUMBER.fullmatch(text):
        return None
    number = float(text)
    return number if math.isfinite(number) else None


def answered_number(text: str) -> float | None:
    """Return the number in the last `<answer>...</answer>`; without one, that the text is."""
    tagged = _ANSWER.findall(text)
    return read_number(tagged[-1] if tagged else text)


def is_right(number: float | None, answer: float, tolerance: float) -> bool:
    """Whether a number is the answer, up to that share of it."""
    return number is not None and abs(number - answer) <= tolerance * abs(answer) + 1e-9


def read_solution(text: str) -> float:
    """Return the value of a data set's answer: a number, or LaTeX such as `2 \\sqrt { 13 }`.

    Raises CalculationError.
    """
    if len(text) > LONGEST:
        raise CalculationError(f"more than {LONGEST} characters")
    for pattern, written in _LATEX:
        text = pattern.sub(written, text)
    return calculate(text.replace("^", "**"))


def right_number(
    task: Task, responses: Sequence[Response], *, tolerance: float = 0.01
) -> list[float | Reward]:
    """Give 1 for the number of the task's answer within a share of it, else 0.

    Responses may write LaTeX too. Raises CalculationError for an answer of the task that is none.
    """
    answer = read_solution(task.answer)
    return [float(is_right(_given(response.text), answer, tolerance)) for response in responses]


def _given(text: str) -> float | None:
    tagged = _ANSWER.findall(text)
    try:
        return read_solution(tagged[-1] if tagged else text)
    except CalculationError:
        return None
