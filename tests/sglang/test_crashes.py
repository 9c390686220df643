"""Processes of SGLang are killed, or lose their parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from services.rollout.engine.interface import PauseMode
from services.rollout.engine.sglang.client import SglangClient, SGLangRefusedError
from services.rollout.engine.sglang.engine import SglangEngine
from services.rollout.errors import EngineFailedError
from sluice.weights.store import StoredVersion
from tests.contract.engine.cases import Model, complete, request_of
from tests.patience import PATIENCE
from tests.sglang.conftest import Start
from tests.sglang_servers import PYTHON


def family(pids: list[int]) -> list[psutil.Process]:
    processes = [psutil.Process(pid) for pid in pids]
    return [*processes, *(child for p in processes for child in p.children(recursive=True))]


async def test_the_key_of_a_server_is_asked_for_and_on_no_command_line(
    models: tuple[Model, Model], launch: Start
) -> None:
    key = "not: 'for' \"others\""
    engine = await launch(model=str(models[0].directory), sglang={"api_key": key})
    (sample,) = await complete(engine, request_of("a", [1, 2]))
    assert sample.token_ids
    lines = [word for process in family(engine.pids) for word in process.cmdline()]
    assert not [word for word in lines if key in word]
    stranger = SglangClient(engine._replica._servers.url)
    with pytest.raises(SGLangRefusedError, match="401"):
        await stranger.post("/generate", {}, PATIENCE)
    await stranger.close()


async def restarted(engine: SglangEngine) -> None:
    async with asyncio.timeout(PATIENCE):
        while engine.status().version is None:
            assert not engine.status().failure, engine.status().failure
            await asyncio.sleep(0.2)


@pytest.mark.parametrize("whose", ["server", "scheduler"])
async def test_a_killed_server_is_restarted_with_the_weights_it_had(
    models: tuple[Model, Model], versions: list[StoredVersion], launch: Start, whose: str
) -> None:
    engine = await launch(model=str(models[0].directory))
    new = versions[1]
    await engine.prepare(new.version, new.digest, new.directory)
    await engine.commit(new.version, PauseMode.IN_PLACE)
    (server,) = engine.pids
    processes = family([server])
    victim = processes[0] if whose == "server" else scheduler_of(processes)
    task = asyncio.create_task(complete(engine, request_of("a", [1, 2], 4, max_new_tokens=3000)))
    async with asyncio.timeout(PATIENCE):
        while engine.status().decode_tokens_total < 10:
            await asyncio.sleep(0.01)
        victim.kill()
        with pytest.raises(EngineFailedError):
            await task
        while engine.status().version is not None:
            await asyncio.sleep(0.05)
        with pytest.raises(EngineFailedError):
            await complete(engine, request_of("b", [1, 2]))
    await restarted(engine)
    assert engine.status().digest == new.digest
    assert engine.status().restarts_total == 1
    (sample,) = await complete(engine, request_of("c", [1, 2]))
    expected = models[1].logprobs([1, 2], sample.token_ids)
    assert sample.logprobs == pytest.approx(expected, abs=1e-3)
    (load,) = engine.status().rank_loads
    assert (load.running_count, load.waiting_count, load.used_tokens) == (0, 0, 0)
    psutil.wait_procs(processes, timeout=PATIENCE)
    assert not [process for process in processes if process.is_running()]


def scheduler_of(processes: list[psutil.Process]) -> psutil.Process:
    """The child that holds the model: it has the most memory of its own."""
    return max(processes[1:], key=lambda process: process.memory_full_info().uss)


async def test_weights_committed_while_the_server_is_away_are_those_it_comes_back_with(
    models: tuple[Model, Model], versions: list[StoredVersion], launch: Start
) -> None:
    engine = await launch(model=str(models[0].directory), sglang={"backoff_seconds": 5})
    new = versions[1]
    await engine.prepare(new.version, new.digest, new.directory)
    os.kill(engine.pids[0], signal.SIGKILL)
    async with asyncio.timeout(PATIENCE):
        while engine.status().version is not None:
            await asyncio.sleep(0.02)
        await engine.commit(new.version, PauseMode.IN_PLACE)
    assert engine.status().digest == new.digest
    (sample,) = await complete(engine, request_of("c", [1, 2]))
    expected = models[1].logprobs([1, 2], sample.token_ids)
    assert sample.logprobs == pytest.approx(expected, abs=1e-3)


OWNER = """
import asyncio, sys
from pathlib import Path
from services.rollout.engine.sglang.engine import SglangEngine
from services.rollout.engine.config import EngineConfig
from services.rollout.engine.config import SglangConfig

async def main():
    sglang = SglangConfig(python=Path(sys.argv[2]))
    engine = SglangEngine(EngineConfig(backend="sglang", model=sys.argv[1], sglang=sglang))
    await engine.start()
    print(*engine.pids, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_no_process_outlives_the_one_that_started_it(
    models: tuple[Model, Model], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", OWNER, str(models[0].directory), str(PYTHON)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        processes = family(pids)
        assert len(processes) > 2
    finally:
        owner.kill()
        owner.wait(timeout=PATIENCE)
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE)
    for process in alive:
        process.kill()
    assert not alive


async def test_a_server_that_cannot_start_is_an_error_and_leaves_nothing(
    models: tuple[Model, Model], launch: Start
) -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with pytest.raises(EngineFailedError, match="before it answered"):
        await launch(
            model=str(models[0].directory), sglang={"server_args": {"no_such_argument": 1}}
        )
    after = {process.pid for process in psutil.Process().children(recursive=True)}
    assert after <= before
