"""Environments, rewards and functions of users over the wire; everything but the judges is real."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from services.rollout.engine.interface import Delta, Generation
from services.rollout.environments.environment import Environment, Response, Reward, Task
from services.rollout.episodes.episode import Episode
from services.rollout.episodes.rollouts import digest_of
from services.rollout.episodes.trajectory import Trajectory
from services.trainer.rank.table import RowTable
from services.trainer.rows import RowLimits
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.trainer.v1 import worker_service_pb2 as worker_pb
from sluice.client import RemoteError, error_from_status
from sluice.config import Config
from sluice.samples.blob_store import BlobStore
from sluice.samples.sample import Sample, validate_sample
from tests.patience import PATIENCE
from tests.service.rollout.harness import (
    Episodes,
    Models,
    Store,
    copy_rows,
    rollout_request,
    running_episodes,
)

HERE = "tests.service.rollout.test_environments"
HIDDEN = "examples.environments.hidden_digits:HiddenDigits"
MODULES = ("tests.service", "examples")
END = 11


@contextlib.asynccontextmanager
async def running(store: Store, models: Models, **episodes: Any) -> AsyncIterator[Episodes]:
    episodes.setdefault("user_modules", MODULES)
    async with running_episodes(store, models.first, **episodes) as made:
        yield made


async def reasons(episodes: Episodes, request: Any) -> dict[str, str]:
    """Reason by failed group; all must fail."""
    async with asyncio.timeout(PATIENCE):
        failed = await episodes.failed(request)
    return {name: error_from_status(group.error).reason for name, group in failed.items()}


# --- episodes of several turns


async def test_observations_are_in_the_row_and_masked(store: Store, models: Models) -> None:
    async with running(store, models) as episodes:
        request = rollout_request(
            {f"g{i}": {"index": i} for i in range(3)},
            environment=HIDDEN,
            settings={"digits": 2},
            sample_count=8,
            max_new_tokens=8,
        )
        for group in request.groups:
            group.seeds.extend(range(8))
        finished = await episodes.finished(request)
        turns = set[int]()
        for group in finished.values():
            for sample, detail in zip(store.samples(group), group.details, strict=True):
                validate_sample(sample)
                await check_turns(episodes, sample, detail.turn_count)
                turns.add(detail.turn_count)
    assert turns == {1, 2}, "some answers ended in time, some did not"


async def check_turns(episodes: Episodes, sample: Sample, turns: int) -> None:
    """The engine, asked again, gives every sampled token the log-prob it had in its turn."""
    response = sample.token_ids[sample.prompt_length :]
    mask = np.asarray(sample.columns.get("loss_mask", np.ones(len(response), bool)))
    found = np.asarray(sample.columns["rollout_logprobs_t1"])
    scored = await episodes.engine.stub.Score(
        engine_pb.ScoreRequest(
            token_ids=sample.token_ids.tolist(), prompt_length=sample.prompt_length
        )
    )
    assert found[mask] == pytest.approx(np.asarray(scored.logprobs)[mask], abs=1e-4)
    assert (found[~mask] == 0).all()
    covered = np.zeros(len(response), bool)
    for span in sample.spans:
        covered[span.first_token : span.last_token + 1] = True
    assert (covered == mask).all(), "weights are named for what they sampled, and nothing else"
    assert mask.sum() <= 8
    if turns == 1:
        assert mask.all() and sample.columns["reward"] == 0.0
        return
    observation = response[~mask]
    assert len(observation) == 3 and observation[-1] == 10, "two digits and ="
    first = int(np.argmin(mask))
    assert response[first - 1] == END, "the first answer ended"
    answer = response[first + 3 :]
    target = [*observation[:2], END]
    right = sum(int(a == b) for a, b in zip(answer, target, strict=False))
    assert sample.columns["reward"] == pytest.approx(right / 3)


async def test_engine_and_trainer_see_the_same_tokens(store: Store, models: Models) -> None:
    """By hash: of what the engine was fed for every answer, and of the trainer's rows."""
    consumed: set[str] = set()
    async with running(store, models) as episodes:
        engine = episodes.worker.engine
        assert engine is not None
        generate = engine.generate

        async def recording(generation: Generation) -> AsyncIterator[Delta]:
            prompt = tuple(generation.prompt_token_ids)
            consumed.add(digest_of(prompt))
            async for delta in generate(generation):
                consumed.add(digest_of((*prompt, *delta.token_ids)))
                yield delta

        engine.generate = recording  # type: ignore[method-assign, assignment]
        plain = await episodes.finished(rollout_request(copy_rows(3), sample_count=3))
        turns = await episodes.finished(
            rollout_request([{"index": 0}], environment=HIDDEN, max_new_tokens=40)
        )
    limits = RowLimits(vocabulary_size=1 << 20, max_tokens=1 << 20)
    table = RowTable(BlobStore(store.root, sync=False), limits)
    for group in (*plain.values(), *turns.values()):
        count = len(group.rewards)
        rows = worker_pb.BlobRows(blob=group.blob, rows=range(count), indices=range(count))
        table.add(worker_pb.AddRows(batch_id=group.group_id, blobs=[rows]))
        for row in table.rows(group.group_id).values():
            ids = row.token_ids.numpy()
            assert digest_of(ids) in consumed
            assert digest_of(ids[: row.prompt_length]) == group.prompt_digest
            assert group.prompt_digest in consumed
            for end in np.flatnonzero(np.diff(row.loss_mask.numpy().astype(int)) == 1):
                upto = row.prompt_length + end + 1
                assert digest_of(ids[:upto]) in consumed, "the prompt of a later turn"


# --- functions of users


def halves(task: Task, responses: Sequence[Response]) -> list[Any]:
    """Every second sample is judged by another rule, with other numbers."""
    return [
        Reward(reward=0.5, raw_reward=1.0, scores={"judge": 0.25}) if i % 2 else 1.0
        for i, _ in enumerate(responses)
    ]


async def branch(episode: Episode) -> list[Trajectory]:
    """Two samples: one answer, and one that goes on after a remark."""
    short = episode.begin()
    await episode.sample(short, 3)
    long = episode.begin()
    await episode.sample(long, 2)
    long.add_observation([1, 2, 3])
    await episode.sample(long, 2)
    long.reward = Reward(reward=7.0, trained=episode.index != 1)
    return [short, long]


async def worthless(episode: Episode) -> list[Trajectory]:
    """Two samples, the first worth nothing; the other is for the environment to judge."""
    both = [episode.begin(), episode.begin()]
    for trajectory in both:
        await episode.sample(trajectory, 2)
    both[0].reward = 0  # type: ignore[assignment]
    return both


async def test_a_reward_of_nothing_is_one(store: Store, models: Models) -> None:
    """Never that of the neighbour, which the environment gave."""
    async with running(store, models) as episodes:
        settings = {"generate": f"{HERE}:worthless", "reward": f"{HERE}:halves"}
        request = rollout_request(copy_rows(1), settings=settings, sample_count=2)
        finished = await episodes.finished(request)
    assert list(finished["g0"].rewards) == [0.0, 1.0, 0.0, 0.5]


async def test_samples_of_one_group_may_have_different_columns(
    store: Store, models: Models
) -> None:
    async with running(store, models) as episodes:
        settings = {"reward": f"{HERE}:halves"}
        finished = await episodes.finished(rollout_request(copy_rows(1), settings=settings))
    group = finished["g0"]
    assert list(group.rewards) == [1.0, 0.5, 1.0, 0.5]
    assert list(group.raw_rewards) == [1.0] * 4
    samples = store.samples(group)
    assert ["score/judge" in sample.columns for sample in samples] == [False, True, False, True]
    assert samples[1].columns["score/judge"] == 0.25
    assert [dict(detail.scores) for detail in group.details] == [{}, {"judge": 0.25}] * 2


async def test_a_generate_function_makes_several_samples_of_an_episode(
    store: Store, models: Models
) -> None:
    async with running(store, models) as episodes:
        request = rollout_request(
            copy_rows(2), settings={"generate": f"{HERE}:branch"}, sample_count=3
        )
        for group in request.groups:
            group.seeds.extend([1, 2, 3])
        finished = await episodes.finished(request)
        samples = store.samples(finished["g0"])
        for sample in samples:
            validate_sample(sample)
            scored = await episodes.engine.stub.Score(
                engine_pb.ScoreRequest(
                    token_ids=sample.token_ids.tolist(), prompt_length=sample.prompt_length
                )
            )
            sampled = np.ones(sample.response_length, bool)
            if len(sample.spans) > 1:
                sampled[sample.spans[0].last_token + 1 : sample.spans[1].first_token] = False
            found = np.asarray(sample.columns["rollout_logprobs_t1"])
            assert found[sampled] == pytest.approx(np.asarray(scored.logprobs)[sampled], abs=1e-4)
    assert [sample.sample_id for sample in samples] == [f"g0/{i}" for i in range(6)]
    first = [tuple(s.token_ids[s.prompt_length :][:2]) for s in samples]
    assert first[::2] != first[1::2], "two trajectories of an episode are two draws"
    assert [detail.episode for detail in finished["g0"].details] == [0, 0, 1, 1, 2, 2]
    assert list(finished["g0"].rewards)[1::2] == [7.0] * 3
    assert set(list(finished["g0"].rewards)[::2]) <= {0.0, 1.0}, "the environment's own"
    assert not np.asarray(samples[3].columns["loss_mask"]).any(), "masked by its function"


class Unplaced(Environment):
    """Does not say where it runs."""

    name = "unplaced"
    settings_type = Config


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"settings": {"reward": "os:getcwd"}}, "environment.settings.reward", "user_modules"),
        ({"settings": {"generate": "os:abort"}}, "environment.settings.generate", "user_modules"),
        (
            {"settings": {"generate": f"{HERE}:halves"}},
            "environment.settings.generate",
            "no coroutine",
        ),
        ({"environment": "os:PathLike"}, "environment.name", "user_modules"),
        ({"environment": f"{HERE}:Episodes"}, "environment.name", "names no Environment"),
        ({"environment": f"{HERE}:Unplaced"}, "environment.name", "does not say its placement"),
        ({"environment": "examples_of_others.x:Y"}, "environment.name", "user_modules"),
        (
            {"settings": {"reward": "remote", "reward_settings": {"url": "http://10.0.0.1/"}}},
            "environment.settings.reward_settings.url",
            "reward_urls",
        ),
        (
            {
                "settings": {
                    "reward": "remote",
                    "reward_settings": {"url": "http://localhost.evil.example/"},
                }
            },
            "environment.settings.reward_settings.url",
            "reward_urls",
        ),
    ],
)
async def test_only_what_the_worker_allows_is_imported_or_asked(
    store: Store, models: Models, changes: dict[str, Any], field: str, message: str
) -> None:
    async with running(store, models) as episodes:
        with pytest.raises(RemoteError, match=message) as caught:
            await episodes.finished(rollout_request(copy_rows(1), **changes))
    assert caught.value.metadata["field"] == field


# --- reward services


@contextlib.asynccontextmanager
async def judge(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/judge", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}/judge"
    finally:
        await runner.cleanup()


def remote(url: str, **values: Any) -> dict[str, Any]:
    quick = {
        "first_backoff_seconds": 0.01,
        "deadline_seconds": PATIENCE,
        "attempt_seconds": PATIENCE,
    }
    return {"reward": "remote", "reward_settings": {"url": url, **quick, **values}}


async def test_a_reward_service_is_asked_again_until_it_answers(
    store: Store, models: Models
) -> None:
    asked: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        if len(asked) == 1:
            return web.Response(status=503, headers={"Retry-After": "0.2"})
        if len(asked) == 2:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        count = len(asked[-1]["responses"])
        return web.json_response({"rewards": [1, *({"reward": 0.5} for _ in range(count - 1))]})

    async with judge(answer) as url, running(store, models) as episodes:
        start = time.monotonic()
        finished = await episodes.finished(rollout_request(copy_rows(1), settings=remote(url)))
        assert time.monotonic() - start >= 0.2, "not before the service wants to be asked"
    assert list(finished["g0"].rewards) == [1.0, 0.5, 0.5, 0.5]
    assert len(asked) == 3 and asked[0] == asked[2]
    assert asked[0]["prompt"] == "0000=" and asked[0]["answer"] == "0000"
    assert len(asked[0]["responses"]) == 4, "a group at once"
    samples = store.samples(finished["g0"])
    assert ["raw_reward" in sample.columns for sample in samples] == [True, False, False, False]
    details = finished["g0"].details
    assert [detail.HasField("raw_reward") for detail in details] == [True, False, False, False]
    assert list(finished["g0"].raw_rewards) == [1.0, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (400, "{}", "REWARD_SERVICE_FAILED"),
        (200, "no json", "REWARD_SERVICE_FAILED"),
        (200, "[]", "REWARD_SERVICE_FAILED"),
        (200, '{"rewards": [1]}', "REWARD_SERVICE_FAILED"),
        (200, '{"rewards": [1, 1, 1, null]}', "REWARD_SERVICE_FAILED"),
        (302, "", "REWARD_SERVICE_FAILED"),
        (500, "", "REWARD_SERVICE_TIMED_OUT"),
    ],
)
async def test_a_reward_service_that_makes_no_sense_is_a_typed_error(
    store: Store, models: Models, status: int, body: str, reason: str
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=body, headers={"Location": "http://127.0.0.1:1/"})

    async with judge(answer) as url, running(store, models) as episodes:
        # one that refuses is not to be too late as well
        seconds = 0.5 if status == 500 else PATIENCE
        request = rollout_request(copy_rows(1), settings=remote(url, deadline_seconds=seconds))
        assert await reasons(episodes, request) == {"g0": reason}


async def test_a_reward_service_that_stalls_holds_up_nobody(store: Store, models: Models) -> None:
    forever = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        await forever.wait()
        return web.Response()

    async with judge(answer) as url, running(store, models) as episodes:
        request = rollout_request(copy_rows(40), settings=remote(url))
        stream = episodes.client.stub.Rollout(request)
        async with asyncio.timeout(PATIENCE):
            while len(await episodes.client.list_waits()) < 40:
                await asyncio.sleep(0.02)
            assert len(await episodes.finished(rollout_request(copy_rows(2)))) == 2
            assert len(await episodes.client.cancel(request.request_id)) == 40
            told = [await stream.read() for _ in range(40)]
        assert {error_from_status(e.failed.error).reason for e in told} == {"GROUP_CANCELLED"}
        late = rollout_request(copy_rows(1), settings=remote(url, deadline_seconds=0.3))
        assert await reasons(episodes, late) == {"g0": "REWARD_SERVICE_TIMED_OUT"}
        forever.set()


# --- what engines cannot read


async def test_an_image_fails_its_group_and_no_other(store: Store, models: Models) -> None:
    image = [{"type": "image", "image": "x.png"}, {"type": "text", "text": "what is it?"}]
    template = models.first / "chat_template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}={% endfor %}")
    try:
        async with running(store, models) as episodes:
            rows = {
                "seen": {"messages": [{"role": "user", "content": image}], "answer": "1"},
                "read": {"messages": [{"role": "user", "content": "12"}], "answer": "1"},
            }
            events = [event async for event in episodes.client.rollout(rollout_request(rows))]
    finally:
        template.unlink()
    (failed,) = [event.failed for event in events if event.HasField("failed")]
    error = error_from_status(failed.error)
    assert (failed.group_id, error.reason) == ("seen", "MEDIA_UNSUPPORTED")
    assert error.code.name == "INVALID_ARGUMENT", "the loop drops it with its reason"
    assert [e.finished.group_id for e in events if e.HasField("finished")] == ["read"]
