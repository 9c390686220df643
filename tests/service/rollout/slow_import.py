"""A module of a user that takes its time to import: until the test lets it go on."""

from __future__ import annotations

from services.rollout.episodes.episode import Episode
from services.rollout.episodes.trajectory import Trajectory
from tests.patience import PATIENCE
from tests.service.rollout import import_gate

LONGEST_SECONDS = PATIENCE / 2  # an import that holds up the test itself ends too, and is found out

import_gate.begun.set()
was_let_go = import_gate.may_end.wait(LONGEST_SECONDS)


async def one(episode: Episode) -> list[Trajectory]:
    assert was_let_go, "nothing else went on during the import"
    trajectory = episode.begin()
    await episode.sample(trajectory)
    return [trajectory]
