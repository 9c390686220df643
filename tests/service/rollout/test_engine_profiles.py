"""Profiles of the reference engine over the wire."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from services.rollout.process import RolloutProcess
from sluice.api.common.v1 import profile_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as pb
from sluice.client import EngineClient, RemoteError, new_request_id, typed_errors
from sluice.profiler import ProfileOptions, Recording
from tests.patience import PATIENCE
from tests.service.rollout.harness import Store, load_weights, running_rollout

PROMPT = (1, 2, 3, 10)


async def sample(client: EngineClient, tokens: int = 8) -> list[pb.Completion]:
    """What an engine that is alone with it answers to one request of two samples."""
    found = await client.generate(PROMPT, max_new_tokens=tokens, sample_count=2, seeds=[5, 6])
    for each in found:
        each.ClearField("timing")
    return found


async def settled(client: EngineClient) -> profile_pb2.Profile:
    """The profile that was asked for last, once nothing of it is to come."""
    async with asyncio.timeout(PATIENCE):
        while (profile := (await client.get()).profile).left_count:
            await asyncio.sleep(0.005)
    return profile


def events(profile: profile_pb2.Profile) -> list[dict[str, Any]]:
    """What is in the trace of a profile."""
    (name,) = [name for name in profile.files if name.endswith(".trace.json.gz")]
    with gzip.open(Path(profile.directory) / name) as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found


def kinds(profile: profile_pb2.Profile) -> set[str]:
    return {event.get("cat", "") for event in events(profile)}


def passes(profile: profile_pb2.Profile) -> list[str]:
    """Names of the passes in the trace of a profile, as they came."""
    complete = [event for event in events(profile) if event["ph"] == "X"]
    assert all({"name", "ts", "dur", "pid", "tid"} <= event.keys() for event in complete)
    assert any(event["name"] == "aten::mm" for event in complete), "no operation is in it"
    found = [event for event in complete if event["name"].startswith("pass: ")]
    return [event["name"] for event in sorted(found, key=lambda event: event["ts"])]


async def test_as_many_passes_are_recorded_as_are_asked_for_and_samples_stay_the_same(
    engine: EngineClient, store: Store
) -> None:
    await load_weights(engine, store.first)
    assert not (await engine.get()).HasField("profile")
    plain = await sample(engine)
    begun = await engine.profile(passes=5, name="here")
    directory = store.root / "profiles" / "here"
    expected = profile_pb2.Profile(name="here", directory=str(directory), left_count=5)
    assert begun == (await engine.get()).profile == expected
    assert await sample(engine) == plain
    expected.left_count = 0
    expected.files[:] = ["engine-rollout-0.trace.json.gz"]
    found = await settled(engine)
    assert found == expected
    assert sorted(path.name for path in directory.iterdir()) == list(found.files)
    lengths = [len(each.token_ids) for each in plain]
    alive = [sum(length > place for length in lengths) for place in range(1, 5)]
    assert passes(found) == [
        "pass: 0 samples, 4 prompt tokens",
        *[f"pass: {count} samples, 0 prompt tokens" for count in alive],
    ]
    assert await sample(engine) == plain


async def test_a_profile_waits_for_passes_and_its_files_for_the_last(
    engine: EngineClient, store: Store
) -> None:
    await load_weights(engine, store.first)
    begun = await engine.profile(passes=1000)
    seen = []
    for _ in range(2):
        await sample(engine)
        profile = (await engine.get()).profile
        seen.append(profile.left_count)
        assert (profile.name, list(profile.files), profile.failure) == (begun.name, [], "")
        assert not (store.root / "profiles").exists()
    assert 1000 > seen[0] > seen[1] > 0


async def test_an_engine_that_waits_for_a_pass_records_nothing(
    engine: EngineClient, store: Store
) -> None:
    """With stacks the calls of all threads, for as long as it waits."""
    await load_weights(engine, store.first)
    options = profile_pb2.ProfileOptions(stacks=True)
    begun = await engine.profile(passes=1, options=options)
    Recording(ProfileOptions()).drop()  # of which a process has one at a time
    await sample(engine)
    found = await settled(engine)
    assert (found.name, len(found.files), found.failure) == (begun.name, 1, "")


async def test_files_are_there_once_they_are_whole(
    engine: EngineClient, engine_process: RolloutProcess, store: Store
) -> None:
    await load_weights(engine, store.first)
    directory = store.root / "profiles" / "slow"
    directory.mkdir(parents=True)
    name = "engine-rollout-0.trace.json.gz"
    beside = directory / f".{os.getpid()}.{name}"
    os.mkfifo(beside)  # whoever writes it waits for a reader
    await engine.profile(passes=1, name="slow")
    asking = asyncio.create_task(sample(engine))
    assert engine_process.engine is not None
    async with asyncio.timeout(PATIENCE):
        while engine_process.engine.status().busy != "the writing of a profile":
            assert (await engine.get()).profile.left_count == 1
    told = (await engine.get()).profile
    assert (told.left_count, list(told.files), told.failure) == (1, [], "")
    assert [*directory.iterdir()] == [beside] and not asking.done()
    trace = gzip.decompress(await asyncio.to_thread(beside.read_bytes))
    assert json.loads(trace)["traceEvents"]
    assert name in (await settled(engine)).files
    await asking


async def test_stacks_and_memory_are_in_the_trace(engine: EngineClient, store: Store) -> None:
    await load_weights(engine, store.first)
    for options, kind in (
        (profile_pb2.ProfileOptions(stacks=True), "python_function"),
        (profile_pb2.ProfileOptions(memory=True), "cpu_instant_event"),
        (None, "cpu_op"),
    ):
        await engine.profile(passes=2, options=options, name=kind)
        await sample(engine)
        found = await settled(engine)
        more = {"python_function", "cpu_instant_event"} & kinds(found)
        assert kind in kinds(found) and more <= {kind}


async def test_one_that_still_records_gives_way_to_another(
    engine: EngineClient, store: Store
) -> None:
    await load_weights(engine, store.first)
    stacks = profile_pb2.ProfileOptions(stacks=True)
    await engine.profile(passes=1000, options=stacks, name="first")
    await sample(engine)
    for name in ("second", "third"):
        assert (await engine.profile(passes=2, name=name)).left_count == 2
        await sample(engine)
        found = await settled(engine)
        assert (found.name, len(passes(found)), found.failure) == (name, 2, "")
        assert "python_function" not in kinds(found), "the first one still records"
    assert not (store.root / "profiles" / "first").exists()


async def test_a_profile_ends_early_where_the_host_has_no_memory_for_more(
    engine: EngineClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What there is is written, as all of it would be, and the samples are what they are."""
    await load_weights(engine, store.first)
    plain = await sample(engine)
    host = psutil.virtual_memory()._replace(available=0)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host)
    await engine.profile(passes=1000, name="crowded")
    assert await sample(engine) == plain
    found = await settled(engine)
    told = re.fullmatch(
        r"ended early, after (\d+) of 1000 passes: what is recorded may take .* GiB of the host's "
        r"memory as it is written, of 0\.0 that are free: ask for less at once",
        found.failure,
    )
    assert told is not None and len(passes(found)) == int(told[1]) < 10
    assert await sample(engine) == plain


async def test_a_repeated_request_begins_no_second_profile(
    engine: EngineClient, store: Store
) -> None:
    await load_weights(engine, store.first)
    request = pb.ProfileRequest(pass_count=2, request_id=new_request_id())
    with typed_errors():
        first = await engine.stub.Profile(request)
        await sample(engine)
        found = await settled(engine)
        assert await engine.stub.Profile(request) == first
    assert (await engine.get()).profile == found
    request.pass_count = 3
    with pytest.raises(RemoteError) as caught, typed_errors():
        await engine.stub.Profile(request)
    assert caught.value.reason == "REQUEST_ID_REUSED"


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("pass_count", {"pass_count": 0}),
        ("pass_count", {"pass_count": -1}),
        ("pass_count", {"pass_count": 1001}),
        ("pass_count", {"pass_count": 2**31 - 1}),
        ("name", {"name": "../x"}),
        ("name", {"name": ".."}),
        ("name", {"name": "a/b"}),
        ("name", {"name": "a\0"}),
        ("name", {"name": "a\n"}),
        ("name", {"name": "a" * 5000}),
    ],
    ids=repr,
)
async def test_what_cannot_be_recorded_is_refused_by_field(
    engine: EngineClient, store: Store, field: str, values: dict[str, Any]
) -> None:
    with pytest.raises(RemoteError) as caught, typed_errors():
        await engine.stub.Profile(pb.ProfileRequest(**values))
    error = caught.value
    found = (error.code, error.reason, error.metadata["field"])
    assert found == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", field)
    assert not (await engine.get()).HasField("profile")
    assert not (store.root / "profiles").exists()


async def test_names_that_are_not_given_sort_by_time_and_20_passes_are_usual(
    engine: EngineClient,
) -> None:
    first = await engine.profile()
    await asyncio.sleep(0.002)  # names tell milliseconds
    assert first.left_count == 20
    assert (await engine.profile(name="")).name > first.name


async def test_a_place_that_cannot_be_written_is_told_and_the_engine_goes_on(
    engine: EngineClient, store: Store
) -> None:
    await load_weights(engine, store.first)
    plain = await sample(engine)
    (store.root / "profiles").write_text("a file")
    await engine.profile(passes=2, name="nowhere")
    assert await sample(engine) == plain
    found = await settled(engine)
    assert "NotADirectoryError" in found.failure or "FileExistsError" in found.failure
    assert list(found.files) == []
    (store.root / "profiles").unlink()
    await engine.profile(passes=2, name="there")
    assert await sample(engine) == plain
    found = await settled(engine)
    assert found.failure == "" and len(passes(found)) == 2


async def test_an_engine_that_stops_drops_what_it_records(store: Store) -> None:
    for _ in range(2):  # what was left of the first would be in the way of the second
        async with (
            running_rollout(store, roles=["engine"]) as process,
            EngineClient(process.server.address) as client,
        ):
            await load_weights(client, store.first)
            begun = await client.profile(passes=1000)
            assert begun.failure == ""
            await sample(client)
        assert process.engine is not None
        assert "closed" in (profile := process.engine.status().profile).failure
        assert profile.left_count == 0
    assert not (store.root / "profiles").exists()


async def test_engines_of_any_names_write_files_of_their_own(store: Store) -> None:
    names = ["a/../b", "a_.._b", "a b"]
    seen = set()
    for name in names:
        async with (
            running_rollout(store, roles=["engine"], engine_id=name) as process,
            EngineClient(process.server.address) as client,
        ):
            await load_weights(client, store.first)
            await client.profile(passes=1, name="all")
            await sample(client)
            found = await settled(client)
            assert found.failure == ""
            seen.update(found.files)
    assert {path.name for path in (store.root / "profiles" / "all").iterdir()} == seen
    assert len(seen) == len(names)
