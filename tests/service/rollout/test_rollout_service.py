"""RolloutService over the wire: router, engine and episode worker are real."""

from __future__ import annotations

import numpy as np
import pytest

from tests.service.rollout.harness import (
    Models,
    Store,
    copy_rows,
    rollout_request,
    running_episodes,
)


@pytest.mark.parametrize("split", [False, True])
async def test_groups_are_durable_before_they_are_announced(
    store: Store, models: Models, split: bool
) -> None:
    async with running_episodes(store, models.first, split=split) as episodes:
        settings = {"reward": "position_match"}
        request = rollout_request(copy_rows(6), settings=settings)
        finished = await episodes.finished(request)
        assert finished.keys() == {f"g{i}" for i in range(6)}
        for i in range(6):
            group = finished[f"g{i}"]
            samples = store.samples(group)
            assert len(samples) == 4
            print(group, samples[0])
