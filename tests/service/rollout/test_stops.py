"""Stop strings, over the wire: a sample ends with the token that completes one of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as pb
from sluice.client import EngineClient, RemoteError, RolloutClient, new_request_id, typed_errors
from sluice.demo.tiny_qwen3 import WORDS
from tests.decoded_stops import expected
from tests.patience import PATIENCE
from tests.service.rollout import talk
from tests.service.rollout.harness import (
    ENGINE,
    Episodes,
    Models,
    Store,
    copy_rows,
    hold_after,
    load_weights,
    named,
    rollout_request,
    running_episodes,
    running_rollout,
    running_router,
    wait_for_engines,
)

# Bytes C3 and A9 are an é; the model's own end and its padding are special tokens.
PIECES = ["</", "s>", "<", "/", "s", ">", "a", "Ã", "©", "aÃ", "/s", "<end>", "<pad>"]
END = PIECES.index("<end>")
LENGTH = 48
STOPS = ["</s>", "</s", "s>", "é", "aé", "é</", "a", "<pad>", "s<pad>", "</s></s>", "x", "aa"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of as many tokens as the model has, in which texts are cut anywhere."""
    made = Tokenizer(models.BPE({piece: number for number, piece in enumerate(PIECES)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>", "<pad>"])
    directory = tmp_path_factory.mktemp("tokenizer")
    made.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
async def engine(store: Store, tokenizer: Path) -> AsyncIterator[EngineClient]:
    settings: dict[str, Any] = {"roles": ["engine"], "tokenizer": str(tokenizer)}
    async with (
        running_rollout(store, engine=ENGINE, **settings) as process,
        EngineClient(process.server.address) as client,
    ):
        await load_weights(client, store.first)
        yield client


def request_of(
    seeds: Sequence[int], stops: Sequence[str] = (), before: Sequence[int] = ()
) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_new_tokens=LENGTH - len(before), seeds=seeds, stop=stops)
    return pb.GenerateRequest(
        request_id=new_request_id(),
        prompt_token_ids=(1, 2, 3, *before),
        sampled_count=len(before),
        sampling=sampling,
        sample_count=len(seeds),
    )


async def generate(client: EngineClient, request: pb.GenerateRequest) -> list[pb.Completion]:
    with typed_errors():
        return list((await client.stub.Generate(request)).completions)


async def streamed(client: EngineClient, request: pb.GenerateRequest) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(request.sample_count)]
    with typed_errors():
        async for message in client.stub.StreamGenerate(pb.StreamGenerateRequest(generate=request)):
            found[message.delta.index] += message.delta.token_ids
    return found


async def test_a_sample_ends_with_the_first_token_that_completes_a_stop_string(
    engine: EngineClient, tokenizer: Path
) -> None:
    """Without `stop` the same seeds go on; beside each other, cut off, and as they come, too."""
    draw = random.Random(5)
    ended, at_once, went_on = 0, [], 0
    for _ in range(20):
        seeds = [draw.getrandbits(40) for _ in range(8)]
        stops = draw.sample(STOPS, draw.randint(1, 3))
        at_once.append((seeds, stops))
    free = await asyncio.gather(*(generate(engine, request_of(s)) for s, _ in at_once))
    cut = await asyncio.gather(*(generate(engine, request_of(*each)) for each in at_once))
    pieces = await asyncio.gather(*(streamed(engine, request_of(*each)) for each in at_once))
    for (seeds, stops), wholes, samples, parts in zip(at_once, free, cut, pieces, strict=True):
        for seed, whole, sample, part in zip(seeds, wholes, samples, parts, strict=True):
            token_ids = list(whole.token_ids)
            count = expected(tokenizer, token_ids, stops)
            assert list(sample.token_ids) == token_ids[: count or None] == part
            near = pytest.approx(whole.logprobs[: count or None], abs=1e-5)
            assert list(sample.logprobs) == near
            assert sample.spans[-1].last_token == len(sample.token_ids) - 1
            if not count:
                assert sample.finish_reason == whole.finish_reason
                went_on += 1
                continue
            assert sample.finish_reason == sample_pb2.FINISH_REASON_STOP
            ended += count < len(token_ids)
            before = token_ids[: draw.randrange(count)]
            (rest,) = await generate(engine, request_of([seed], stops, before))
            assert [*before, *rest.token_ids] == list(sample.token_ids)
            assert rest.finish_reason == sample_pb2.FINISH_REASON_STOP
    assert ended > 40
    assert went_on > 5


async def test_weights_that_change_in_the_middle_of_a_stop_string_hide_it_from_nobody(
    store: Store, tokenizer: Path
) -> None:
    settings: dict[str, Any] = {"roles": ["engine"], "tokenizer": str(tokenizer)}
    stops = ["</s>", "é", "aa"]
    async with (
        running_rollout(store, engine=ENGINE, **settings) as process,
        EngineClient(process.server.address) as client,
    ):
        await load_weights(client, store.first)
        await client.prepare_weights(named(store.second))
        hold_after(process, 90)
        samples = asyncio.create_task(generate(client, request_of(range(24), stops)))
        async with asyncio.timeout(PATIENCE):
            while not (await client.get()).paused:
                await asyncio.sleep(0.005)
        await client.commit_weights(named(store.second))
        await client.stub.Resume(pb.ResumeRequest())
        answers = await samples
    assert sum(len(answer.spans) == 2 for answer in answers) > 5
    over = 0
    for answer in answers:
        count = expected(tokenizer, answer.token_ids, stops)
        assert count in (0, len(answer.token_ids))
        assert count or answer.token_ids[-1] == END or len(answer.token_ids) == LENGTH
        if count and len(answer.spans) == 2:  # the string lies on both sides of the commit
            over += answer.spans[1].first_token == count - 1
    assert over, "a token that ends a string, and only that, is of the new weights"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"stop": [""]}, "sampling.stop"),
        ({"stop": ["a", ""]}, "sampling.stop"),
        ({"stop": ["a" * 5000]}, "sampling.stop"),
        ({"stop": ["a"] * 65}, "sampling.stop"),
        ({"stop": [f"{number:04d}" for number in range(10_000)]}, "sampling.stop"),
        ({"sampled_count": 9}, "sampled_count"),
        ({"sampled_count": -1}, "sampled_count"),
    ],
)
async def test_stop_strings_are_within_limits(
    engine: EngineClient, fields: dict[str, Any], field: str
) -> None:
    request = request_of([1])
    request.sampling.stop.extend(fields.get("stop", ()))
    request.sampled_count = fields.get("sampled_count", 0)
    with pytest.raises(RemoteError) as caught:
        await generate(engine, request)
    expected = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", field)
    error = caught.value
    assert (error.code, error.reason, error.metadata.get("field")) == expected


async def test_any_text_within_the_limits_may_be_a_stop_string(engine: EngineClient) -> None:
    odd = ["\0", "\n\n", "a" * 1024, "\u202e", "🙂", "aa" * 400 + "b"]
    (free,), (sample,) = [await generate(engine, request_of([4], stops)) for stops in ((), odd)]
    assert sample.token_ids == free.token_ids


async def test_an_engine_without_a_tokenizer_says_so(store: Store, tmp_path: Path) -> None:
    for given in ({}, {"tokenizer": str(tmp_path)}):
        settings: dict[str, Any] = {"roles": ["engine"], **given}
        async with (
            running_rollout(store, engine=ENGINE, **settings) as process,
            EngineClient(process.server.address) as client,
        ):
            await load_weights(client, store.first)
            with pytest.raises(RemoteError) as caught:
                await generate(client, request_of([1], ["a"]))
            error = caught.value
            assert error.code == grpc.StatusCode.FAILED_PRECONDITION
            assert error.reason == "NO_TOKENIZER"
            assert len((await generate(client, request_of([1])))[0].token_ids)


HEARD = ("7", "34", "=5")


def check_turn(token_ids: Sequence[int], reason: str) -> None:
    """Digits are tokens of their own: a turn has a stop string at its end, or nowhere."""
    text = "".join(WORDS[each] for each in token_ids)
    places = [text.find(stop) + len(stop) for stop in HEARD if stop in text]
    assert not places or min(places) == len(text)
    assert bool(places) or reason == "length" or WORDS[token_ids[-1]] == "<end>"


@pytest.mark.parametrize("chunk_tokens", [0, 3], ids=["whole", "in pieces of three, of a server"])
async def test_a_turn_ends_there_and_the_environment_hears_its_text(
    store: Store, models: Models, chunk_tokens: int
) -> None:
    own = {"environments": {"hearing": talk.HEARING}, "chunk_tokens": chunk_tokens}
    rollout: dict[str, Any] = {"episodes": own}
    split = bool(chunk_tokens)
    async with running_episodes(store, models.first, split=split, rollout=rollout) as episodes:
        found = {}
        for stops in ((), HEARD):
            request = rollout_request(
                copy_rows(4), environment="hearing", sample_count=8, max_new_tokens=40
            )
            request.sampling.stop.extend(stops)
            for number, group in enumerate(request.groups):
                group.seeds.extend(range(8 * number, 8 * number + 8))
            groups = await episodes.finished(request)
            found[stops] = [s for event in groups.values() for s in store.samples(event)]
    free = ["".join(WORDS[each] for each in sample.token_ids) for sample in found[()]]
    assert any(stop in text.partition("=")[2][:-2] for text in free for stop in HEARD)
    ended = 0
    for sample in found[HEARD]:
        tokens = sample.token_ids[sample.prompt_length :].tolist()
        mask = np.broadcast_to(sample.columns.get("loss_mask", True), len(tokens)).tolist()
        turns = [
            list(run)
            for kept, run in groupby(zip(mask, tokens, strict=True), itemgetter(0))
            if kept
        ]
        for number, turn in enumerate(turns):
            last = number == len(turns) - 1
            check_turn([token for _, token in turn], sample.finish_reason if last else "stop")
        ended += int(sample.columns["score/heard"])
        logprobs = np.asarray(sample.columns["rollout_logprobs"])
        assert logprobs.shape == (len(tokens),)
        assert (logprobs[mask] < 0).all()
    assert ended > 40


async def test_a_stop_string_is_found_over_an_aborting_commit(store: Store, models: Models) -> None:
    async with running_episodes(store, models.first) as episodes:
        request = rollout_request(copy_rows(16), max_new_tokens=40, sample_count=4)
        request.sampling.stop.extend(HEARD)
        request.versions.min_version = store.first.version
        hold_after(episodes.worker, 120)
        running = asyncio.create_task(episodes.finished(request))
        async with asyncio.timeout(PATIENCE):
            while not (await episodes.engine.get()).paused:
                await asyncio.sleep(0.005)
        await episodes.engine.prepare_weights(named(store.second))
        await episodes.engine.commit_weights(named(store.second), pb.PAUSE_MODE_ABORT)
        await episodes.engine.stub.Resume(pb.ResumeRequest())
        finished = await running
        samples = [s for event in finished.values() for s in store.samples(event)]
    assert any(len(sample.spans) == 2 for sample in samples)
    for sample in samples:
        check_turn(sample.token_ids[sample.prompt_length :].tolist(), sample.finish_reason)


async def test_a_rollout_with_an_empty_stop_string_is_refused(refusing: Episodes) -> None:
    request = rollout_request(copy_rows(1))
    request.sampling.stop.append("")
    with pytest.raises(RemoteError, match=r"sampling\.stop"):
        await refusing.finished(request)


async def test_groups_fail_with_the_reason_of_an_engine_that_finds_none(
    store: Store, models: Models
) -> None:
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router())
        common: dict[str, Any] = {"router": router.server.address, "engine": ENGINE}
        engine = await stack.enter_async_context(
            running_rollout(store, roles=["engine"], engine_id="e", **common)
        )
        client = await stack.enter_async_context(EngineClient(engine.server.address))
        await load_weights(client, store.first)
        worker = await stack.enter_async_context(
            running_rollout(store, roles=["episodes"], tokenizer=str(models.first), **common)
        )
        await wait_for_engines(router.server.address, 1)
        episodes = await stack.enter_async_context(RolloutClient(worker.server.address))
        request = rollout_request(copy_rows(1))
        request.sampling.stop.append("7")
        (event,) = [event async for event in episodes.rollout(request)]
    assert "tokenizer" in event.failed.error.message
    assert event.failed.error.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
