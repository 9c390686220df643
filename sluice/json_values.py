"""Values as JSON has them that every reader takes."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from itertools import zip_longest
from typing import Any

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
DEEPEST = 100  # levels of lists and objects


def json_fault(value: Any) -> str:
    """Says why a value is not JSON that every reader takes, or nothing.

    Such has finite numbers and whole characters, and is nested `DEEPEST` levels at most.
    """
    values: list[Any] = [value]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for each in values:
            if type(each) is int:  # first: prompts are made of them, and other kinds take longer
                continue
            if isinstance(each, str):
                if not each.isascii() and _has_half_pair(each):
                    return "holds half a surrogate pair"
            elif isinstance(each, Mapping):
                inner += (*each.keys(), *each.values())
            elif isinstance(each, Sequence) and not isinstance(each, bytes | bytearray):
                inner += each
            elif not isinstance(each, int | float | None):
                return f"holds {shown(each)}, which JSON has not"
            elif isinstance(each, float) and not math.isfinite(each):
                return "holds a number that is not finite"
        if not inner:
            return ""
        values = inner
    return f"is nested deeper than {DEEPEST} levels"


def plain_number(number: float) -> int | float:
    """A number of JSON whose kind is not known: an integer, where that has the same digits.

    So has 3.0, but not 1e23: as an integer that is 99999999999999991611392.
    """
    if not number.is_integer():
        return number
    whole = int(number)
    return whole if abs(whole) < 1 << 53 or whole == Decimal(repr(number)) else number


def key_order(value: Any) -> Any:
    """The order of keys in a value, which a Struct loses: its shape, with 0 for all but objects."""
    if isinstance(value, Mapping):
        order = {key: key_order(each) for key, each in value.items()}
        return order if len(order) > 1 or any(order.values()) else 0
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        orders = [key_order(each) for each in value]
        return orders if any(orders) else 0
    return 0


def in_order(value: Any, order: Any = 0) -> Any:
    """A value with its keys as `key_order` has them; those that it does not have last, by name."""
    if isinstance(value, Mapping):
        own = order if isinstance(order, Mapping) else {}
        keys = [*(key for key in own if key in value), *sorted(value.keys() - own.keys())]
        return {key: in_order(value[key], own.get(key)) for key in keys}
    if isinstance(value, list):
        orders = order if isinstance(order, list) else []
        return [in_order(each, one) for each, one in zip_longest(value, orders[: len(value)])]
    return value


def find(values: Mapping[str, Any], key: str) -> Any:
    """What stands at a key, or at one of an object inside (`a.b`); None where nothing does."""
    if key in values:
        return values[key]
    first, dot, rest = key.partition(".")
    inner = values.get(first)
    return find(inner, rest) if dot and isinstance(inner, Mapping) else None


def _has_half_pair(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def shown(value: Any) -> str:
    """A value in short, and its type; a number of too many digits has no text at all."""
    kind = type(value).__name__
    try:
        return f"{reprlib.repr(value)} ({kind})"
    except ValueError:
        return f"a long {kind}"


def load_json(
    data: bytes, *, pairs: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = None
) -> Any:
    """Parse JSON of any origin; `pairs` makes an object of its keys and values.

    Raises ValueError, also for what is nested too deep or no text.
    """
    try:
        document = json.loads(data.decode(), object_pairs_hook=pairs)
        if SURROGATE.search(data):  # half of a pair is a name that could be written nowhere
            json.dumps(document, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    return document
