"""The controller's trainer with ranks that answer as told: poison, alarms, cancelled callers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

import pytest
from prometheus_client import REGISTRY

from services.trainer.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    GradientsIncompleteError,
    RankError,
    RankLostError,
    SkippedTooOftenError,
)
from services.trainer.servicer import TrainerServicer
from sluice.api.common.v1 import wait_service_pb2
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.balance.planner import MicroBatchPlan, PlanLimits, PlanRows, plan_micro_batches
from sluice.runtime.errors import LoadingError, QueueFullError
from sluice.runtime.operations import Operations
from sluice.runtime.wire import sample_to_proto
from sluice.samples.blob_store import BlobStore
from sluice.samples.blobs import BlobReference
from sluice.weights.manifest import seal
from tests.unit.trainer.ranks import until
from tests.unit.trainer.rows import make_samples
from tests.unit.trainer.stage import Stage


async def test_a_pass_that_fails_poisons_the_gradients(stage: Stage) -> None:
    batch = await stage.upload()
    await stage.trainer.passes.forward_backward(batch, stage.request("a"))

    async def fail(name: str) -> pb.CommandResult:
        return pb.CommandResult(error=LoadingError("out of memory").to_status())

    stage.script = fail
    with pytest.raises(RankError, match="out of memory"):
        await stage.trainer.passes.forward_backward(batch, stage.request("b"))
    stage.script = stage.succeed
    for call in (
        stage.trainer.passes.forward_backward(batch, stage.request("a")),
        stage.trainer.passes.forward_backward(batch, stage.request("c")),
        stage.trainer.passes.step(0, ["a"], None),
    ):
        with pytest.raises(GradientsIncompleteError, match="out of memory"):
            await call
    assert await stage.trainer.passes.discard() == ["a"]
    await stage.trainer.passes.forward_backward(batch, stage.request("a"))
    assert (await stage.trainer.passes.step(0, ["a"], None)).step == 1


async def test_a_step_that_fails_restarts_the_ranks(stage: Stage) -> None:
    """Some ranks may have stepped: only a checkpoint, here the initial model, is whole again."""
    batch = await stage.upload()
    await stage.trainer.passes.forward_backward(batch, stage.request("a"))
    await stage.trainer.passes.step(0, ["a"], None)
    await stage.trainer.passes.forward_backward(batch, stage.request("b", step=1))

    async def fail(name: str) -> pb.CommandResult:
        return pb.CommandResult(error=LoadingError("nan in all_reduce").to_status())

    stage.script = fail
    with pytest.raises(RankError, match="nan in all_reduce"):
        await stage.trainer.passes.step(1, ["b"], None)
    assert stage.rank is not None
    await stage.rank.ended()
    stage.script = stage.succeed
    stage.commands.clear()
    await until(lambda: stage.trainer.ranks.restart_count == 1)
    await stage.connect()
    assert stage.commands == ["add_rows"], "the batch is registered again"
    assert stage.trainer.state.step == 0
    assert stage.trainer.state.ledger.parts == {}


async def test_a_checkpoint_that_fails_to_load_leaves_no_mixture(stage: Stage) -> None:
    """Ranks hold neither the old state nor the new one: they restart from the last good one."""
    batch = await stage.upload()
    await stage.trainer.checkpoints.save("good")
    for step in range(2):
        await stage.trainer.passes.forward_backward(batch, stage.request("a", step))
        await stage.trainer.passes.step(step, ["a"], None)
    await stage.trainer.checkpoints.save("bad")
    assert await stage.trainer.checkpoints.load("checkpoints/good") == 0

    async def fail(name: str) -> pb.CommandResult:
        status = CheckpointMismatchError("optimizer.safetensors is damaged").to_status()
        return pb.CommandResult(error=status) if name == "load" else pb.CommandResult()

    stage.script = fail
    with pytest.raises(RankError, match=r"optimizer.*is damaged") as caught:
        await stage.trainer.checkpoints.load("checkpoints/bad")
    assert caught.value.reason == "CHECKPOINT_MISMATCH"
    stage.script = stage.succeed
    assert stage.rank is not None
    await stage.rank.ended()
    await until(lambda: stage.trainer.ranks.restart_count == 1)
    stage.commands.clear()
    await stage.connect()
    assert stage.commands == ["load"]
    assert (stage.trainer.state.step, stage.trainer.state.checkpoint) == (0, "checkpoints/good")


async def test_checkpoints_of_another_kind_are_refused_by_the_front(stage: Stage) -> None:
    await stage.trainer.checkpoints.save("first")
    record = stage.config.store / "checkpoints" / "first" / "checkpoint.json"
    document = json.loads(record.read_text())
    del document["record_digest"]
    for change in ({"backend": "megatron"}, {"format": 99}):
        record.write_bytes(seal({**document, **change}, "record_digest"))
        with pytest.raises(CheckpointMismatchError):
            await stage.trainer.checkpoints.load("checkpoints/first")
    record.unlink()
    with pytest.raises(CheckpointDamagedError, match=r"'checkpoint\.json' is missing"):
        await stage.trainer.checkpoints.load("checkpoints/first")
    assert "load" not in stage.commands


async def test_a_failed_save_leaves_nothing(stage: Stage) -> None:
    async def fail(name: str) -> pb.CommandResult:
        return pb.CommandResult(error=LoadingError("no space left").to_status())

    stage.script = fail
    with pytest.raises(RankError, match="no space left"):
        await stage.trainer.checkpoints.save("full")
    stage.script = stage.succeed
    assert list((stage.config.store / "checkpoints").iterdir()) == []
    await stage.trainer.checkpoints.save("full")
    assert stage.trainer.state.checkpoint == "checkpoints/full"


async def test_what_waits_for_its_turn_is_listed(stage: Stage) -> None:
    batch = await stage.upload()
    go_on = asyncio.Event()

    async def wait(name: str) -> pb.CommandResult:
        await go_on.wait()
        return pb.CommandResult()

    stage.script = wait
    stage.commands.clear()
    first = asyncio.create_task(stage.trainer.passes.forward_backward(batch, stage.request("a")))
    await until(lambda: bool(stage.commands))
    second = asyncio.create_task(stage.trainer.passes.discard())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    listed = await stage.waits.ListWaits(wait_service_pb2.ListWaitsRequest(), None)
    turns = {wait.what: list(wait.on) for wait in listed.waits}
    assert turns["turn of discard"] == ["forward backward"]
    assert turns["forward_backward on all ranks"] == ["rank 0"]
    go_on.set()
    await asyncio.gather(first, second)


async def test_many_skips_in_a_row_raise_an_alarm(stage: Stage) -> None:
    batch = await stage.upload()

    async def skip(name: str) -> pb.CommandResult:
        outcome = pb.StepResult(grad_norm=float("nan"), skipped_reason="non-finite gradient norm")
        return pb.CommandResult(step=outcome) if name == "step" else pb.CommandResult()

    stage.script = skip
    for step in range(2):
        await stage.trainer.passes.forward_backward(batch, stage.request("a", step))
        done = await stage.trainer.passes.step(step, ["a"], None)
        assert (done.skips_in_a_row, done.step) == (step + 1, step + 1)
    with pytest.raises(SkippedTooOftenError, match="non-finite gradient norm") as caught:
        await stage.trainer.passes.forward_backward(batch, stage.request("a", 2))
    assert caught.value.metadata["count"] == "2"
    await stage.trainer.passes.discard()
    stage.script = stage.succeed
    await stage.trainer.passes.forward_backward(batch, stage.request("a", 2))
    done = await stage.trainer.passes.step(2, ["a"], None)
    assert (done.skips_in_a_row, done.skipped_count) == (0, 2)


async def test_what_ranks_are_brought_back_to_is_what_metrics_show(stage: Stage) -> None:
    """Without a checkpoint that is the beginning, of which a trainer showed nothing."""
    batch = await stage.upload()

    async def skip(name: str) -> pb.CommandResult:
        outcome = pb.StepResult(grad_norm=float("nan"), skipped_reason="non-finite gradient norm")
        return pb.CommandResult(step=outcome) if name == "step" else pb.CommandResult()

    stage.script = skip
    for step in range(2):
        await stage.trainer.passes.forward_backward(batch, stage.request("a", step))
        await stage.trainer.passes.step(step, ["a"], None)
    assert (shown("step_number"), shown("consecutive_skipped_steps")) == (2, 2)
    assert stage.rank is not None
    await stage.rank.leave()
    await until(lambda: stage.trainer.ranks.state != trainer_pb.Trainer.STATE_ACTIVE)
    await stage.connect()
    assert stage.trainer.state.step == 0
    assert (shown("step_number"), shown("consecutive_skipped_steps")) == (0, 0)


def test_what_there_is_none_of_yet_is_no_number() -> None:
    """A critic had no mismatch with engines, and weights of version 0 were behind every engine."""
    program = (
        "import services.trainer.metrics, prometheus_client as client\n"
        "print(client.generate_latest().decode())"
    )
    page = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    for name in ("loss", "learning_rate", "weight_version", "rollout_mismatch_logprob"):
        assert f"sluice_trainer_{name} NaN" in page.stdout


def shown(name: str) -> float | None:
    return REGISTRY.get_sample_value(f"sluice_trainer_{name}")


async def test_a_caller_that_goes_away_does_not_stop_the_pass(stage: Stage) -> None:
    batch = await stage.upload()
    go_on = asyncio.Event()

    async def wait(name: str) -> pb.CommandResult:
        await go_on.wait()
        return pb.CommandResult(sums=pb.PassSums(loss=3.0))

    stage.script = wait
    stage.commands.clear()
    call = asyncio.create_task(stage.trainer.passes.forward_backward(batch, stage.request("a")))
    await until(lambda: bool(stage.commands))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    go_on.set()
    answer = await stage.trainer.passes.forward_backward(batch, stage.request("a"))
    assert answer.loss * stage.trainer.state.ledger.normalizer == pytest.approx(3.0)
    assert stage.commands == ["forward_backward"], "the part was added once"


async def test_a_lost_rank_leaves_no_half_registered_batch(stage: Stage) -> None:
    async def wait(name: str) -> pb.CommandResult:
        await asyncio.Event().wait()
        raise AssertionError

    stage.script = wait
    uploading = asyncio.create_task(stage.upload())
    await until(lambda: bool(stage.commands))
    assert stage.rank is not None
    await stage.rank.leave()
    with pytest.raises(RankLostError):
        await uploading
    assert stage.trainer.state.batches.all() == []
    assert stage.trainer.batches.blobs.pinned(stage.config.name) == set()


async def test_pins_of_a_former_life_are_dropped_at_the_start(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    blob = stage.trainer.batches.blobs.put(b"left behind")
    stage.trainer.batches.blobs.pin(stage.config.name, [blob.digest])
    stage.trainer.batches.blobs.pin("another", [blob.digest])
    await stage.server.start()
    starting = asyncio.create_task(stage.trainer.start(stage.server.address))
    await until(lambda: stage.trainer.ranks._incarnation is not None)
    assert stage.trainer.batches.blobs.pinned(stage.config.name) == set()
    assert stage.trainer.batches.blobs.pinned("another") == {blob.digest}
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await stage.trainer.close()
    await stage.server.close()


async def test_rows_are_not_judged_before_the_ranks_are_known(tmp_path: Path) -> None:
    """How long a row may be depends on them: it would be refused as too long, for good."""
    with pytest.raises(LoadingError):
        Stage(tmp_path).trainer.batches.begin_upload()


class NotingStore(BlobStore):
    """Notes which threads wrote."""

    writers: ClassVar[set[int]] = set()

    def put(self, data: bytes) -> BlobReference:
        self.writers.add(threading.get_ident())
        return super().put(data)


async def test_uploads_are_written_off_the_event_loop(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a slow disk takes them, heartbeats are heard and health is answered."""
    monkeypatch.setattr("services.trainer.controller.uploads.SPOOL_ROWS", 2)
    stage.trainer.batches.blobs = NotingStore(stage.config.store, sync=False)

    async def messages() -> AsyncIterator[trainer_pb.UploadBatchRequest]:
        header = trainer_pb.BatchHeader(batch_id="b", sample_count=3)
        yield trainer_pb.UploadBatchRequest(header=header)
        for sample in make_samples([[3, 4], [5]]):
            yield trainer_pb.UploadBatchRequest(sample=sample_to_proto(sample))

    servicer = TrainerServicer(stage.trainer, Operations())
    answer = await servicer.UploadBatch(messages(), None)
    assert answer.sample_count == 3
    assert len(stage.trainer.state.batches.get("batches/b").stored) == 2
    assert stage.trainer.batches.blobs.writers
    assert threading.get_ident() not in stage.trainer.batches.blobs.writers


async def test_passes_are_planned_off_the_event_loop(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    planners: set[int] = set()

    def noting(rows: PlanRows, limits: PlanLimits) -> MicroBatchPlan:
        planners.add(threading.get_ident())
        return plan_micro_batches(rows, limits)

    monkeypatch.setattr("services.trainer.controller.planning.plan_micro_batches", noting)
    batch = await stage.upload()
    await stage.trainer.passes.compute_logprobs(batch, 1, 1.0)
    await stage.trainer.passes.compute_values(batch)
    await stage.trainer.passes.forward_backward(batch, stage.request("a"))
    assert planners
    assert threading.get_ident() not in planners


async def test_batches_beyond_the_limit_are_refused_until_one_is_deleted(stage: Stage) -> None:
    first, _ = await stage.upload("a"), await stage.upload("b")
    with pytest.raises(QueueFullError) as caught:
        await stage.upload("c")
    assert caught.value.metadata == {"limit": "2", "kind": "batches"}
    await stage.trainer.batches.delete(first)
    assert await stage.upload("c") == "batches/c"


async def test_calls_beyond_the_limit_are_refused_and_nothing_is_lost(stage: Stage) -> None:
    batch, gate = await stage.upload(), asyncio.Event()

    async def wait(name: str) -> pb.CommandResult:
        await gate.wait()
        return pb.CommandResult()

    stage.script = wait
    passes = [
        asyncio.create_task(stage.trainer.passes.forward_backward(batch, stage.request(part)))
        for part in ("a", "b", "c")
    ]
    await until(lambda: "forward_backward" in stage.commands)
    with pytest.raises(QueueFullError) as caught:
        await stage.trainer.passes.forward_backward(batch, stage.request("d"))
    assert caught.value.metadata == {"limit": "3", "kind": "calls"}
    gate.set()
    await asyncio.gather(*passes)
    await stage.trainer.passes.forward_backward(batch, stage.request("d"))
    assert list(stage.trainer.state.ledger.parts) == ["a", "b", "c", "d"]
