"""Preparing and committing versions while generating."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from services.rollout.engine.interface import PauseMode
from services.rollout.errors import DigestMismatchError, UnfitWeightsError, VersionNotPreparedError
from sluice.weights.store import StoredVersion, WeightStore
from tests.contract.engine.cases import Model, StartEngine, build_model, complete, request_of
from tests.imported import import_checkpoint
from tests.patience import PATIENCE

Versions = list[tuple[StoredVersion, Model]]
LENGTH = 1000  # tokens, of a sample that is seen to run before it ends


async def test_an_empty_engine_serves_its_first_version(
    versions: Versions, start_engine: StartEngine
) -> None:
    engine = await start_engine()
    record, model = versions[0]
    await engine.prepare(record.version, record.digest, record.directory)
    assert engine.status().prepared_versions == (record.version,)
    assert engine.status().version is None
    await engine.commit(record.version, PauseMode.IN_PLACE)
    status = engine.status()
    assert (status.version, status.digest) == (record.version, record.digest)
    assert status.prepared_versions == ()
    (sample,) = await complete(engine, request_of("a", [1, 2]))
    assert sample.logprobs == pytest.approx(model.logprobs([1, 2], sample.token_ids), abs=1e-4)


async def test_a_configured_model_is_version_0_with_the_digest_of_its_tensors(
    versions: Versions, start_engine: StartEngine
) -> None:
    record, model = versions[0]
    engine = await start_engine(model=str(model.directory))
    assert (engine.status().version, engine.status().digest) == (0, record.digest)


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_spans_tell_which_tokens_came_from_which_version(
    versions: Versions, start_engine: StartEngine, mode: PauseMode
) -> None:
    (old, old_model), (new, new_model) = versions
    engine = await start_engine(model=str(old_model.directory))
    request = request_of("a", [1, 2, 3], 2, max_new_tokens=LENGTH)
    running = asyncio.create_task(complete(engine, request))
    while engine.status().rank_loads[0].running_count < 2:
        await asyncio.sleep(0)
    await engine.pause(PauseMode.IN_PLACE)  # so that it does not end while weights are prepared
    await engine.prepare(new.version, new.digest, new.directory)
    _, pause = await asyncio.gather(engine.resume(), engine.commit(new.version, mode))
    assert engine.status().last_pause_seconds == pause >= 0
    samples = await asyncio.wait_for(running, PATIENCE)
    for sample in samples:
        spans = [(s.version, s.digest, s.first_token, s.last_token) for s in sample.spans]
        cut = spans[0][3] + 1
        assert spans[0] == (0, old.digest, 0, cut - 1)
        drawn = sample.token_ids
        expected = old_model.logprobs([1, 2, 3], drawn[:cut])
        assert sample.logprobs[:cut] == pytest.approx(expected, abs=1e-4)
        if mode is PauseMode.IN_PLACE:
            assert spans[1:] == [(new.version, new.digest, cut, LENGTH - 1)]
            # The cache is kept: later tokens see keys of the old weights, their logits the new.
            later = new_model.logprobs([1, 2, 3], drawn)[cut:]
            assert sample.logprobs[cut:] != pytest.approx(later, abs=1e-4)
        else:
            assert len(drawn) == cut == (LENGTH if mode is PauseMode.WAIT else cut)
    (fresh,) = await complete(engine, request_of("b", [4]))
    assert [(s.version, s.last_token) for s in fresh.spans] == [(new.version, 7)]
    assert fresh.logprobs == pytest.approx(new_model.logprobs([4], fresh.token_ids), abs=1e-4)


async def test_commit_under_a_pause_swaps_and_stays_paused(
    versions: Versions, start_engine: StartEngine
) -> None:
    engine = await start_engine(model=str(versions[0][1].directory))
    running = asyncio.create_task(complete(engine, request_of("a", [1], max_new_tokens=4000)))
    while engine.status().rank_loads[0].running_count < 1:
        await asyncio.sleep(0)
    await engine.pause(PauseMode.IN_PLACE)
    new, _ = versions[1]
    await engine.prepare(new.version, new.digest, new.directory)
    await asyncio.wait_for(engine.commit(new.version, PauseMode.WAIT), PATIENCE)
    assert engine.status().paused
    assert engine.status().version == new.version
    assert not running.done()
    drawn = engine.status().decode_tokens_total
    await engine.resume()
    while engine.status().decode_tokens_total == drawn:
        await asyncio.sleep(0)
    await engine.abort(["a"])
    (sample,) = await asyncio.wait_for(running, PATIENCE)
    assert [span.version for span in sample.spans] == [0, new.version]


async def test_what_was_not_prepared_cannot_be_committed(
    versions: Versions, start_engine: StartEngine
) -> None:
    engine = await start_engine()
    with pytest.raises(VersionNotPreparedError):
        await engine.commit(7, PauseMode.WAIT)
    record, _ = versions[0]
    await engine.prepare(record.version, record.digest, record.directory)
    with pytest.raises(VersionNotPreparedError):
        await engine.commit(record.version + 1, PauseMode.WAIT)


async def test_of_many_prepared_versions_the_last_two_stay(
    qwen3: Model, start_engine: StartEngine, tmp_path: Path
) -> None:
    engine = await start_engine()
    store = WeightStore(tmp_path / "store", durable=False)
    records = [import_checkpoint(store, qwen3.directory, None, 0) for _ in range(3)]
    for record in reversed(records):
        await engine.prepare(record.version, record.digest, record.directory)
    assert engine.status().prepared_versions == (records[0].version, records[1].version)


async def test_a_damaged_tensor_is_named_and_the_old_weights_go_on(
    versions: Versions, start_engine: StartEngine
) -> None:
    engine = await start_engine(model=str(versions[0][1].directory))
    (before,) = await complete(engine, request_of("a", [1], temperature=0))
    record, _ = versions[1]
    name = "model.layers.1.mlp.up_proj.weight"
    _flip_a_bit(record.directory, name)
    with pytest.raises(DigestMismatchError) as raised:
        await engine.prepare(record.version, record.digest, record.directory)
    assert raised.value.metadata["tensor"] == name
    assert engine.status().prepared_versions == ()
    (after,) = await complete(engine, request_of("b", [1], temperature=0))
    assert (after.token_ids, after.spans) == (before.token_ids, before.spans)


async def test_another_digest_than_asked_for_is_refused(
    versions: Versions, start_engine: StartEngine
) -> None:
    engine = await start_engine()
    (old, _), (new, _) = versions
    with pytest.raises(DigestMismatchError):
        await engine.prepare(new.version, old.digest, new.directory)
    with pytest.raises(UnfitWeightsError):
        await engine.prepare(new.version, old.digest, old.directory)
    assert engine.status().prepared_versions == ()


async def test_weights_of_another_architecture_or_no_weights_are_refused(
    qwen3: Model, start_engine: StartEngine, tmp_path: Path
) -> None:
    engine = await start_engine(model=str(qwen3.directory))
    store = WeightStore(tmp_path / "store", durable=False)
    llama = build_model(tmp_path / "llama", "llama", seed=0)
    record = import_checkpoint(store, llama.directory, None, 0)
    with pytest.raises(UnfitWeightsError):
        await engine.prepare(record.version, record.digest, record.directory)
    with pytest.raises(UnfitWeightsError):
        await engine.prepare(9, "0" * 32, tmp_path / "nowhere")
    assert engine.status().prepared_versions == ()


def _flip_a_bit(directory: Path, name: str) -> None:
    path = next(directory.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    begin, _ = json.loads(data[8 : 8 + length])[name]["data_offsets"]
    data[8 + length + begin] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
