"""What a mistyped name was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from typing import Any, get_args

from pydantic import BaseModel

SHOWN = 12  # names of a short list, where none is near


def hint(name: str, known: Collection[str]) -> str:
    """`; did you mean x?`, or what there is where that is little, or nothing."""
    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.6):
        return f"; did you mean {near[0]}?"
    if 0 < len(known) <= SHOWN:
        return f"; known: {', '.join(sorted(known))}"
    return ""


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
