"""Saves and loads checkpoints in Megatron's torch_dist format, from what each rank holds itself.

Weights have Megatron's keys, what the optimizer keeps of them those of its `fully_reshardable`
state. Megatron's own way there gathers whole parameters on one rank, and its writer forks; here
each rank writes the ranges that it updates, by threads of its own.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

from services.trainer.backends.chunks import (
    PIECE_BYTES,
    Box,
    BoxData,
    ChunkReader,
    RankFiles,
    StagedChunks,
    cut,
)
from services.trainer.backends.megatron import upstream
from services.trainer.backends.megatron.config import MegatronConfig
from services.trainer.backends.megatron.model import PolicyModel
from services.trainer.backends.megatron.parallel import RankGroups
from services.trainer.backends.megatron.stepping import Stepper
from services.trainer.backends.megatron.upstream import on_cpu
from services.trainer.errors import CheckpointMismatchError
from services.trainer.staging import StagedCheckpoint
from sluice import platform
from sluice.vision import part_of
from sluice.weights.convert.stored import COMMON, CONFIG, MALFORMED, save_object

DESCRIPTION = "sluice.json"
FORMAT, KIND = 2, "ranges"
GATHERED_FORMAT = 1  # of earlier releases: Megatron's `fully_reshardable`, read in the same way
LAYOUT_FIELDS = (
    "tensor",
    "pipeline",
    "virtual_pipeline",
    "context",
    "expert",
    "expert_tensor_size",
    "distributed_optimizer",
    "dtype",
)
STATE = "optimizer.state."
MAIN, MOMENTS = "param", ("exp_avg", "exp_avg_sq")
FORMER_MAIN = "fp32_param"  # of plain optimizers, in the format before
_MEGATRON_CONFIG = b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
UNSHARED_BYTES = 1 << 20  # what is smaller is written by one of the ranks that hold it


class UnfitCheckpointError(CheckpointMismatchError, ValueError):
    """A checkpoint is of another backend, model or layout than it is read into."""


@dataclass(frozen=True)
class HeldPart:
    """A part of a parameter or buffer that is a tensor of its own in a checkpoint.

    `flat` are its elements in their order, from the `begin`-th of the parameter on. `replica` of
    `replicas` data ranks have the same; `leads` where this one and those are to write it.
    """

    place: Box
    flat: torch.Tensor
    begin: int
    replica: int
    replicas: int
    leads: bool
    stacked: bool  # in a tensor with those of other layers, or experts, along the first axis

    @cached_property
    def share(self) -> tuple[int, int]:
        """Return the elements of which this rank writes, where others hold the same: whole rows."""
        count = len(self.flat)
        if not self.leads:
            return 0, 0
        if count * self.flat.element_size() < UNSHARED_BYTES:
            return (0, count) if self.replica == 0 else (0, 0)
        height = next(size for size in self.place.sizes if size > 1)
        row = count // height
        first, last = (height * (self.replica + i) // self.replicas for i in range(2))
        return first * row, last * row


class HeldState:
    """What this rank holds of a model and its optimizer: parts of the tensors of a checkpoint."""

    def __init__(self, policy: PolicyModel, stepper: Stepper, frozen: Set[str]) -> None:
        """frozen: tensors of the HF checkpoint. Where it is some of the layers that are, what the
        optimizer keeps of each layer is a tensor of its own: one of all would have gaps.
        """
        weights = policy.source.weights
        self._by_layer = any(weights.binding(name).layer is not None for name in frozen)
        metadata = {
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)
        }
        self._optimizer = stepper.optimizer
        self.extra_states: dict[str, bytes] = {}
        self._parts: list[HeldPart] = []
        self._by_parameter: dict[int, list[HeldPart]] = {}
        models: list[Any] = list(policy.models)
        for model in models:
            for base in nested_values(model.sharded_state_dict(metadata=metadata)):
                if isinstance(base, ShardedObject):
                    if _is_first(base.replica_id):
                        self.extra_states[base.unique_key] = save_object([base.data])
                    continue
                parts = list(_parts_of(base, base.data))
                self._parts += parts
                self._by_parameter[id(base.data)] = parts

    def written_chunks(self) -> Iterator[BoxData]:
        """Yield what this rank writes: with the others', every element once."""
        for part in self._parts:
            first, last = part.share
            place, begin = part.place, first
            yield from cut(place, part.flat[first:last], begin, PIECE_BYTES)
        for share, part, first, last in self._optimizer_ranges():
            if share.spread:
                low, high = (first, last) if part.leads else (0, 0)
            else:
                low, high = part.share
            for name, flat in _state_of(share).items():
                at = part.begin - share.begin
                place = _renamed(self._state_place(part), name)
                yield from cut(place, flat[at + low : at + high], low, PIECE_BYTES)

    def wanted_weights(self) -> Iterator[BoxData]:
        """Yield all weights of this rank, to be read."""
        for part in self._parts:
            yield from cut(part.place, part.flat)

    def wanted_state(self) -> Iterator[tuple[str, str, list[BoxData]]]:
        """Yield what the optimizer keeps, as (name, key of the weights, chunks), to be read."""
        for share, part, first, last in self._optimizer_ranges():
            for name in MOMENTS:
                share.state.setdefault(name, torch.zeros_like(share.main, dtype=torch.float32))
            for name, flat in _state_of(share).items():
                at = part.begin - share.begin
                place = self._state_place(part)
                yield name, place.key, cut(place, flat[at + first : at + last], first)

    def _state_place(self, part: HeldPart) -> Box:
        place = part.place
        if not (self._by_layer and part.stacked):
            return place
        key = f"{place.key}.{place.offset[0]}"
        return Box(key, place.shape[1:], place.offset[1:], place.sizes[1:], place.padded)

    def _optimizer_ranges(
        self,
    ) -> Iterator[tuple[upstream.OptimizerShare, HeldPart, int, int]]:
        """Yield shares by part, with the elements of the part that are in the share."""
        for share in upstream.optimizer_shares(self._optimizer):
            end = share.begin + len(share.main)
            for part in self._by_parameter[id(share.parameter)]:
                size = len(part.flat)
                first, last = (
                    min(max(bound - part.begin, 0), size) for bound in (share.begin, end)
                )
                if first < last:
                    yield share, part, first, last


def _parts_of(
    base: ShardedTensor | ShardedTensorFactory, tensor: torch.Tensor
) -> Iterator[HeldPart]:
    whole = tensor.detach()
    made = nested_values(base.build()) if isinstance(base, ShardedTensorFactory) else [base]
    for sharded in made:
        data = sharded.data.detach()
        offset = data.storage_offset() - whole.storage_offset()
        inside = data.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert inside and data.is_contiguous() and whole.is_contiguous(), sharded.key
        *model_replica, replica = (0, *_numbers(sharded.replica_id))
        prepended = (1,) * sharded.prepend_axis_num
        place = Box(
            sharded.key,
            tuple(sharded.global_shape),
            tuple(sharded.global_offset),
            (*prepended, *sharded.local_shape),
            padded=sharded.allow_shape_mismatch,
        )
        yield HeldPart(
            place,
            data.view(-1),
            offset,
            replica,
            _replicas_of(tensor),
            leads=not any(model_replica),
            stacked=bool(prepended),
        )


def _numbers(replica_id: int | tuple[int, ...]) -> tuple[int, ...]:
    return (replica_id,) if isinstance(replica_id, int) else tuple(replica_id)


def _is_first(replica_id: int | tuple[int, ...]) -> bool:
    return not any(_numbers(replica_id))


def _replicas_of(tensor: torch.Tensor) -> int:
    """Count the data ranks with the same tensor: experts have groups of their own."""
    if not isinstance(tensor, torch.nn.Parameter):
        return 1
    if getattr(tensor, "allreduce", True):
        return int(parallel_state.get_data_parallel_world_size(with_context_parallel=True))
    return int(parallel_state.get_expert_data_parallel_world_size())


def _state_of(share: upstream.OptimizerShare) -> dict[str, torch.Tensor]:
    """Find the tensors of a share that are not its weights themselves, flat."""
    found = {name: share.state[name] for name in MOMENTS if name in share.state}
    own = share.main.untyped_storage().data_ptr()
    if own != share.parameter.untyped_storage().data_ptr():
        found[MAIN] = share.main
    return {name: tensor.detach().view(-1) for name, tensor in found.items()}


def _renamed(place: Box, name: str) -> Box:
    return Box(f"{STATE}{name}.{place.key}", place.shape, place.offset, place.sizes, place.padded)


def stage(
    policy: PolicyModel,
    stepper: Stepper,
    config: MegatronConfig,
    groups: RankGroups,
    directory: Path,
    *,
    scales: Mapping[str, float],
    frozen: Set[str],
    durable: bool,
) -> StagedCheckpoint:
    """Take in what is to be written into the existing, empty `directory`."""
    state = HeldState(policy, stepper, frozen)
    objects = {_rng_name(): save_object([_rng_states()]), **state.extra_states}
    description = {
        "format": FORMAT,
        "kind": KIND,
        "backend": "megatron",
        "model": _fingerprint(policy),
        "layout": _layout(config),
        "scales": dict(scales),
        "frozen": _frozen_digest(frozen),
        "predicts": policy.source.predicts,
    }
    return StagedChunks(
        directory,
        RankFiles(dist.get_rank(), state.written_chunks(), objects),
        {
            COMMON: save_object(_common_state(stepper)),
            CONFIG: _MEGATRON_CONFIG,
            DESCRIPTION: json.dumps(description).encode(),
        },
        groups.checkpoint,
        threads=config.save_threads,
        durable=durable,
    )


def load(
    policy: PolicyModel,
    stepper: Stepper,
    config: MegatronConfig,
    directory: Path,
    *,
    scales: Mapping[str, float],
    frozen: Set[str],
) -> None:
    """Read a checkpoint of any layout into this rank's tensors.

    Raises UnfitCheckpointError when it is of another kind or does not fit.
    """
    description = _read_description(directory)
    if description.get("predicts", False) != policy.source.predicts:
        other = "no" if policy.source.predicts else "a"
        raise UnfitCheckpointError(
            f"the checkpoint {directory.name!r} has {other} layer of multi-token prediction that "
            "was trained (megatron.mtp_loss_scaling_factor): publish the weights and start there"
        )
    if description["model"] != _fingerprint(policy):
        raise UnfitCheckpointError(f"the checkpoint {directory.name!r} is of another model")
    saved = description["layout"]
    if saved["dtype"] != config.dtype:
        raise UnfitCheckpointError(
            f"optimizer state saved with dtype {saved['dtype']} cannot be read with {config.dtype}"
            ": set megatron.dtype to that, or start from the weights that were published, as model"
        )
    were = description.get("scales", dict.fromkeys(scales, 1.0))
    if were != scales:
        raise UnfitCheckpointError(
            f"optimizer state saved with learning rates of {were} times that of the text cannot be "
            f"read with {dict(scales)}: publish the weights and start from them"
        )
    # of a release before: parts of vision alone were frozen
    by_part = {name for name in frozen if not scales[part_of(name)]}
    if description.get("frozen", _frozen_digest(by_part)) != _frozen_digest(frozen):
        raise UnfitCheckpointError(
            f"the checkpoint {directory.name!r} was saved by a trainer that had frozen other "
            "parameters: set `trainable` and `vision` as they were, or publish the weights and "
            "start from them"
        )
    try:
        _read_state(HeldState(policy, stepper, frozen), stepper, directory)
        if saved == _layout(config):
            _restore_rng(directory)
    except OSError:
        raise
    except MALFORMED as error:
        raise UnfitCheckpointError(f"{directory.name!r} cannot be read: {error}") from error


def _read_state(state: HeldState, stepper: Stepper, directory: Path) -> None:
    reader, common = ChunkReader(directory), torch.load(directory / COMMON, weights_only=True)
    step = _find_number(common, ("step", "common_step"))
    reader.fill(state.wanted_weights())
    for name, weights, chunks in state.wanted_state():
        key = f"{STATE}{name}.{weights}"
        if name == MAIN and key not in reader:
            key = f"{STATE}{FORMER_MAIN}.{weights}"
        if key in reader or step:
            reader.fill(chunks, key)
        else:  # the format before leaves out what has not stepped
            for chunk in chunks:
                chunk.data.zero_()
    with torch.no_grad():
        reader.read()
    stepper.resume(int(step))
    for scaler in upstream.scalers_of(stepper.optimizer):
        scaler.load_state_dict(_find_scaler(common))


def _common_state(stepper: Stepper) -> dict[str, Any]:
    """What all ranks have alike, in the words of Megatron's optimizer."""
    common: dict[str, Any] = {"step": stepper.steps}
    for scaler in upstream.scalers_of(stepper.optimizer)[:1]:
        common["grad_scaler"] = scaler.state_dict()
    return {"optimizer": common}


def _find_number(state: Any, names: tuple[str, ...]) -> float:
    """Find a number by its name, however deep; 0 where there is none."""
    if isinstance(state, (dict, list)):
        for name, value in state.items() if isinstance(state, dict) else enumerate(state):
            if name in names and value is not None:
                return float(value)
            if found := _find_number(value, names):
                return found
    return 0.0


def _find_scaler(common: dict[str, Any]) -> dict[str, Any]:
    """Find the state of a scaler: of the only optimizer, or of the first of several."""
    state = common["optimizer"]
    found: dict[str, Any] = (
        state["grad_scaler"] if "grad_scaler" in state else state[0]["grad_scaler"]
    )
    return found


def _layout(config: MegatronConfig) -> dict[str, Any]:
    fields = {name: getattr(config, name) for name in LAYOUT_FIELDS}
    return {**fields, "world_size": dist.get_world_size()}


def _read_description(directory: Path) -> dict[str, Any]:
    try:
        description: dict[str, Any] = json.loads((directory / DESCRIPTION).read_bytes())
        backend, number = description["backend"], description["format"]
        kind = description["kind"] if number == FORMAT else KIND
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnfitCheckpointError(
            f"{directory.name!r} is no complete checkpoint of the Megatron backend"
        ) from error
    if backend != "megatron" or number not in (FORMAT, GATHERED_FORMAT) or kind != KIND:
        raise UnfitCheckpointError(
            f"{directory.name!r} is of backend {backend!r}, format {number!r}, kind {kind!r}: "
            f"this release reads kind {KIND!r} of format {FORMAT}, and format {GATHERED_FORMAT}; "
            "load it with the release that wrote it, publish the weights and start from them"
        )
    return description


def _fingerprint(policy: PolicyModel) -> str:
    """The same for models of equal tensors, by names and shapes."""
    tensors = sorted(policy.source.weights.hf_tensors().items())
    return xxhash.xxh3_128_hexdigest(json.dumps(tensors).encode())


def _frozen_digest(names: Set[str]) -> str:
    """The same for the same tensors of a checkpoint; empty where none is frozen."""
    return xxhash.xxh3_128_hexdigest(json.dumps(sorted(names)).encode()) if names else ""


def _rng_name() -> str:
    """Name the object of this rank as Megatron's ShardedObject does."""
    return f"rng/shard_{dist.get_rank()}_{dist.get_world_size()}"


def _rng_states() -> dict[str, Any]:
    states: dict[str, Any] = {
        "python": random.getstate(),
        "cpu": torch.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if not on_cpu():
        states["device"] = platform.current().module.get_rng_state()
    return states


def _restore_rng(directory: Path) -> None:
    """Go on with the random numbers of a run under the same layout."""
    content = ChunkReader(directory).read_object(_rng_name())
    if content is None:
        raise ValueError(f"{_rng_name()!r} is missing")
    (states,) = torch.load(io.BytesIO(content), weights_only=True)
    random.setstate(states["python"])
    torch.set_rng_state(states["cpu"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])
    if "device" in states:
        platform.current().module.set_rng_state(states["device"])
