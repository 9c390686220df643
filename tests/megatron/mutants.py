"""Families with one rule made wrong, for a test that every rule is needed as it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sluice.weights.rules.rule import Family, Pack, ShardAxis, WeightRule
from sluice.weights.rules.shape import ModelShape

OTHER_CUT = {
    ShardAxis.NONE: ShardAxis.ROWS,
    ShardAxis.ROWS: ShardAxis.COLUMNS,
    ShardAxis.COLUMNS: ShardAxis.ROWS,
}


def mutants(family: Family, shape: ModelShape) -> Iterator[tuple[str, Family]]:
    """Every rule that is in force, wrong in its sources and wrong in its cut."""
    for index, rule in enumerate(family.rules):
        if not shape.allows(rule.when):
            continue
        for kind, wrong in _wrong(rule):
            rules = (*family.rules[:index], *wrong, *family.rules[index + 1 :])
            yield f"{rule.megatron} {kind}", replace(family, rules=rules)


def _wrong(rule: WeightRule) -> Iterator[tuple[str, tuple[WeightRule, ...]]]:
    yield "missing", ()
    if rule.pack is Pack.ONE and not rule.padded:  # another cut of these cannot be written
        yield "cut", (replace(rule, cut=OTHER_CUT[rule.cut]),)
    if len(rule.sources) > 1:
        turned = (*rule.sources[:-2], rule.sources[-1], rule.sources[-2])
        yield "order", (replace(rule, sources=turned),)


def exchanged(family: Family, shape: ModelShape) -> Iterator[tuple[str, Family]]:
    """Two rules of one source each, in force and of equal shape, with their sources exchanged."""
    single = [
        (index, rule)
        for index, rule in enumerate(family.rules)
        if len(rule.sources) == 1 and shape.allows(rule.when) and not rule.alias
    ]
    for first, left in single:
        for second, right in single:
            alike = left.sources[0].shape == right.sources[0].shape and left.stage == right.stage
            if first < second and alike:
                rules = list(family.rules)
                rules[first] = replace(left, sources=right.sources)
                rules[second] = replace(right, sources=left.sources)
                yield f"{left.megatron} <-> {right.megatron}", replace(family, rules=tuple(rules))
