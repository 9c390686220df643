"""HF tensors out of a checkpoint of the trainer that has those of transformers' modules.

Backends `fsdp` and `reference` save so. transformers' own conversions say which HF tensors a
module's is made into, as where a trainer publishes; there are no rules of families. They are run on
tensors without memory, and on numbers of rows, which say where the rows of each HF tensor lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sluice.model_types import TOWERS, read_config
from sluice.routers import BIASES
from sluice.weights.checkpoint import map_shard
from sluice.weights.classifier import CRITIC, REWARD_MODEL
from sluice.weights.convert.hf import TensorPart
from sluice.weights.convert.pieces import Content, Files
from sluice.weights.convert.saved import MODEL_FILE
from sluice.weights.convert.stored import Chunk, StoredKey, read_tensors
from sluice.weights.convert.stored_chunks import Pieces, StoredChunks
from sluice.weights.dtypes import TORCH_DTYPES
from sluice.weights.errors import (
    InvalidCheckpointError,
    MissingFileError,
    MissingTensorError,
    UnexpectedTensorError,
)
from sluice.weights.rules.weight_map import TensorShapeError
from sluice.weights.stored_experts import as_stored, tensor_shapes

PREFIX = "model/"  # of keys that are no optimizer's
_MOVES = {"Chunk", "Concatenate", "MergeModulelist", "SplitModulelist"}  # operations, of whole rows
Tensors = dict[str, torch.Tensor]
Runs = list[tuple[int, int]]  # of rows, which count over the first two axes of three and more


class ModuleSource:
    """A checkpoint of the model that the `config.json` in `described` is of.

    Where tensors lie there too, HF tensors are named and stored as these are. Raises
    InvalidCheckpointError, MissingTensorError, UnexpectedTensorError or TensorShapeError.
    """

    def __init__(self, directory: Path, described: Path, files: Files) -> None:
        self._keys = _read_modules(directory)
        self._chunks = StoredChunks(self._keys, files)
        self._model = _build(described)
        self._buffers = self._check_tensors()
        self._converters = [
            operation
            for conversion in self._model._weight_conversions
            for operation in getattr(conversion, "operations", None) or ()
        ]

    @property
    def dtype(self) -> str:
        """The type that most of it is stored in."""
        kinds = [str(stored.dtype) for stored in self._keys.values()]
        return max(set(kinds), key=kinds.count).removeprefix("torch.")

    def groups(self) -> list[tuple[str, list[TensorPart]]]:
        """List the HF tensors that each module's tensor is made into.

        Raises InvalidCheckpointError where some are made of several, and UncoveredTensorError.
        """
        empty = {n: torch.empty(s.shape, device="meta") for n, s in self._keys.items()}
        alone = {name: self._revert({name: tensor}) for name, tensor in empty.items()}
        made = {n: t.shape for tensors in alone.values() for n, t in tensors.items()}
        if made != {n: t.shape for n, t in self._revert(empty).items()}:
            kind = self._model.config.model_type
            raise InvalidCheckpointError(f"model_type {kind} has tensors that are made of several")
        return [(n, [*self._parts(n, empty[n], tensors)]) for n, tensors in alone.items()]

    def _parts(self, key: str, whole: torch.Tensor, made: Tensors) -> Iterator[TensorPart]:
        if len(made) == 1 and whole is next(iter(made.values())):  # by another name at most
            runs: dict[str, Runs] | None = {name: [(0, _height(whole.shape))] for name in made}
        else:
            runs = self._runs(key, whole.shape, made)
        is_kept = key in self._buffers or key.rpartition(".")[2] in BIASES
        for name, tensor in made.items():
            content = (
                self._converted(key, name, tensor)
                if runs is None
                else self._moved(key, runs[name], tuple(tensor.shape))
            )
            yield TensorPart(name, content, is_kept=is_kept)

    def _runs(self, key: str, shape: torch.Size, made: Tensors) -> dict[str, Runs] | None:
        """Rows of a module's tensor that each HF tensor is made of; None where more is changed."""
        kept = shape[: min(2, len(shape) - 1)]
        known = all(
            type(each).__name__ in _MOVES and each.dim < len(kept) for each in self._converters
        )
        if not known:
            return None
        tail, count = shape[len(kept) :], math.prod(kept)
        columns = (2,) * len(tail)  # not one: conversions drop axes of one
        numbers = torch.arange(count).view(*kept, *(1 for _ in tail)).expand(*kept, *columns)
        found = self._revert({key: numbers})
        flat = {name: rows.reshape(-1, math.prod(columns))[:, 0] for name, rows in found.items()}
        same = all(
            (*rows.shape[: -len(tail)], *tail) == tuple(made[name].shape)
            and rows.shape[-len(tail) :] == columns
            for name, rows in found.items()
        )
        if not same or not torch.equal(
            torch.cat([*flat.values()]).sort().values, torch.arange(count)
        ):
            return None
        return {name: _runs_of(rows) for name, rows in flat.items()}

    def _moved(self, key: str, runs: Runs, shape: tuple[int, ...]) -> Content:
        """Whole rows, as they lie in files, or out of chunks whose columns were cut."""
        stored = self._keys[key]
        pieces: Pieces = ()
        for first, last in runs:
            if (own := self._rows(key, first, last)) is None:
                break
            pieces += own
        else:
            return Content(stored.dtype, shape, pieces)
        parts = [part for run in runs for part in _segments(stored.shape, *run)]
        for index, _, _ in parts:
            self._chunks.check_covered(key, index)

        def compute() -> torch.Tensor:
            found = [torch.atleast_1d(self._chunks.assemble(key, i))[a:b] for i, a, b in parts]
            return (torch.cat(found) if len(found) > 1 else found[0]).reshape(shape)

        held = sum(math.prod(stored.shape[len(index) :]) for index, _, _ in parts)
        return _computed(stored.dtype, shape, compute, held)

    def _rows(self, key: str, first: int, last: int) -> Pieces | None:
        shape = self._keys[key].shape
        if not shape:
            return None
        height = shape[1] if len(shape) > 2 else 1
        if first % height == last % height == 0:
            found = self._chunks.rows(key, (), first // height, last // height)
            if found is not None or len(shape) <= 2:
                return found
        pieces: Pieces = ()
        for part in _segments(shape, first, last):
            own = self._chunks.rows(key, *part)
            if own is None:
                return None
            pieces += own
        return pieces

    def _converted(self, key: str, name: str, tensor: torch.Tensor) -> Content:
        """What is more than rows that move: made of the whole tensor."""
        self._chunks.check_covered(key, ())

        def compute() -> torch.Tensor:
            made: torch.Tensor = self._revert({key: self._chunks.assemble(key, ())})[name]
            return made

        stored = self._keys[key]
        return _computed(stored.dtype, tuple(tensor.shape), compute, math.prod(stored.shape))

    def _revert(self, tensors: Tensors) -> Tensors:
        from transformers.core_model_loading import revert_weight_conversion

        made: Tensors = revert_weight_conversion(self._model, tensors)
        return made

    def _check_tensors(self) -> set[str]:
        """Compare names and shapes with the model's, whose buffers' names are returned."""
        kept = self._model.state_dict().keys()
        buffers = {n: t for n, t in self._model.named_buffers() if n in kept}
        wanted = {**dict(self._model.named_parameters()), **buffers}
        if missing := sorted(wanted.keys() - self._keys.keys()):
            raise MissingTensorError(tuple(missing))
        if surplus := sorted(self._keys.keys() - wanted.keys()):
            raise UnexpectedTensorError(tuple(surplus))
        for name, tensor in wanted.items():
            if (found := self._keys[name].shape) != tuple(tensor.shape):
                shape = tuple(tensor.shape)
                raise TensorShapeError(f"tensor {name!r} has shape {found}, the model has {shape}")
        return set(buffers)


def _read_modules(directory: Path) -> dict[str, StoredKey]:
    path = directory / MODEL_FILE
    if not path.is_file():
        keys = read_tensors(directory, lambda key: key.startswith(PREFIX))
        return {key.removeprefix(PREFIX): stored for key, stored in keys.items()}
    mapped, extents = map_shard(path)
    mapped.close()
    return {
        name: StoredKey(
            name,
            TORCH_DTYPES[extent.dtype],
            extent.shape,
            (
                Chunk(
                    (0,) * len(extent.shape),
                    extent.shape,
                    path,
                    extent.begin,
                    extent.end - extent.begin,
                    is_bare=True,
                ),
            ),
        )
        for name, extent in extents.items()
    }


def _build(directory: Path) -> Any:
    """The model without memory, which knows how the checkpoint in its directory was read."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.conversion_mapping import PrefixChange, get_model_conversion_mapping

    try:
        config = read_config(directory)
        sees = config.model_type in TOWERS
        kinds: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        with as_stored(directory, config.model_type), torch.device("meta"):
            model = kinds.from_config(config)
            conversions = get_model_conversion_mapping(model)
            usual = get_model_conversion_mapping(model, add_legacy=False)
    except (OSError, ValueError) as error:
        raise InvalidCheckpointError(f"{str(directory)!r} says of no model: {error}") from error
    architecture = str((config.architectures or [""])[0])
    if architecture.endswith((CRITIC, REWARD_MODEL)):
        del model.lm_head
        width = config.get_text_config().hidden_size
        has_bias = architecture.endswith(CRITIC)
        model.score = torch.nn.Linear(width, 1, bias=has_bias, device="meta")
    else:
        model.tie_weights()
    try:
        _use(model, conversions, tensor_shapes(directory))
    except MissingFileError:  # as transformers writes what it has not read
        model._weight_conversions = [c for c in usual if not isinstance(c, PrefixChange)]
    return model


def _use(model: Any, conversions: list[Any], names: Mapping[str, object]) -> None:
    """Keep those that apply to a checkpoint's names, as transformers does where it loads one."""
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    rename = partial(
        rename_source_key,
        weight_renamings=renamings,
        weight_converters=converters,
        base_model_prefix=model.base_model_prefix,
        meta_state_dict=model.state_dict(),
    )
    for name in names:
        rename(name)
    model._weight_conversions = [each for each in conversions if each.was_used()]


def _computed(
    dtype: torch.dtype, shape: tuple[int, ...], compute: Callable[[], torch.Tensor], held: int
) -> Content:
    """A tensor for which `held` numbers are in memory besides."""
    working = (math.prod(shape) + held) * dtype.itemsize
    return Content(dtype, shape, compute=compute, working_bytes=working)


def _height(shape: tuple[int, ...]) -> int:
    """Rows of a tensor, as `Runs` count them."""
    return math.prod(shape[:2]) if len(shape) > 2 else math.prod(shape[:1])


def _segments(
    shape: tuple[int, ...], first: int, last: int
) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Cut a run of rows by the first axis of three and more: its index, and rows within."""
    if len(shape) <= 2:
        yield (), first, last
        return
    while first < last:
        index, row = divmod(first, shape[1])
        count = min(shape[1] - row, last - first)
        yield (index,), row, row + count
        first += count


def _runs_of(rows: torch.Tensor) -> Runs:
    breaks = (rows.diff() != 1).nonzero().reshape(-1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in rows.tensor_split(breaks)]
