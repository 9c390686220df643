"""What a rank holds of a model between calls, by the headers of its files and the settings.

Of weights, gradients and optimizer alone: what passes make comes and goes beside them. Imports no
torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.trainer.backends.megatron.fit import stage_layers
from services.trainer.config import TrainableConfig, TrainerConfig
from services.trainer.mesh import Mesh
from sluice.weights.checkpoint import Extent

WIDE, NARROW = 4, 2  # bytes of a number
MOMENTS = {"adamw": 2, "muon": 1}  # of a matrix; everything else has two
NUMBERS = {"F32", "F16", "BF16", "F64"}  # dtypes that hold a number each
HEADS = ("lm_head.weight", "output.weight")
EMBEDDING = "embed_tokens.weight"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts(?:\.|$)")


@dataclass(frozen=True)
class HeldBytes:
    """Of the rank that holds most; `adapters` says that these are beside it, and small."""

    weights: float
    gradients: float
    optimizer: float
    adapters: bool = False

    @property
    def whole(self) -> float:
        return self.weights + self.gradients + self.optimizer


def held_bytes(
    config: TrainerConfig, mesh: Mesh, document: Mapping[str, Any], tensors: Mapping[str, Extent]
) -> HeldBytes | None:
    """Return what a rank of this layout holds once it has stepped.

    None where headers do not tell: of packed weights, parts that are frozen, weights that wait on
    the host, and models that a provider builds.
    """
    partly = config.trainable != TrainableConfig() or not all(config.vision.scales(1.0).values())
    packed = any(extent.dtype not in NUMBERS for extent in tensors.values())
    elsewhere = config.fsdp.cpu_offload or bool(config.megatron.model_provider)
    if not tensors or partly or packed or elsewhere:
        return None
    shapes = {
        name: extent.shape
        for name, extent in tensors.items()
        if config.head == "policy" or name not in HEADS
    }
    if config.backend == "megatron":
        held = _of_megatron(config, mesh, document, shapes)
    else:
        held = _of_whole_tensors(config, mesh, shapes)
    if config.lora is None:
        return held
    return HeldBytes(held.weights, 0, 0, adapters=True)


def _of_whole_tensors(
    config: TrainerConfig, mesh: Mesh, shapes: Mapping[str, tuple[int, ...]]
) -> HeldBytes:
    """Of `reference`, which has all on every rank, and of `fsdp`, which cuts all of it."""
    parts = mesh.world_size // mesh.replicas if config.backend == "fsdp" else 1
    numbers = sum(map(math.prod, shapes.values()))
    moments = sum(
        math.prod(shape) * _moments(config, name, shape) for name, shape in shapes.items()
    )
    return HeldBytes(WIDE * numbers / parts, WIDE * numbers / parts, WIDE * moments / parts)


def _moments(config: TrainerConfig, name: str, shape: tuple[int, ...]) -> int:
    hidden = len(shape) > 1 and _LAYER.search(name) is not None
    return MOMENTS[config.optim.kind if hidden else "adamw"]


def _of_megatron(
    config: TrainerConfig,
    mesh: Mesh,
    document: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
) -> HeldBytes:
    """Of the pipeline stage that holds most; optimizer state is cut over data ranks."""
    settings = config.megatron
    text = document.get("text_config") or document
    stages = stage_layers(int(text["num_hidden_layers"]), settings)
    dense, experts = [0.0] * len(stages), [0.0] * len(stages)
    tied = not any(name in HEADS for name in shapes) and config.head == "policy"
    for name, shape in shapes.items():
        at = _stage_of(name, stages)
        if _EXPERT.search(name):
            cut = settings.expert * settings.expert_tensor_size
            experts[at] += math.prod(shape) / cut
            continue
        if shape and (name.endswith(EMBEDDING) or name in HEADS):
            shape = (_padded(shape[0], config), *shape[1:])
        size = math.prod(shape) / (settings.tensor if len(shape) > 1 else 1)
        dense[at] += size
        if tied and name.endswith(EMBEDDING) and len(stages) > 1:
            dense[-1] += size
    narrow = settings.dtype != "float32"
    data = mesh.data_size * mesh.context_size if settings.distributed_optimizer else 1
    spread = settings.pipeline * settings.expert * settings.expert_tensor_size
    expert_data = mesh.world_size // spread if settings.distributed_optimizer else 1
    kept = WIDE * ((1 if narrow else 0) + 2) * (1 - settings.optimizer_offload)
    each = [
        HeldBytes(
            (NARROW if narrow else WIDE) * (some + others),
            WIDE * (some + others),
            kept * (some / data + others / expert_data),
        )
        for some, others in zip(dense, experts, strict=True)
    ]
    return max(each, key=lambda held: held.whole)


def _stage_of(name: str, stages: list[int]) -> int:
    """Layers by their number; embeddings and a tower are on the first, norm and head on the last.

    So are layers of multi-token prediction, which are numbered behind the others.
    """
    if "visual." in name or name.endswith(EMBEDDING):
        return 0
    found = _LAYER.search(name)
    if found is None:
        return len(stages) - 1
    number = int(found[1])
    for at, count in enumerate(stages):
        if number < count:
            return at
        number -= count
    return len(stages) - 1


def _padded(rows: int, config: TrainerConfig) -> int:
    multiple = config.megatron.vocab_multiple * config.megatron.tensor
    return -(-rows // multiple) * multiple
