"""Where ranks stand under a Megatron layout: every place once, and one that answers a data rank."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from services.trainer.backend import LayoutError
from services.trainer.backends.megatron.config import MegatronConfig
from services.trainer.backends.megatron.layout import position_of


@pytest.mark.parametrize(
    ("world", "layout", "data_size"),
    [
        (1, {}, 1),
        (8, {"tensor": 2, "pipeline": 2}, 2),
        (12, {"tensor": 2, "context": 3, "pipeline": 2}, 1),
        (16, {"tensor": 2, "context": 2, "expert": 8, "expert_tensor": 1}, 4),
    ],
)
def test_ranks_fill_the_mesh(world: int, layout: dict[str, Any], data_size: int) -> None:
    config = MegatronConfig(**layout)
    found = [position_of(config, rank, world) for rank in range(world)]
    assert {position.data_size for position in found} == {data_size}
    places = {(p.tensor, p.context, p.data, p.pipeline) for p in found}
    assert len(places) == world
    reporting = [position for position in found if position.reports]
    assert Counter(p.data for p in reporting) == dict.fromkeys(range(data_size), 1)
    assert {p.pipeline for p in reporting} == {config.pipeline - 1}, "who has the log-probs"


def test_the_order_is_tensor_context_data_pipeline() -> None:
    config = MegatronConfig(tensor=2, context=2, pipeline=2)
    found = [position_of(config, rank, 16) for rank in (0, 1, 2, 4, 8, 15)]
    assert [(p.tensor, p.context, p.data, p.pipeline) for p in found] == [
        (0, 0, 0, 0),
        (1, 0, 0, 0),
        (0, 1, 0, 0),
        (0, 0, 1, 0),
        (0, 0, 0, 1),
        (1, 1, 1, 1),
    ]


@pytest.mark.parametrize(
    ("world", "layout"),
    [(3, {"tensor": 2}), (4, {"expert": 3}), (4, {"pipeline": 2, "expert": 4})],
)
def test_a_world_that_does_not_divide_is_refused(world: int, layout: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match="do not divide"):
        position_of(MegatronConfig(**layout), 0, world)
