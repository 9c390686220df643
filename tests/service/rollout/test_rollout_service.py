"""RolloutService over the wire: router, engine and episode worker are real."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import numpy as np
import pytest

from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.client import RemoteError, RouterClient, error_from_status
from sluice.demo.tiny_qwen3 import WORDS
from sluice.runtime import wire
from sluice.samples.arrow import read_metadata
from sluice.samples.blob_store import BlobStore
from sluice.samples.sample import validate_sample
from sluice.samples.tokenizer import TextTokenizer
from tests.patience import PATIENCE
from tests.service.rollout import talk
from tests.service.rollout.harness import (
    Episodes,
    Models,
    Store,
    copy_rows,
    rollout_request,
    running_episodes,
)

DENSE = {"reward": "position_match"}
END = 11


@pytest.mark.parametrize("split", [False, True])
async def test_a_finished_group_is_durable_and_whole(
    store: Store, models: Models, split: bool
) -> None:
    """What the trainer reads is what the engine consumed and sampled."""
    tokenizer = TextTokenizer(models.first)
    async with running_episodes(store, models.first, split=split) as episodes:
        request = rollout_request(copy_rows(3), settings=DENSE)
        request.sampling.temperature = 1.5
        finished = await episodes.finished(request)
        assert finished.keys() == {"g0", "g1", "g2"}
        for i, group in enumerate(finished[f"g{i}"] for i in range(3)):
            samples = store.samples(group)
            prompt = tokenizer.encode(f"{i:04d}=", special=True)
            target = [*(int(digit) for digit in f"{i:04d}"), END]
            assert [s.sample_id for s in samples] == [f"g{i}/{k}" for k in range(4)]
            for sample, reward, length in zip(
                samples, group.rewards, group.response_lengths, strict=True
            ):
                validate_sample(sample)
                tokens = sample.token_ids.tolist()
                response = tokens[sample.prompt_length :]
                assert tokens[: sample.prompt_length] == prompt
                assert reward == sample.columns["reward"]
                right = sum(a == b for a, b in zip(response, target, strict=False))
                assert reward == pytest.approx(right / 5)
                assert length == sample.response_length == len(response)
                assert sample.finish_reason == ("stop" if response[-1] == END else "length")
                scored = await episodes.engine.stub.Score(
                    engine_pb.ScoreRequest(token_ids=tokens, prompt_length=len(prompt))
                )
                assert sample.columns["temperature"] == 1.5
                at_one = np.asarray(sample.columns["rollout_logprobs_t1"])
                assert at_one == pytest.approx(list(scored.logprobs), abs=1e-4)
                assert np.abs(at_one - sample.columns["rollout_logprobs"]).max() > 1e-3
                assert [(s.version, s.first_token, s.last_token) for s in sample.spans] == [
                    (1, 0, length - 1)
                ]
            assert (group.min_version, group.max_version, group.prompt_length) == (1, 1, 5)
            blobs = BlobStore(store.root, sync=False)
            sampling = json.loads(
                read_metadata(blobs.get(wire.blob_from_proto(group.blob)))["sampling"]
            )
            assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (1.5, 1, 0)
        pinned = BlobStore(store.root, sync=False).pinned(f"rollout/{request.request_id}")
        assert pinned == {group.blob.digest for group in finished.values()}


async def test_seeds_decide_the_samples_wherever_they_run(store: Store, models: Models) -> None:
    async with running_episodes(store, models.first) as episodes:
        drawn = []
        for order in ([0, 1, 2], [2, 0, 1]):
            rows = copy_rows(3)
            request = rollout_request({f"g{i}": rows[i] for i in order}, settings=DENSE)
            for group in request.groups:
                number = int(group.group_id[1:])
                group.seeds.extend(100 * number + k for k in range(4))
            finished = await episodes.finished(request)
            drawn.append(
                {k: [s.token_ids.tolist() for s in store.samples(finished[k])] for k in finished}
            )
        assert drawn[0] == drawn[1]
        assert len({tuple(tokens) for tokens in drawn[0]["g0"]}) > 1


async def test_tasks_come_from_text_chat_and_generated_data(store: Store, models: Models) -> None:
    async with running_episodes(store, models.first) as episodes:
        generated = rollout_request(
            {"r": {"index": 3}},
            environment="reasoning_gym",
            settings={"dataset": "chain_sum", "size": 10},
        )
        failed = await episodes.failed(generated)
        error = error_from_status(failed["r"].error)
        assert error.reason == "INVALID_FIELD" and "chat template" in str(error)

        template = models.first / "chat_template.jinja"
        template.write_text("{% for m in messages %}{{ m.content }}={% endfor %}")
    try:
        async with running_episodes(store, models.first) as episodes:
            generated.request_id += "-again"
            finished = await episodes.finished(generated)
            assert finished["r"].prompt_length > 5
            turns = [{"role": "user", "content": "12"}, {"role": "assistant", "content": "3"}]
            chat = rollout_request([{"messages": turns, "answer": "3"}])
            assert (await episodes.finished(chat))["g0"].prompt_length == len("12=3=")
    finally:
        template.unlink()


async def test_a_failing_grader_fails_its_group_and_no_other(store: Store, models: Models) -> None:
    deeds = {"good": "smile", "dead": "die", "bad": "raise", "odd": "nan", "fine": "smile"}
    rows = {name: {"prompt": "12=", "deed": deed} for name, deed in deeds.items()}
    async with running_episodes(store, models.first) as episodes:
        request = rollout_request(rows, environment="grim")
        events = [event async for event in episodes.client.rollout(request)]
    finished = {event.finished.group_id for event in events if event.HasField("finished")}
    failed = {
        event.failed.group_id: error_from_status(event.failed.error)
        for event in events
        if event.HasField("failed")
    }
    assert finished == {"good", "fine"}
    codes = {name: (error.code.name, error.reason) for name, error in failed.items()}
    assert codes == {
        "dead": ("INTERNAL", "GRADER_CRASHED"),
        "bad": ("INTERNAL", "ENVIRONMENT_FAILED"),
        "odd": ("INTERNAL", "ENVIRONMENT_FAILED"),
    }


async def test_cancelling_does_not_wait_for_a_judge(store: Store, models: Models) -> None:
    rows = {name: {"prompt": "12=", "deed": "stall"} for name in ("a", "b")}
    async with running_episodes(store, models.first) as episodes:
        request = rollout_request(rows, environment="grim")
        stream = episodes.client.stub.Rollout(request)
        async with asyncio.timeout(PATIENCE):
            while not any("reward of" in wait.what for wait in await episodes.client.list_waits()):
                await asyncio.sleep(0.02)
        with pytest.raises(RemoteError) as caught:
            await episodes.client.cancel("never-heard-of")
        assert caught.value.reason == "ROLLOUT_NOT_FOUND"

        assert await episodes.client.cancel(request.request_id, ["a", "nobody", "a"]) == ["a"]
        event = await stream.read()
        error = error_from_status(event.failed.error)
        assert (event.failed.group_id, error.code, error.reason) == (
            "a",
            grpc.StatusCode.CANCELLED,
            "GROUP_CANCELLED",
        )
        assert await episodes.client.cancel(request.request_id) == ["b"]
        assert (await stream.read()).failed.group_id == "b"
        assert await stream.read() is grpc.aio.EOF
        assert await episodes.client.cancel(request.request_id) == []
        async with asyncio.timeout(PATIENCE):
            while await episodes.client.list_waits():
                await asyncio.sleep(0.02)  # the judges are ended, too


async def test_cancelling_does_not_wait_for_a_step(store: Store, models: Models) -> None:
    environments = {"stalling": talk.STALLING}
    async with running_episodes(store, models.first, environments=environments) as episodes:
        request = rollout_request(copy_rows(2), environment="stalling", max_new_tokens=40)
        stream = episodes.client.stub.Rollout(request)
        async with asyncio.timeout(PATIENCE):
            while not any("step of" in wait.what for wait in await episodes.client.list_waits()):
                await asyncio.sleep(0.02)
        assert await episodes.client.cancel(request.request_id) == ["g0", "g1"]
        assert (await stream.read()).failed.group_id == "g0"
        async with asyncio.timeout(PATIENCE):
            while await episodes.client.list_waits():
                await asyncio.sleep(0.02)


async def test_no_rank_is_held_while_an_environment_steps(store: Store, models: Models) -> None:
    environments = {"stalling": talk.STALLING}
    async with running_episodes(store, models.first, environments=environments) as episodes:
        request = rollout_request(copy_rows(1), environment="stalling")
        request.sampling.stop_token_ids.extend(range(len(WORDS)))  # no answer is cut off
        stream = episodes.client.stub.Rollout(request)
        async with (
            asyncio.timeout(PATIENCE),
            RouterClient(episodes.router.server.address) as router,
        ):
            leased, stepping = 1, 0
            while leased or stepping < request.sample_count:
                (engine,) = await router.list_engines(router_pb.ROLE_ENGINE)
                leased = sum(engine.leased_counts)
                waits = await episodes.client.list_waits()
                stepping = sum("step of" in wait.what for wait in waits)
                await asyncio.sleep(0.02)
        assert await episodes.client.cancel(request.request_id) == ["g0"]
        assert (await stream.read()).failed.group_id == "g0"


async def test_a_cancelled_group_leaves_engine_and_router(store: Store, models: Models) -> None:
    """Also when half of its samples run and the others wait for a slot."""
    engine = {"max_running": 2, "max_model_length": 64, "threads": 1}
    async with running_episodes(store, models.first, split=True, engine=engine) as episodes:
        await episodes.engine.stub.Pause(engine_pb.PauseRequest(mode=engine_pb.PAUSE_MODE_IN_PLACE))
        request = rollout_request(copy_rows(1), sample_count=4)
        stream = episodes.client.stub.Rollout(request)
        async with asyncio.timeout(PATIENCE):
            while len(waits := await episodes.client.list_waits()) < 2:
                await asyncio.sleep(0.02)
        assert {wait.what for wait in waits} == {"samples of group g0", "room for group g0"}
        assert await episodes.client.cancel(request.request_id) == ["g0"]
        assert (await stream.read()).failed.group_id == "g0"
        async with asyncio.timeout(PATIENCE):
            while (await episodes.engine.get()).rank_loads[0].waiting_count:
                await asyncio.sleep(0.02)  # it hears of it after the caller
            await episodes.engine.stub.Resume(engine_pb.ResumeRequest())
            left = await episodes.engine.get()
            assert (left.rank_loads[0].running_count, left.decoded_token_count) == (0, 0)
            while any((await _engine(episodes)).leased_counts):
                await asyncio.sleep(0.02)
        finished = await episodes.finished(rollout_request(copy_rows(3), sample_count=5))
        assert [len(store.samples(group)) for group in finished.values()] == [5, 5, 5]


async def _engine(episodes: Episodes) -> router_pb.Engine:
    async with RouterClient(episodes.router.server.address) as client:
        (engine,) = await client.list_engines(router_pb.ROLE_ENGINE)
        return engine


async def test_a_group_ends_at_its_deadline_and_leaves_the_engine(
    store: Store, models: Models
) -> None:
    async with running_episodes(store, models.first) as episodes:
        await episodes.engine.stub.Pause(engine_pb.PauseRequest(mode=engine_pb.PAUSE_MODE_IN_PLACE))
        request = rollout_request(copy_rows(2))
        request.group_timeout.FromMilliseconds(300)
        async with asyncio.timeout(PATIENCE):
            failed = await episodes.failed(request)
        for group in failed.values():
            error = error_from_status(group.error)
            expected = (grpc.StatusCode.DEADLINE_EXCEEDED, "GROUP_TIMED_OUT")
            assert (error.code, error.reason) == expected
        await episodes.engine.stub.Resume(engine_pb.ResumeRequest())
        load = (await episodes.engine.get()).rank_loads[0]
        assert (load.running_count, load.waiting_count) == (0, 0)


async def test_a_version_nobody_serves_ends_at_the_deadline(store: Store, models: Models) -> None:
    async with running_episodes(store, models.first) as episodes:
        request = rollout_request(copy_rows(1), versions=engine_pb.VersionBounds(exact_version=2))
        request.group_timeout.FromMilliseconds(300)
        failed = await episodes.failed(request)
        assert error_from_status(failed["g0"].error).reason == "GROUP_TIMED_OUT"


async def test_a_prompt_beyond_the_model_fails_alone(store: Store, models: Models) -> None:
    rows = [{"prompt": "1" * 80, "answer": "1"}, {"prompt": "1=", "answer": "1"}]
    async with running_episodes(store, models.first) as episodes:
        events = [event async for event in episodes.client.rollout(rollout_request(rows))]
    failed = next(event.failed for event in events if event.HasField("failed"))
    error = error_from_status(failed.error)
    assert (failed.group_id, error.code.name) == ("g0", "INVALID_ARGUMENT")
    assert error.reason == "PROMPT_TOO_LONG"
    assert [event.finished.group_id for event in events if event.HasField("finished")] == ["g1"]


ROW = {"prompt": "1=", "answer": "1"}


@pytest.mark.parametrize(
    ("rows", "changes", "field"),
    [
        ([ROW, {"answer": "1"}], {}, "groups[1].row.prompt"),
        ([ROW, {**ROW, "answer": {}}], {}, "groups[1].row.answer"),
        ([{"index": 4}], {}, "groups[0].row"),
        (
            [{"index": 10}],
            {"environment": "reasoning_gym", "settings": {"dataset": "chain_sum", "size": 10}},
            "groups[0].index",
        ),
    ],
)
async def test_a_task_that_cannot_be_made_fails_alone(
    store: Store, models: Models, rows: list[Any], changes: dict[str, Any], field: str
) -> None:
    request = rollout_request(rows, **changes)
    async with running_episodes(store, models.first) as episodes:
        events = [event async for event in episodes.client.rollout(request)]
        async for event in episodes.client.rollout(request):
            assert event.WhichOneof("event") in ("finished", "failed"), "it is told again"
    failed = [event.failed for event in events if event.HasField("failed")]
    errors = [error_from_status(failure.error) for failure in failed]
    assert [(e.code.name, e.metadata["field"]) for e in errors] == [("INVALID_ARGUMENT", field)]
    assert len([event for event in events if event.HasField("finished")]) == len(rows) - 1


async def test_what_was_finished_is_told_alone_though_its_task_is_refused_by_now(
    store: Store, models: Models
) -> None:
    request = rollout_request(copy_rows(2), environment="talk", max_new_tokens=8)
    told = []
    for path in (talk.PATH, talk.STRICT):
        values = {"environments": {"talk": path}}
        async with running_episodes(store, models.first, **values) as episodes:
            told.append(await episodes.finished(request))
    assert told[1].keys() == {"g0", "g1"}
    assert [group.blob for group in told[1].values()] == [group.blob for group in told[0].values()]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"environment": "chess"}, "environment.name"),
        ({"settings": {"reward": "best"}}, "environment.settings.reward"),
        ({"settings": {"chta": True}}, "environment.settings.chta"),
        (
            {"environment": "grim", "settings": {"flavour": "poison"}},
            "environment.settings.flavour",
        ),
        (
            {"environment": "reasoning_gym", "rows": [{"index": 0}]},
            "environment.settings.dataset",
        ),
        (
            {
                "environment": "reasoning_gym",
                "rows": [{"index": 0}],
                "settings": {"dataset": "no_such_set"},
            },
            "environment.settings.dataset",
        ),
        ({"sample_count": 0}, "sample_count"),
        ({"sample_count": -1}, "sample_count"),
        ({"max_new_tokens": 0}, "sampling.max_new_tokens"),
        ({"request_id": "x" * 300}, "request_id"),
    ],
)
async def test_a_wrong_field_is_named(refusing: Any, changes: dict[str, Any], field: str) -> None:
    request_id = changes.pop("request_id", None)
    request = rollout_request(changes.pop("rows", [ROW]), **changes)
    request.request_id = request_id or request.request_id
    with pytest.raises(RemoteError) as caught:
        await refusing.finished(request)
    error = caught.value
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert error.metadata["field"] == field


async def test_groups_and_seeds_must_fit(refusing: Any) -> None:
    request = rollout_request([ROW, ROW])
    request.groups[1].group_id = "g0"
    no_task = rollout_request([ROW])
    no_task.groups[0].ClearField("row")
    few_seeds = rollout_request([ROW])
    few_seeds.groups[0].seeds.append(1)
    own_seeds = rollout_request([ROW])
    own_seeds.sampling.seeds.extend([1, 2, 3, 4])
    late = rollout_request([ROW])
    late.group_timeout.FromMilliseconds(-1)
    too_many = rollout_request([ROW])
    too_many.sample_count = 2**31 - 1
    nul = rollout_request([ROW])
    nul.groups[0].group_id = "a\0b"
    long = rollout_request([ROW])
    long.request_id = "\u5c64" * 100  # a file named so has 900 bytes
    for wrong, field in (
        (long, "request_id"),
        (request, "groups[1].group_id"),
        (no_task, "groups[0].task"),
        (few_seeds, "groups[0].seeds"),
        (own_seeds, "sampling.seeds"),
        (late, "group_timeout"),
        (too_many, "sample_count"),
        (nul, "groups[0].group_id"),
    ):
        with pytest.raises(RemoteError) as caught:
            await refusing.finished(wrong)
        assert caught.value.metadata["field"] == field


async def test_environments_are_listed_with_their_settings(refusing: Any) -> None:
    environments = await refusing.client.list_environments()
    assert [environment.name for environment in environments] == [
        "grim",
        "prompts",
        "reasoning_gym",
        "tools",
        "verifiers",
    ]
    schema = json.loads(environments[2].settings_schema)
    assert {"dataset", "size", "partial_credit"} <= schema["properties"].keys()
    assert schema["additionalProperties"] is False


async def test_an_environment_is_opened_without_a_group(refusing: Any) -> None:
    spec = pb.EnvironmentSpec(name="grim")
    await refusing.client.check_environment(spec)
    spec.settings.update({"flavour": "poison"})
    with pytest.raises(RemoteError, match="is not served here") as caught:
        await refusing.client.check_environment(spec)
    assert caught.value.metadata["field"] == "environment.settings.flavour"
    with pytest.raises(RemoteError) as caught:
        await refusing.client.check_environment(pb.EnvironmentSpec(name="grimm"))
    assert caught.value.metadata["field"] == "environment.name"


async def test_an_answer_beyond_the_size_of_messages_is_asked_for_once(
    store: Store, models: Models
) -> None:
    server = {"drain_seconds": 0.2, "max_message_bytes": 4096}
    async with running_episodes(store, models.first, split=True, server=server) as episodes:
        request = rollout_request(copy_rows(1), sample_count=64, max_new_tokens=48)
        failed = await episodes.failed(request)
    error = error_from_status(failed["g0"].error)
    assert (error.code.name, error.reason) == ("INVALID_ARGUMENT", "MESSAGE_TOO_LARGE")
    assert "server.max_message_bytes" in error.message
    assert error.metadata["attempts"] == "1"


async def test_a_full_worker_refuses_and_recovers(store: Store, models: Models) -> None:
    async with running_episodes(
        store, models.first, max_open_groups=4, max_open_rollouts=2
    ) as episodes:
        with pytest.raises(RemoteError) as caught:
            await episodes.finished(rollout_request(copy_rows(5)))
        assert caught.value.reason == "INVALID_FIELD", "it could never be accepted"
        await episodes.engine.stub.Pause(engine_pb.PauseRequest(mode=engine_pb.PAUSE_MODE_IN_PLACE))
        both = [
            asyncio.create_task(episodes.finished(rollout_request(copy_rows(3)))) for _ in range(2)
        ]
        (refused,), (running,) = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        error = refused.exception()
        assert isinstance(error, RemoteError) and error.reason == "QUEUE_FULL", "they came together"
        late = rollout_request(copy_rows(2))
        with pytest.raises(RemoteError) as caught:
            await episodes.finished(late)
        error = caught.value
        assert (error.code.name, error.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        assert error.metadata["kind"] == "groups" and error.metadata["limit"] == "4"
        row = {"other": {"prompt": "1=", "answer": "1"}}
        other = asyncio.create_task(episodes.finished(rollout_request(row)))
        async with asyncio.timeout(PATIENCE):
            while not [w for w in await episodes.client.list_waits() if "other" in w.what]:
                await asyncio.sleep(0.01)
        with pytest.raises(RemoteError) as caught:
            await episodes.finished(rollout_request([ROW]))
        assert caught.value.metadata["kind"] == "rollouts"
        await episodes.engine.stub.Resume(engine_pb.ResumeRequest())
        assert len(await running) == 3 and len(await other) == 1
        assert len(await episodes.finished(late)) == 2, "a refusal is not remembered"
