"""Two ranks of a trainer in a process of their own, told what to publish and to send."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from sluice import faults
from sluice.weights.checkpoint import companion_files
from sluice.weights.errors import WeightStoreError
from sluice.weights.shards import PublishedShards
from sluice.weights.store import StoredVersion, WeightStore
from sluice.weights.transfer.deadline import Deadline
from sluice.weights.transfer.group import Meeting, MemberGroup, send
from sluice.weights.transfer.plan import Bucket, plan_shards
from tests.fresh import FRESH
from tests.patience import PATIENCE


@dataclass(frozen=True)
class Told:
    """One call: the name of a method of `_Ranks`, and its arguments."""

    name: str
    arguments: tuple[Any, ...]


class _Ranks:
    """Rank 0 owns the embeddings, rank 1 all else."""

    def __init__(self) -> None:
        self._shards = [PublishedShards(keep=True, sync=False) for _ in range(2)]
        self._meetings: list[Meeting] = []
        self._groups: list[MemberGroup] = []
        self._damaged = ""

    def publish(self, store_root: Path, model: Path, base: int | None) -> StoredVersion:
        store = WeightStore(store_root, durable=False)
        staging = store.allocate(base)
        tensors = load_file(model / "model.safetensors")
        reports = []
        for rank, shards in enumerate(self._shards):
            own = {n: t for n, t in tensors.items() if ("embed_tokens" in n) == (rank == 0)}
            shards.begin(base)
            reports.append(shards.write(staging.directory, f"model-{rank}.safetensors", own))
            shards.finish(staging.version)
        return store.commit(staging, reports, companion_files(model), 0, base=base)

    def open(self, world_size: int, seconds: float) -> list[str]:
        self._groups = []
        self._meetings = [Meeting("127.0.0.1", world_size, seconds) for _ in self._shards]
        return [meeting.address for meeting in self._meetings]

    def send(self, version: int, name: str, bucket_bytes: int, seconds: float, backend: str) -> str:
        """Why it broke, or nothing."""
        deadline = Deadline(seconds)
        try:
            for rank, meeting in enumerate(self._meetings):
                self._groups.append(meeting.join(f"{name}-{rank}", backend, deadline))
            for group, shards in zip(self._groups, self._shards, strict=True):
                buckets = plan_shards(shards.report(version), bucket_bytes)
                send(group, buckets, partial(self._read, shards), deadline)
        except WeightStoreError as error:
            return str(error)
        return ""

    def damage(self, name: str) -> None:
        """Flip one bit of this tensor on its way, from now on."""
        self._damaged = name

    def _read(self, shards: PublishedShards, bucket: Bucket) -> torch.Tensor:
        flat = shards.read(bucket)
        for piece in bucket.pieces:
            if piece.name == self._damaged:
                flat = flat.clone()
                flat[piece.end - 1] ^= 1
        return flat


def _serve(pipe: Connection, faults_directory: Path) -> None:
    os.environ[faults.VARIABLE] = str(faults_directory)
    importlib.reload(faults)  # which has read it already
    ranks = _Ranks()
    while (told := pipe.recv()) is not None:
        pipe.send(getattr(ranks, told.name)(*told.arguments))


class Sender:
    """The process; calls block until it answers."""

    def __init__(self, faults_directory: Path) -> None:
        self._faults = faults_directory
        self._pipe, other = FRESH.Pipe()
        serve = (other, faults_directory)
        self._process = FRESH.Process(target=_serve, args=serve, daemon=True)
        self._process.start()
        other.close()

    def kill_at(self, passing: int) -> None:
        """It dies (-9) after so many buckets."""
        faults.arm(self._faults, "transfer.sent", passing)

    def call(self, name: str, *arguments: Any) -> Any:
        """Raises EOFError where it has died."""
        self._pipe.send(Told(name, arguments))
        assert self._pipe.poll(PATIENCE), f"{name} hangs"
        return self._pipe.recv()

    def close(self) -> None:
        self._process.kill()
        self._process.join(PATIENCE)
        self._pipe.close()
