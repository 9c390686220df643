"""Dataclasses that are made by the thousand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.rollout.environments.environment import Response, Reward
from sluice.light import light_dataclass
from sluice.samples.sample import Sample


@light_dataclass(frozen=True, kw_only=True)
class Point:
    x: int
    y: int = 0


@pytest.mark.parametrize("kind", [Point, Sample, Response, Reward])
def test_no_guard_stands_before_each_field(kind: type) -> None:
    assert "__setattr__" not in vars(kind)


def test_it_is_a_dataclass_in_all_else() -> None:
    assert Point(x=1) == Point(x=1, y=0) != Point(x=2)
    assert replace(Point(x=1), y=3) == Point(x=1, y=3)
    assert repr(Point(x=1)) == "Point(x=1, y=0)"
    with pytest.raises(TypeError):
        Point(1)  # type: ignore[call-arg]
