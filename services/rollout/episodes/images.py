"""From the images of chat messages to tokens and spans: read, prepared, stored, expanded.

A prompt's images are prepared once for all its samples, in threads. They lie in the store, pinned,
before an engine is asked: engines and trainers read them there.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import stat
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import unquote_to_bytes

import xxhash

from services.rollout.config import ImagesConfig
from services.rollout.engine.images import ImageReader
from services.rollout.episodes.spool import StoreFailedError
from services.rollout.episodes.trajectory import Trajectory
from services.rollout.errors import ImageRefusedError, MediaUnsupportedError
from sluice.config import ConfigError
from sluice.runtime.errors import InvalidFieldError
from sluice.samples.blobs import BlobNotFoundError, BlobReference, Blobs
from sluice.samples.images import ImageLimits, InvalidImageError, PreparedImage
from sluice.samples.messages import MessageError, image_sources
from sluice.samples.sample import MediaSpan

IMAGE = "image"  # the kind of a span
REMEMBERED_BYTES = 64 << 20  # of prepared images: prompts come again every epoch
_DATA, _FILE = "data:", "file://"


@dataclass(frozen=True)
class StoredImage:
    """A prepared image in the store; its patches by time, height and width; its tokens."""

    blob: BlobReference
    grid_thw: tuple[int, int, int]
    token_count: int


@dataclass(frozen=True)
class Passage:
    """Tokens of a prompt or an observation, as trainers see them, and the images they stand for.

    Spans count from the start of the passage.
    """

    token_ids: Sequence[int]
    media: tuple[MediaSpan, ...] = ()


def collapse(token_ids: tuple[int, ...], media: Sequence[MediaSpan]) -> tuple[int, ...]:
    """Return what engines are sent: one placeholder an image, in place of its span."""
    if not media:
        return token_ids
    pieces, start = list[int](), 0
    for span in media:
        pieces += token_ids[start : span.first_token + 1]
        start = span.end
    return (*pieces, *token_ids[start:])


class Images:
    """Shows images to one model; owns the threads that prepare them."""

    def __init__(
        self,
        reader: ImageReader,
        blobs: Blobs | None = None,
        config: ImagesConfig | None = None,
    ) -> None:
        """A reader that refuses all images needs no store."""
        self._reader, self._blobs = reader, blobs
        self._config = config or ImagesConfig()
        self._limits = ImageLimits(self._config.max_bytes, self._config.max_pixels)
        self._threads = ThreadPoolExecutor(self._config.threads, "images")
        self._lock = Lock()
        self._prepared = OrderedDict[str, PreparedImage]()  # by the digest of the file
        self._prepared_bytes = 0

    @classmethod
    def of_model(cls, directory: Path, blobs: Blobs, config: ImagesConfig) -> Images:
        """Read how the model of a HF directory is shown images. Raises ConfigError."""
        path = directory / "config.json"
        try:
            document = json.loads(path.read_bytes()) if path.exists() else {}
            if not isinstance(document, dict):
                raise ValueError("is no object")
        except (OSError, ValueError) as error:
            raise ConfigError(f"tokenizer: {path}: {error}") from None
        return cls(ImageReader.of_model(directory, document), blobs, config)

    @property
    def processor(self) -> str:
        """Digest of the rules by which images are prepared, empty where none are."""
        return self._reader.processor

    def ends(self, token: int) -> bool:
        """Whether a sampled token stands for a medium, behind which nothing can follow."""
        return token in self._reader.unsampled

    async def show(
        self,
        messages: Sequence[Mapping[str, Any]],
        owner: str = "",
        *,
        before: int = 0,
        files: bool = True,
    ) -> tuple[StoredImage, ...]:
        """Prepare and store the images of messages, in order.

        They are pinned by `owner`, if any. `before`: images of the sample so far. `files`: paths
        below the configured directories may be named. Raises ImageRefusedError,
        MediaUnsupportedError, InvalidFieldError and StoreFailedError.
        """
        try:
            sources = image_sources(messages)
        except MessageError as error:
            if error.medium:
                raise MediaUnsupportedError(str(error), field=error.field) from None
            raise InvalidFieldError(error.field, str(error)) from None
        if not sources:
            return ()
        first = next(iter(sources))
        if self._reader.rules is None:
            raise MediaUnsupportedError(f"{first}: {self._reader.refusal}", field=first)
        if (count := before + len(sources)) > self._config.max_count:
            message = f"{count} images in one sample, images.max_count is {self._config.max_count}"
            raise ImageRefusedError("TOO_MANY_IMAGES", first, message)
        roots = self._config.roots if files else ()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._store, sources, owner, roots)

    def expand(self, token_ids: Sequence[int], images: Sequence[StoredImage]) -> Passage:
        """Return ids with every placeholder as often as its image has tokens, and the spans.

        Raises ImageRefusedError where they are not as many.
        """
        placeholder, unsampled = self._reader.placeholder, self._reader.unsampled
        found = [token for token in unsampled if token in token_ids]
        if not images and not found:
            return Passage(token_ids)
        places = sum(token == placeholder for token in token_ids)
        if places != len(images) or any(token != placeholder for token in found):
            raise ImageRefusedError(
                "IMAGE_PLACES",
                "messages",
                f"{places} placeholders of images for {len(images)} images: a text holds one, or "
                "the chat template leaves images out",
            )
        expanded, media, rest = list[int](), list[MediaSpan](), iter(images)
        for token in token_ids:
            if token != placeholder:
                expanded.append(token)
                continue
            image = next(rest)
            media.append(
                MediaSpan(
                    digest=image.blob.digest,
                    size=image.blob.size,
                    kind=IMAGE,
                    first_token=len(expanded),
                    token_count=image.token_count,
                    grid_thw=image.grid_thw,
                )
            )
            expanded += [token] * image.token_count
        return Passage(expanded, tuple(media))

    def close(self) -> None:
        """Wait for what is being prepared, and end the threads."""
        self._threads.shutdown(cancel_futures=True)

    def _store(
        self, sources: Mapping[str, Any], owner: str, roots: Sequence[Path]
    ) -> tuple[StoredImage, ...]:
        assert self._blobs is not None
        images = []
        for field, source in sources.items():
            data = _read(source, field, roots, self._limits.max_bytes)
            try:
                images.append(self._prepare(data))
            except InvalidImageError as error:
                raise ImageRefusedError(error.reason, field, str(error)) from None
        try:
            blobs = self._blobs.put_all(image.png for image in images)
            if owner:
                self._blobs.pin(owner, [blob.digest for blob in blobs])
        except (OSError, BlobNotFoundError) as error:
            raise StoreFailedError(str(error)) from error
        return tuple(
            StoredImage(blob, image.grid_thw, image.token_count)
            for blob, image in zip(blobs, images, strict=True)
        )

    def _prepare(self, data: bytes) -> PreparedImage:
        """Raises InvalidImageError."""
        assert self._reader.rules is not None
        key = xxhash.xxh3_128_hexdigest(data)
        with self._lock:
            if (known := self._prepared.get(key)) is not None:
                self._prepared.move_to_end(key)
                return known
        prepared = self._reader.rules.prepare(data, self._limits)
        with self._lock:
            if key not in self._prepared:
                self._prepared[key] = prepared
                self._prepared_bytes += len(prepared.png)
            while self._prepared_bytes > REMEMBERED_BYTES:
                _, oldest = self._prepared.popitem(last=False)
                self._prepared_bytes -= len(oldest.png)
        return prepared


@dataclass(frozen=True)
class SampleImages:
    """Images of one group or call, pinned by `owner`; `files`: paths may be named."""

    images: Images
    owner: str = ""
    files: bool = True

    async def show(
        self, messages: Sequence[Mapping[str, Any]], before: int = 0
    ) -> tuple[StoredImage, ...]:
        """As `Images.show`."""
        return await self.images.show(messages, self.owner, before=before, files=self.files)

    def ends(self, trajectory: Trajectory) -> bool:
        """Whether the model drew a placeholder: nothing is there to see, and nothing can follow."""
        last = trajectory.last_token
        return last is not None and self.images.ends(last)


NO_IMAGES = SampleImages(Images(ImageReader()))


def _read(source: Any, field: str, roots: Sequence[Path], max_bytes: int) -> bytes:
    """Return the bytes of a file. Raises ImageRefusedError."""
    if isinstance(source, Mapping):  # as data sets hold an image
        source = source.get("bytes") or source.get("path")
    if not isinstance(source, str) or not source:
        raise ImageRefusedError("IMAGE_NOT_FOUND", field, "an image has neither bytes nor a path")
    if source.startswith(_DATA):
        return _decode(source, field, max_bytes)
    scheme, separator, _ = source.partition("://")
    if separator and not source.startswith(_FILE):
        raise ImageRefusedError(
            "IMAGE_ADDRESS", field, f"{scheme}:// is not fetched: send the image as a data: URL"
        )
    return _read_file(source.removeprefix(_FILE), field, roots, max_bytes)


def _decode(url: str, field: str, max_bytes: int) -> bytes:
    header, comma, body = url.partition(",")
    if not comma:
        raise ImageRefusedError("IMAGE_BROKEN", field, "a data: URL without a comma")
    is_base64 = header.endswith(";base64")
    longest = (max_bytes + 2) // 3 * 4 if is_base64 else max_bytes * 3
    if len(body) > longest:  # before anything is decoded
        raise ImageRefusedError("IMAGE_TOO_LARGE", field, f"more than {max_bytes:,} bytes")
    try:
        return base64.b64decode(body, validate=True) if is_base64 else unquote_to_bytes(body)
    except (binascii.Error, ValueError) as error:
        raise ImageRefusedError("IMAGE_BROKEN", field, f"a data: URL: {error}") from None


def _read_file(name: str, field: str, roots: Sequence[Path], max_bytes: int) -> bytes:
    try:
        path = _allowed(name, roots)
        if path is None:
            where = ", ".join(map(str, roots)) or "none may be read"
            message = f"{name[:200]!r} is not below a directory of images.roots: {where}"
            raise ImageRefusedError("IMAGE_OUTSIDE", field, message)
        if not stat.S_ISREG(path.stat().st_mode):
            raise ImageRefusedError("IMAGE_NOT_FOUND", field, f"{name!r} is no file")
        with path.open("rb") as file:
            return file.read(max_bytes + 1)  # who decodes it refuses one that is longer
    # ValueError: a name that no file can have; RuntimeError: links in a circle, before Python 3.13
    except (OSError, ValueError, RuntimeError) as error:
        raise ImageRefusedError("IMAGE_NOT_FOUND", field, f"{name[:200]!r}: {error}") from None


def _allowed(name: str, roots: Sequence[Path]) -> Path | None:
    """Return the file of that name, links followed, below the first root that has it.

    Where none has it the path that it would have, None where that is outside of all. Raises
    OSError and ValueError.
    """
    below = None
    for root in (root.resolve() for root in roots):
        path = (root / name).resolve()
        if path.is_relative_to(root):
            if path.exists():
                return path
            below = below or path
    return below
