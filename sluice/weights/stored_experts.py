"""How a checkpoint stores experts: a tensor for each, or one of all experts of a layer.

Those of Qwen3-VL-MoE are published in one, whose axes are exchanged: [experts, hidden, 2 x width]
and [experts, width, hidden], as SGLang and vLLM read them, by name alone. transformers writes them
straight, and reads either by comparing shapes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sluice.weights.checkpoint import read_extents
from sluice.weights.errors import WeightStoreError

FIRST, SECOND = ".experts.gate_up_proj", ".experts.down_proj"
TRANSPOSED_TYPES = {"qwen3_vl_moe"}  # model types, published so
_loading = threading.Lock()


def tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes of a checkpoint from the headers of its files.

    Raises DamagedFileError or MissingFileError.
    """
    return {name: extent.shape for name, extent in read_extents(directory).items()}


def are_stacked(names: Iterable[str]) -> bool:
    """Tell whether one tensor has all experts of a layer, by the names of a checkpoint."""
    return any(name.endswith(FIRST) for name in names)


def are_straight(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Tell whether tensors of all experts of a layer are as transformers writes them, by both.

    One alone does not say so, as it may be square. True where those of any layer are, which no
    reader takes beside others; False where there are none.
    """
    pairs = (
        (first, shapes.get(name.removesuffix(FIRST) + SECOND, ()))
        for name, first in shapes.items()
        if name.endswith(FIRST)
    )
    return any(
        len(first) == len(second) == 3 and first[1:] == (2 * second[2], second[1])
        for first, second in pairs
    )


@contextmanager
def as_stored(directory: Path, model_type: str) -> Iterator[None]:
    """Have transformers read experts as a model's directory has them, and give them back so.

    By itself it transposes what has not the parameter's shape, which no part that a rank reads has,
    and gives back none transposed. What is loaded meanwhile remembers.
    """
    if model_type not in TRANSPOSED_TYPES:
        yield
        return
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.core_model_loading import Transpose, WeightConverter

    made: list[WeightConverter] = []
    try:
        straight = are_straight(tensor_shapes(directory))
    except WeightStoreError:
        straight = False  # transformers says what is wrong with the files
    if not straight:
        names = (f"mlp{name}" for name in (FIRST, SECOND))
        made = [WeightConverter(name, name, [Transpose(1, 2)]) for name in names]
    with _loading:
        before = get_checkpoint_conversion_mapping(model_type)
        register_checkpoint_conversion_mapping(model_type, made, overwrite=True)
        try:
            yield
        finally:
            register_checkpoint_conversion_mapping(model_type, before, overwrite=True)
