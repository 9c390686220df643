"""Images as a checkpoint's own processor sees them.

An image is kept as PNG, RGB and already resized, so that whoever processes it later finds nothing
to resize: engines and trainers then see the same pixels, and what their processors would do
differently (torchvision's bicubic is not PIL's) does not come up.
"""

from __future__ import annotations

import io
import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from PIL import Image, ImageOps

from sluice.config import ConfigError

# The older of the two files that transformers writes holds the rules itself.
FILE, WHOLE_FILE, PART = "preprocessor_config.json", "processor_config.json", "image_processor"
# Qwen2.5-VL and Qwen3-VL; a suffix names whose arithmetic a processor uses.
PROCESSORS = frozenset(f"Qwen2VLImageProcessor{suffix}" for suffix in ("", "Fast", "Pil"))
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
EXACT_MODES = frozenset({"RGB", "L", "1"})  # RGB says the same as these
STEEPEST = 200  # one side by the other: from there on the processors of transformers refuse
CHANNELS = 3
_PNG_LEVEL = 1  # a quarter of the time of the usual one, and a sixth more bytes
_PNG_BYTES = 1 << 16  # for what is no pixel in a PNG
_LONGEST, _LARGEST = 1 << 8, 1 << 26  # of a patch, and of an image: what rules may ask for, pixels
# What Pillow raises for bytes that are no image, or the half of one.
_BROKEN = (
    *(OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, OverflowError, TypeError),
    *(struct.error, zlib.error),
)


def processor_digest(directory: Path) -> str | None:
    """Digest of how the model of a HF directory is shown images.

    None where it is shown none: a model of text, or rules that are not known here.
    """
    try:
        if "vision_config" not in json.loads((directory / "config.json").read_bytes()):
            return None
        return ImageRules.from_directory(directory).digest
    except (OSError, ValueError, TypeError):  # ConfigError is a ValueError
        return None


class InvalidImageError(ValueError):
    """An image that no policy may be shown; `reason` is one of `REASONS`."""

    REASONS = (
        *("IMAGE_BROKEN", "IMAGE_TOO_LARGE", "IMAGE_MODE", "IMAGE_SHAPE", "IMAGE_ANIMATED"),
        "IMAGE_NOT_PREPARED",
    )

    def __init__(self, reason: str, message: str) -> None:
        assert reason in self.REASONS
        self.reason = reason
        super().__init__(message)


@dataclass(frozen=True)
class ImageLimits:
    """What is taken from outside, before anything of it is decoded."""

    max_bytes: int = 32 << 20
    max_pixels: int = _LARGEST  # 200 MB once decoded


@dataclass(frozen=True)
class PreparedImage:
    """PNG of an image already resized; its patches by time, height and width; its tokens."""

    png: bytes
    grid_thw: tuple[int, int, int]
    token_count: int


@dataclass(frozen=True)
class ImageRules:
    """How a checkpoint wants images: `preprocessor_config.json` of the Qwen-VL families.

    min_pixels, max_pixels: of the resized image. mean, std: of values that `rescale` has been
    multiplied with. resample: Pillow's number of the filter.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale: float
    resample: int

    @classmethod
    def from_directory(cls, directory: Path) -> ImageRules:
        """Read the rules of a HF model directory. Raises ConfigError, also where it has none."""
        for path in (directory / WHOLE_FILE, directory / FILE):
            try:
                document = json.loads(path.read_text())
                if path.name == WHOLE_FILE:
                    if PART not in document:
                        continue
                    document = document[PART]
                return _read_rules(document)
            except FileNotFoundError:
                continue
            except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
                raise ConfigError(f"{path}: {error}") from None
        raise ConfigError(f"{directory / FILE} does not exist: the model takes no images")

    @cached_property
    def digest(self) -> str:
        """xxh3-128 of all that decides what a model sees of an image: 32 hexadecimal digits."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return xxhash.xxh3_128_hexdigest(text.encode())

    @property
    def factor(self) -> int:
        """Pixels by which both sides of a resized image can be divided: those of a token."""
        return self.patch_size * self.merge_size

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width that an image of this size is given. Raises InvalidImageError.

        Nearest multiples of `factor`; scaled, and rounded to the safe side, where that is not
        within min_pixels..max_pixels: `smart_resize` of transformers' Qwen2-VL.
        """
        if min(height, width) < 1 or max(height, width) > STEEPEST * min(height, width):
            raise InvalidImageError(
                "IMAGE_SHAPE", f"an image of {width} x {height} pixels is no picture"
            )
        factor = self.factor
        tall, wide = round(height / factor) * factor, round(width / factor) * factor
        if tall * wide > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            tall, wide = (
                max(factor, math.floor(side / scale / factor) * factor) for side in (height, width)
            )
        elif tall * wide < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            tall, wide = (math.ceil(side * scale / factor) * factor for side in (height, width))
        return tall, wide

    def prepare(self, data: bytes, limits: ImageLimits | None = None) -> PreparedImage:
        """Decode and resize an image of PNG, JPEG, WebP or BMP. Raises InvalidImageError.

        What a camera noted about which way is up is followed. Alpha, palettes and CMYK are
        refused: there is more than one way to make them RGB.
        """
        image = _decode(data, limits or ImageLimits())
        tall, wide = self.resized(image.height, image.width)
        if self.resized(tall, wide) != (tall, wide):
            raise InvalidImageError(
                "IMAGE_SHAPE",
                f"an image of {image.width} x {image.height} pixels fits no size that these "
                f"rules leave as it is: they allow {self.min_pixels}..{self.max_pixels} pixels",
            )
        if (image.height, image.width) != (tall, wide):
            image = image.resize((wide, tall), Image.Resampling(self.resample))
        file = io.BytesIO()
        image.save(file, "PNG", compress_level=_PNG_LEVEL, icc_profile=None)  # pixels alone
        grid = self._grid(tall, wide)
        return PreparedImage(file.getvalue(), grid, self.count_tokens(grid))

    def count_tokens(self, grid_thw: Sequence[int]) -> int:
        """Tokens, each of merge_size x merge_size patches, that stand for an image."""
        return math.prod(grid_thw) // self.merge_size**2

    def grid_of(self, png: bytes | memoryview) -> tuple[int, int, int]:
        """Patches of an image prepared by these rules, which is decoded whole.

        Raises InvalidImageError for any other.
        """
        _, grid = self._load_prepared(png)
        return grid

    def patches(self, png: bytes | memoryview) -> tuple[np.ndarray, tuple[int, int, int]]:
        """What the vision tower takes: float32[patches, values], and the grid they lie in.

        A patch holds CHANNELS x temporal_patch_size x patch_size x patch_size values; those that
        become one token are neighbours. Raises InvalidImageError for an image that has not been
        prepared by these rules.
        """
        image, grid = self._load_prepared(png)
        pixels = np.asarray(image)
        # As transformers computes it, to the last bit.
        values = (pixels.astype(np.float64) * self.rescale).astype(np.float32)
        values -= np.array(self.mean, np.float32)
        values /= np.array(self.std, np.float32)
        merge, patch = self.merge_size, self.patch_size
        blocks = values.reshape(grid[1] // merge, merge, patch, grid[2] // merge, merge, patch, -1)
        blocks = blocks.transpose(0, 3, 1, 4, 6, 2, 5)  # ..., channel, y, x
        blocks = np.repeat(blocks[..., None, :, :], self.temporal_patch_size, axis=-3)
        return np.ascontiguousarray(blocks.reshape(math.prod(grid), -1)), grid

    def _load_prepared(self, png: bytes | memoryview) -> tuple[Image.Image, tuple[int, int, int]]:
        """Returns an image and its grid."""
        pixels = max(self.max_pixels, self.factor**2)
        noise = (CHANNELS + 1) * pixels  # bytes: it does not pack
        limits = ImageLimits(noise + _PNG_BYTES, pixels)
        image = _open(png, limits, formats=("PNG",))
        size = image.height, image.width
        if self.resized(*size) == size and image.mode == "RGB":
            _load(image, limits)
            if "exif" not in image.info:
                return image, self._grid(*size)
        raise InvalidImageError(
            "IMAGE_NOT_PREPARED",
            f"an image of {image.width} x {image.height} pixels, mode {image.mode}, is not "
            "one that the model's own processor has resized",
        )

    def _grid(self, height: int, width: int) -> tuple[int, int, int]:
        return 1, height // self.patch_size, width // self.patch_size


def _read_rules(document: Mapping[str, Any]) -> ImageRules:
    """Raises ValueError, TypeError, AttributeError, OverflowError."""
    if not isinstance(document, dict):
        raise ValueError("is no object")
    name = document.get("image_processor_type")
    if name not in PROCESSORS:
        raise ValueError(
            f"image_processor_type {name!r} is not supported; {', '.join(sorted(PROCESSORS))} are"
        )
    for step in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if document.get(step, True) is not True:
            raise ValueError(f"{step} is {document[step]!r}: images would not be what is kept")
    size = document.get("size") or {}
    smallest = document.get("min_pixels", size.get("shortest_edge"))
    largest = document.get("max_pixels", size.get("longest_edge"))
    rules = ImageRules(
        patch_size=_count("patch_size", document.get("patch_size"), 14, _LONGEST),
        temporal_patch_size=_count(
            "temporal_patch_size", document.get("temporal_patch_size"), 2, _LONGEST
        ),
        merge_size=_count("merge_size", document.get("merge_size"), 2, _LONGEST),
        min_pixels=_count("min_pixels", smallest, 56 * 56, _LARGEST),
        max_pixels=_count("max_pixels", largest, 28 * 28 * 1280, _LARGEST),
        mean=_three(document, "image_mean", (0.48145466, 0.4578275, 0.40821073)),  # of CLIP
        std=_three(document, "image_std", (0.26862954, 0.26130258, 0.27577711)),
        rescale=float(document.get("rescale_factor", 1 / 255)),
        resample=int(Image.Resampling(document.get("resample", Image.Resampling.BICUBIC))),
    )
    if rules.min_pixels > rules.max_pixels:
        raise ValueError(f"min_pixels {rules.min_pixels} > max_pixels {rules.max_pixels}")
    if not math.isfinite(rules.rescale) or rules.rescale <= 0:
        raise ValueError(f"rescale_factor is {rules.rescale}")
    if min(rules.std) <= 0:
        raise ValueError(f"image_std is {list(rules.std)}")
    return rules


def _count(name: str, value: Any, default: int, most: int) -> int:
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise ValueError(f"{name} is {value!r}, not within 1..{most}")
    return value


def _three(document: Mapping[str, Any], name: str, default: tuple[float, ...]) -> tuple[float, ...]:
    values = tuple(float(value) for value in document.get(name) or default)
    if len(values) != CHANNELS or not all(map(math.isfinite, values)):
        raise ValueError(f"{name} is {list(values)}, not {CHANNELS} numbers")
    return values


def _decode(data: bytes | memoryview, limits: ImageLimits) -> Image.Image:
    """RGB, upright. Raises InvalidImageError."""
    image = _open(data, limits)
    _load(image, limits)
    with _naming_broken():
        return ImageOps.exif_transpose(image).convert("RGB")


def _open(
    data: bytes | memoryview, limits: ImageLimits, formats: tuple[str, ...] = FORMATS
) -> Image.Image:
    """Whose header alone has been read. Raises InvalidImageError."""
    if len(data) > limits.max_bytes:
        raise InvalidImageError(
            "IMAGE_TOO_LARGE", f"{len(data):,} bytes, more than {limits.max_bytes:,}"
        )
    with _naming_broken():
        image = Image.open(io.BytesIO(data), formats=formats)
        _check(image, limits)
    return image


def _load(image: Image.Image, limits: ImageLimits) -> None:
    """Raises InvalidImageError."""
    with _naming_broken():
        image.load()
        _check(image, limits)  # chunks behind the pixels may say more


@contextmanager
def _naming_broken() -> Iterator[None]:
    try:
        yield
    except InvalidImageError:
        raise
    except Image.DecompressionBombError as error:
        raise InvalidImageError("IMAGE_TOO_LARGE", str(error)) from None
    except _BROKEN as error:
        what = f"no image of {', '.join(FORMATS)}, or a part of one: {error}"
        raise InvalidImageError("IMAGE_BROKEN", what) from None


def _check(image: Image.Image, limits: ImageLimits) -> None:
    """What the header says: pixels are decoded later. Raises InvalidImageError."""
    if image.width * image.height > limits.max_pixels:
        raise InvalidImageError(
            "IMAGE_TOO_LARGE",
            f"{image.width} x {image.height} pixels, more than {limits.max_pixels:,}",
        )
    if getattr(image, "n_frames", 1) > 1:
        raise InvalidImageError("IMAGE_ANIMATED", f"{image.n_frames} frames: video is not taken")  # type: ignore[attr-defined]
    if image.mode not in EXACT_MODES or "transparency" in image.info:
        mode = "transparency" if "transparency" in image.info else f"mode {image.mode}"
        raise InvalidImageError(
            "IMAGE_MODE", f"an image with {mode}: convert it to RGB, as it is to be seen"
        )
