"""Tensors that training does not own, taken from the checkpoint that it started from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from sluice.weights.convert.fp8 import SCALE
from sluice.weights.convert.hf_source import HfSource
from sluice.weights.convert.hf_target import Part
from sluice.weights.convert.options import ConvertOptions
from sluice.weights.convert.pieces import Files
from sluice.weights.convert.work import Report
from sluice.weights.rules import WeightMap


@dataclass(frozen=True)
class Merge:
    """What comes on top, in groups, and the report of the whole."""

    groups: list[tuple[str, list[Part]]]
    report: Report


def fill_from_origin(
    groups: Sequence[tuple[str, Sequence[Part]]],
    options: ConvertOptions,
    weights: WeightMap | None,
    files: Files,
) -> Merge:
    """The tensors of `options.origin` that the groups lack.

    Left out are copies of tied tensors, which would be stale, and names that the patterns do not
    let through; scales of quantised tensors go with their tensors, which are copied as numbers.
    Tensors in both with another shape are conflicts: the converted one is kept.
    """
    assert options.origin is not None
    origin = HfSource(options.origin, files, weights.family.spellings if weights else ())
    own = {part.name: part.shape for _, parts in groups for part in parts}
    copied: list[tuple[str, list[Part]]] = []
    skipped: dict[str, str] = {n: "stored twice, equal" for n in origin.duplicates}
    conflicting: dict[str, str] = {}
    for name in origin.names():
        shape = origin.found(name).content.shape
        if name in own:
            if own[name] != shape:
                conflicting[name] = f"{shape} in the origin, {own[name]} converted"
        elif (reason := _left_out(name, options, weights)) is not None:
            skipped[name] = reason
        else:
            copied.append((name, [Part(name, origin.content(name))]))
    stale = [
        name for name in origin.stored() if name.endswith(SCALE) and name not in origin.names()
    ]
    skipped |= {name: "scale: the numbers are copied unquantised" for name in stale}
    report = Report(
        converted=tuple(sorted(own)),
        copied=tuple(sorted(name for name, _ in copied)),
        skipped=skipped,
        conflicting=conflicting,
    )
    return Merge(copied, report)


def _left_out(name: str, options: ConvertOptions, weights: WeightMap | None) -> str | None:
    if weights is not None and weights.is_copy(name):
        return "tied: it would be a stale copy"
    if weights is not None and weights.is_ignored(name):
        return "carries no weights"
    if not any(fnmatchcase(name, pattern) for pattern in options.allow):
        return "not allowed"
    if any(fnmatchcase(name, pattern) for pattern in options.deny):
        return "denied"
    return None
