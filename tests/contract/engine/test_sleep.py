"""Engines that sleep: memory is free, and what is committed afterwards serves as ever."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import psutil
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import Engine, Generation, PauseMode, Sampling
from services.rollout.engine.reference.engine import ReferenceEngine
from services.rollout.errors import DigestMismatchError, NotQuietError, NoWeightsError
from sluice.durable import scratch
from sluice.weights.store import StoredVersion, WeightStore
from tests.contract.engine.cases import SIZES, Model, StartEngine
from tests.imported import import_checkpoint
from tests.patience import PATIENCE

PROMPT = [1, 2, 3, 10]


async def greedy(engine: Engine, name: str, count: int = 8) -> tuple[tuple[int, ...], list[float]]:
    """Tokens of highest probability, and their log-probs."""
    sampling = Sampling(max_new_tokens=count, top_k=1, temperature=1.0)
    request = Generation(request_id=name, prompt_token_ids=PROMPT, sampling=sampling)
    tokens: list[int] = []
    async for delta in engine.generate(request):
        tokens += delta.token_ids
    return tuple(tokens), await engine.score([*PROMPT, *tokens], len(PROMPT))


async def test_what_is_committed_after_sleep_serves(
    start_seeded_engine: StartEngine, versions: list[tuple[StoredVersion, Model]]
) -> None:
    engine = await start_seeded_engine()
    for number, (record, model) in enumerate(versions):
        await engine.prepare(record.version, record.digest, record.directory)
        await engine.commit(record.version, PauseMode.IN_PLACE)
        await engine.resume()
        tokens, logprobs = await greedy(engine, f"g{number}")
        assert logprobs == pytest.approx(model.logprobs(PROMPT, tokens), abs=1e-4)
        await engine.pause(PauseMode.ABORT)
        await engine.sleep()
        with pytest.raises(NoWeightsError):
            await greedy(engine, f"asleep{number}")
        with pytest.raises(NotQuietError):
            await engine.prepare(record.version, record.digest, record.directory)
        assert engine.status().version is None and engine.status().prepared_versions == ()
        await engine.wake()
        assert engine.status().paused


async def test_an_engine_with_requests_does_not_sleep(
    start_seeded_engine: StartEngine, qwen3: Model
) -> None:
    engine = await start_seeded_engine(model=str(qwen3.directory))
    with pytest.raises(NotQuietError):
        await engine.sleep()
    await engine.pause(PauseMode.IN_PLACE)
    waiting = asyncio.create_task(greedy(engine, "waits"))
    while not engine.status().rank_loads[0].waiting_count:
        await asyncio.sleep(0)
    with pytest.raises(NotQuietError):
        await engine.sleep()
    await engine.pause(PauseMode.ABORT)  # what waits ends with it
    scoring = asyncio.create_task(engine.score([*PROMPT, 5], len(PROMPT)))
    while engine.status().rank_loads[0].waiting_count < 2:
        await asyncio.sleep(0)
    await engine.sleep()
    for task in (waiting, scoring):
        with pytest.raises(NoWeightsError):  # of the scoring that `greedy` ends with, too
            await task
    assert engine.status().rank_loads[0].waiting_count == 0


async def test_the_models_own_weights_are_read_again(
    start_seeded_engine: StartEngine, qwen3: Model
) -> None:
    """Adapters are put on them: no publication brings them back."""
    engine = await start_seeded_engine(model=str(qwen3.directory))
    before, base = await greedy(engine, "before"), engine.status().base
    await engine.pause(PauseMode.WAIT)
    await engine.sleep()
    assert engine.status().base is None
    await engine.wake()
    await engine.resume()
    assert engine.status().base == base
    assert await greedy(engine, "after") == before


async def test_whoever_has_an_engine_sleep_and_goes_away_costs_it_no_base(
    qwen3: Model,
) -> None:
    """A loop may be killed while its engines fall asleep; what is prepared then is waited for."""
    engine = ReferenceEngine(EngineConfig(model=str(qwen3.directory), threads=1))
    await engine.start()
    before, base = await greedy(engine, "before"), engine.status().base
    await engine.pause(PauseMode.WAIT)
    prepared = threading.Event()
    engine._loader.submit(prepared.wait)
    falling = asyncio.create_task(engine.sleep())
    async with asyncio.timeout(PATIENCE):
        while not engine.status().asleep:
            await asyncio.sleep(0)
        falling.cancel()
        await asyncio.sleep(0)
        prepared.set()
        with pytest.raises(asyncio.CancelledError):
            await falling
    await engine.wake()
    await engine.resume()
    assert engine.status().base == base
    assert await greedy(engine, "after") == before
    await engine.close()


async def test_memory_is_free_meanwhile(start_seeded_engine: StartEngine, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": 1024, "intermediate_size": 8192, "num_attention_heads": 16}
    module = Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=False))
    size = sum(parameter.nbytes for parameter in module.parameters())
    module.save_pretrained(tmp_path / "model")
    engine = await start_seeded_engine(model=str(tmp_path / "model"))
    del module
    await greedy(engine, "first")
    await engine.pause(PauseMode.WAIT)
    before = psutil.Process().memory_info().rss
    await engine.sleep()
    assert before - psutil.Process().memory_info().rss > 0.9 * size


MEMORY = Path("/dev/shm")
HAS_MEMORY = MEMORY.is_dir()


def is_mapped(directory: Path) -> bool:
    """Whether a file below it is in the address space of this process."""
    return str(directory) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("deterministic", [False, True])
async def test_versions_in_memory_serve_as_they_lie(
    start_seeded_engine: StartEngine, qwen3: Model, *, deterministic: bool
) -> None:
    """No copy is made of them, and nothing that becomes of the files reaches what serves."""
    with scratch("sluice-test-", MEMORY if HAS_MEMORY else None) as directory:
        store = WeightStore(directory / "weights", durable=False)
        record = import_checkpoint(store, qwen3.directory, None, 0)
        assert record.directory is not None
        engine = await start_seeded_engine(deterministic=deterministic, max_running=4)
        for _ in range(2):  # the first version makes the model, and is copied
            await engine.prepare(record.version, record.digest, record.directory)
            await engine.commit(record.version, PauseMode.IN_PLACE)
            await engine.resume()
            expected = await greedy(engine, "before")
            mapped = is_mapped(record.directory)
            await engine.pause(PauseMode.ABORT)
            await engine.sleep()
            assert not is_mapped(record.directory)
            await engine.wake()
        assert mapped == (HAS_MEMORY and not deterministic)
        await engine.prepare(record.version, record.digest, record.directory)
        await engine.commit(record.version, PauseMode.IN_PLACE)
        await engine.resume()
    tokens, logprobs = await greedy(engine, "after")
    assert (tokens, logprobs) == expected
    assert logprobs == pytest.approx(qwen3.logprobs(PROMPT, tokens), abs=1e-4)


async def test_asleep_it_checks_what_it_need_not_copy(
    start_seeded_engine: StartEngine, qwen3: Model, tmp_path: Path
) -> None:
    """A version in memory is read while it is published; one on a disk would take memory."""
    with scratch("sluice-test-", MEMORY if HAS_MEMORY else None) as directory:
        engine = await start_seeded_engine(model=str(qwen3.directory), max_running=4)
        expected = await greedy(engine, "before")
        await engine.pause(PauseMode.WAIT)
        await engine.sleep()
        for place, lies in ((directory, HAS_MEMORY), (tmp_path, False)):
            store = WeightStore(place / "weights", durable=False)
            record = import_checkpoint(store, qwen3.directory, None, 0)
            assert record.directory is not None
            (shard,) = store.manifest(record.version).shards()
            path = record.directory / shard.file_name
            if not lies:
                with pytest.raises(NotQuietError):
                    await engine.stage(path, shard)
                continue
            whole = path.read_bytes()
            path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
            with pytest.raises(DigestMismatchError):
                await engine.stage(path, shard)
            path.write_bytes(whole)
            await engine.stage(path, shard)
            assert is_mapped(record.directory)
            path.unlink()  # so that it cannot be read again
            await engine.wake()
            await engine.prepare(record.version, record.digest, record.directory)
            await engine.commit(record.version, PauseMode.IN_PLACE)
            await engine.resume()
            tokens, logprobs = await greedy(engine, "after")
            assert tokens == expected[0]
            assert logprobs == pytest.approx(expected[1], abs=1e-5)
            await engine.pause(PauseMode.WAIT)
            await engine.sleep()
