"""What a trainer says of itself by its settings alone, before it has ranks."""

from __future__ import annotations

from services.trainer.config import Head, TrainerConfig
from services.trainer.rows import RowLimits
from sluice.algo.plugins import SHIPPED
from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.balance.planner import OversizePolicy

VALUE_LOSSES = ("value", "linear_value")
LOSSES: dict[Head, tuple[str, ...]] = {
    "policy": tuple(name for name in SHIPPED["loss"] if name not in VALUE_LOSSES),
    "value": VALUE_LOSSES,
    "reward": VALUE_LOSSES,
}


def describe_settings(config: TrainerConfig, vocabulary: str) -> pb.Trainer:
    """Describe all that no rank has to tell. `vocabulary`: its digest."""
    return pb.Trainer(
        losses=LOSSES[config.head],
        advantage_estimators=SHIPPED["advantage"],
        corrections=SHIPPED["correction"],
        kl_estimators=SHIPPED["kl"],
        user_modules=config.user_modules,
        backend=config.backend,
        head=config.head,
        name=config.name,
        vocabulary=vocabulary,
        write_behind=config.transfer.write_behind,
        sends_weights=config.transfer.enabled,
        trains_adapters=config.lora is not None,
        fixed_reference=config.fixed_reference,
        settings=config.shaping,
    )


def longest_row(limits: RowLimits) -> int:
    """Return how many tokens a row may have; 0 where any is taken, or longer ones are cut."""
    cuts = limits.oversize is OversizePolicy.TRUNCATE
    return 0 if cuts else limits.longest or 0
