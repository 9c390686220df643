"""Profiles of servers. SGLang's answers are played back, and its files are written here."""

from __future__ import annotations

import asyncio
import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from services.rollout.engine.config import EngineConfig, SglangConfig
from services.rollout.engine.interface import EngineProfile, ProfileOrder
from services.rollout.engine.sglang import profiling, replica
from services.rollout.engine.sglang.engine import SglangEngine
from services.rollout.errors import NoProfileError, NoWeightsError
from sluice.profiler import ProfileOptions
from tests.patience import PATIENCE
from tests.unit.sglang.test_attached import Recorded, attached
from tests.unit.sglang.test_handshake import SERVER, openapi
from tests.unit.sglang.test_weights import write_model

TRACE = gzip.compress(b'{"traceEvents": []}' * 1000)
MEMORY = pickle.dumps({"segments": list(range(1000))})


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(profiling, "LOOK_SECONDS", 0.01)
    write_model(tmp_path / "model")


def order(folder: Path, name: str, *, memory: bool = False) -> ProfileOrder:
    options = ProfileOptions(stacks=True, memory=memory)
    directory = folder / "profiles" / name
    return ProfileOrder(
        name=name, directory=directory, prefix="engine-a", pass_count=7, options=options
    )


async def settled(engine: SglangEngine) -> EngineProfile:
    async with asyncio.timeout(PATIENCE):
        while (profile := engine.status().profile) is None or profile.left_count:
            await asyncio.sleep(0.005)
    return profile


async def test_a_profile_is_there_once_all_ranks_have_written_all_of_it(tmp_path: Path) -> None:
    recorded = Recorded()
    async with attached(tmp_path, recorded) as engine:
        begun = await engine.profile(order(tmp_path, "p", memory=True))
        folder = begun.directory
        assert json.loads(recorded.given["/start_profile"]) == {
            "output_dir": str(folder),
            "num_steps": 7,
            "activities": ["CPU", "GPU", "MEM"],
            "with_stack": True,
            "record_shapes": True,
            "profile_prefix": "engine-a",
        }
        assert engine.status().profile == begun
        others = ["engine-a-1-173.5-TP-0.trace.json.gz", "rank-0.trace.json.gz"]
        mine = {
            "engine-a-1732809.25-TP-0.trace.json.gz": TRACE,
            "engine-a-1732809.25-TP-1-PP-0.trace.json.gz": TRACE,
            "engine-a-1732811.5-TP-0-memory.pickle": MEMORY,
            "engine-a-1732812.5-TP-1-memory.pickle": MEMORY,
        }
        for last in mine:
            begun = await engine.profile(order(tmp_path, last, memory=True))
            for name in [*others, *mine.keys() - {last}]:
                (begun.directory / name).write_bytes(mine.get(name, TRACE))
            await looks(engine)
            (begun.directory / last).write_bytes(mine[last][: len(mine[last]) // 2])
            await looks(engine)
            assert engine.status().profile == begun
            (begun.directory / last).write_bytes(mine[last])
            found = await settled(engine)
            assert (found.files, found.failure) == (tuple(sorted(mine)), "")


async def looks(engine: SglangEngine) -> None:
    """Until files were looked at four times: what stays as it is may be whole at the second."""
    files = engine._replica.profiles._files
    assert files is not None
    seen, whole = asyncio.Semaphore(0), files.whole

    def count() -> Any:
        found = whole()
        loop.call_soon_threadsafe(seen.release)
        return found

    loop, files.whole = asyncio.get_running_loop(), count  # type: ignore[method-assign]
    for _ in range(4):
        await seen.acquire()
    files.whole = whole  # type: ignore[method-assign]


async def test_one_that_records_is_stopped_and_its_files_removed_for_another(
    tmp_path: Path,
) -> None:
    recorded = Recorded(tp_size=1)
    async with attached(tmp_path, recorded) as engine:
        first = await engine.profile(order(tmp_path, "p"))
        recorded.holds = "/stop_profile"
        asking = asyncio.create_task(engine.profile(order(tmp_path, "p")))
        await recorded.came.wait()
        dropped = first.directory / "engine-a-1.5-TP-0.trace.json.gz"
        dropped.write_bytes(TRACE)
        recorded.let.set()
        assert (await asking).left_count == 7 and not dropped.exists()
        (first.directory / "engine-a-2.5-TP-0.trace.json.gz").write_bytes(TRACE)
        assert (await settled(engine)).files == ("engine-a-2.5-TP-0.trace.json.gz",)
        await engine.profile(order(tmp_path, "p"))  # beside the files of the one before
        assert recorded.asked.count("/stop_profile") == 1
        (first.directory / "engine-a-3.5-TP-0.trace.json.gz").write_bytes(TRACE)
        assert (await settled(engine)).files == ("engine-a-3.5-TP-0.trace.json.gz",)


async def test_what_sglang_refuses_is_told(tmp_path: Path) -> None:
    recorded = Recorded()
    recorded.answers["/start_profile"] = {"success": False, "message": "in use"}
    async with attached(tmp_path, recorded) as engine:
        found = await engine.profile(order(tmp_path, "p"))
        assert found == engine.status().profile
        assert "in use" in found.failure and found.left_count == 0


@pytest.mark.parametrize("lacks", ["/start_profile", "device"])
async def test_a_server_that_cannot_record_says_so(tmp_path: Path, lacks: str) -> None:
    recorded = Recorded(device="npu" if lacks == "device" else "gpu")
    if lacks != "device":
        recorded.answers["/openapi.json"] = openapi(path=lacks)
    async with attached(tmp_path, recorded) as engine:
        with pytest.raises(NoProfileError):
            await engine.profile(order(tmp_path, "p"))
        assert engine.status().profile is None
        assert "/start_profile" not in recorded.asked


async def test_before_there_are_weights_nothing_is_recorded(tmp_path: Path) -> None:
    own = tmp_path / "python"  # of another environment, which does not answer
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    sglang = SglangConfig(python=own)
    engine = SglangEngine(EngineConfig(backend="sglang", sglang=sglang))
    await engine.start()
    with pytest.raises(NoWeightsError):
        await engine.profile(order(tmp_path, "p"))
    await engine.close()


async def test_a_server_that_ends_takes_its_profile_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "WATCH_SECONDS", 0.02)
    recorded = Recorded()
    async with attached(tmp_path, recorded) as engine:
        await engine.profile(order(tmp_path, "p"))
        monkeypatch.setattr(replica.SglangClient, "answers", silent)
        assert "does not answer" in (await settled(engine)).failure


async def silent(client: object) -> bool:
    return False


@pytest.mark.parametrize(
    ("server", "count"),
    [
        ({"tp_size": 4}, 4),
        ({"tp_size": 4, "pp_size": 2}, 8),
        ({"tp_size": 2, "dp_size": 3}, 6),
        ({"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}, 4),
        ({"tp_size": 4, "attn_dp_size": 4, "enable_dp_attention": True}, 4),
        ({"tp_size": 1, "prefill_server_info": {**SERVER, "tp_size": 2}}, 3),
    ],
)
async def test_files_are_awaited_of_each_process_that_holds_a_part(
    tmp_path: Path, server: dict[str, Any], count: int
) -> None:
    async with attached(tmp_path, Recorded(**server)) as engine:
        folder = (await engine.profile(order(tmp_path, "p"))).directory
        for rank in range(count):
            await looks(engine)
            (folder / f"engine-a-1.5-TP-{rank}.trace.json.gz").write_bytes(TRACE)
        assert len((await settled(engine)).files) == count
