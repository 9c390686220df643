"""A trainer that is told to stop, or loses its ranks, while a thread of it finishes a directory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.config import TrainerConfig
from services.trainer.controller.publication import Publisher
from services.trainer.controller.state import TrainerState, Turns
from services.trainer.errors import StoreRefusedError
from services.trainer.rank.publisher import _shard_to_proto
from sluice import faults
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.config import parse_config
from sluice.runtime.waits import Waits
from sluice.weights.errors import MissingTensorError
from sluice.weights.host_cache import HostCache
from sluice.weights.shards import write_shard
from sluice.weights.store import WeightStore
from tests.patience import PATIENCE
from tests.unit.trainer.ranks import until
from tests.unit.trainer.stage import Stage


class Gate:
    """Holds threads at a point of `sluice.faults`."""

    def __init__(self, point: str, patch: pytest.MonkeyPatch) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        self._point = point
        patch.setattr(faults, "point", self._pass)

    def let_go(self) -> None:
        self._open.set()

    def _pass(self, name: str) -> None:
        if name == self._point:
            self.reached.set()
            assert self._open.wait(PATIENCE)


class Ended:
    """Calls a method; `is_set` once that has returned or raised, in whatever thread."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call, self._ended = call, threading.Event()
        self.is_set = self._ended.is_set

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        try:
            return self._call(*arguments, **options)
        finally:
            self._ended.set()


class WritingRanks:
    """Ranks of which one writes `count` tensors."""

    @property
    def incarnation(self) -> WritingRanks:
        return self

    def __init__(self, count: int) -> None:
        self._count = count

    async def run(self, command: pb.FollowResponse) -> list[pb.CommandResult]:
        directory = Path(command.publish.directory)
        tensors = {f"t{index}": torch.ones(8) for index in range(self._count)}
        shards = [
            write_shard(directory, f"{name}.safetensors", {name: tensor}, sync=False)
            for name, tensor in tensors.items()
        ]
        return [pb.CommandResult(shards=[_shard_to_proto(shard) for shard in shards])]


@pytest.fixture(params=["directory", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> WeightStore:
    if request.param == "directory":
        return WeightStore(tmp_path / "weights", durable=False)
    return WeightStore("memory:///weights", scratch=tmp_path / "weights" / "staging")


def publisher(store: WeightStore, path: Path, count: int) -> Publisher:
    (path / "model").mkdir()
    (path / "model" / "config.json").write_text("{}")
    values = {"model": str(path / "model"), "store": str(path / "store"), "durable": False}
    config = parse_config(TrainerConfig, values)
    ranks: Any = WritingRanks(count)
    waits = Waits()
    return Publisher(config, store, TrainerState(), ranks, Turns(1, waits), waits)


async def test_a_stop_in_mid_commit_leaves_a_whole_version(
    store: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread cannot be cancelled: what is aborted beside it would become visible damaged."""
    gate, ended = Gate("weights.manifest", monkeypatch), Ended(store.commit)
    monkeypatch.setattr(store, "commit", ended)
    publishing = asyncio.create_task(publisher(store, tmp_path, 4).publish(lambda version: None))
    await until(gate.reached.is_set)
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    gate.let_go()
    await until(ended.is_set)
    assert list(store.versions()) == [1]
    HostCache(tmp_path / "cache", store).take(1)  # looks at every byte


async def test_a_commit_that_is_refused_leaves_nothing(store: WeightStore, tmp_path: Path) -> None:
    with pytest.raises(MissingTensorError):
        await publisher(store, tmp_path, 0).publish(lambda version: None)
    assert list(store.versions()) == []
    assert list((tmp_path / "weights" / "staging").iterdir()) == []


def write_file(stage: Stage) -> None:
    """Have the rank write one into the checkpoint."""

    async def script(name: str) -> pb.CommandResult:
        (partial,) = (stage.config.store / "checkpoints").glob(".*")
        (partial / "weights").write_bytes(b"all of them")
        written = pb.CheckpointFile(name="weights", size_bytes=11, digest="0" * 32)
        return pb.CommandResult(checkpoint_files=[written])

    stage.script = script


async def test_a_stop_in_mid_save_leaves_a_whole_checkpoint(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, ended = (
        Gate("checkpoint.record", monkeypatch),
        Ended(stage.trainer.checkpoints.store.finish),
    )
    monkeypatch.setattr(stage.trainer.checkpoints.store, "finish", ended)
    write_file(stage)
    saving = asyncio.create_task(stage.trainer.checkpoints.save("last"))
    await until(gate.reached.is_set)
    await stage.trainer.close()  # what SIGTERM comes to
    gate.let_go()
    await until(ended.is_set)
    names = {path.name for path in (stage.config.store / "checkpoints" / "last").glob("*")}
    assert names == {"weights", "checkpoint.json"}
    with pytest.raises(asyncio.CancelledError):
        await saving


async def test_a_save_that_cannot_finish_leaves_nothing(stage: Stage) -> None:
    root = stage.config.store / "checkpoints"

    async def script(name: str) -> pb.CommandResult:
        (partial,) = root.glob(".*")
        (partial / "checkpoint.json").mkdir()  # so that the record cannot be written
        return pb.CommandResult()

    stage.script = script
    with pytest.raises(StoreRefusedError, match=r"checkpoint\.json"):
        await stage.trainer.checkpoints.save("full")
    assert list(root.iterdir()) == []


async def test_ranks_are_restored_after_a_save_that_ends_without_them(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It still syncs when they are lost; it answers, and is restored, at its own step."""
    batch = await stage.upload()
    await stage.trainer.checkpoints.save("first")
    await stage.trainer.passes.forward_backward(batch, stage.request("a"))
    await stage.trainer.passes.step(0, ["a"], None)
    gate = Gate("checkpoint.record", monkeypatch)
    saving = asyncio.create_task(stage.trainer.checkpoints.save("second"))
    await until(gate.reached.is_set)
    assert stage.rank is not None
    await stage.rank.leave()
    await until(lambda: stage.trainer.ranks.restart_count == 1)
    connecting = asyncio.create_task(stage.connect())
    await until(
        lambda: (
            connecting.done() or any(wait.what == "turn of restore" for wait in stage.waits._waits)
        )
    )
    gate.let_go()
    assert await saving == 1
    await connecting
    assert (stage.trainer.state.step, stage.trainer.state.checkpoint) == (1, "checkpoints/second")
