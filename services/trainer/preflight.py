"""What a trainer would be by its settings: what would end it as it loads, and what it would say.

The checks are those of the controller, and of ranks of the backend. None of them needs torch, but
transformers' configuration of a model is imported where a backend goes by it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from services.trainer.backends.families import (
    check_context,
    check_dropout,
    check_lengths,
    check_reference,
    check_replay,
    check_tensor,
    expert_count,
    layout_of,
)
from services.trainer.backends.fsdp.layout import check_heads
from services.trainer.backends.fsdp.layout import mesh_of as fsdp_mesh
from services.trainer.backends.megatron import fit
from services.trainer.backends.megatron.layout import mesh_of as megatron_mesh
from services.trainer.config import TrainerConfig
from services.trainer.description import describe_settings, longest_row
from services.trainer.memory import held_bytes
from services.trainer.mesh import LayoutError, Mesh
from services.trainer.rows import RowLimits, read_shape
from sluice.config import ConfigError
from sluice.model_types import read_config
from sluice.preflight.service import LookedAt, Size
from sluice.samples.vocabulary import vocabulary_digest
from sluice.weights.checkpoint import Extent, read_extents
from sluice.weights.errors import MissingFileError, WeightStoreError
from sluice.weights.rules.shape import read_shape as read_megatron_shape
from sluice.weights.rules.weight_map import family_of
from sluice.weights.stored_experts import are_stacked, are_straight, tensor_shapes

REFUSALS = (ConfigError, KeyError, OSError, ValueError, WeightStoreError)
NEEDED = {  # packages by backend, and the extra that has them
    "reference": ("reference", ("torch", "transformers")),
    "fsdp": ("reference", ("torch", "transformers")),
    "megatron": ("megatron", ("torch", "transformers", "megatron")),
}
STATE_BYTES = 12  # of a parameter in a checkpoint: float32, and the two moments of AdamW
NARROW_BYTES = 2  # beside those, where weights are narrower than what is stepped
TORCH_FILES = "pytorch_model*.bin"  # which transformers reads too


def look(config: TrainerConfig) -> LookedAt:
    """Look at what this trainer would load and say. The configuration itself is sound."""
    found = LookedAt()
    extra, packages = NEEDED[config.backend]
    if missing := [name for name in packages if find_spec(name) is None]:
        found.faults.append(
            f"backend: {config.backend} needs {', '.join(missing)}, which is not installed: "
            f"pip install 'sluice[{extra}]'"
        )
    mesh = _mesh(config, found)
    document = json.loads((Path(config.model) / "config.json").read_bytes())
    tensors = _tensors(config, document, found)
    if not missing:
        for model in dict.fromkeys(filter(None, (config.model, config.reference_model))):
            with found.noting(*REFUSALS):
                for check in _checks_of(config, Path(model), mesh):
                    with found.noting(*REFUSALS):
                        check()
    with found.noting(*REFUSALS):
        read_shape(config.model)
        limits = RowLimits.from_config(config, mesh.context_size)
        found.trainer = describe_settings(config, vocabulary_digest(Path(config.model)))
        found.trainer.max_row_tokens = longest_row(limits)
        found.trainer.layout.data = mesh.data_size
    found.local_ranks = config.ranks.count if config.ranks.launch == "local" else 0
    parameters = sum(math.prod(extent.shape) for extent in tensors.values())
    found.size = _size(config, parameters) if parameters else None
    found.limits["max_rows"] = config.max_rows
    if config.lora is not None:
        found.adapter = config.lora.spec("0" * 32)
    found.described = _described(config, document, mesh)
    if not found.faults:  # of a layout that does not divide nothing can be told
        found.held = _held(config, mesh, document, tensors)
    return found


def _mesh(config: TrainerConfig, found: LookedAt) -> Mesh:
    """Where the first rank stands; alone where the world does not divide."""
    count = config.ranks.count
    try:
        if config.backend == "fsdp":
            return fsdp_mesh(config.fsdp, 0, count)
        if config.backend == "megatron":
            return megatron_mesh(config.megatron, 0, count)
    except LayoutError as error:
        found.faults.append(f"ranks.count: {error}")
        return Mesh(rank=0, world_size=1)
    return Mesh(rank=0, world_size=count, data_size=count)


def _tensors(
    config: TrainerConfig, document: Mapping[str, Any], found: LookedAt
) -> dict[str, Extent]:
    """Of the model, by the headers of its files."""
    directory, tensors = Path(config.model), dict[str, Extent]()
    try:
        tensors = read_extents(directory)
    except MissingFileError as error:
        if not any(directory.glob(TORCH_FILES)):
            found.faults.append(f"model: {directory}: {error}")
    except (OSError, WeightStoreError) as error:
        found.faults.append(f"model: {directory}: {error}")
    return tensors


def _checks_of(
    config: TrainerConfig, directory: Path, mesh: Mesh
) -> Iterator[Callable[[], object]]:
    """What ranks ask as they load a model, before they have read its tensors.

    Each raises what they would. Raises itself for a config.json that is none of a model.
    """
    if config.backend == "megatron":
        yield partial(_check_megatron, config, directory)
        return
    hf_config = read_config(directory)
    values, kind = hf_config.to_dict(), hf_config.model_type
    if config.backend == "reference":
        yield partial(check_reference, kind)
    else:
        yield from _checks_of_fsdp(config, hf_config, mesh)
    yield partial(check_lengths, values, config.longest_row)
    mode = getattr(config, config.backend).routing_replay
    if mode != "off" and directory == Path(config.model):
        setting = f"{config.backend}.routing_replay"
        yield partial(check_replay, kind, setting)
        yield partial(_check_has_experts, directory, kind, setting)


def _checks_of_fsdp(
    config: TrainerConfig, hf_config: Any, mesh: Mesh
) -> Iterator[Callable[[], object]]:
    settings, values = config.fsdp, hf_config.to_dict()
    yield partial(layout_of, values, unproven=settings.unproven)
    if settings.tensor > 1:
        text = hf_config.get_text_config()
        plan = getattr(text, "base_model_tp_plan", None) or {}
        yield partial(check_tensor, hf_config.model_type)
        yield partial(check_heads, text, plan, mesh.tensor_size)
    if settings.context > 1:
        yield partial(check_context, values)
    if settings.activation_checkpointing:
        yield partial(check_dropout, values)


def _check_has_experts(directory: Path, kind: str, setting: str) -> None:
    if expert_count(json.loads((directory / "config.json").read_bytes())) == 0:
        raise ValueError(f"{setting}: model_type {kind} has no experts; leave it out")


def _check_megatron(config: TrainerConfig, directory: Path) -> None:
    settings = config.megatron
    if settings.model_provider:
        return  # whose layers only it knows
    document = json.loads((directory / "config.json").read_bytes())
    family = family_of(document)
    fit.check_family(family.name)
    hf_config = read_config(directory).get_text_config()
    predicts = bool(settings.mtp_loss_scaling_factor)
    fit.check_model(family.name, hf_config, predicts=predicts)
    architecture = document["architectures"][0]
    is_classifier = fit.is_classifier_of(architecture, hf_config, predicts=predicts)
    shapes = tensor_shapes(directory)
    shape = read_megatron_shape(
        family,
        document,
        stacked_experts=are_stacked(shapes),
        straight_experts=are_straight(shapes),
        value_head=is_classifier or config.head != "policy",
        predicts=predicts,
    )
    fit.check_shape(family.name, shape, settings)
    if shape.experts:
        fit.check_chosen(hf_config)


def _size(config: TrainerConfig, parameters: int) -> Size | None:
    """What is written of a model that is trained whole; None of adapters, which are small."""
    if config.lora is not None:
        return None
    is_narrow = config.backend == "megatron" and config.megatron.dtype != "float32"
    state = STATE_BYTES + (NARROW_BYTES if is_narrow else 0)
    published = 2 if is_narrow or config.publish_dtype == "bfloat16" else 4
    if config.publish.quantization:
        published = 1
    return Size(
        parameters=parameters,
        checkpoint_bytes=parameters * state,
        version_bytes=0 if config.head == "value" else parameters * published,
        kept_versions=config.keep_versions,
    )


def _held(
    config: TrainerConfig, mesh: Mesh, document: Mapping[str, Any], tensors: Mapping[str, Extent]
) -> str:
    """What the fullest rank holds, where headers tell."""
    held = held_bytes(config, mesh, document, tensors)
    if held is None:
        return ""
    names = {"weights": held.weights, "gradients": held.gradients, "optimizer": held.optimizer}
    parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in names.items() if size)
    beside = "adapters and what passes make" if held.adapters else "what passes make"
    return f"a rank holds {held.whole / 2**30:.1f} GiB of a device ({parts}), beside {beside}"


def _described(config: TrainerConfig, document: Mapping[str, Any], mesh: Mesh) -> str:
    sizes = {
        "data": mesh.data_size,
        "tensor": mesh.tensor_size,
        "pipeline": mesh.pipeline_size,
        "context": mesh.context_size,
        "expert": mesh.expert_size,
    }
    named = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    ranks = f"{config.ranks.count} rank{'s' if config.ranks.count > 1 else ''}"
    what = "adapters" if config.lora is not None else "the model itself"
    if config.head != "policy":
        what = f"head {config.head}"
    kind = document.get("model_type", "?")
    over = f" ({named})" if named else ""
    return f"{config.backend}, {kind} of {config.model}, {what}, {ranks}{over}"
