"""Which parameters of a model are trained, by the names that a Hugging Face checkpoint has."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from typing import Any

import torch

from services.trainer.backends.sparse import INDEXER
from services.trainer.config import TrainableConfig, TrainerConfig
from sluice.imports import uncompiled
from sluice.vision import part_of

with uncompiled():
    from transformers.core_model_loading import revert_weight_conversion

NAMED = 3  # near names, and names of a fused tensor, that an error lists
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")

# A tensor of a checkpoint, with its other names behind it, where it is tied.
TensorNames = tuple[str, ...]


class TrainableError(ValueError):
    """`trainable` names what the model has not, or parts what is one tensor."""


def frozen_tensors(
    config: TrainerConfig, parameters: Mapping[str, Sequence[TensorNames]]
) -> frozenset[str]:
    """Return the first names of the tensors of a checkpoint that are not trained.

    `parameters`: what each is made of, by the backend's own name; those of the whole model, on
    every rank alike. Raises TrainableError.
    """
    tensors = [names for sources in parameters.values() for names in sources]
    _check_patterns(config.trainable, tensors)
    rates = config.vision.scales(config.optim.learning_rate)
    frozen = frozenset(
        names[0]
        for names in tensors
        if _is_unreached(names[0])
        or not (_is_chosen(names, config.trainable) and rates[part_of(names[0])])
    )
    for parameter, sources in parameters.items():
        held = [names[0] for names in sources if names[0] in frozen]
        trained = [names[0] for names in sources if names[0] not in frozen]
        if held and trained:
            raise TrainableError(
                f"trainable: backend {config.backend} has {_listed(trained)} and {_listed(held)} "
                f"in one tensor, {parameter}, which is trained or frozen whole: name all that it "
                "is made of, or none"
            )
    trained_parts = {part_of(names[0]) for names in tensors if names[0] not in frozen}
    if not trained_parts:
        raise TrainableError("trainable: every parameter is frozen, nothing would be trained")
    for part in ("tower", "projector"):
        if getattr(config.vision, f"{part}_learning_rate") and part not in trained_parts:
            raise TrainableError(
                f"vision.{part}_learning_rate has no effect: trainable freezes all of that part"
            )
    return frozen


def frozen_parameters(config: TrainerConfig, model: Any) -> frozenset[str]:
    """Return the names of the parameters of a transformers model that are not trained.

    Raises TrainableError.
    """
    if config.trainable == TrainableConfig() and all(config.vision.scales(1.0).values()):
        return frozenset(name for name, _ in model.named_parameters() if _is_unreached(name))
    made = _checkpoint_names(model)
    frozen = frozen_tensors(config, made)
    return frozenset(name for name, sources in made.items() if sources[0][0] in frozen)


def other_trained(trained: Set[str], saved: Set[str]) -> str:
    """Say how a checkpoint has optimizer state of other parameters than are trained; or nothing.

    One that has none was written before the first step, when nothing was trained yet.
    """
    if not saved or saved == trained:
        return ""
    less, more = sorted(trained - saved), sorted(saved - trained)
    parts = ([f"had frozen {_listed(less)}"] if less else []) + (
        [f"had trained {_listed(more)}"] if more else []
    )
    return (
        f"it was saved by a trainer that {' and '.join(parts)}: set `trainable` and `vision` as "
        "they were, or publish the weights and start from them"
    )


def _checkpoint_names(model: Any) -> dict[str, list[TensorNames]]:
    """Return of what tensors of a checkpoint each parameter is made."""
    others: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        others.setdefault(id(parameter), []).append(name)
    found = {}
    for name, parameter in model.named_parameters():
        empty = torch.empty(parameter.shape, device="meta")
        made = revert_weight_conversion(model, {name: empty})
        found[name] = [(each, *others[id(parameter)][1:]) for each in made]
    return found


def _is_unreached(name: str) -> bool:
    """Whether a tensor makes a hard choice, of keys: it has no gradient, and does not decay."""
    return INDEXER in name


def _is_chosen(names: TensorNames, patterns: TrainableConfig) -> bool:
    return _matches(names, patterns.allow) and not _matches(names, patterns.deny)


def _matches(names: TensorNames, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)


def _check_patterns(patterns: TrainableConfig, tensors: Collection[TensorNames]) -> None:
    """Raise TrainableError for a pattern that does nothing."""
    for setting in ("allow", "deny"):
        for pattern in getattr(patterns, setting):
            if not any(_matches(names, [pattern]) for names in tensors):
                raise TrainableError(
                    f"trainable.{setting}: no parameter is called {pattern!r}; near are "
                    f"{', '.join(_near_names(pattern, tensors))}"
                )
    for pattern in patterns.allow:
        if all(_is_unreached(names[0]) for names in tensors if _matches(names, [pattern])):
            raise TrainableError(
                f"trainable.allow: {pattern!r} names indexers alone, which no gradient reaches: "
                "they stay as they are; leave it out"
            )
    allowed = [names for names in tensors if _matches(names, patterns.allow)]
    for pattern in patterns.deny:
        if not any(_matches(names, [pattern]) for names in allowed):
            raise TrainableError(
                f"trainable.deny: {pattern!r} freezes nothing that allow lets be trained; leave it "
                "out"
            )


def _near_names(pattern: str, tensors: Iterable[TensorNames]) -> list[str]:
    """Return names that share most with a pattern, as patterns of all layers and experts."""
    text = re.sub(r"[*?]|\[[^]]*\]", "", pattern)

    def shared(name: str) -> tuple[float, int]:
        blocks = SequenceMatcher(None, text, name, autojunk=False).get_matching_blocks()
        return -sum(block.size**2 for block in blocks), len(name)

    known = {_NUMBER.sub("*", name): None for names in tensors for name in names}
    return sorted(known, key=shared)[:NAMED]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
