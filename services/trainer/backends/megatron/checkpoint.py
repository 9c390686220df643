"""Saves and loads Megatron's torch_dist checkpoints, written by threads of this process.

Megatron's own writer forks, and starts a further process that imports the program again: neither
is safe in a process that serves gRPC. The plan, the layout of files and the metadata stay
Megatron's; only the writing of this rank's files happens here.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from services.trainer.backends.megatron import upstream
from services.trainer.backends.megatron.config import MegatronConfig
from services.trainer.backends.megatron.model import PolicyModel
from services.trainer.backends.megatron.parallel import RankGroups
from services.trainer.backends.megatron.stepping import Stepper
from services.trainer.backends.megatron.upstream import on_cpu
from services.trainer.errors import CheckpointMismatchError
from sluice import platform
from sluice.durable import naming, write_new
from sluice.weights.manifest import FileEntry, digest_file


class CheckpointWriteError(OSError):
    """Files of a checkpoint could not be written."""


class ThreadSave(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's save strategy with a writer that neither forks nor spawns."""

    def __init__(self, *, threads: int, durable: bool) -> None:
        super().__init__("torch_dist", 1, thread_count=threads)
        self._durable = durable
        self.writer: HostWriter | None = None

    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> Any:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        writer = self.writer = HostWriter(
            checkpoint_dir, thread_count=self.thread_count, sync_files=self._durable
        )
        planned, *_ = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(state, False),
            writer,
            None,
            0,
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
        return AsyncRequest(writer.write, (), [lambda: save_state_dict_async_finalize(*planned)])


class _DigestedStream:
    """A file that is hashed as it is written, from its beginning to its end."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._hasher = xxhash.xxh3_128()
        self.tell, self.flush = stream.tell, stream.flush
        self.fileno, self.close = stream.fileno, stream.close

    def write(self, data: Any) -> int:
        self._hasher.update(data)
        written: int = self._stream.write(data)
        return written

    def entry(self, path: Path) -> FileEntry:
        return FileEntry(path.stat().st_size, self._hasher.hexdigest())


class _DigestingFiles(FileSystem):
    """torch's files. `entries` are of those written; `failures` of threads that torch forgets."""

    def __init__(self) -> None:
        self.entries: dict[str, FileEntry] = {}
        self.failures: list[Exception] = []

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        try:
            with naming(path), super().create_stream(path, mode) as stream:
                digested = _DigestedStream(stream)
                yield digested
        except Exception as error:
            self.failures.append(error)
            raise
        self.entries[path.name] = digested.entry(path)


class HostWriter(FileSystemWriter):
    """torch's writer in the steps that Megatron takes: prepare, write, collect."""

    def __init__(self, path: Path, *, thread_count: int, sync_files: bool) -> None:
        super().__init__(path, thread_count=thread_count, sync_files=sync_files)
        self.fs = self.files = _DigestingFiles()
        self._plan: SavePlan | None = None
        self._data: dict[int, Any] = {}
        self._results: Any = None

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Resolves everything that is to be written, and moves it to the host."""
        self._plan = plan
        for item in plan.items:
            data: Any = planner.resolve_data(item)
            if item.type != WriteItemType.BYTE_IO:
                data = data.detach().cpu()
            self._data[id(item)] = data

    def write(self) -> None:
        """Writes this rank's files; uses torch's writer threads and no collectives."""
        assert self._plan is not None
        planner: Any = SimpleNamespace(resolve_data=self._resolve)
        self._results = self.write_data(self._plan, planner).wait()
        self._data.clear()
        if self.files.failures:
            raise self.files.failures[0]

    def retrieve_write_results(self) -> Any:
        return self._results

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        super().finish(metadata, results)

    def _resolve(self, item: WriteItem) -> Any:
        return self._data[id(item)]


DESCRIPTION = "sluice.json"
FORMAT = 1
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


class UnfitCheckpointError(CheckpointMismatchError, ValueError):
    """A checkpoint is of another backend, model or layout than it is read into."""


def save(
    policy: PolicyModel,
    stepper: Stepper,
    config: MegatronConfig,
    groups: RankGroups,
    directory: Path,
    *,
    scales: Mapping[str, float],
    durable: bool,
) -> dict[str, FileEntry]:
    """Writes into the existing, empty `directory`; collective. The files of this rank.

    Raises CheckpointWriteError on every rank when any rank's files could not be written.
    """
    state = _sharded_state(policy, stepper, loading=False)
    state["rng"] = _rng_object()
    strategy = ThreadSave(threads=config.save_threads, durable=durable)
    request = dist_checkpointing.save(
        state,
        str(directory),
        sharded_strategy=strategy,
        async_sharded_save=True,  # so that the files are written here, where an error can be shared
        content_metadata={"distrib_optim_sharding_type": "fully_reshardable"},
    )
    failure: OSError | RuntimeError | None = None
    try:
        request.async_fn(*request.async_fn_args)
    except (OSError, RuntimeError) as error:
        failure = error
    if groups.any_rank(failure is not None):
        raise CheckpointWriteError(
            f"checkpoint {directory.name!r} was not written" + (f": {failure}" if failure else "")
        ) from failure
    for finalize in request.finalize_fns:
        finalize()
    _describe(policy, config, scales, directory)
    assert strategy.writer is not None
    files = {n: e for n, e in strategy.writer.files.entries.items() if (directory / n).exists()}
    if dist.get_rank() == 0:  # the small ones, of which Megatron writes some by itself
        names = {path.name for path in directory.iterdir() if not path.match("*.distcp")}
        files |= {name: FileEntry(*digest_file(directory / name)) for name in names}
    return files


def _describe(
    policy: PolicyModel, config: MegatronConfig, scales: Mapping[str, float], directory: Path
) -> None:
    """Names model and layout in the finished checkpoint; on rank 0, then all ranks go on."""
    if dist.get_rank() == 0:
        description = {
            "format": FORMAT,
            "backend": "megatron",
            "model": _fingerprint(policy),
            "layout": _layout(config),
            "scales": dict(scales),
        }
        write_new(directory / DESCRIPTION, json.dumps(description).encode())
    dist.barrier()


def load(
    policy: PolicyModel,
    stepper: Stepper,
    config: MegatronConfig,
    directory: Path,
    *,
    scales: Mapping[str, float],
) -> None:
    """Reads a checkpoint of any layout; collective.

    Raises UnfitCheckpointError when it is of another kind or its optimizer does not fit.
    """
    description = _read_description(directory)
    if description["model"] != _fingerprint(policy):
        raise UnfitCheckpointError(f"the checkpoint {directory.name!r} is of another model")
    saved = description["layout"]
    _check_optimizer(saved, config)
    were = description.get("scales", dict.fromkeys(scales, 1.0))
    if were != scales:
        raise UnfitCheckpointError(
            f"optimizer state saved with learning rates of {were} times that of the text cannot be "
            f"read with {dict(scales)}: publish the weights and start from them"
        )
    state = _sharded_state(policy, stepper, loading=True)
    if saved == _layout(config):
        state["rng"] = _rng_object()
    try:
        loaded = dist_checkpointing.load(
            state, str(directory), strict=StrictHandling.RAISE_UNEXPECTED
        )
    except CheckpointException as error:  # of whatever rank; no subclass of Exception
        cause = next(iter(error.failures.values()))[0]
        raise UnfitCheckpointError(f"{directory.name!r} cannot be read: {cause}") from error
    for name, model in _named_models(policy):
        model.load_state_dict(loaded[name])
    upstream.name_missing_steps(loaded["optimizer"])
    with torch.no_grad(), upstream.keep_steps(stepper.optimizer):
        stepper.optimizer.load_state_dict(loaded["optimizer"])
    upstream.own_steps(stepper.optimizer)
    if "rng" in loaded:
        _restore_rng(loaded["rng"])


def _sharded_state(policy: PolicyModel, stepper: Stepper, *, loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state: dict[str, Any] = {
        name: model.sharded_state_dict(metadata=metadata) for name, model in _named_models(policy)
    }
    models = dict(state)
    state["optimizer"] = stepper.optimizer.sharded_state_dict(
        models, is_loading=loading, metadata=metadata
    )
    return state


def _named_models(policy: PolicyModel) -> Sequence[tuple[str, Any]]:
    return [(f"model{index}", model) for index, model in enumerate(policy.models)]


def _layout(config: MegatronConfig) -> dict[str, Any]:
    fields = {name: getattr(config, name) for name in LAYOUT_FIELDS}
    return {**fields, "world_size": dist.get_world_size()}


def _read_description(directory: Path) -> dict[str, Any]:
    try:
        description: dict[str, Any] = json.loads((directory / DESCRIPTION).read_bytes())
        is_ours = description["backend"] == "megatron" and description["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnfitCheckpointError(
            f"{directory.name!r} is no complete checkpoint of the Megatron backend"
        ) from error
    if not is_ours:
        raise UnfitCheckpointError(f"{directory.name!r} is of another backend or format")
    return description


def _fingerprint(policy: PolicyModel) -> str:
    """The same for models of equal tensors, by names and shapes."""
    tensors = sorted(policy.source.weights.hf_tensors().items())
    return xxhash.xxh3_128_hexdigest(json.dumps(tensors).encode())


def _check_optimizer(saved: dict[str, Any], config: MegatronConfig) -> None:
    now = _layout(config)
    if (saved["expert"] > 1) != (config.expert > 1):
        raise UnfitCheckpointError(
            f"optimizer state saved with expert {saved['expert']} cannot be read with expert "
            f"{config.expert}: publish the weights and start from them",
            saved=saved["expert"],
            expert=config.expert,
        )
    for name in ("distributed_optimizer", "dtype"):
        if saved[name] != now[name]:
            raise UnfitCheckpointError(
                f"optimizer state saved with {name} {saved[name]} cannot be read with {now[name]}"
            )


def _rng_object() -> ShardedObject:
    """All generators of this rank; the data is read when saving and ignored when loading."""
    states = {
        "python": random.getstate(),
        "cpu": torch.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if not on_cpu():
        states["device"] = platform.current().module.get_rng_state()
    return ShardedObject("rng", states, (dist.get_world_size(),), (dist.get_rank(),))


def _restore_rng(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["cpu"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])
    if "device" in states:
        platform.current().module.set_rng_state(states["device"])
