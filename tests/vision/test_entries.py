"""Images at every entry of a rollout process that runs: shown, or refused by name."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import httpx2
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from openai import AsyncOpenAI, BadRequestError

from services.rollout.process import RolloutProcess
from services.trainer.backend import Mesh, Row
from services.trainer.backends.reference.backend import ReferenceBackend
from services.trainer.config import TrainerConfig
from services.trainer.rank.table import RowTable
from services.trainer.rows import RowLimits
from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as pb
from sluice.api.trainer.v1 import worker_service_pb2 as worker_pb
from sluice.client import EngineClient, RemoteError, error_from_status, new_request_id, typed_errors
from sluice.config import parse_config
from sluice.loop.row_files import read_rows
from sluice.runtime import wire
from sluice.samples.arrow import decode_group
from sluice.samples.blob_store import BlobStore
from sluice.samples.blobs import BlobReference
from sluice.samples.sample import Sample, validate_sample
from sluice.weights.store import WeightStore
from tests.imported import import_checkpoint
from tests.patience import PATIENCE
from tests.service.rollout.harness import (
    Episodes,
    Store,
    hold_after,
    rollout_request,
    running_episodes,
)
from tests.service.rollout.harness import (
    named as stored,
)
from tests.service.rollout.test_partial_rollouts import until_held
from tests.vision import bad_images
from tests.vision.bad_images import GOOD, LIMITS, inline, make_files, named, part, url
from tests.vision.cases import (
    IMAGE,
    MAX_LOGPROB_DIFF,
    VIDEO,
    VOCABULARY,
    Model,
    Oracle,
    build_model,
    digest_of,
    draw_image,
    record,
    speak,
)
from tests.vision.observing import CALLING_PATH, PATH

pytestmark = pytest.mark.fast
LAYOUT = "worker, reference engine and trainer"


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return speak(build_model(tmp_path_factory.mktemp("spoken"), "qwen3_vl"))


@pytest.fixture
def store(tmp_path: Path, spoken: Model) -> Store:
    weights = WeightStore(tmp_path / "store" / "weights", durable=False)
    first = import_checkpoint(weights, spoken.directory, None, 0)
    return Store(tmp_path / "store", weights, first, first)


@contextlib.asynccontextmanager
async def running(store: Store, spoken: Model, root: Path) -> AsyncIterator[Episodes]:
    make_files(root)
    images = {"roots": [str(root / "pictures")], **LIMITS}
    engine = {"max_running": 32, "max_model_length": 200, "threads": 1}
    async with running_episodes(
        store,
        spoken.directory,
        engine=engine,
        rollout={"images": images, "openai": {}},
        environments={"observing": PATH, "calling": CALLING_PATH},
        user_modules=["tests"],
    ) as episodes:
        yield episodes


def one_token(request: Any) -> Any:
    """Every answer ends with its first token, whichever it is."""
    request.sampling.stop_token_ids.extend(range(VOCABULARY))
    return request


async def outcomes(episodes: Episodes, request: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """Reasons of the groups that failed, and the groups that finished."""
    async with asyncio.timeout(PATIENCE):
        events = [event async for event in episodes.client.rollout(request)]
    failed = [event.failed for event in events if event.HasField("failed")]
    errors = {each.group_id: error_from_status(each.error) for each in failed}
    assert {error.code for error in errors.values()} <= {grpc.StatusCode.INVALID_ARGUMENT}
    reasons = {group: error.reason for group, error in errors.items()}
    return reasons, {e.finished.group_id: e.finished for e in events if e.HasField("finished")}


def asked(parts: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
    text = {"type": "text", "text": "WHAT?"}
    return {"messages": [{"role": "user", "content": [*parts, text]}], "answer": "1", **fields}


async def test_prompts_and_observations(store: Store, spoken: Model, tmp_path: Path) -> None:
    """A bad image is an error of its row by name; rows beside it are finished and can be read."""
    async with running(store, spoken, tmp_path) as episodes:
        bad = {**inline(), **named(tmp_path)}
        rows: dict[str, dict[str, Any]] = {name: asked(parts) for name, (parts, _) in bad.items()}
        good = {
            "inline": asked([part(url(GOOD))]),
            "file": asked([{"type": "image", "image": "good.png"}]),
            "file address": asked(
                [{"type": "image", "image": f"file://{tmp_path}/pictures/good.png"}]
            ),
            "three": asked([part(url(GOOD))] * 3),
            "none": asked([]),
        }
        reasons, finished = await outcomes(episodes, one_token(rollout_request(rows | good)))
        expected = {name: reason for name, (_, reason) in bad.items()}
        videos = rollout_request([{"prompt": "A", "answer": "1", "videos": ["a.mp4"]}])
        assert [*(await outcomes(episodes, videos))[0].values()] == ["INVALID_FIELD"]
        taught = one_token(rollout_request({"taught": good["inline"]}))
        taught.groups[0].teacher_pool = "others"
        reasons_of_teachers, _ = await outcomes(episodes, taught)
        assert reasons_of_teachers == {"taught": "INVALID_FIELD"}, "engines score text alone"
        assert reasons == expected
        assert finished.keys() == good.keys()
        counts = {name: len(group.media) for name, group in finished.items()}
        assert counts == {"inline": 1, "file": 1, "file address": 1, "three": 1, "none": 0}
        for group in finished.values():
            for sample in store.samples(group):
                validate_sample(sample)

        observed = {
            name: {"shown": parts} for name, (parts, _) in bad.items() if name != "too many"
        }
        observed["as a tool"] = {"shown": url(GOOD[:-40])}
        expected["as a tool"] = "IMAGE_BROKEN"
        good = {"shown": {"shown": [part(url(GOOD))]}}
        good["plain"] = {"shown": [{"type": "text", "text": "3"}]}
        request = rollout_request(observed | good, environment="observing")
        reasons, finished = await outcomes(episodes, one_token(request))
        assert reasons == {name: expected[name] for name in observed}
        assert finished.keys() == good.keys()
        (turn,) = {span.turn for s in store.samples(finished["shown"]) for span in s.media}
        assert turn == 1


async def test_pictures_of_tools(store: Store, spoken: Model, tmp_path: Path) -> None:
    """A broken one is an error of the row by name; what else a tool does, the model is told."""

    def row(data: bytes, name: str = "draw") -> dict[str, Any]:
        arguments = {"data": base64.b64encode(data).decode()}
        call = json.dumps({"name": name, "arguments": arguments})
        return {"prompt": "DRAW", "answer": "1", "call": f"<tool_call>{call}</tool_call>"}

    async with running(store, spoken, tmp_path) as episodes:
        broken = {name: row(data) for name, (data, _) in bad_images.files().items()}
        good = {"drawn": row(GOOD), "unknown tool": row(GOOD, "paint"), "silent": row(b"")}
        good["silent"]["call"] = "no call"
        settings = {
            "tools": {"draw": "tests.vision.observing:picture"},
            "reward": "tests.vision.observing:length",
            "state_keys": ["call"],
            "chat": True,
        }
        request = rollout_request(broken | good, environment="calling", settings=settings)
        reasons, finished = await outcomes(episodes, one_token(request))
        assert reasons == {name: reason for name, (_, reason) in bad_images.files().items()}
        assert finished.keys() == good.keys()
        samples = {name: store.samples(group) for name, group in finished.items()}
        prepared = digest_of(spoken.rules.prepare(GOOD))
        for name, each in samples.items():
            assert len(each) == 4
            for sample in each:
                validate_sample(sample)
                shown = [(span.digest, span.turn) for span in sample.media]
                # nothing follows a placeholder that the policy drew
                answered = sample.token_ids[sample.prompt_length] not in (IMAGE, VIDEO)
                assert shown == ([(prepared, 1)] if name == "drawn" and answered else [])
        assert any(sample.media for sample in samples["drawn"])


async def test_a_column_of_parquet(store: Store, spoken: Model, tmp_path: Path) -> None:
    """As Hugging Face data sets are written: {bytes, path} by image, or a list of these."""
    other = bad_images.encoded(bad_images.noise(7, 30, 20, 3))

    def image(data: bytes | None, path: str | None = None) -> dict[str, Any]:
        return {"bytes": data, "path": path}

    columns = {
        "prompt": ["FIRST <image> THEN <image>?", "WHAT?", "TEXT", "FILE", "CUT", "GONE"],
        "answer": ["1"] * 6,
        "images": [
            [image(other), image(GOOD, "good.png")],
            [image(GOOD)],
            [],
            [image(None, "good.png")],
            [image(GOOD[:-40])],
            [image(None, "missing.png")],
        ],
        "scan": [other, GOOD, None, other, None, None],
    }
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    types = {"images": pyarrow.list_(kind), "scan": pyarrow.binary()}
    table = pyarrow.table(
        {name: pyarrow.array(values, types.get(name)) for name, values in columns.items()}
    )
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(table, path)
    rows = dict(zip(columns["prompt"], (row for _, row in read_rows(path, "file")), strict=True))
    whole, second = (digest_of(spoken.rules.prepare(data)) for data in (GOOD, other))
    two, one, text, file, cut, gone = rows
    chat = {"chat": True, "reward": "position_match"}
    async with running(store, spoken, tmp_path) as episodes:
        for key, expected, refused in (
            (
                "images",
                {two: [second, whole], one: [whole], text: [], file: [whole]},
                {cut: "IMAGE_BROKEN", gone: "IMAGE_NOT_FOUND"},
            ),
            ("scan", {one: [whole], text: [], file: [second], cut: [], gone: []}, {}),
        ):
            settings = {**chat, "images_key": key}
            asked_for = {name: rows[name] for name in (*expected, *refused)}
            request = rollout_request(asked_for, settings=settings)
            reasons, finished = await outcomes(episodes, one_token(request))
            assert reasons == refused
            shown = {
                name: {tuple(span.digest for span in s.media) for s in store.samples(group)}
                for name, group in finished.items()
            }
            assert shown == {name: {tuple(digests)} for name, digests in expected.items()}


@pytest.mark.parametrize(
    ("environment", "row", "tokens"),
    [
        ("prompts", asked([part(url(GOOD))]), 40),
        ("observing", {"shown": [part(url(GOOD))]}, 130),  # first turns have 120
    ],
)
async def test_a_sample_that_is_cut_off_goes_on_seeing(
    environment: str,
    row: dict[str, Any],
    tokens: int,
    store: Store,
    spoken: Model,
    tmp_path: Path,
) -> None:
    """Each token has the log-prob that transformers gives it, by the weights that drew it."""
    other = build_model(tmp_path / "other", "qwen3_vl", seed=1)
    second = import_checkpoint(store.weights, other.directory, None, 0)
    request = rollout_request([row], environment=environment, sample_count=12, max_new_tokens=40)
    request.groups[0].seeds.extend(range(12))
    request.sampling.stop_token_ids.extend(range(6))
    async with running(store, spoken, tmp_path) as episodes:
        hold_after(episodes.worker, tokens)
        sampling = asyncio.create_task(episodes.finished(request))
        await until_held(episodes.engine)
        await episodes.engine.prepare_weights(stored(second))
        await episodes.engine.commit_weights(stored(second), pb.PAUSE_MODE_ABORT)
        await episodes.engine.stub.Resume(pb.ResumeRequest())
        (group,) = (await sampling).values()
    blobs = BlobStore(store.root, sync=False)
    samples = store.samples(group)
    reference = wire.blob_from_proto(group.blob)
    rows = rows_of(len(samples), blobs, reference, trainer_config(blobs, spoken))
    oracles = {store.first.version: Oracle(spoken), second.version: Oracle(other)}
    went_on = 0
    for sample, told in zip(samples, rows, strict=True):
        expected = {name: oracle.logprobs(told).detach() for name, oracle in oracles.items()}
        said = torch.from_numpy(np.array(sample.columns["rollout_logprobs"]))
        for span in sample.spans:
            drawn = slice(span.first_token, span.last_token + 1)
            off = (expected[span.version][drawn] - said[drawn])[told.loss_mask[drawn]].abs()
            assert record("logprob", off.max().item(), LAYOUT) <= MAX_LOGPROB_DIFF
        for before, after in pairwise(sample.spans):
            cut_in_turn = after.first_token == before.last_token + 1
            seen = [
                span for span in sample.media if span.end <= told.prompt_length + after.first_token
            ]
            went_on += cut_in_turn and bool(seen)
    assert went_on, "none was cut off behind an image"


async def test_the_engine_and_the_port(store: Store, spoken: Model, tmp_path: Path) -> None:
    async with running(store, spoken, tmp_path) as episodes:
        await check_wire(episodes.engine, store, spoken)
        process = episodes.worker
        assert process.openai is not None
        async with AsyncOpenAI(
            base_url=process.openai.url, api_key="none", max_retries=0
        ) as client:
            await check_port(client)
            await check_recorded(client, process, store, spoken)


async def check_wire(engine: EngineClient, store: Store, spoken: Model) -> None:
    """Generate by blobs, and Score, which is shown none."""
    blobs = BlobStore(store.root, sync=False)
    good = draw_image(spoken.rules, 1, 2, 3)
    blobs.put(good.png)

    def media(data: bytes, **fields: Any) -> pb.Media:
        reference = blobs.put(data)
        blob = sample_pb2.BlobReference(digest=reference.digest, size_bytes=reference.size)
        return pb.Media(**{"kind": pb.MEDIA_KIND_IMAGE, "blob": blob, **fields})

    def request(*shown: pb.Media, **fields: Any) -> pb.GenerateRequest:
        values = {
            "request_id": new_request_id(),
            "prompt_token_ids": [1, IMAGE, 2],
            "sampling": pb.SamplingParams(max_new_tokens=2),
            "media": shown,
        }
        return pb.GenerateRequest(**{**values, **fields})

    async def refused(request: pb.GenerateRequest) -> str:
        with pytest.raises(RemoteError) as caught, typed_errors():
            await engine.stub.Generate(request)
        return caught.value.reason

    whole = media(good.png)
    for name, (data, _) in bad_images.files().items():
        assert await refused(request(media(data))) == "INVALID_FIELD", name
    assert await refused(request(media(GOOD))) == "INVALID_FIELD"  # not of a size of the rules
    missing = sample_pb2.BlobReference(digest="0" * 32)
    for digest in ("../" * 20, "\0", "a" * 5000, ""):
        named = sample_pb2.BlobReference(digest=digest, size_bytes=2**62)
        reason = await refused(request(pb.Media(kind=pb.MEDIA_KIND_IMAGE, blob=named)))
        assert reason in ("NOT_FOUND", "BLOB_NOT_FOUND", "INVALID_FIELD"), digest
    expected = {
        "NOT_FOUND": request(pb.Media(kind=pb.MEDIA_KIND_IMAGE, blob=missing)),
        "INVALID_FIELD": request(media(good.png, kind=2)),  # no video yet
        "IMAGE_PROCESSOR": request(whole, processor="0" * 32),
    }
    for reason, each in expected.items():
        assert reason in await refused(each)
    for count in (0, 2, 300):
        assert await refused(request(*[whole] * count)) == "INVALID_FIELD"
    for ids in ([1, 2], [IMAGE, IMAGE], []):
        assert await refused(request(whole, prompt_token_ids=ids)) == "INVALID_FIELD"
    assert (await engine.stub.Generate(request(whole))).completions
    assert (await engine.stub.Generate(request(whole, processor=spoken.rules.digest))).completions

    scored = pb.ScoreRequest(token_ids=[1, IMAGE, 2], prompt_length=1)
    with pytest.raises(RemoteError) as caught, typed_errors():
        await engine.stub.Score(scored)
    assert caught.value.metadata["field"] == "token_ids"
    scored = pb.ScoreRequest(token_ids=[1, 3, 2], prompt_length=1)
    assert len((await engine.stub.Score(scored)).logprobs) == 2


async def check_port(client: AsyncOpenAI) -> None:
    files = {"a file": ([part("good.png")], "IMAGE_OUTSIDE")}
    for name, (parts, reason) in {**inline(), **files}.items():
        with pytest.raises(BadRequestError) as refused:
            await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": parts}], max_tokens=2
            )
        code = "unsupported_content" if reason == "MEDIA_UNSUPPORTED" else reason.lower()
        assert refused.value.code == code, name
        if reason == "TOO_MANY_IMAGES":
            assert f"images.max_count is {LIMITS['max_count']}" in refused.value.message


async def check_recorded(
    client: AsyncOpenAI, process: RolloutProcess, store: Store, spoken: Model
) -> None:
    """A conversation with images is a sample that a trainer scores as the engine did."""
    messages: list[Any] = [
        {"role": "user", "content": [part(url(GOOD)), {"type": "text", "text": "WHAT?"}]}
    ]
    record_as = {"sluice_record": {"group": "g", "session": "s"}}
    for turn in range(3):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=3, seed=turn, extra_body=record_as
        )
        text = answer.choices[0].message.content
        shown = [part(url(bad_images.encoded(bad_images.noise(turn, 33, 33, 3))))]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": shown}]
    assert process.openai is not None
    address = process.openai.url.replace("/v1", "/sluice/v1/groups/g")
    async with httpx2.AsyncClient() as http:
        await http.post(f"{address}/rewards", json={"rewards": {"s": 1.0}})
        blob = (await http.post(f"{address}/close")).json()["blob"]
    blobs = BlobStore(store.root, sync=False)
    reference = BlobReference(blob["digest"], blob["size_bytes"])
    samples = decode_group(blobs.get(reference))
    (sample,) = samples  # every prompt went on from what was sampled and shown before
    assert [span.turn for span in sample.media] == [0, 1, 2]
    assert not np.asarray(sample.columns["loss_mask"]).all()
    check_scores(samples, blobs, reference, spoken)


def trainer_config(blobs: BlobStore, spoken: Model) -> TrainerConfig:
    values = {"model": str(spoken.directory), "store": str(blobs.root), "durable": False}
    return parse_config(TrainerConfig, values)


def rows_of(
    count: int, blobs: BlobStore, reference: BlobReference, config: TrainerConfig
) -> Sequence[Row]:
    """What a trainer makes of the samples of a blob."""
    table = RowTable(blobs, RowLimits.from_config(config))
    numbers = list(range(count))
    blob_rows = worker_pb.BlobRows(
        blob=wire.blob_to_proto(reference), indices=numbers, rows=numbers
    )
    table.add(worker_pb.AddRows(batch_id="b", blobs=[blob_rows]))
    (rows,) = table.micro_batches("b", [worker_pb.MicroBatchRows(rows=numbers)])
    return rows


def check_scores(
    samples: Sequence[Sample], blobs: BlobStore, reference: BlobReference, spoken: Model
) -> None:
    config = trainer_config(blobs, spoken)
    rows = rows_of(len(samples), blobs, reference, config)
    backend = ReferenceBackend(config, Mesh(rank=0, world_size=1))
    scored = backend.compute_logprobs([rows], model="policy", temperature=1.0)
    for sample in samples:
        mask = np.asarray(sample.columns["loss_mask"])
        said = torch.from_numpy(np.array(sample.columns["rollout_logprobs"]))
        off = (scored[sample.sample_id] - said)[torch.from_numpy(mask.copy())].abs().max().item()
        assert record("logprob", off, LAYOUT) <= MAX_LOGPROB_DIFF
