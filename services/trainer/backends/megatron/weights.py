"""Weights straight from an HF checkpoint: each rank reads its own slices and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from safetensors import safe_open

from services.trainer.backends.megatron import parallel
from services.trainer.backends.megatron.fit import UnsupportedFeatureError
from services.trainer.backends.megatron.model_config import ModelSource
from services.trainer.backends.trainable import TensorNames
from sluice.weights.checkpoint import shard_paths
from sluice.weights.errors import DuplicateTensorError, UnexpectedTensorError
from sluice.weights.manifest import ShardFile
from sluice.weights.rules.packing import Slice, pack, source_slices, unpack
from sluice.weights.rules.rule import Pack, ShardAxis
from sluice.weights.rules.weight_map import Binding, WeightMap, rule_name
from sluice.weights.shards import PendingShard, ShardWrite

NEW_HEAD = {"score.weight", "score.bias"}  # zero where a checkpoint is a language model's
LANGUAGE_HEAD = "lm_head.weight"
ROUTER_BIAS = ".expert_bias"
_EXPERT = re.compile(r"(\.local_experts\.)\d+\.")


class TiedTensorError(ValueError):
    """A checkpoint holds two different values for one tied tensor."""


class HfCheckpoint:
    """Slices of the tensors of an HF checkpoint. `bytes_read` counts what was asked for."""

    def __init__(self, directory: Path) -> None:
        self.bytes_read = 0
        self._directory = directory
        self._files = ExitStack()
        self._slices: dict[str, Any] = {}

    def __enter__(self) -> Self:
        found: dict[str, str] = {}
        for path in shard_paths(self._directory):
            file = self._files.enter_context(safe_open(path, framework="pt", device="cpu"))
            for name in file.keys():  # noqa: SIM118  # not a mapping
                if name in found:
                    raise DuplicateTensorError(name, (found[name], path.name))
                found[name] = path.name
                self._slices[name] = file.get_slice(name)
        return self

    def __exit__(self, *_: object) -> None:
        self._slices.clear()
        self._files.close()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(piece.get_shape()) for name, piece in self._slices.items()}

    def read(self, part: Slice) -> torch.Tensor:
        bounds = [slice(None)] * part.axis + [slice(part.start, part.stop)]
        source = self._slices[part.name]
        if part.index is None:
            tensor: torch.Tensor = source[tuple(bounds)]
        else:
            tensor = source[(slice(part.index, part.index + 1), *bounds)][0]
        self.bytes_read += tensor.nbytes
        return tensor


def parameters_of(weights: WeightMap) -> dict[str, list[TensorNames]]:
    """Return of what tensors of a checkpoint each parameter of a whole model is made.

    The experts of a layer count as one: a grouped layer computes gradients of all or of none.
    """
    found: dict[str, list[TensorNames]] = {}
    for binding in weights.bindings():
        if binding.alias or binding.megatron.endswith(ROUTER_BIAS):
            continue
        tied = [copy.name for copy in binding.copies if not weights.is_foreign(copy.name)]
        name = _EXPERT.sub(r"\1*.", binding.megatron)
        found.setdefault(name, []).extend((each.name, *tied) for each in binding.sources)
    return found


def _router_biases(chunk: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The one kind of buffer that a checkpoint has."""
    for name, buffer in chunk.named_buffers():
        if name.endswith(ROUTER_BIAS):
            yield name, buffer


@dataclass(frozen=True)
class LocalTensor:
    """A parameter or buffer of this rank and the binding that says what it is."""

    binding: Binding
    parameter: torch.nn.Parameter


def local_tensors(
    chunks: Sequence[torch.nn.Module], source: ModelSource, config: TransformerConfig
) -> Iterator[LocalTensor]:
    """Yields every parameter of this rank's chunks, by the rules. Raises UnexpectedTensorError.

    Each is marked with its cut: Megatron only does so when it initialises weights, and without
    the mark takes a share for a copy, so that norm and clipping leave it out on other ranks.
    """
    experts = source.shape.experts // max(config.expert_model_parallel_size, 1)
    expert_offset = parallel_state.get_expert_model_parallel_rank() * experts
    interleaved = config.virtual_pipeline_model_parallel_size is not None
    for index, chunk in enumerate(chunks):
        offset = get_transformer_layer_offset(config, vp_stage=index if interleaved else None)
        for name, parameter in (*chunk.named_parameters(), *_router_biases(chunk)):
            canonical = rule_name(name, layer_offset=offset, expert_offset=expert_offset)
            binding = source.weights.binding(canonical)
            if binding.cut is not ShardAxis.NONE and not hasattr(
                parameter, "tensor_model_parallel"
            ):
                axis = 0 if binding.cut is ShardAxis.ROWS else 1
                set_tensor_model_parallel_attributes(parameter, True, axis, 1)
            yield LocalTensor(binding, parameter)


@dataclass(frozen=True)
class Loaded:
    """What came of a checkpoint. untrained: the names of what it has beside the model's tensors.

    repeated: names of further copies, by the tensor that they equal.
    """

    bytes_read: int
    untrained: tuple[str, ...]
    repeated: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@torch.no_grad()
def load_hf(
    tensors: Sequence[LocalTensor], source: ModelSource, directory: Path, *, padded_vocab: int
) -> Loaded:
    """Fill this rank's parameters from the checkpoint in `directory`.

    Raises MissingTensorError, UnexpectedTensorError, TensorShapeError, DuplicateTensorError or
    TiedTensorError, each with the names.
    """
    with HfCheckpoint(directory) as checkpoint:
        available = checkpoint.shapes()
        untrained = sorted(filter(source.weights.is_foreign, available))
        repeated: dict[str, tuple[str, ...]] = {}
        if source.predicts:
            repeated = _check_prediction(source, untrained)
            untrained = []
        new_head = source.value_head and not NEW_HEAD & available.keys()
        source.weights.check_hf(_as_critic(source, available) if new_head else available)
        for tensor in tensors:
            binding = tensor.binding
            if new_head and {part.name for part in binding.sources} <= NEW_HEAD:
                tensor.parameter.zero_()
                continue
            partition = parallel.partition(
                expert=binding.expert is not None, padded_vocab=padded_vocab
            )
            slices = source_slices(binding, partition)
            parts = [checkpoint.read(part) for part in slices]
            for copy in binding.copies:
                if copy.name in available:
                    _check_copy(checkpoint, slices[0], copy.name, parts[0])
            if binding.pack is Pack.SHIFTED:  # what is to be trained may be rounded
                tensor.parameter.copy_(parts[0].float() - 1)
            else:
                tensor.parameter.copy_(pack(binding, parts, partition))
        kept = () if source.value_head else tuple(untrained)
        return Loaded(checkpoint.bytes_read, kept, repeated)


def _check_prediction(source: ModelSource, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Find what of `names`, of the layer of prediction, repeats other tensors, by those.

    Raises UnsupportedFeatureError where there are none, UnexpectedTensorError for others.
    """
    if not names:
        raise UnsupportedFeatureError(
            f"mtp_loss_scaling_factor: {source.directory.name!r} has no layer of multi-token "
            "prediction to be trained"
        )
    owned = source.weights.hf_tensors()
    repeated = {
        name: tuple(copy for copy in source.weights.copies_of(name) if copy in names)
        for name in owned
    }
    copies = {copy for each in repeated.values() for copy in each}
    if unknown := tuple(name for name in names if name not in owned and name not in copies):
        raise UnexpectedTensorError(unknown)
    return {name: each for name, each in repeated.items() if each}


def repeat(
    made: Iterable[dict[str, torch.Tensor]], repeated: Mapping[str, tuple[str, ...]]
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield what is made, and copies under the names that a checkpoint has them by too."""
    for part in made:
        yield part
        for name, tensor in part.items():
            for copy in repeated.get(name, ()):
                yield {copy: tensor}


def _as_critic(
    source: ModelSource, available: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """A language model's tensors, with a value head in place of its output."""
    head = {name: shape for name, shape in source.weights.hf_tensors().items() if name in NEW_HEAD}
    return {name: shape for name, shape in available.items() if name != LANGUAGE_HEAD} | head


def _check_copy(checkpoint: HfCheckpoint, part: Slice, name: str, expected: torch.Tensor) -> None:
    copy = checkpoint.read(Slice(name, part.axis, part.start, part.stop))
    if not torch.equal(copy, expected):
        raise TiedTensorError(f"{name!r} and {part.name!r} are tied but differ")


Reader = Callable[[LocalTensor], torch.Tensor]


def read_parameter(tensor: LocalTensor) -> torch.Tensor:
    return tensor.parameter.detach()


@torch.no_grad()
def export_tensors(
    tensors: Sequence[LocalTensor], read: Reader = read_parameter
) -> Iterator[dict[str, torch.Tensor]]:
    """Yields the HF tensors that this rank owns, those of one Megatron tensor at a time.

    `read` gives what is exported of each, in the parameter's shape. Of the copies of a tensor
    over data and context ranks the first is taken; its shares are gathered on one of the tensor
    ranks, each in turn, and experts that are one HF tensor on one of the ranks that hold them.
    Collective over the tensor- and expert-parallel groups: run it to the end.
    """
    waiting: dict[str, list[torch.Tensor]] = {}
    for index, tensor in enumerate(tensors):
        binding = tensor.binding
        expert = binding.expert is not None
        if binding.alias or _copy_index(expert=expert) != 0:
            continue
        group = parallel.tensor_group(expert=expert)
        stacked = binding.sources[0].index is not None
        turn = (binding.layer or 0) if stacked else index  # all of a layer on one rank
        shares = _collect(read(tensor), binding.cut, turn % group.size(), group)
        if shares is None:
            continue
        made = unpack(binding, shares)
        if not stacked:
            yield made
            continue
        for name, part in made.items():
            waiting.setdefault(name, []).append(part)
            if (whole := _join_experts(waiting, name, binding)) is not None:
                yield {name: whole}


def _join_experts(
    waiting: dict[str, list[torch.Tensor]], name: str, binding: Binding
) -> torch.Tensor | None:
    """The tensor of all experts, on one of the ranks that hold some of them.

    None elsewhere, and while others of this rank's are still to come. Collective over the
    expert-parallel group: its ranks have as many each, in the order of experts.
    """
    group = parallel_state.get_expert_model_parallel_group()
    (count,) = {source.shape[0] for source in binding.sources}
    if len(waiting[name]) < count // group.size():
        return None
    owner = (binding.layer or 0) % group.size()
    shares = _collect(torch.stack(waiting.pop(name)), ShardAxis.ROWS, owner, group)
    return None if shares is None else torch.cat(shares)


def write_shards(
    made: Iterator[dict[str, torch.Tensor]],
    directory: Path,
    *,
    rank: int,
    max_bytes: int,
    write: ShardWrite,
) -> list[ShardFile]:
    """Write what this rank has `made` as safetensors files of about `max_bytes` each."""
    pending: list[PendingShard] = []
    waiting: dict[str, torch.Tensor] = {}

    def flush() -> None:
        name = f"model-{rank:05d}-{len(pending):05d}.safetensors"
        pending.append(write(directory, name, dict(waiting), {}))
        waiting.clear()

    for part in made:
        waiting.update({name: tensor.contiguous() for name, tensor in part.items()})
        if sum(tensor.nbytes for tensor in waiting.values()) >= max_bytes:
            try:
                flush()
            except BaseException:  # other ranks wait for this one in what is to come
                for _ in made:
                    pass
                raise
    if waiting:
        flush()
    return [wait() for wait in pending]


def _copy_index(*, expert: bool) -> int:
    if expert:
        return int(parallel_state.get_expert_data_parallel_rank())
    return int(parallel_state.get_data_parallel_rank(with_context_parallel=True))


def _collect(
    share: torch.Tensor, cut: ShardAxis, owner: int, group: dist.ProcessGroup
) -> list[torch.Tensor] | None:
    """All shares on the owner, None elsewhere. What is not cut needs no exchange."""
    mine = group.rank() == owner
    if cut is ShardAxis.NONE or group.size() == 1:
        return [share] if mine else None
    share = share.contiguous()
    shares = [torch.empty_like(share) for _ in range(group.size())] if mine else None
    dist.gather(share, shares, dst=dist.get_global_rank(group, owner), group=group)
    return shares
