"""A damaged checkpoint is never trained on: each file of it, each way, policy and critic."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import torch

from services.trainer import metrics
from services.trainer.backends.reference.backend import ReferenceBackend
from services.trainer.config import TrainerConfig
from services.trainer.errors import StoreRefusedError, disk_errors
from services.trainer.rank.executor import Executor
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.config import parse_config
from sluice.durable import locked
from sluice.runtime.errors import ServiceError
from tests.contract.training_backend.cases import build_model
from tests.unit.trainer.conftest import serving
from tests.unit.trainer.ranks import until
from tests.unit.trainer.stage import Stage

FILES = [
    "policy.safetensors",
    "optimizer.safetensors",
    "random-00000.safetensors",
    "checkpoint.json",
]
Damage = Callable[[Path], object]


def flip(path: Path) -> None:
    """One bit in the middle, where tensors are."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Damage] = {
    "flipped": flip,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "nested too deep": lambda path: path.write_bytes(b"[" * 100_000),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


class WholeStage(Stage):
    """A stage whose rank is a real one, but for its process."""

    def __init__(self, path: Path, executor: Executor) -> None:
        super().__init__(path)
        self._executor = executor
        loop = asyncio.get_running_loop()

        self.held: list[pb.FollowRequest] | None = None  # what ended beside, once it is a list

        def report(event: pb.FollowRequest) -> None:
            loop.call_soon_threadsafe(self._tell, event)

        executor._behind._report = report

    def _tell(self, event: pb.FollowRequest) -> None:
        if self.held is None:
            assert self.rank is not None
            self.rank.say(event)
        else:
            self.held.append(event)

    async def _answer(self, command: pb.FollowResponse) -> pb.CommandResult:
        self.commands.append(command.WhichOneof("command") or "")
        return await asyncio.to_thread(self._executor.execute, command)

    @property
    def parameters(self) -> list[torch.Tensor]:
        backend = self._executor._backend
        assert isinstance(backend, ReferenceBackend)
        return [parameter.detach().clone() for parameter in backend._policy.model.parameters()]

    def change(self) -> None:
        """Move the weights away from what any checkpoint holds."""
        backend = self._executor._backend
        assert isinstance(backend, ReferenceBackend)
        with torch.no_grad():
            for parameter in backend._policy.model.parameters():
                parameter.add_(1.0)

    async def reconnect(self) -> None:
        """What a launcher does for ranks that hold neither the old state nor the new one."""
        assert self.rank is not None
        await self.rank.ended()
        await until(lambda: self.trainer.ranks.restart_count == 1)
        await self.connect()


@pytest.fixture(scope="module", params=["policy", "value"])
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Executor:
    root = tmp_path_factory.mktemp(request.param)
    model = build_model(root / "model", "qwen3").directory
    patch = pytest.MonkeyPatch()
    patch.setenv("RANK", "0")
    patch.setenv("WORLD_SIZE", "1")
    with patch.context():
        values = {"model": str(model), "store": str(root), "head": request.param, "threads": 1}
        return Executor.load(
            parse_config(TrainerConfig, {**values, "durable": False}), lambda event: None
        )


@pytest.fixture
async def whole(tmp_path: Path, executor: Executor) -> AsyncIterator[WholeStage]:
    stage = WholeStage(tmp_path, executor)
    async with serving(stage):
        yield stage


def checkpoint(stage: Stage, checkpoint_id: str) -> Path:
    return stage.config.store / "checkpoints" / checkpoint_id


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
async def test_a_damaged_file_is_found_and_named(whole: WholeStage, file: str, damage: str) -> None:
    checkpoints = whole.trainer.checkpoints
    await checkpoints.save("good")
    expected = whole.parameters
    await checkpoints.save("bad")
    DAMAGES[damage](checkpoint(whole, "bad") / file)
    with pytest.raises(ServiceError, match=file) as caught:
        await checkpoints.load("checkpoints/bad")
    assert (caught.value.code.name, caught.value.reason) == ("DATA_LOSS", "CHECKPOINT_DAMAGED")
    assert caught.value.metadata["file"] == file
    if damage == "flipped" and file != "checkpoint.json":  # found by ranks that read already
        await whole.reconnect()
    else:
        assert "load" not in whole.commands
        assert all(map(torch.equal, whole.parameters, expected))
    whole.change()
    assert await checkpoints.load("checkpoints/good") == 0
    assert all(map(torch.equal, whole.parameters, expected))


@pytest.mark.parametrize("where", [0.0, 0.2, 0.4, 0.6, 0.8, 0.99])
async def test_no_byte_of_the_record_may_change(whole: WholeStage, where: float) -> None:
    await whole.trainer.checkpoints.save("bad")
    path = checkpoint(whole, "bad") / "checkpoint.json"
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(ServiceError) as caught:
        await whole.trainer.checkpoints.load("checkpoints/bad")
    assert caught.value.reason == "CHECKPOINT_DAMAGED"


async def test_ranks_that_restart_into_a_damaged_checkpoint_begin_anew(whole: WholeStage) -> None:
    """A trainer that could never start again would keep its run from an older checkpoint."""
    await whole.trainer.checkpoints.save("last")
    flip(checkpoint(whole, "last") / "policy.safetensors")
    whole.trainer.state.step = 7
    assert whole.rank is not None
    await whole.rank.leave()
    await until(lambda: whole.trainer.ranks.restart_count == 1)
    with contextlib.suppress(asyncio.CancelledError):
        restarting = asyncio.create_task(whole.connect())  # loads, and is ended for it
        await until(lambda: whole.trainer.ranks.restart_count == 2)
        restarting.cancel()
        await restarting
    await whole.rank.leave()
    await whole.connect()
    assert (whole.trainer.state.step, whole.trainer.state.checkpoint) == (0, "")


async def test_a_checkpoint_of_another_backend_is_refused_with_a_way_on(whole: WholeStage) -> None:
    await whole.trainer.checkpoints.save("theirs")
    path = checkpoint(whole, "theirs") / "checkpoint.json"
    document = json.loads(path.read_text())
    del document["record_digest"], document["files"]
    path.write_text(json.dumps({**document, "format": 1, "backend": "fsdp"}))
    before = whole.parameters
    with pytest.raises(ServiceError, match=r"of backend fsdp, .* reference: set backend to that,"):
        await whole.trainer.checkpoints.load("checkpoints/theirs")
    assert all(map(torch.equal, whole.parameters, before))


async def test_a_checkpoint_without_digests_loads_and_is_counted(
    whole: WholeStage, caplog: pytest.LogCaptureFixture
) -> None:
    """Earlier releases wrote none."""
    await whole.trainer.checkpoints.save("old")
    path = checkpoint(whole, "old") / "checkpoint.json"
    document = json.loads(path.read_text())
    del document["record_digest"], document["files"]
    path.write_text(json.dumps({**document, "format": 1}))
    expected = whole.parameters
    whole.change()
    before = metrics.UNVERIFIED_CHECKPOINTS._value.get()
    await whole.trainer.checkpoints.load("checkpoints/old")
    assert all(map(torch.equal, whole.parameters, expected))
    assert metrics.UNVERIFIED_CHECKPOINTS._value.get() == before + 1
    (line,) = [text for text in caplog.messages if "names no digests" in text]
    assert "checkpoints/old" in line
    path.write_text(json.dumps({**document, "format": 2}))  # which always had one
    with pytest.raises(ServiceError, match="lost its digest"):
        await whole.trainer.checkpoints.load("checkpoints/old")


async def test_a_store_that_ranks_do_not_share_is_found_when_saving(whole: WholeStage) -> None:
    """Else the checkpoint would turn out to be incomplete when it is needed."""
    finish = whole.trainer.checkpoints.store.finish

    def elsewhere(checkpoint_id: str, partial: str, record: object) -> None:
        Path(partial, "policy.safetensors").unlink()
        finish(checkpoint_id, partial, record)  # type: ignore[arg-type]

    whole.trainer.checkpoints.store.finish = elsewhere  # type: ignore[method-assign, assignment]
    with pytest.raises(ServiceError, match=r"policy\.safetensors.*share"):
        await whole.trainer.checkpoints.save("apart")
    assert not checkpoint(whole, "apart").exists()


@contextlib.contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file may grow beyond `room` bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("room", "file"),
    [(0, "random-00000.safetensors"), (10_000, "policy.safetensors")],
)
async def test_a_full_disk_is_named_by_the_rank_that_meets_it(
    whole: WholeStage, room: int, file: str
) -> None:
    with full_disk(room), pytest.raises(ServiceError, match=rf"too large: .*{file}") as caught:
        await whole.trainer.checkpoints.save("full")
    assert (caught.value.code.name, caught.value.reason) == ("FAILED_PRECONDITION", "STORE_FAILED")
    assert caught.value.metadata["file"].endswith(file)
    assert list((whole.config.store / "checkpoints").iterdir()) == []
    await whole.trainer.checkpoints.save("full")


async def test_a_full_disk_is_named_by_the_controller(whole: WholeStage) -> None:
    store = whole.config.store
    with full_disk(0):
        with pytest.raises(ServiceError, match=f"too large: .*{store}/blobs/tmp") as caught:
            await whole.upload("inline")
        assert caught.value.reason == "STORE_FAILED"
        with pytest.raises(ServiceError, match=f"{store}") as caught:
            await whole.trainer.publisher.publish(lambda version: None)
        assert caught.value.reason == "STORE_FAILED"
    assert [path for path in store.rglob("*") if path.is_file() and path.stat().st_size] == []


async def test_a_store_that_is_gone_is_named(whole: WholeStage) -> None:
    shutil.rmtree(whole.config.store)
    for work in (
        whole.upload("inline"),
        whole.trainer.checkpoints.save("nowhere"),
        whole.trainer.publisher.publish(lambda version: None),
    ):
        with pytest.raises(ServiceError, match=str(whole.config.store)) as caught:
            await work
        assert caught.value.reason == "STORE_FAILED"


def _on_disk(stage: Stage) -> set[str]:
    return {path.name for path in (stage.config.store / "checkpoints").iterdir()}


async def test_one_checkpoint_is_written_beside_other_calls_at_a_time(whole: WholeStage) -> None:
    checkpoints, state = whole.trainer.checkpoints, whole.trainer.state
    await checkpoints.save("before")
    expected = whole.parameters
    whole.held = []
    saving = asyncio.create_task(checkpoints.save("beside", behind=True))
    # Its files are there, the turn is over, and the controller has not heard of them.
    await until(lambda: bool(whole.held) and checkpoints._writing is not None)
    state.step = 5
    assert not checkpoint(whole, "beside").exists()
    assert state.checkpoint == "checkpoints/before"
    whole.change()
    loading = asyncio.create_task(checkpoints.load("checkpoints/before"))
    (event,) = whole.held
    whole.held = None
    later = [asyncio.create_task(checkpoints.save(f"later-{n}", behind=n > 0)) for n in range(2)]
    await until(lambda: whole.trainer.turns._lock.locked())
    assert "load" not in whole.commands, "it waits for the end of the writing"
    whole._tell(event)
    assert await saving == 0, "of the step at which it was asked for"
    assert await loading == 0
    assert await asyncio.gather(*later) == [0, 0]
    assert all(map(torch.equal, whole.parameters, expected))
    assert state.checkpoint == "checkpoints/later-1"
    assert _on_disk(whole) == {"before", "beside", "later-0", "later-1"}
    await checkpoints.load("checkpoints/beside")
    assert all(map(torch.equal, whole.parameters, expected))


async def test_a_rank_that_is_lost_while_it_writes_leaves_the_checkpoint_before(
    whole: WholeStage,
) -> None:
    checkpoints = whole.trainer.checkpoints
    await checkpoints.save("before")
    expected = whole.parameters
    whole.held = []
    saving = asyncio.create_task(checkpoints.save("lost", behind=True))
    await until(lambda: bool(whole.held) and checkpoints._writing is not None)
    whole.change()
    assert whole.rank is not None
    await whole.rank.leave()
    with pytest.raises(ServiceError) as caught:
        await saving
    assert caught.value.reason == "RANK_LOST"
    assert _on_disk(whole) == {"before"}
    await until(lambda: whole.trainer.ranks.restart_count == 1)
    whole.held = None
    await whole.connect()
    assert all(map(torch.equal, whole.parameters, expected))
    assert await checkpoints.save("lost", behind=True) == 0


async def test_a_full_disk_is_named_where_it_is_met_beside_other_calls(whole: WholeStage) -> None:
    with full_disk(10_000), pytest.raises(ServiceError, match=r"too large: .*policy") as caught:
        await whole.trainer.checkpoints.save("full", behind=True)
    assert (caught.value.code.name, caught.value.reason) == ("FAILED_PRECONDITION", "STORE_FAILED")
    assert _on_disk(whole) == set()
    await whole.trainer.checkpoints.save("full", behind=True)


def test_a_lock_that_another_process_keeps_is_named(tmp_path: Path) -> None:
    lock = tmp_path / "x.lock"
    with (
        locked(lock),
        pytest.raises(StoreRefusedError, match=r"^lock '.*x\.lock' was not free within 0 s$"),
        disk_errors(),
        locked(lock, timeout_seconds=0),
    ):
        raise AssertionError("two holders")
