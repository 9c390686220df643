"""Images: the same pixels as transformers' own processor, and nothing that harms."""

from __future__ import annotations

import io
import json
import random
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from sluice.config import ConfigError
from sluice.samples.images import FILE, ImageLimits, ImageRules, InvalidImageError

RULES = ImageRules(
    patch_size=8,
    temporal_patch_size=2,
    merge_size=2,
    min_pixels=16 * 16,
    max_pixels=64 * 16 * 16,
    mean=(0.5,) * 3,
    std=(0.5,) * 3,
    rescale=1 / 255,
    resample=3,
)


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(values, "RGBA").convert("RGB").convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def write_rules(directory: Path, **changes: Any) -> Path:
    document = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, **changes}
    (directory / FILE).write_text(json.dumps(document))
    return directory


def refusal(data: bytes, limits: ImageLimits | None = None) -> str:
    with pytest.raises(InvalidImageError) as caught:
        RULES.prepare(data, limits)
    return caught.value.reason


@pytest.mark.parametrize("patch", [8, 14, 16])
@pytest.mark.parametrize("of_clip", [True, False])
def test_pixels_are_those_of_transformers_to_the_last_bit(
    tmp_path: Path, patch: int, of_clip: bool
) -> None:
    rng = random.Random(patch)
    for case in range(12):
        area = (2 * patch) ** 2
        size = {
            "shortest_edge": rng.randint(1, 4) * area,
            "longest_edge": rng.randint(8, 80) * area,
        }
        usual: dict[str, Any] = {} if of_clip else {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        theirs = Qwen2VLImageProcessorPil(patch_size=patch, size=size, **usual)
        document = json.loads(theirs.to_json_string())
        document["image_processor_type"] = rng.choice(
            ["Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast"]
        )
        (tmp_path / FILE).write_text(json.dumps(document))
        rules = ImageRules.from_directory(tmp_path)
        image = picture(rng.randint(8, 400), rng.randint(8, 400), seed=case)
        expected = theirs(images=[image], return_tensors="np")
        prepared = rules.prepare(encoded(image))
        values, grid = rules.patches(prepared.png)
        assert values.dtype == expected["pixel_values"].dtype == np.float32
        assert np.array_equal(values, expected["pixel_values"])
        assert grid == prepared.grid_thw == tuple(expected["image_grid_thw"][0])
        assert prepared.token_count == len(values) // 4
        # Whoever processes what is kept finds nothing to resize.
        again = theirs(images=[Image.open(io.BytesIO(prepared.png))], return_tensors="np")
        assert np.array_equal(again["pixel_values"], values)
        assert rules.prepare(prepared.png) == prepared


@settings(max_examples=300)
@given(
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.integers(1, 64),
    st.integers(1, 4),
    st.integers(1, 4_000_000),
    st.integers(1, 64),
)
def test_sizes_are_those_of_transformers(
    height: int, width: int, patch: int, merge: int, least: int, ratio: int
) -> None:
    rules = replace(
        RULES, patch_size=patch, merge_size=merge, min_pixels=least, max_pixels=least * ratio
    )
    limits = {"min_pixels": least, "max_pixels": least * ratio}
    try:
        expected = smart_resize(height, width, patch * merge, **limits)
    except ValueError:
        with pytest.raises(InvalidImageError):
            rules.resized(height, width)
        return
    assert rules.resized(height, width) == expected


@pytest.mark.parametrize("kind", ["PNG", "BMP", "WEBP"])
@pytest.mark.parametrize("mode", ["RGB", "L", "1"])
def test_formats_without_loss_show_the_same(kind: str, mode: str) -> None:
    image = picture(32, 32, mode)
    prepared = RULES.prepare(encoded(image, kind, **({"lossless": True} if kind == "WEBP" else {})))
    shown = Image.open(io.BytesIO(prepared.png))
    assert (shown.format, shown.mode) == ("PNG", "RGB")
    assert np.array_equal(np.asarray(shown), np.asarray(image.convert("RGB")))


def test_a_photograph_stands_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    lying = encoded(picture(64, 32), "JPEG", exif=exif.tobytes())
    assert RULES.prepare(lying).grid_thw == (1, 8, 4)
    assert RULES.prepare(encoded(picture(64, 32), "JPEG")).grid_thw == (1, 4, 8)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "CMYK", "I;16", "F", "YCbCr"])
def test_what_has_more_than_one_way_to_be_seen_is_refused(mode: str) -> None:
    kind = {"CMYK": "JPEG", "YCbCr": "JPEG", "F": "TIFF"}.get(mode, "PNG")
    image = Image.new("I;16", (32, 32)) if mode == "I;16" else picture(32, 32, mode)
    if mode == "YCbCr":  # of every usual JPEG, and no other way to see it
        assert RULES.prepare(encoded(image, kind)).grid_thw == (1, 4, 4)
    else:
        reason = "IMAGE_BROKEN" if kind == "TIFF" else "IMAGE_MODE"
        assert refusal(encoded(image, kind)) == reason


def test_a_colour_that_is_transparent_is_refused() -> None:
    assert refusal(encoded(picture(32, 32), transparency=(0, 0, 0))) == "IMAGE_MODE"


@pytest.mark.parametrize("mode", ["RGB", "L", "1"])
def test_what_a_file_says_behind_its_pixels_counts_too(mode: str) -> None:
    plain, exif = encoded(picture(32, 32, mode)), Image.Exif()
    exif[0x0112] = 6
    colour = b"\0\1" * (3 if mode == "RGB" else 1)
    seen = plain[:-12] + chunk(b"tRNS", colour) + plain[-12:]
    turned = plain[:-12] + chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")) + plain[-12:]
    assert refusal(seen) == "IMAGE_MODE"
    assert (
        RULES.prepare(turned).png == RULES.prepare(encoded(picture(32, 32, mode).rotate(270))).png
    )
    for data in (seen, turned):
        with pytest.raises(InvalidImageError):
            RULES.grid_of(data)
        with pytest.raises(InvalidImageError):
            RULES.patches(data)


def test_moving_pictures_are_refused() -> None:
    frames = [picture(32, 32, seed=seed) for seed in range(2)]
    for kind in ("PNG", "WEBP"):
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
        assert refusal(data) == "IMAGE_ANIMATED"


def chunk(name: bytes, data: bytes) -> bytes:
    """A part of a PNG."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def bomb(width: int, height: int) -> bytes:
    """A PNG of few bytes that says it is large."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(b"\0" * 10_000))
    return b"\x89PNG\r\n\x1a\n" + header + pixels + chunk(b"IEND", b"")


def test_large_ones_are_refused_before_they_are_decoded() -> None:
    assert refusal(bomb(30_000, 30_000)) == "IMAGE_TOO_LARGE"
    assert refusal(bomb(2**31 - 1, 2**31 - 1)) == "IMAGE_TOO_LARGE"
    assert refusal(bomb(9_000, 9_000)) == "IMAGE_TOO_LARGE"  # Pillow would only warn
    small = encoded(picture(32, 32))
    assert refusal(small, ImageLimits(max_bytes=len(small) - 1)) == "IMAGE_TOO_LARGE"
    assert refusal(small, ImageLimits(max_pixels=32 * 32 - 1)) == "IMAGE_TOO_LARGE"
    assert RULES.prepare(small, ImageLimits(max_bytes=len(small), max_pixels=32 * 32))


def test_slivers_are_refused() -> None:
    assert refusal(encoded(picture(402, 2))) == "IMAGE_SHAPE"
    assert RULES.prepare(encoded(picture(400, 2)))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP"])
def test_broken_bytes_are_refused_by_name_or_seen(kind: str) -> None:
    """Whatever is flipped or cut: an image, or the error of one that is none."""
    good, rng = encoded(picture(40, 24), kind), random.Random(0)
    refused = 0
    for _ in range(150):
        data = bytearray(good)
        for _ in range(rng.choice([1, 1, 4])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        broken = bytes(data[: rng.randrange(len(data))] if rng.random() < 0.5 else data)
        try:
            RULES.patches(RULES.prepare(broken).png)
        except InvalidImageError:
            refused += 1
    assert refused > 50
    assert refusal(b"") == refusal(b"GIF89a") == refusal(b"\0" * 1000) == "IMAGE_BROKEN"
    assert refusal(good[: len(good) // 2]) == "IMAGE_BROKEN"


def test_only_pixels_are_kept() -> None:
    """So that the same picture has one digest, and is as small as its pixels."""
    image = picture(32, 32)
    plain = RULES.prepare(encoded(image)).png
    exif = Image.Exif()
    exif[0x010E] = "a holiday"
    described = encoded(image, icc_profile=b"x" * 10_000, exif=exif.tobytes(), dpi=(72, 72))
    assert len(described) > len(plain) + 100
    assert RULES.prepare(described).png == plain


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "BMP"])
def test_what_was_kept_is_a_png_of_rgb(kind: str) -> None:
    """By no path: decoders of JPEG differ, and a note on which way is up is followed by some."""
    exif = Image.Exif()
    exif[0x0112] = 6
    good = encoded(picture(32, 32))
    for data in (
        encoded(picture(32, 32), kind),
        encoded(picture(32, 32, "L")),
        encoded(picture(32, 32), exif=exif.tobytes()),
    ):
        for read in (RULES.grid_of, RULES.patches):
            assert read(good)
            with pytest.raises(InvalidImageError) as caught:
                read(data)
            assert caught.value.reason in {"IMAGE_NOT_PREPARED", "IMAGE_BROKEN"}


def test_a_large_picture_of_noise_is_read_as_it_was_prepared() -> None:
    large = replace(RULES, max_pixels=1 << 24)
    noise = Image.frombytes("RGB", (3360, 3360), random.Random(0).randbytes(3360 * 3360 * 3))
    prepared = large.prepare(encoded(noise, "BMP"), ImageLimits(max_bytes=1 << 26))
    assert len(prepared.png) > ImageLimits().max_bytes
    assert large.grid_of(prepared.png) == prepared.grid_thw


def test_an_image_prepared_by_other_rules_is_refused() -> None:
    other = replace(RULES, patch_size=14, min_pixels=28 * 28)
    with pytest.raises(InvalidImageError) as caught:
        RULES.patches(other.prepare(encoded(picture(300, 200))).png)
    assert caught.value.reason in {"IMAGE_NOT_PREPARED", "IMAGE_TOO_LARGE"}
    assert RULES.patches(RULES.prepare(encoded(picture(300, 200))).png)


def test_a_digest_tells_rules_apart() -> None:
    changes: list[dict[str, Any]] = [
        {"patch_size": 16},
        {"mean": (0.5, 0.5, 0.4)},
        {"max_pixels": RULES.max_pixels + 1},
        {"resample": 2},
        {"rescale": 1 / 256},
    ]
    digests = {RULES.digest, *(replace(RULES, **change).digest for change in changes)}
    assert len(digests) == len(changes) + 1
    assert replace(RULES).digest == RULES.digest


@pytest.mark.parametrize(
    "changes",
    [
        {"image_processor_type": "SiglipImageProcessor"},
        {"image_processor_type": None},
        {"patch_size": 0},
        {"patch_size": -1},
        {"patch_size": 1e300},
        {"patch_size": True},
        {"patch_size": 1 << 39},
        {"merge_size": 1 << 39},
        {"temporal_patch_size": 1 << 39},
        {"max_pixels": 1 << 39},
        {"merge_size": "2"},
        {"min_pixels": 0},
        {"min_pixels": 1 << 39},
        {"size": {"shortest_edge": 10, "longest_edge": 9}},
        {"size": 3},
        {"image_mean": [0.5]},
        {"image_mean": [0.5, 0.5, "x"]},
        {"image_std": [0.5, 0.5, 0.0]},
        {"image_std": [0.5, 0.5, float("nan")]},
        {"rescale_factor": 0},
        {"rescale_factor": float("inf")},
        {"resample": 77},
        {"do_resize": False},
        {"do_rescale": False},
    ],
)
def test_rules_that_cannot_be_followed_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert ImageRules.from_directory(write_rules(tmp_path)).patch_size == 16
    with pytest.raises(ConfigError, match=FILE):
        ImageRules.from_directory(write_rules(tmp_path, **changes))


def test_a_model_without_rules_takes_no_images(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes no images"):
        ImageRules.from_directory(tmp_path)
    for text in ("", "[]", "{", "null", '"x"'):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(ConfigError):
            ImageRules.from_directory(tmp_path)
