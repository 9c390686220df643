"""EngineService over the wire, on the reference engine."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest
from prometheus_client import REGISTRY

from services.rollout.process import RolloutProcess
from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as pb
from sluice.client import EngineClient, RemoteError, new_request_id, typed_errors
from tests.patience import PATIENCE
from tests.service.rollout.harness import (
    ENGINE,
    Store,
    hold_after,
    load_weights,
    named,
    running_rollout,
)

PROMPT = (1, 2, 3, 10)
LONG = {"max_new_tokens": 50, "top_k": 1}  # greedy, so that no stop token comes before


def generate_request(**fields: Any) -> pb.GenerateRequest:
    sampling = {"max_new_tokens": 6, **fields.pop("sampling", {})}
    return pb.GenerateRequest(
        **{
            "request_id": new_request_id(),
            "prompt_token_ids": PROMPT,
            "sampling": pb.SamplingParams(**sampling),
            **fields,
        }
    )


async def generate(client: EngineClient, request: pb.GenerateRequest) -> pb.GenerateResponse:
    with typed_errors():
        return await client.stub.Generate(request)


async def decoded(client: EngineClient) -> int:
    return (await client.get()).decoded_token_count


async def wait_until_waiting(client: EngineClient, count: int) -> None:
    """Until so many samples wait in the engine; nothing starts while it is paused."""
    async with asyncio.timeout(PATIENCE):
        while (await client.get()).rank_loads[0].waiting_count != count:
            await asyncio.sleep(0.005)


async def pause(client: EngineClient, mode: pb.PauseMode = pb.PAUSE_MODE_IN_PLACE) -> None:
    await client.stub.Pause(pb.PauseRequest(mode=mode))


async def resume(client: EngineClient) -> None:
    await client.stub.Resume(pb.ResumeRequest())


async def test_an_engine_without_weights_says_so(engine: EngineClient) -> None:
    assert not (await engine.get()).HasField("weights")
    with pytest.raises(RemoteError) as caught:
        await generate(engine, generate_request())
    expected = (grpc.StatusCode.FAILED_PRECONDITION, "NO_WEIGHTS")
    assert (caught.value.code, caught.value.reason) == expected


async def test_an_engine_says_what_its_numbers_depend_on(engine: EngineClient) -> None:
    told = dict((await engine.get()).settings)
    assert told["backend"] == '"reference"' and told["dtype"] == '"float32"'
    assert "max_running" not in told, "which the bits of a deterministic one alone depend on"
    assert told["operations.attention"] == '"auto"'


async def test_an_engine_that_sleeps_serves_again_once_it_has_weights(
    engine: EngineClient, store: Store
) -> None:
    await load_weights(engine, store.first)
    expected = (await generate(engine, generate_request(sampling={"top_k": 1}))).completions
    not_quiet = grpc.StatusCode.FAILED_PRECONDITION, "NOT_QUIET"
    with pytest.raises(RemoteError) as caught:
        await engine.sleep()
    assert (caught.value.code, caught.value.reason) == not_quiet
    await engine.pause()
    for _ in range(2):
        await engine.sleep()
        found = await engine.get()
        assert (found.asleep, found.paused, found.HasField("weights")) == (True, True, False)
    weights = sample_pb2.WeightVersion(version=store.first.version, digest=store.first.digest)
    for call in (engine.prepare_weights(weights), engine.commit_weights(weights)):
        with pytest.raises(RemoteError) as caught:
            await call
        assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
    with pytest.raises(RemoteError) as caught:
        await generate(engine, generate_request())
    assert caught.value.reason == "NO_WEIGHTS" and "sleeps" in caught.value.message
    for _ in range(2):
        await engine.wake()
        assert not (await engine.get()).asleep
    await load_weights(engine, store.first)
    await engine.resume()
    found_again = (await generate(engine, generate_request(sampling={"top_k": 1}))).completions
    assert [c.token_ids for c in found_again] == [c.token_ids for c in expected]


async def test_a_request_id_runs_once_and_is_answered_again(
    engine: EngineClient, store: Store
) -> None:
    await load_weights(engine, store.first)
    request = generate_request(sample_count=3)
    first, joined = await asyncio.gather(generate(engine, request), generate(engine, request))
    before = await decoded(engine)
    assert first == joined == await generate(engine, request)
    assert await decoded(engine) == before
    with pytest.raises(RemoteError) as caught:
        await generate(engine, generate_request(request_id=request.request_id, sample_count=2))
    assert caught.value.reason == "REQUEST_ID_REUSED"


async def test_samples_are_counted_once_and_whole(engine: EngineClient, store: Store) -> None:
    """Also those of a stream, and of answers that are asked for again."""
    await load_weights(engine, store.first)
    request = generate_request(sample_count=3, sampling=LONG)
    count, tokens = counted()
    await asyncio.gather(generate(engine, request), generate(engine, request))
    answer = await generate(engine, request)
    lengths = [len(each.token_ids) for each in answer.completions]
    assert counted() == (count + 3, tokens + sum(lengths))
    streaming = pb.StreamGenerateRequest(generate=generate_request(sampling=LONG))
    for _ in range(2):
        deltas = [each.delta async for each in engine.stub.StreamGenerate(streaming)]
    assert len(deltas) > 1
    assert counted() == (count + 4, tokens + sum(lengths) + lengths[0])


def counted() -> tuple[float, float]:
    """Samples that ended, whatever for, and the tokens that they had."""
    reasons = ("stop", "length", "aborted")
    name = "sluice_rollout_samples_total"
    samples = sum(REGISTRY.get_sample_value(name, {"finish_reason": each}) or 0 for each in reasons)
    lengths = "sluice_rollout_sample_length_tokens"
    assert REGISTRY.get_sample_value(f"{lengths}_count") == samples
    return samples, REGISTRY.get_sample_value(f"{lengths}_sum") or 0


async def test_columns_hold_what_repeated_fields_do(engine: EngineClient, store: Store) -> None:
    await load_weights(engine, store.first)
    form: dict[str, Any] = {"sample_count": 2, "sampling": {"max_new_tokens": 6, "seeds": [1, 2]}}
    whole = await generate(engine, generate_request(**form))
    columns = await generate(engine, generate_request(**form, takes_columns=True))
    asking = generate_request(**form, takes_columns=True)
    stream = engine.stub.StreamGenerate(pb.StreamGenerateRequest(generate=asking))
    streamed = [response.delta async for response in stream]
    for answer in (columns.completions, streamed):
        assert not any(each.token_ids or each.logprobs for each in answer)
        for sample in whole.completions:
            mine = [each.columns for each in answer if each.index == sample.index]
            ids, logprobs = (
                np.frombuffer(b"".join(getattr(each, name) for each in mine), kind).tolist()
                for name, kind in (("token_ids", "<i4"), ("logprobs", "<f4"))
            )
            assert (ids, logprobs) == (list(sample.token_ids), list(sample.logprobs))


async def test_answers_are_forgotten_however_short_they_are(store: Store) -> None:
    settings = {**ENGINE, "remembered_tokens": 1000}
    short = {"sampling": {"max_new_tokens": 2}}
    async with (
        running_rollout(store, roles=["engine"], engine=settings) as process,
        EngineClient(process.server.address) as client,
    ):
        await load_weights(client, store.first)
        requests = [generate_request(**short) for _ in range(60)]
        for request in requests:
            await generate(client, request)
        before = await decoded(client)
        await generate(client, requests[-1])
        assert await decoded(client) == before
        await generate(client, requests[0])
        assert await decoded(client) > before


async def test_seeds_fix_the_draws(engine: EngineClient, store: Store) -> None:
    await load_weights(engine, store.first)
    seeds = {"sampling": {"seeds": [5, 6]}, "sample_count": 2}
    first = await generate(engine, generate_request(**seeds))
    again = await generate(engine, generate_request(**seeds))
    for one, other in zip(first.completions, again.completions, strict=True):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
    assert first.completions[0].token_ids != first.completions[1].token_ids


async def test_a_cancelled_call_aborts_in_the_engine(
    engine: EngineClient, engine_process: RolloutProcess, store: Store
) -> None:
    await load_weights(engine, store.first)
    request = pb.StreamGenerateRequest(generate=generate_request(sampling=LONG))
    hold_after(engine_process, 1)
    call, other = engine.stub.StreamGenerate(request), engine.stub.StreamGenerate(request)
    answers = aiter(other)
    for stream in (aiter(call), answers):
        await anext(stream)
    call.cancel()
    await pause(engine)  # a call after the one that tells of it
    await resume(engine)
    last = [message async for message in answers][-1]
    assert last.delta.finish_reason == sample_pb2.FINISH_REASON_LENGTH, "it has a caller left"

    await pause(engine)
    lone = asyncio.create_task(generate(engine, generate_request(sampling=LONG)))
    await wait_until_waiting(engine, 1)
    before = await decoded(engine)
    lone.cancel()
    await asyncio.gather(lone, return_exceptions=True)
    await wait_until_waiting(engine, 0)  # it hears of it after the caller has gone
    await resume(engine)
    assert (await engine.get()).rank_loads[0].running_count == 0
    assert await decoded(engine) == before


@pytest.mark.parametrize("bounds", [{"min_version": 2}, {"exact_version": 2}])
async def test_bounds_decide_which_weights_may_serve(
    engine: EngineClient, store: Store, bounds: dict[str, int]
) -> None:
    await load_weights(engine, store.first)
    with pytest.raises(RemoteError) as caught:
        await generate(engine, generate_request(versions=pb.VersionBounds(**bounds)))
    expected = (grpc.StatusCode.FAILED_PRECONDITION, "VERSION_UNAVAILABLE")
    assert (caught.value.code, caught.value.reason) == expected
    assert caught.value.metadata["serving"] == "1"
    await load_weights(engine, store.second)
    answer = await generate(engine, generate_request(versions=pb.VersionBounds(**bounds)))
    spans = [span.weights for completion in answer.completions for span in completion.spans]
    assert spans == [named(store.second)]


async def test_a_commit_in_the_middle_breaks_an_exact_bound_only(
    engine: EngineClient, engine_process: RolloutProcess, store: Store
) -> None:
    await load_weights(engine, store.first)
    await engine.prepare_weights(named(store.second))
    await pause(engine)  # until both are there, then held after a token of each
    hold_after(engine_process, 2)
    long = {"sampling": {"max_new_tokens": 59, "top_k": 1}, "prompt_token_ids": [1, 10]}
    requests = [
        generate_request(**long, versions=pb.VersionBounds(min_version=1)),
        generate_request(**long, versions=pb.VersionBounds(exact_version=1)),
    ]
    streams = [engine.stub.StreamGenerate(pb.StreamGenerateRequest(generate=r)) for r in requests]
    await wait_until_waiting(engine, 2)
    await resume(engine)
    answers = [aiter(stream) for stream in streams]
    for each in answers:
        await anext(each)
    await engine.commit_weights(named(store.second))
    await resume(engine)
    versions = [
        span.weights.version async for message in answers[0] for span in message.delta.spans
    ]
    assert versions[-1] == 2
    with pytest.raises(RemoteError) as caught, typed_errors():
        _ = [message async for message in streams[1]]
    assert caught.value.reason == "VERSION_UNAVAILABLE"


async def test_prepared_weights_are_pinned_until_they_are_not_used(
    engine: EngineClient, store: Store
) -> None:
    one, two = store.first.version, store.second.version
    await engine.prepare_weights(named(store.first))
    assert store.weights.pins() == {one: {"rollout-0"}}
    await engine.commit_weights(named(store.first))
    assert store.weights.pins() == {one: {"rollout-0"}}
    await engine.prepare_weights(named(store.second))
    assert set(store.weights.pins()) == {one, two}
    assert list((await engine.get()).prepared_versions) == [two]
    await engine.commit_weights(named(store.second))
    assert store.weights.pins() == {two: {"rollout-0"}}
    assert (await engine.get()).weights == named(store.second)


async def test_weights_that_cannot_serve_are_refused(engine: EngineClient, store: Store) -> None:
    await load_weights(engine, store.first)
    wrong = sample_pb2.WeightVersion(version=2, digest="0" * 32)
    missing = sample_pb2.WeightVersion(version=9, digest="0" * 32)
    unprepared = named(store.second)
    for call, code, reason in (
        (engine.prepare_weights(wrong), "DATA_LOSS", "DIGEST_MISMATCH"),
        (engine.prepare_weights(missing), "NOT_FOUND", "WEIGHT_VERSION_NOT_FOUND"),
        (engine.commit_weights(unprepared), "FAILED_PRECONDITION", "VERSION_NOT_PREPARED"),
        (engine.prepare_weights(sample_pb2.WeightVersion(version=2)), None, "INVALID_FIELD"),
    ):
        with pytest.raises(RemoteError) as caught:
            await call
        assert caught.value.reason == reason
        assert code is None or caught.value.code.name == code
    assert (await engine.get()).weights == named(store.first)
    assert store.weights.pins() == {1: {"rollout-0"}}, "what failed is not kept"
    await engine.prepare_weights(named(store.second))
    with pytest.raises(RemoteError) as caught:
        await engine.commit_weights(wrong)
    assert caught.value.reason == "DIGEST_MISMATCH"


async def test_preparing_and_committing_again_is_free(engine: EngineClient, store: Store) -> None:
    first = named(store.first)
    await asyncio.gather(*(engine.prepare_weights(first) for _ in range(3)))
    assert await engine.commit_weights(first) > 0
    assert await engine.commit_weights(first) == 0
    assert await engine.prepare_weights(first) == 0


async def test_a_damaged_version_is_refused_and_names_the_tensor(
    engine: EngineClient, store: Store
) -> None:
    await load_weights(engine, store.first)
    file = next(store.second.directory.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)
    with pytest.raises(RemoteError) as caught:
        await engine.prepare_weights(named(store.second))
    assert caught.value.code is grpc.StatusCode.DATA_LOSS
    assert any("weight" in value for value in caught.value.metadata.values())
    await generate(engine, generate_request())


async def test_a_stream_adds_up_to_the_whole_and_can_be_followed_again(
    engine: EngineClient, store: Store
) -> None:
    await load_weights(engine, store.first)
    fields = {"sampling": {"seeds": [1, 2], "temperature": 0.7}, "sample_count": 2}
    whole = await generate(engine, generate_request(**fields))
    request = pb.StreamGenerateRequest(generate=generate_request(**fields))
    for _ in range(2):
        tokens: dict[int, list[int]] = {0: [], 1: []}
        at_one: dict[int, list[float]] = {0: [], 1: []}
        ends = []
        async for message in engine.stub.StreamGenerate(request):
            tokens[message.delta.index] += message.delta.token_ids
            at_one[message.delta.index] += message.delta.logprobs_t1
            ends += [message.delta.index] * (message.delta.finish_reason != 0)
        for completion in whole.completions:
            assert tokens[completion.index] == list(completion.token_ids)
            expected = pytest.approx(list(completion.logprobs_t1), abs=1e-5)
            assert at_one[completion.index] == expected
            assert completion.logprobs_t1 != completion.logprobs
        assert sorted(ends) == [0, 1]


async def test_scores_are_the_log_probabilities_of_what_was_sampled(
    engine: EngineClient, store: Store
) -> None:
    await load_weights(engine, store.first)
    (completion,) = await engine.generate(PROMPT, max_new_tokens=8)
    tokens = [*PROMPT, *completion.token_ids]
    request = pb.ScoreRequest(token_ids=tokens, prompt_length=len(PROMPT))
    answer = await engine.stub.Score(request)
    assert list(answer.logprobs) == pytest.approx(list(completion.logprobs), abs=1e-4)
    assert answer.weights == named(store.first)
    request.versions.min_version = 5
    with pytest.raises(RemoteError) as caught, typed_errors():
        await engine.stub.Score(request)
    assert caught.value.reason == "VERSION_UNAVAILABLE"


async def test_an_abort_keeps_what_was_sampled(
    engine: EngineClient, engine_process: RolloutProcess, store: Store
) -> None:
    await load_weights(engine, store.first)
    hold_after(engine_process, 1)
    request = generate_request(sampling={"max_new_tokens": 60, "top_k": 1})
    stream = engine.stub.StreamGenerate(pb.StreamGenerateRequest(generate=request))
    answers = aiter(stream)
    first = await anext(answers)
    aborted = await engine.stub.Abort(
        pb.AbortRequest(request_ids=[request.request_id, "never-here"])
    )
    assert list(aborted.aborted_request_ids) == [request.request_id]
    await resume(engine)
    last = first
    async for message in answers:
        last = message
    assert last.delta.finish_reason == sample_pb2.FINISH_REASON_ABORTED
    assert len(first.delta.token_ids) >= 1


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"request_id": ""}, "request_id"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [1, 99]}, "prompt_token_ids"),
        ({"sampling": {"max_new_tokens": 0}}, "sampling.max_new_tokens"),
        ({"sampling": {"temperature": -1.0}}, "sampling.temperature"),
        ({"sampling": {"temperature": float("nan")}}, "sampling.temperature"),
        ({"sampling": {"top_p": 0.0}}, "sampling.top_p"),
        ({"sampling": {"min_new_tokens": -1}}, "sampling.min_new_tokens"),
        ({"sampling": {"min_new_tokens": 2**31 - 1}}, "sampling.min_new_tokens"),
        ({"sampling": {"top_k": -1}}, "sampling.top_k"),
        ({"sampling": {"seeds": [1, 2]}}, "sampling.seeds"),
        ({"sample_count": -1}, "sample_count"),
        ({"sample_count": 2**31 - 1}, "sample_count"),
        ({"sampling": {"stop_token_ids": [1] * 2000}}, "sampling.stop_token_ids"),
        ({"sampling": {"stop_token_ids": [3, 97]}}, "sampling.stop_token_ids"),
        ({"sampling": {"stop_token_ids": [-1]}}, "sampling.stop_token_ids"),
        ({"media": [{"kind": 1, "blob": {"digest": "a"}}] * 300}, "media"),
        ({"request_id": "a\0b"}, "request_id"),
        ({"dp_rank": 1}, "dp_rank"),
        ({"dp_rank": -1}, "dp_rank"),
    ],
)
async def test_a_wrong_field_is_named(
    engine: EngineClient, store: Store, fields: dict[str, Any], field: str
) -> None:
    await load_weights(engine, store.first)
    with pytest.raises(RemoteError) as caught:
        await generate(engine, generate_request(**fields))
    expected = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", field)
    error = caught.value
    assert (error.code, error.reason, error.metadata.get("field")) == expected


async def test_a_prompt_beyond_the_model_is_refused(engine: EngineClient, store: Store) -> None:
    await load_weights(engine, store.first)
    with pytest.raises(RemoteError) as caught:
        await generate(engine, generate_request(prompt_token_ids=[1] * 64))
    expected = (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG")
    assert (caught.value.code, caught.value.reason) == expected
    assert "a prompt of 64 tokens leaves no room" in caught.value.message
    assert "engine.max_model_length is" in caught.value.message


async def test_a_score_is_within_limits(engine: EngineClient, store: Store) -> None:
    await load_weights(engine, store.first)
    many = pb.ScoreRequest(token_ids=[1] * 15_000_000, prompt_length=1)
    with pytest.raises(RemoteError) as caught, typed_errors():
        await engine.stub.Score(many)
    assert caught.value.reason == "PROMPT_TOO_LONG"
    for count in (-1, 2**31 - 1):
        with pytest.raises(RemoteError) as caught, typed_errors():
            await engine.stub.Score(
                pb.ScoreRequest(token_ids=[1, 2, 3], prompt_length=1, top_count=count)
            )
        assert caught.value.metadata["field"] == "top_count"


async def test_unknown_pause_modes_are_refused(engine: EngineClient, store: Store) -> None:
    with pytest.raises(RemoteError) as caught, typed_errors():
        await engine.stub.Pause(pb.PauseRequest(mode=17))  # type: ignore[arg-type]
    assert caught.value.metadata["field"] == "mode"


async def test_the_limits_of_the_settings_are_those_of_requests(store: Store) -> None:
    limits = {"max_stop_tokens": 2, "max_stop_strings": 1, "max_top_tokens": 2, "max_media": 1}
    settings = {"roles": ["engine"], "engine_id": "rollout-0", "engine": {**ENGINE, **limits}}
    score = {"token_ids": [1, 2, 3], "prompt_length": 1}
    media = [{"kind": 1, "blob": {"digest": "a"}}] * 2
    async with (
        running_rollout(store, **settings) as process,
        EngineClient(process.server.address) as engine,
    ):
        await load_weights(engine, store.first)
        answer = await generate(engine, generate_request(sampling={"stop_token_ids": [7, 8]}))
        assert len(answer.completions) == 1
        with typed_errors():
            await engine.stub.Score(pb.ScoreRequest(**score, top_count=2))
        stops = generate_request(sampling={"stop_token_ids": [7, 8, 9]})
        texts = generate_request(sampling={"stop": ["a", "b"]})
        for call, setting in (
            (engine.stub.Generate(texts), "max_stop_strings"),
            (engine.stub.Score(pb.ScoreRequest(**score, top_count=3)), "max_top_tokens"),
            (engine.stub.Generate(generate_request(media=media)), "max_media"),
            (engine.stub.Generate(stops), "max_stop_tokens"),
        ):
            with pytest.raises(RemoteError, match=f"engine.{setting}"), typed_errors():
                await call
