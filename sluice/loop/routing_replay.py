"""Routing replay: whether a run has what the routers of its trainers are told to choose.

A trainer says by its settings that it replays experts. Rows that lack them, or that no pass has
recorded them for, would be refused in the first step, once engines have sampled for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.config import ConfigError
from sluice.loop.config import AlgorithmConfig
from sluice.loop.fleet import DescribedEngine
from sluice.runtime.wire import replay_of

RECORDED, ROLLOUT = "recorded", "rollout"


def check_recorded(algorithm: AlgorithmConfig, trainer: trainer_pb.Trainer) -> None:
    """Raises ConfigError where experts are to be recorded, and no pass of old log-probs does it.

    What a user's loss or estimator reads only the trainer knows: then its first pass says so.
    """
    setting, mode = replay_of(trainer)
    if mode == RECORDED and "old_logprobs" not in algorithm.columns and not algorithm.plugins:
        raise ConfigError(
            f"{setting}: the trainer takes experts again that the pass of old log-probs recorded, "
            f"and a run with loss {algorithm.loss.name} has no such pass: set "
            f"algorithm.loss.old_logprobs: old, or the trainer's {setting}: off"
        )


def check_sampled(
    who: str, trainer: trainer_pb.Trainer, engines: Iterable[DescribedEngine]
) -> None:
    """Raises ConfigError where experts of rollouts are taken again, and an engine names none."""
    setting, mode = replay_of(trainer)
    if mode != ROLLOUT:
        return
    for each in engines:
        if each.said.HasField("records_experts") and not each.said.records_experts:
            raise ConfigError(
                f"{setting}: the {who} takes the experts of rollouts again, and engine {each.name} "
                "tells none: set engine.routed_experts: true of its service, or the "
                f"{who}'s {setting}: off"
            )


def check_rows(who: str, trainer: trainer_pb.Trainer) -> None:
    """Raises ConfigError for a trainer that takes experts again, which rows of a file have not."""
    setting, mode = replay_of(trainer)
    if mode:
        raise ConfigError(
            f"{setting}: the {who} takes experts again, and rows of a file bring none: set it to "
            "off"
        )
