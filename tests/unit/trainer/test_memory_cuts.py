"""A pass that ranks have no memory for: smaller micro-batches, or words on what makes room."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from services.trainer.config import TrainerConfig
from services.trainer.errors import (
    GradientsIncompleteError,
    MicroBatchesCutError,
    OutOfMemoryError,
    OversizeSampleError,
    RankLostError,
)
from sluice.algo.spec import AdvantageSpec, LossSpec
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.config import parse_config
from tests.unit.trainer.conftest import serving
from tests.unit.trainer.ranks import until
from tests.unit.trainer.rows import make_samples
from tests.unit.trainer.stage import MODEL, Script, Stage

FULL = "forward_backward is out of memory: 3 GiB were asked for"


def lacking(*names: str) -> Script:
    """One answer for each name, in order, that there is no memory; else commands succeed."""
    left = list(names)

    async def answer(name: str) -> pb.CommandResult:
        if left and name == left[0]:
            left.pop(0)
            return pb.CommandResult(error=OutOfMemoryError(FULL).to_status())
        return pb.CommandResult()

    return answer


async def upload(stage: Stage, *lengths: int) -> str:
    """Rows of one prompt token and so many tokens of response."""
    batches = stage.trainer.batches
    upload = batches.begin_upload()
    for sample in make_samples([[length] for length in lengths]):
        upload.add_sample(sample)
    return (await batches.upload("b", upload.finish(), len(lengths))).name


def cap(stage: Stage) -> int:
    return stage.trainer._planner.limits.token_cap


@pytest.fixture
async def fsdp_stage(tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(tmp_path, backend="fsdp")
    async with serving(stage):
        yield stage


async def test_a_pass_over_columns_is_made_again_with_half_the_tokens(stage: Stage) -> None:
    name = await upload(stage, 10, 9, 8, 7)
    whole = await stage.trainer.passes.compute_logprobs(name, 1, 1.0)
    assert whole.micro_batch_count == 1
    stage.script, stage.commands = lacking("compute_logprobs", "compute_logprobs"), []
    found = await stage.trainer.passes.compute_logprobs(name, 1, 1.0)
    assert stage.commands == ["compute_logprobs"] * 3
    assert cap(stage) <= (11 + 11 + 11 + 11) // 4, "halved twice, from what the rows took"
    assert found.micro_batch_count > 2
    assert stage.trainer.batches.limits.max_tokens == stage.config.max_tokens_per_micro_batch


async def test_gradients_of_a_pass_that_failed_are_taken_back_before_it_is_made_again(
    stage: Stage,
) -> None:
    name = await upload(stage, 10, 9)
    stage.script = lacking("forward_backward")
    stage.commands.clear()
    answer = await stage.trainer.passes.forward_backward(name, stage.request("a"))
    assert stage.commands == ["forward_backward", "discard", "forward_backward"]
    assert answer.micro_batch_count == 2
    assert (await stage.trainer.passes.step(0, ["a"], None)).step == 1


async def test_gradients_of_other_parts_are_not_taken_back_unasked(stage: Stage) -> None:
    name = await upload(stage, 10, 9)
    passes = stage.trainer.passes
    await passes.forward_backward(name, stage.request("a"))
    stage.script = lacking("forward_backward")
    stage.commands.clear()
    with pytest.raises(MicroBatchesCutError, match="discard the gradients") as caught:
        await passes.forward_backward(name, stage.request("b"))
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE, "for whom it may succeed later"
    assert stage.commands == ["forward_backward"]
    with pytest.raises(GradientsIncompleteError):
        await passes.step(0, ["a"], None)
    await passes.discard()
    assert (await passes.forward_backward(name, stage.request("a"))).micro_batch_count == 2
    assert (await passes.step(0, ["a"], None)).step == 1


async def test_a_row_by_itself_is_told_with_what_makes_room(stage: Stage) -> None:
    name = await upload(stage, 30, 9)
    stage.script = lacking(*["compute_logprobs"] * 9)
    with pytest.raises(OutOfMemoryError, match=r"'g0/0' of 31 tokens") as caught:
        await stage.trainer.passes.compute_logprobs(name, 1, 1.0)
    told = caught.value
    assert told.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert told.metadata == {"rank": "0", "sample_id": "g0/0", "length": "31"}
    assert "3 GiB were asked for" in str(told)
    assert "autocast: true" in str(told)
    assert "backend: fsdp" in str(told)
    stage.script = stage.succeed
    await stage.trainer.passes.compute_logprobs(name, 1, 1.0)


async def test_what_is_cut_is_no_less_than_half_of_a_row_that_stays_whole(stage: Stage) -> None:
    """Where that does not fit, less of the others would not help, nor any pass to come."""
    name = await upload(stage, 199, *[3] * 64)
    stage.script, stage.commands = lacking(*["compute_logprobs"] * 99), []
    with pytest.raises(OutOfMemoryError, match=r"'g0/0' of 200 tokens"):
        await stage.trainer.passes.compute_logprobs(name, 1, 1.0)
    assert cap(stage) >= 50
    assert len(stage.commands) <= 4
    stage.script = stage.succeed
    whole = await stage.trainer.passes.compute_logprobs(name, 1, 1.0)
    assert whole.micro_batch_count < 10


async def test_a_rank_without_rows_is_told_too(stage: Stage) -> None:
    """It takes part in what ranks compute together: here none of the rows has a gradient."""
    name = await upload(stage, 10)

    async def answer(command: str) -> pb.CommandResult:
        if command == "forward_backward":
            return pb.CommandResult(error=OutOfMemoryError(FULL).to_status())
        return pb.CommandResult(advantages=pb.AdvantageResult(silent_rows=[0]))

    stage.script = answer
    await stage.trainer.passes.compute_advantages(name, AdvantageSpec(name="grpo"))
    request = replace(stage.request("a"), loss=LossSpec(name="reinforce"))
    with pytest.raises(OutOfMemoryError, match=r"3 GiB.*What makes room"):
        await stage.trainer.passes.forward_backward(name, request)


async def test_what_makes_room_is_not_in_use_already_and_would_be_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.trainer.controller.memory_cuts import MemoryCuts

    (tmp_path / "config.json").write_text(json.dumps(MODEL))

    scattered = {"joining": "PYTORCH_ALLOC_CONF=expandable_segments:True", "in_pieces": 9 << 30}

    def remedies(told: dict[str, object] | None = None, **settings: object) -> Iterator[str]:
        values = {"model": str(tmp_path), "store": str(tmp_path), **settings}
        error, config = OutOfMemoryError(FULL, **told or {}), parse_config(TrainerConfig, values)
        return MemoryCuts(config, None)._remedies(error)  # type: ignore[arg-type]

    def joins(medium: str) -> bool:
        found = remedies(scattered, transfer={"enabled": True, "medium": medium})
        return any("expandable_segments" in each for each in found)

    assert joins("collective")
    assert not joins("handles"), "torch opens those of such memory by a call that containers forbid"
    assert not any("expandable_segments" in each for each in remedies())
    fsdp = {"backend": "fsdp"}
    assert "fsdp.activation_checkpointing: true" in remedies(**fsdp)
    used = {"activation_checkpointing": True}
    assert "fsdp.activation_checkpointing: true" not in remedies(**fsdp, fsdp=used)
    assert "fsdp.activation_offload: true" in remedies(**fsdp, fsdp=used)
    assert "megatron.recompute: full" in remedies(backend="megatron")
    offload = "fsdp.cpu_offload: true"
    monkeypatch.setenv("SLUICE_DEVICE", "cpu")
    assert offload not in remedies(**fsdp), "it needs an accelerator"
    monkeypatch.setenv("SLUICE_DEVICE", "cuda")
    assert offload in remedies(**fsdp)
    whole, apart = {"distributed_optimizer": True}, {"distributed_optimizer": False}
    assert "megatron.optimizer_offload: 1" in remedies(backend="megatron", megatron=whole)
    assert "megatron.optimizer_offload: 1" not in remedies(backend="megatron", megatron=apart)
    full = {"recompute": "full"}
    assert "megatron.recompute: full" not in remedies(backend="megatron", megatron=full)


async def test_what_joins_memory_that_lies_in_pieces_is_told_first(stage: Stage) -> None:
    joining = {"joining": "PYTORCH_ALLOC_CONF=expandable_segments:True", "in_pieces": 9 << 30}
    scattered = OutOfMemoryError(FULL, **joining).to_status()

    async def answer(command: str) -> pb.CommandResult:
        return pb.CommandResult(error=scattered if command == "step" else None)

    name = await upload(stage, 10, 9)
    await stage.trainer.passes.forward_backward(name, stage.request("a"))
    stage.script = answer
    first = r"What makes room: PYTORCH_ALLOC_CONF=expandable_segments:True in the .* 9\.0 GiB"
    with pytest.raises(OutOfMemoryError, match=first):
        await stage.trainer.passes.step(0, ["a"], None)


async def test_ranks_that_compute_together_restart_and_have_less(fsdp_stage: Stage) -> None:
    """What they exchange within a pass may be half done; new ones have no more memory."""
    stage = fsdp_stage
    name = await upload(stage, 10, 9)
    stage.script = lacking("forward_backward")
    with pytest.raises(RankLostError, match="3 GiB were asked for"):
        await stage.trainer.passes.forward_backward(name, stage.request("a"))
    assert stage.rank is not None
    await stage.rank.ended()
    await until(lambda: stage.trainer.ranks.restart_count == 1)
    await stage.connect()
    assert cap(stage) == 11, "half of 22 tokens, though the settings have more"
    answer = await stage.trainer.passes.forward_backward(name, stage.request("a"))
    assert answer.micro_batch_count == 2


async def test_ranks_that_are_cut_again_and_again_are_not_given_up(fsdp_stage: Stage) -> None:
    """They would be after `max_restarts` losses in a row, of which these are none."""
    stage = fsdp_stage
    name = await upload(stage, *[3] * 64)
    for restarts in range(1, 7):
        stage.script = lacking("compute_logprobs")
        with pytest.raises(RankLostError):
            await stage.trainer.passes.compute_logprobs(name, 1, 1.0)
        assert stage.rank is not None
        await stage.rank.ended()
        await until(lambda count=restarts: stage.trainer.ranks.restart_count == count)
        await stage.connect()
    found = await stage.trainer.passes.compute_logprobs(name, 1, 1.0)
    assert found.micro_batch_count == 64


async def test_rows_between_the_cut_and_the_setting_run_and_longer_ones_are_refused(
    stage: Stage,
) -> None:
    name = await upload(stage, 10, 9)
    stage.script = lacking("compute_logprobs")
    await stage.trainer.passes.compute_logprobs(name, 1, 1.0)
    assert cap(stage) == 11
    limit = stage.config.max_tokens_per_micro_batch
    with pytest.raises(OversizeSampleError):
        await upload(stage, limit)
    await stage.trainer.batches.delete(name)
    name = await upload(stage, limit - 1)
    assert (await stage.trainer.passes.compute_logprobs(name, 1, 1.0)).micro_batch_count == 1


async def test_a_step_without_memory_is_told_and_not_tried_for_ever(stage: Stage) -> None:
    name = await upload(stage, 10, 9)
    await stage.trainer.passes.forward_backward(name, stage.request("a"))
    stage.script = lacking("step")
    with pytest.raises(OutOfMemoryError, match="What makes room: autocast: true") as caught:
        await stage.trainer.passes.step(0, ["a"], None)
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
