"""Images: one server, and an encoder of its own beside a language server (EPD)."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from PIL import Image
from safetensors.numpy import load_file, save_file

from services.rollout.engine.interface import (
    Delta,
    FinishReason,
    Generation,
    Media,
    MediaKind,
    PauseMode,
    Sampling,
)
from services.rollout.engine.sglang.engine import SglangEngine
from services.rollout.engine.sglang.jobs import PromptAlteredError
from services.rollout.errors import MediaUnsupportedError
from sluice.runtime.errors import InvalidFieldError
from sluice.samples.images import ImageRules
from sluice.weights.store import WeightStore
from tests.contract.engine.cases import Model, complete
from tests.imported import import_checkpoint
from tests.patience import PATIENCE
from tests.sglang.conftest import Start
from tests.sglang_servers import PYTHON

BUILDER = Path(__file__).with_name("build_vision_model.py")
VISION_START, VISION_END, IMAGE, VIDEO = 2, 3, 4, 5


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vision")
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1"}
    command = [str(PYTHON), str(BUILDER), str(directory)]
    subprocess.run(command, check=True, timeout=PATIENCE, env=environment, capture_output=True)
    return directory


def picture(seed: int, side: int = 112) -> Media:
    pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    data = file.getvalue()
    return Media(MediaKind.IMAGE, xxhash.xxh3_128_hexdigest(data), memoryview(data))


def request_for(name: str, images: Sequence[Media], count: int = 2) -> Generation:
    prompt = [10, 50]
    for _ in images:
        prompt += [VISION_START, IMAGE, VISION_END]
    return Generation(
        request_id=name,
        prompt_token_ids=[*prompt, 60, 70],
        sampling=Sampling(max_new_tokens=12, temperature=0),
        sample_count=count,
        media=tuple(images),
    )


async def answers(engine: SglangEngine) -> list[list[Delta]]:
    """Of one image, another, and two at once."""
    pictures = [[picture(0)], [picture(1)], [picture(0), picture(2, 168)]]
    requests = [request_for(str(number), images) for number, images in enumerate(pictures)]
    return list(await asyncio.gather(*[complete(engine, request) for request in requests]))


async def test_an_encoder_apart_gives_the_same_tokens_as_one_server(
    vision_model: Path, launch: Start
) -> None:
    settings = {"model": str(vision_model), "max_model_length": 1024}
    whole = await launch(**settings)
    expected = await answers(whole)
    await whole.close()
    assert len({samples[0].token_ids for samples in expected}) == 3  # images matter
    apart = await launch(**settings, sglang={"encoders": 1})
    assert len(apart.pids) == 2
    found = await answers(apart)
    check_same(found, expected)

    os.kill(apart.pids[1], signal.SIGKILL)  # it comes back at another port
    before = apart._replica._servers._encoders[0].launch.url
    async with asyncio.timeout(PATIENCE):
        while apart._replica._servers.published_count < 1:
            await asyncio.sleep(0.2)
    assert apart._replica._servers._encoders[0].launch.url != before
    again = await asyncio.wait_for(complete(apart, request_for("new", [picture(5)])), PATIENCE)
    assert len(again[0].token_ids) == 12
    check_same(await answers(apart), expected)


def check_same(found: list[list[Delta]], expected: list[list[Delta]]) -> None:
    for samples, others in zip(found, expected, strict=True):
        for sample, other in zip(samples, others, strict=True):
            assert sample.token_ids == other.token_ids
            assert sample.logprobs == pytest.approx(other.logprobs, abs=1e-3)


async def test_what_sglang_would_answer_about_something_else_is_refused(
    vision_model: Path, launch: Start
) -> None:
    engine = await launch(model=str(vision_model), max_model_length=1024)
    (good, _) = await complete(engine, request_for("good", [picture(0)]))
    assert len(good.token_ids) == 12
    request = request_for("bad", [picture(0)])
    placeholder_elsewhere = [10, 50, IMAGE, 60, 70]  # not between start and end of an image
    with pytest.raises(PromptAlteredError):
        await complete(engine, replace(request, prompt_token_ids=placeholder_elsewhere))
    await check_counts(engine)
    await check_sizes(engine, ImageRules.from_directory(vision_model))
    await check_drawn(engine)


async def check_counts(engine: SglangEngine) -> None:
    """Images and placeholders are as many."""
    for prompt, images in (
        ([10, VISION_START, IMAGE, VISION_END], 0),
        ([10, VISION_START, IMAGE, VISION_END], 2),
        ([10, 50], 1),
        ([10, VISION_START, IMAGE, IMAGE, VISION_END], 1),
    ):
        request = request_for("odd", [picture(number) for number in range(images)])
        with pytest.raises(InvalidFieldError) as caught:
            await complete(engine, replace(request, prompt_token_ids=prompt))
        assert caught.value.metadata["field"] == "media"


async def check_sizes(engine: SglangEngine, rules: ImageRules) -> None:
    """An image that SGLang would resize, by another filter than the trainer's, is refused."""
    for side in (100, 252):  # no multiple of 28; too large
        with pytest.raises(InvalidFieldError) as caught:
            await complete(engine, request_for("odd", [picture(0, side)]))
        assert caught.value.metadata["field"] == "media[0]"
        png = rules.prepare(bytes(picture(0, side).data)).png
        image = Media(MediaKind.IMAGE, xxhash.xxh3_128_hexdigest(png), memoryview(png))
        (even, _) = await complete(engine, request_for("even", [image]))
        assert len(even.token_ids) == 12


async def check_drawn(engine: SglangEngine) -> None:
    """A sample ends that draws a placeholder: SGLang would fail on the next turn, as a trainer."""
    request = request_for("drawn", [picture(0)], count=32)
    sampling = Sampling(max_new_tokens=96, temperature=1000)  # all tokens are as likely
    samples = await complete(engine, replace(request, sampling=sampling))
    drawn = [sample for sample in samples if {IMAGE, VIDEO} & set(sample.token_ids)]
    assert drawn  # of up to 3,072 tokens of 320, two of which stand for media
    for sample in drawn:
        assert sample.finish_reason == FinishReason.STOP
        assert sample.token_ids[-1] in (IMAGE, VIDEO)
        assert not {IMAGE, VIDEO} & set(sample.token_ids[:-1])


async def test_an_image_seen_before_is_seen_anew_by_new_weights(
    vision_model: Path, launch: Start, tmp_path: Path
) -> None:
    """What SGLang's cache holds of an image outlives an update: log-probs would be those of no
    policy that there ever was."""
    changed = tmp_path / "changed"
    shutil.copytree(vision_model, changed)
    tensors = load_file(changed / "model.safetensors")
    rng = np.random.default_rng(0)
    for name, values in tensors.items():
        if "visual." in name:
            values += rng.normal(0, 0.1, values.shape).astype(values.dtype)
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    store = WeightStore(tmp_path / "weights", durable=False)
    record = import_checkpoint(store, changed, None, 0)

    async def seen(engine: SglangEngine, name: str) -> Delta:
        return (await complete(engine, request_for(name, [picture(0)], count=1)))[0]

    engine = await launch(model=str(vision_model), max_model_length=1024)
    old = await seen(engine, "old")
    await engine.prepare(record.version, record.digest, record.directory)
    await engine.commit(record.version, PauseMode.WAIT)
    found = await seen(engine, "new")
    await engine.close()
    expected = await seen(await launch(model=str(changed), max_model_length=1024), "expected")
    assert found.token_ids == expected.token_ids
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert max(abs(np.subtract(old.logprobs[:1], found.logprobs[:1]))) > 1e-3


async def test_a_model_that_only_reads_refuses_images(
    models: tuple[Model, Model], attach: Start
) -> None:
    engine = await attach()
    with pytest.raises(MediaUnsupportedError):
        await complete(engine, request_for("a", [picture(0)]))
