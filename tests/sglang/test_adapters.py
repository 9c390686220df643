"""Adapters in real SGLang: mixed batches with the log-probs of peft, versions that come and go."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.rollout.engine.interface import Delta, PauseMode
from services.rollout.engine.sglang.engine import SglangEngine
from services.rollout.errors import (
    AdapterBaseError,
    DigestMismatchError,
    MixedWeightsError,
    NoTransferError,
    UnfitAdapterError,
    VersionUnavailableError,
)
from sluice.weights.adapter import ADAPTER_FILE, DEFAULT_TARGETS
from sluice.weights.checkpoint import digest_base
from sluice.weights.store import StoredVersion, WeightStore
from tests.adapters import import_adapter, make_adapter, peft_logprobs, publish_adapters
from tests.contract.engine.cases import Model, complete, request_of
from tests.imported import import_checkpoint
from tests.patience import PATIENCE
from tests.sglang.conftest import Start
from tests.sglang_servers import SharedServers

LORA = {
    "enable_lora": True,
    "lora_backend": "torch_native",
    "max_lora_rank": 8,
    "lora_target_modules": list(DEFAULT_TARGETS),
    "max_loras_per_batch": 4,
}


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "weights", durable=False)


@pytest.fixture
def records(store: WeightStore, models: tuple[Model, Model], tmp_path: Path) -> list[StoredVersion]:
    """Adapters of some layers of each stack: of q and v, and of up without gate."""
    return publish_adapters(store, models[0].directory, tmp_path, 3)


@pytest.fixture
async def engine(
    attach: Start, models: tuple[Model, Model], sglang_servers: SharedServers
) -> AsyncIterator[SglangEngine]:
    url = sglang_servers.url(models[0].directory, **LORA)
    yield await attach(sglang={"url": url}, max_adapters=2)


async def serve(
    engine: SglangEngine, record: StoredVersion, mode: PauseMode = PauseMode.IN_PLACE
) -> None:
    assert record.directory is not None
    await engine.prepare(record.version, record.digest, record.directory)
    await engine.commit(record.version, mode)


def furthest(model: Model, folder: Path | None, prompt: list[int], delta: Delta) -> float:
    expected = peft_logprobs(model.directory, folder, prompt, delta.token_ids)
    return max(abs(a - b) for a, b in zip(delta.logprobs, expected, strict=True))


async def sample(engine: SglangEngine, key: int, version: int | None, tokens: int = 8) -> Delta:
    request = request_of(f"r{key}-{version}-{tokens}", [1, 2, 3, key], max_new_tokens=tokens)
    (delta,) = await complete(engine, replace(request, version=version))
    return delta


@pytest.mark.fast
async def test_versions_are_served_mixed_and_refused_by_name(
    engine: SglangEngine,
    models: tuple[Model, Model],
    store: WeightStore,
    records: list[StoredVersion],
    tmp_path: Path,
) -> None:
    base = digest_base(models[0].directory)
    for record in records[:2]:
        await serve(engine, record)
    running = asyncio.create_task(sample(engine, 9, None, tokens=400))
    async with asyncio.timeout(PATIENCE):
        while not engine.status().rank_loads[0].running_count:
            await asyncio.sleep(0.01)
    versions = [0, 1, 2, None, 1, 0]
    found = await asyncio.gather(*(sample(engine, key, v) for key, v in enumerate(versions)))
    for key, (version, delta) in enumerate(zip(versions, found, strict=True)):
        served = 2 if version is None else version
        folder = tmp_path / f"adapter-{served - 1}" if served else None
        assert furthest(models[0], folder, [1, 2, 3, key], delta) < 1e-5
        assert furthest(models[0], tmp_path / "adapter-2", [1, 2, 3, key], delta) > 1e-3
        assert [(s.version, s.base_digest) for s in delta.spans] == [
            (served, (served and base) or "")
        ]
    scores = await engine.score([1, 2, 3, 4, 5], 3, version=1)
    expected = peft_logprobs(models[0].directory, tmp_path / "adapter-0", [1, 2, 3], [4, 5])
    assert scores == pytest.approx(expected, abs=1e-5)

    await serve(engine, records[2])  # the first goes, for nobody uses it; the second is in use
    assert [w.version for w in engine.status().adapters] == [2, 3]
    assert engine.status().version == 3
    with pytest.raises(VersionUnavailableError):
        await sample(engine, 1, 1)
    assert (
        furthest(models[0], tmp_path / "adapter-2", [1, 2, 3, 5], await sample(engine, 5, None))
        < 1e-5
    )
    late = await asyncio.wait_for(running, PATIENCE)
    assert [span.version for span in late.spans] == [2]
    assert furthest(models[0], tmp_path / "adapter-1", [1, 2, 3, 9], late) < 1e-4

    large = make_adapter(models[0].directory, tmp_path / "large", seed=5, rank=9)
    with pytest.raises(UnfitAdapterError, match="rank 9") as rank:
        await serve(engine, import_adapter(store, large, base))
    assert rank.value.metadata["limit"] == "8"
    with pytest.raises(AdapterBaseError):
        await serve(engine, import_adapter(store, tmp_path / "adapter-0", "0" * 32))
    whole = WeightStore(tmp_path / "whole", durable=False)
    with pytest.raises(MixedWeightsError):
        await serve(engine, import_checkpoint(whole, models[1].directory, None, 0))
    with pytest.raises(NoTransferError):
        engine.check_incoming(store.manifest(records[0].version))
    damaged = import_adapter(store, tmp_path / "adapter-0", base)
    assert damaged.directory is not None
    path = damaged.directory / ADAPTER_FILE
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(DigestMismatchError) as flipped:
        await serve(engine, damaged)
    assert "lora_" in flipped.value.metadata["tensor"]
    assert (
        furthest(models[0], tmp_path / "adapter-2", [1, 2, 3, 6], await sample(engine, 6, None))
        < 1e-5
    )


async def test_a_killed_server_comes_back_with_its_base_and_the_newest_adapter(
    launch: Start, models: tuple[Model, Model], records: list[StoredVersion], tmp_path: Path
) -> None:
    engine = await launch(
        model=str(models[0].directory),
        max_cached_tokens=4096,
        sglang={"lora": {"max_rank": 4}, "backoff_seconds": 0.1},
    )
    for record in records[:2]:
        await serve(engine, record)
    os.killpg(engine.pids[0], signal.SIGKILL)
    async with asyncio.timeout(2 * PATIENCE):
        while engine.status().version is not None:
            await asyncio.sleep(0.05)
        while engine.status().version != 2:
            await asyncio.sleep(0.05)
    assert [w.version for w in engine.status().adapters] == [2]
    for key, version in enumerate((0, 2, None)):
        folder = None if version == 0 else tmp_path / "adapter-1"
        delta = await sample(engine, key, version)
        assert furthest(models[0], folder, [1, 2, 3, key], delta) < 1e-5
    await serve(engine, records[2])
    assert (
        furthest(models[0], tmp_path / "adapter-2", [1, 2, 3, 7], await sample(engine, 7, None))
        < 1e-5
    )
