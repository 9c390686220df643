"""Runs that train adapters: what samples name, how old they are, and engines that come back."""

import asyncio
import os
import signal

import pytest

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice.client import EngineClient
from sluice.samples.arrow import decode_group
from sluice.samples.blob_store import BlobStore
from sluice.weights.checkpoint import digest_base
from sluice.weights.store import WeightStore
from tests.e2e.conftest import GRIM, Stack, Training, start_stack, stop_stack


@pytest.fixture(scope="module")
def adapting(tmp_path_factory: pytest.TempPathFactory):
    run_dir = tmp_path_factory.mktemp("adapting")
    model = str(build_tiny_qwen3(run_dir / "model", 0))
    trainer = {
        "model": model,
        "lora": {"rank": 4, "alpha": 16},
        "optim": {"learning_rate": 2e-2},
        "transfer": {"enabled": True},
        "keep_versions": 0,
    }
    engine = {"model": model, "max_running": 64, "max_model_length": 16, "threads": 1}
    engine["max_adapters"] = 2
    stack = start_stack(
        run_dir,
        trainer={"kind": "trainer", "config": trainer},
        rollout={"kind": "rollout", "config": {"tokenizer": model, "engine": engine, **GRIM}},
    )
    yield stack
    stop_stack(stack)


def versions_of(stack: Stack, training: Training) -> list[set[int]]:
    """Versions that sampled each group, all of them adapters of the base and in the store."""
    blobs = BlobStore(stack.run_dir / "store", sync=False)
    store = WeightStore(stack.run_dir / "store" / "weights")
    base, found = digest_base(stack.run_dir / "model"), []
    for group in training.groups("consumed"):
        assert group.blob is not None
        spans = [span for row in decode_group(blobs.get(group.blob)) for span in row.spans]
        assert spans
        for span in spans:
            assert span.base_digest == base
            record = store.get(span.version)
            assert record.digest == span.digest
            assert record.adapter is not None
        found.append({span.version for span in spans})
    return found


@pytest.mark.parametrize("pause_mode", ["wait", "in_place"])
def test_samples_name_their_adapter_and_are_no_older_than_allowed(
    adapting: Stack, pause_mode: str
) -> None:
    training = adapting.train(
        pause_mode, steps=6, max_staleness=2, pause_mode=pause_mode, stops_at=("consumed", 3)
    )
    with training.held():
        os.kill(adapting.pid("rollout"), signal.SIGKILL)  # it comes back with its base
    training.finish()
    groups = training.groups("consumed")
    assert {g.group_id: g.consumed_step for g in groups}.keys() == {f"g{i:07}" for i in range(24)}
    assert not training.groups("dropped")
    ages = [group.consumed_step - 1 - group.oldest_step for group in groups]
    assert min(ages) >= 0
    assert 1 <= max(ages) <= 2
    versions = versions_of(adapting, training)
    assert len(set.union(*versions)) >= 2  # six steps, and none is more than two older
    assert all(row["rollout_mismatch"] < 1 for row in training.learning_rows())

    async def described():
        async with EngineClient(adapting.services["rollout"]["address"]) as engine:
            return await engine.get()

    engine = asyncio.run(described())
    assert 1 <= len(engine.adapters) <= 2
    assert engine.adapters[-1] == engine.weights
    assert engine.base.version == 0


def test_adapters_are_sent_past_the_store(adapting: Stack) -> None:
    training = adapting.train("sent", weight_transport="collective")
    training.finish()
    assert [row["step"] for row in training.rows()] == [1, 2, 3, 4]
    assert all(row["rollout_mismatch"] <= 1e-4 for row in training.learning_rows())
    assert all(len(versions) == 1 for versions in versions_of(adapting, training))
