"""A module of a user that takes its time to import."""

from __future__ import annotations

import threading

from services.rollout.episodes.episode import Episode
from services.rollout.episodes.trajectory import Trajectory

IMPORT_SECONDS = 3.0

threading.Event().wait(IMPORT_SECONDS)


async def one(episode: Episode) -> list[Trajectory]:
    trajectory = episode.begin()
    await episode.sample(trajectory)
    return [trajectory]
