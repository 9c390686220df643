"""The reference engine answers about what it is shown, by the weights that serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import (
    Engine,
    FinishReason,
    PauseMode,
    create_engine,
)
from services.rollout.errors import MediaUnsupportedError
from sluice.runtime.errors import InvalidFieldError
from sluice.vision import VisionTower
from sluice.weights.store import WeightStore
from tests.contract.engine.cases import build_model as build_text_model
from tests.imported import import_checkpoint
from tests.vision.asking import check, request, rows_and_images, sample, shown
from tests.vision.cases import (
    IMAGE,
    VIDEO,
    Model,
    Oracle,
    build_model,
    draw_image,
    make_row,
)

LAYOUT = "reference engine"
Start = Callable[..., Coroutine[Any, Any, Engine]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    started: list[Engine] = []

    async def begin(directory: Path, **settings: Any) -> Engine:
        config = EngineConfig(model=str(directory), max_model_length=200, threads=1, **settings)
        engine = create_engine("reference", config)
        started.append(engine)
        await engine.start()
        return engine

    yield begin
    for engine in started:
        await engine.close()


@pytest.fixture(scope="module")
def oracle(model: Model) -> Oracle:
    return Oracle(model)


@pytest.mark.parametrize(
    "settings", [{}, {"deterministic": True}, {"prefill_chunk_tokens": 3}], ids=str
)
async def test_logprobs_are_those_of_transformers(
    model: Model, oracle: Oracle, start: Start, settings: dict[str, Any]
) -> None:
    """Siblings of several prompts together, whatever the chunks in which prompts are encoded."""
    engine = await start(model.directory, **settings)
    for row, images in rows_and_images(model):
        check(oracle, row, LAYOUT, await sample(engine, request(row, images, sample_count=3)))


@pytest.mark.fast
async def test_requests_that_run_together(model: Model, oracle: Oracle, start: Start) -> None:
    engine, rows = await start(model.directory), rows_and_images(model)
    found = await asyncio.gather(
        *(sample(engine, request(row, images, sample_count=2)) for row, images in rows)
    )
    for (row, _), deltas in zip(rows, found, strict=True):
        check(oracle, row, LAYOUT, deltas)


async def test_a_prompt_is_cached_with_what_it_shows(
    model: Model, oracle: Oracle, start: Start
) -> None:
    """Equal tokens with other pictures are no equal prefix; equal pictures are."""
    engine = await start(model.directory, prefix_cache_tokens=1 << 12)
    pictures = [draw_image(model.rules, seed, 3, 4) for seed in (1, 2)]
    rows = [make_row("a/0", [4, picture, 20], [8], seed=1) for picture in pictures]
    assert torch.equal(rows[0].token_ids, rows[1].token_ids)
    hits = list[int]()
    for turn, (row, picture) in enumerate([*zip(rows, pictures, strict=True)] * 2):
        found = await sample(engine, request(row, [picture], request_id=str(turn)))
        check(oracle, row, LAYOUT, found)
        hits.append(engine.status().prefix_hit_tokens_total)
    assert hits[0] == hits[1] == 0 < hits[2] < hits[3]


async def test_the_tower_sees_an_image_once_for_a_group(
    qwen3_vl: Model, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[str]()
    encode = VisionTower.encode

    def counted(tower: VisionTower, images: dict[str, bytes]) -> Any:
        seen.extend(images)
        return encode(tower, images)

    monkeypatch.setattr(VisionTower, "encode", counted)
    engine = await start(qwen3_vl.directory)
    for row, images in rows_and_images(qwen3_vl)[1:]:
        await sample(engine, request(row, images, sample_count=8))
    assert sorted(seen) == sorted({digest for digest in seen})
    assert len(seen) == 2


@pytest.mark.fast
async def test_new_weights_see_anew(
    model: Model, start: Start, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """An image seen before is answered by the tower that serves, not by that of before."""
    family, store = model.load().config.model_type, WeightStore(tmp_path / "weights", durable=False)
    other = build_model(tmp_path_factory.mktemp("other"), family, seed=1)
    stored = import_checkpoint(store, other.directory, None, 0)
    engine, oracle = await start(model.directory), Oracle(other)
    row, images = rows_and_images(model)[1]
    await sample(engine, request(row, images, request_id="before"))
    await engine.prepare(stored.version, stored.digest, stored.directory)
    await engine.commit(stored.version, PauseMode.WAIT)
    check(oracle, row, LAYOUT, await sample(engine, request(row, images, request_id="after")))


@pytest.mark.fast
async def test_a_drawn_placeholder_ends_a_sample(qwen3_vl: Model, start: Start) -> None:
    """Nothing would be there to see."""
    engine = await start(qwen3_vl.directory)
    row, images = rows_and_images(qwen3_vl)[1]
    found = await sample(engine, request(row, images, sample_count=512))
    drawn = [delta for delta in found if {IMAGE, VIDEO} & set(delta.token_ids)]
    assert drawn
    for delta in drawn:
        assert delta.token_ids[-1] in {IMAGE, VIDEO}
        assert delta.finish_reason is FinishReason.STOP


@pytest.mark.fast
async def test_bad_images_are_refused_and_nothing_else_is_lost(
    qwen3_vl: Model, start: Start, tmp_path_factory: pytest.TempPathFactory
) -> None:
    engine = await start(qwen3_vl.directory)
    row, (picture,) = rows_and_images(qwen3_vl)[1]
    good = request(row, [picture])
    for number, bad in enumerate(
        [
            replace(good, media=()),
            replace(good, media=(*good.media, *good.media)),
            replace(good, media=(shown(picture, picture.png[:-40]),)),
            replace(good, media=(shown(picture, b""),)),
        ]
    ):
        with pytest.raises(InvalidFieldError):
            await sample(engine, replace(bad, request_id=str(number)))
    assert await sample(engine, good)
    text = build_text_model(tmp_path_factory.mktemp("text"), "qwen3", seed=0)
    with pytest.raises(MediaUnsupportedError):
        await sample(await start(text.directory), good)
