"""What an engine makes of the images of a prompt before anybody sees them."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from services.rollout.engine.images import ImageReader
from services.rollout.engine.interface import Media, MediaKind
from services.rollout.errors import MediaUnsupportedError
from sluice.runtime.errors import InvalidFieldError
from sluice.samples.images import FILE, WHOLE_FILE

IMAGE, VIDEO = 7, 8
CONFIG = {"vision_config": {}, "image_token_id": IMAGE, "video_token_id": VIDEO}
RULES = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 14,
    "size": {"shortest_edge": 28 * 28, "longest_edge": 56 * 28 * 28},
}


def media(width: int, height: int, mode: str = "RGB", kind: str = "PNG") -> Media:
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, kind)
    return Media(MediaKind.IMAGE, "0" * 32, memoryview(file.getvalue()))


def reader(directory: Path, rules: Any = RULES, config: Any = CONFIG) -> ImageReader:
    (directory / FILE).write_text(json.dumps(rules))
    return ImageReader.of_model(directory, config)


def test_a_placeholder_becomes_as_many_as_its_image_has_tokens(tmp_path: Path) -> None:
    of_model, rng = reader(tmp_path), random.Random(0)
    for _ in range(50):
        sides = [(rng.randint(1, 7), rng.randint(1, 7)) for _ in range(rng.randint(0, 4))]
        prompt, expected, spans = [1], [1], list[tuple[int, int]]()
        for wide, tall in sides:
            text = [rng.randrange(7) for _ in range(rng.randint(0, 3))]
            prompt += [IMAGE, *text]
            spans.append((len(expected), wide * tall))
            expected += [IMAGE] * (wide * tall) + text
        images = [media(28 * wide, 28 * tall) for wide, tall in sides]
        shown = of_model.read(prompt, images)
        assert shown.token_ids == expected
        assert [(span.first_token, span.token_count) for span in shown.media] == spans
        assert [span.grid_thw for span in shown.media] == [(1, 2 * t, 2 * w) for w, t in sides]
    assert of_model.unsampled == (IMAGE, VIDEO)


@pytest.mark.parametrize(("prompt", "count"), [([1], 1), ([IMAGE], 0), ([IMAGE], 2), ([7, 7], 1)])
def test_images_are_as_many_as_placeholders(tmp_path: Path, prompt: list[int], count: int) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        reader(tmp_path).read(prompt, [media(28, 28)] * count)
    assert caught.value.metadata["field"] == "media"


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (media(30, 28), "IMAGE_NOT_PREPARED"),
        (media(28 * 57, 28), "IMAGE_TOO_LARGE"),
        (media(28, 28, "L"), "IMAGE_NOT_PREPARED"),
        (media(28, 28, "RGBA"), "IMAGE_MODE"),
        (Media(MediaKind.IMAGE, "0" * 32, memoryview(b"")), "IMAGE_BROKEN"),
        (Media(MediaKind.IMAGE, "0" * 32, memoryview(b"\x89PNG\r\n\x1a\n")), "IMAGE_BROKEN"),
    ],
)
def test_an_image_that_was_not_prepared_is_refused(
    tmp_path: Path, image: Media, reason: str
) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        reader(tmp_path).read([IMAGE, IMAGE], [media(28, 28), image])
    assert (caught.value.metadata["field"], caught.value.metadata["image"]) == ("media[1]", reason)


def test_what_a_model_cannot_be_shown_is_told_by_name(tmp_path: Path) -> None:
    for of_model, words in (
        (ImageReader.of_model(tmp_path, {}), "text only"),
        (ImageReader.of_model(tmp_path, CONFIG), FILE),
        (reader(tmp_path, {"image_processor_type": "Gemma3ImageProcessor"}), "Gemma3"),
        (reader(tmp_path, config={"vision_config": {}}), "image_token_id"),
    ):
        assert of_model.read([1, IMAGE], []).token_ids == [1, IMAGE]  # text is served all the same
        with pytest.raises(MediaUnsupportedError, match=words):
            of_model.read([IMAGE], [media(28, 28)])


def test_rules_of_the_newer_file_count(tmp_path: Path) -> None:
    (tmp_path / WHOLE_FILE).write_text(json.dumps({"image_processor": {**RULES, "patch_size": 7}}))
    assert len(reader(tmp_path).read([IMAGE], [media(28, 28)]).token_ids) == 4
    (tmp_path / WHOLE_FILE).write_text(json.dumps({"processor_class": "X"}))
    assert len(reader(tmp_path).read([IMAGE], [media(28, 28)]).token_ids) == 1
