"""Profiles that SGLang records."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path

import pytest

from services.rollout.engine.interface import EngineProfile, ProfileOrder
from services.rollout.engine.sglang import profiling
from services.rollout.engine.sglang.engine import SglangEngine
from sluice.profiler import ProfileOptions
from tests.contract.engine.cases import Model, complete, request_of
from tests.patience import PATIENCE
from tests.sglang.conftest import Start


def order(folder: Path, name: str, count: int) -> ProfileOrder:
    directory = folder / "profiles" / name
    options = ProfileOptions(memory=True)  # of a device; there is none here
    return ProfileOrder(
        name=name, directory=directory, prefix="engine-a", pass_count=count, options=options
    )


async def settled(engine: SglangEngine) -> EngineProfile:
    async with asyncio.timeout(PATIENCE):
        while (profile := engine.status().profile) is None or profile.left_count:
            await asyncio.sleep(0.02)
    return profile


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "LOOK_SECONDS", 0.1)


@pytest.mark.fast
async def test_sglang_records_passes_and_samples_stay_the_same(
    models: tuple[Model, Model], attach: Start, tmp_path: Path
) -> None:
    engine = await attach()
    plain = await complete(engine, request_of("a", [1, 2, 3], max_new_tokens=12, temperature=0))
    dropped = await engine.profile(order(tmp_path, "first", 1000))
    assert dropped.left_count == 1000
    begun = await engine.profile(order(tmp_path, "second", 4))
    assert begun.left_count == 4 and not dropped.directory.exists()
    again = await complete(engine, request_of("b", [1, 2, 3], max_new_tokens=12, temperature=0))
    assert [each.token_ids for each in again] == [each.token_ids for each in plain]
    found = await settled(engine)
    assert found.failure == "" and found.name == "second"
    (name,) = found.files
    assert [path.name for path in found.directory.iterdir()] == [name]
    with gzip.open(found.directory / name) as file:
        events = json.load(file)["traceEvents"]
    assert any(event["name"] == "aten::mm" for event in events)


async def test_a_place_that_sglang_could_not_write_is_told_before_it_records(
    models: tuple[Model, Model], attach: Start, tmp_path: Path
) -> None:
    engine = await attach()
    (tmp_path / "profiles").write_text("a file")
    found = await engine.profile(order(tmp_path, "nowhere", 1))
    assert found == engine.status().profile
    assert "profiles" in found.failure and found.left_count == 0
    await complete(engine, request_of("a", [1, 2, 3], max_new_tokens=4))
