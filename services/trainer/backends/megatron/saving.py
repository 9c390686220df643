"""Writing Megatron's torch_dist checkpoints from threads of this process.

Megatron's own writer forks, and starts a further process that imports the program again: neither
is safe in a process that serves gRPC. The plan, the layout of files and the metadata stay
Megatron's; only the writing of this rank's files happens here.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
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
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from services.trainer.backends.megatron.device import any_rank


class CheckpointWriteError(OSError):
    """Files of a checkpoint could not be written in time."""


class ThreadSave(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's save strategy with a writer that neither forks nor spawns.

    `copies`: the writer works on copies in host memory, so that training may go on meanwhile.
    """

    def __init__(self, *, threads: int, copies: bool, durable: bool) -> None:
        super().__init__("torch_dist", 1, thread_count=threads)
        self._copies, self._durable = copies, durable

    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> Any:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        writer = HostWriter(
            checkpoint_dir,
            thread_count=self.thread_count,
            sync_files=self._durable,
            copies=self._copies,
        )
        planned, *_ = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(state, False),
            writer,
            None,
            0,
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
        return AsyncRequest(writer.write, (), [lambda: save_state_dict_async_finalize(*planned)])


class HostWriter(FileSystemWriter):
    """torch's writer in the steps that Megatron takes: prepare, write (anywhere), collect."""

    def __init__(self, path: Path, *, thread_count: int, sync_files: bool, copies: bool) -> None:
        super().__init__(path, thread_count=thread_count, sync_files=sync_files)
        self._copies = copies
        self._plan: SavePlan | None = None
        self._data: dict[int, Any] = {}
        self._results: Any = None

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Take hold of everything that is to be written."""
        self._plan = plan
        for item in plan.items:
            data: Any = planner.resolve_data(item)
            if item.type != WriteItemType.BYTE_IO:
                data = self._on_host(data)
            self._data[id(item)] = data

    def write(self) -> None:
        """Write this rank's files; uses torch's writer threads and no collectives."""
        assert self._plan is not None
        planner: Any = SimpleNamespace(resolve_data=self._resolve)
        self._results = self.write_data(self._plan, planner).wait()
        self._data.clear()

    def retrieve_write_results(self) -> Any:
        return self._results

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        super().finish(metadata, results)

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if tensor.device.type != "cpu":
            return tensor.cpu()
        return tensor.clone() if self._copies else tensor

    def _resolve(self, item: WriteItem) -> Any:
        return self._data[id(item)]


class PendingSave:
    """A checkpoint whose files are being written by a thread; `finish` makes it valid."""

    def __init__(self, request: AsyncRequest, directory: Path) -> None:
        self._request = request
        self._directory = directory
        self._error: OSError | RuntimeError | None = None
        self._thread = threading.Thread(
            target=self._write, name=f"checkpoint {directory.name}", daemon=True
        )
        self._thread.start()

    @property
    def written(self) -> bool:
        """Whether this rank's files are written (or have failed)."""
        return not self._thread.is_alive()

    def finish(self, timeout: float) -> None:
        """Wait for the files, then write the metadata: collective over all ranks.

        Raises CheckpointWriteError on every rank when any rank failed or was too slow.
        """
        self._thread.join(timeout)
        failed = self._thread.is_alive() or self._error is not None
        if any_rank(failed):
            raise CheckpointWriteError(
                f"checkpoint {self._directory.name!r} was not written"
                + (f": {self._error}" if self._error else "")
            ) from self._error
        for finalize in self._request.finalize_fns:
            finalize()

    def _write(self) -> None:
        try:
            self._request.async_fn(*self._request.async_fn_args)
        except (OSError, RuntimeError) as error:
            self._error = error
