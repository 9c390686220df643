"""Options of the reference backend alone. Imports no torch: the controller reads it too."""

from __future__ import annotations

from typing import Literal

from sluice.config import Config


class ReferenceConfig(Config):
    """Options of the reference backend.

    routing_replay: experts taken again in training: recorded in the pass of old log-probs (R2), or
    in the rollout (R3).
    """

    routing_replay: Literal["off", "recorded", "rollout"] = "off"
