"""What a command that some ranks refused leaves behind: nothing that a later pass could take."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from services.trainer.config import TrainerConfig
from services.trainer.controller.uploads import ColumnUpdate
from services.trainer.errors import RankError
from services.trainer.rank.executor import Executor
from sluice.algo.spec import AdvantageSpec
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.config import parse_config
from sluice.runtime.errors import LoadingError
from tests.contract.training_backend.cases import build_model
from tests.unit.trainer.stage import Script, Stage


def failing(*names: str) -> Script:
    """Ranks that cannot do these commands, and go on."""

    async def answer(name: str) -> pb.CommandResult:
        if name in names:
            return pb.CommandResult(error=LoadingError(f"no {name}").to_status())
        return pb.CommandResult()

    return answer


async def test_ranks_drop_the_rows_of_an_upload_that_some_refuse(stage: Stage) -> None:
    """Else a later batch of that id would have them among its own."""
    stage.script = failing("add_rows")
    with pytest.raises(RankError, match="no add_rows"):
        await stage.upload()
    assert stage.commands == ["add_rows", "drop_batch"]
    assert stage.trainer.state.batches.all() == []
    stage.script = stage.succeed
    await stage.upload()


async def put_masks(stage: Stage, batch: str) -> None:
    update = ColumnUpdate(stage.trainer.state.batches.get(batch))
    update.add("g0/0", {"loss_mask": np.array([True, False, False])})
    await stage.trainer.batches.put_columns(update, update.spool(stage.trainer.batches.blobs))


async def test_columns_that_some_ranks_refuse_bring_back_the_upload(stage: Stage) -> None:
    """Ranks that took the mask would train on other tokens than the divisor counts."""
    name = await stage.upload()
    batch = stage.trainer.state.batches.get(name)
    await put_masks(stage, name)
    assert batch.mask_counts[0] == 1
    stage.script = failing("set_columns")
    stage.commands.clear()
    with pytest.raises(RankError, match="no set_columns"):
        await put_masks(stage, name)
    assert stage.commands == ["set_columns", "drop_batch", "add_rows"]
    assert batch.mask_counts[0] == 2, "as it was uploaded"
    stage.script = failing("set_columns", "add_rows")
    with pytest.raises(RankError, match="no set_columns"):
        await put_masks(stage, name)
    assert stage.trainer.state.batches.all() == []
    assert stage.trainer.batches.blobs.pinned(stage.config.name) == set()


@pytest.mark.parametrize("command", ["compute_logprobs", "compute_advantages", "compute_values"])
async def test_a_column_is_absent_after_a_pass_that_failed_midway(
    stage: Stage, command: str
) -> None:
    """Some rows may have new values and others those of an earlier pass."""
    trainer, name = stage.trainer, await stage.upload()
    passes = trainer.passes
    advantages = AdvantageSpec(name="reinforce_plus_plus", whiten=False)
    calls: dict[str, tuple[Callable[[], Awaitable[object]], str]] = {
        "compute_logprobs": (lambda: passes.compute_logprobs(name, 1, 1.0), "old_logprobs"),
        "compute_advantages": (
            lambda: trainer.passes.compute_advantages(name, advantages),
            "advantages",
        ),
        "compute_values": (lambda: passes.compute_values(name), "values"),
    }
    call, column = calls[command]
    present = trainer.state.batches.get(name).present
    await call()
    assert present[column].all()
    stage.script = failing(command)
    with pytest.raises(RankError):
        await call()
    assert column not in present


def test_a_store_that_refuses_a_shard_costs_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The errors of weights are no OSErrors; uncaught they would end the process."""
    model = build_model(tmp_path / "model", "qwen3")
    values = {"model": str(model.directory), "store": str(tmp_path / "store"), "durable": False}
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    executor = Executor.load(parse_config(TrainerConfig, values), [].append)
    staging = tmp_path / "staging"
    staging.mkdir()
    command = pb.PublishCommand(directory=str(staging), version=1)
    assert executor.execute(pb.FollowResponse(publish=command)).shards
    again = executor.execute(pb.FollowResponse(publish=command))
    assert "DuplicateFileError in publish" in again.error.message
    executor.close()


@pytest.mark.parametrize(
    ("experts", "meets"), [({}, False), ({"z_loss_coefficient": 0.1}, True)], ids=["alone", "meet"]
)
def test_ranks_say_in_which_passes_one_may_wait_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experts: dict[str, float], *, meets: bool
) -> None:
    """Losses of routers are scaled by what all ranks have."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    model = build_model(tmp_path / "model", "qwen3_moe").directory
    values = {"model": str(model), "store": str(tmp_path), "durable": False, "experts": experts}
    executor = Executor.load(parse_config(TrainerConfig, values), lambda event: None)
    alone = set(executor.describe().alone)
    executor.close()
    assert {"forward_backward", "compute_logprobs"}.isdisjoint(alone) == meets
    assert "add_rows" in alone and "step" not in alone
