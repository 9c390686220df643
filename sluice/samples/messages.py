"""Chat messages whose content has parts: texts, and images by where they come from.

A part is as in OpenAI's API, `{"type": "image_url", "image_url": {"url": "data:..."}}`, or as
transformers writes it, `{"type": "image", "image": ...}`.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MARK = "<image>"  # stands for an image where a message is shown as text, and in data sets
OTHER_MEDIA = frozenset({"audio", "audio_url", "file", "input_audio", "video", "video_url"})
_SOURCES = ("image", "url", "path")
_MARKS = re.compile(f"({re.escape(MARK)})")


class MessageError(ValueError):
    """A message that nobody can read; `field` says where, `medium` what it shows, if that is it."""

    def __init__(self, field: str, detail: str, medium: str = "") -> None:
        self.field, self.medium = field, medium
        super().__init__(f"{field}: {detail}")


def image_part(data: bytes) -> dict[str, Any]:
    """Return a part that shows an image: the bytes of a PNG, JPEG, WebP or BMP file."""
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def data_url(data: bytes) -> str:
    """Return bytes as text that stands where an address would."""
    return f"data:;base64,{base64.b64encode(data).decode()}"


def has_parts(messages: Iterable[Mapping[str, Any]]) -> bool:
    """Whether any of them holds more than one text."""
    return not all(isinstance(message.get("content") or "", str) for message in messages)


def text_of(message: Mapping[str, Any]) -> str:
    """Return a message as people read it, a mark for each image."""
    content = message.get("content")
    if not isinstance(content, list):
        return str(content or "")
    return "".join(
        str(part.get("text", "")) if part.get("type") == "text" else MARK
        for part in content
        if isinstance(part, Mapping)
    )


def image_sources(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what each image is read from, in order, by its place in the messages.

    A source is a text, address or path, or `{"bytes": ..., "path": ...}` as data sets have it.
    Raises MessageError.
    """
    found = dict[str, Any]()
    for number, message in enumerate(messages):
        for place, part in _parts(message, f"messages[{number}].content"):
            if part["type"] != "text":
                found[place] = _source(part, place)
    return found


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them: images without what they are read from.

    A content of texts alone becomes one text, which templates of text models read too. Raises
    MessageError.
    """
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def split_marks(text: str, images: Sequence[Any]) -> str | list[dict[str, Any]]:
    """Return a content that shows the images where `text` has marks, or before it where none is.

    Raises ValueError for marks that are not as many as the images.
    """
    if not images:
        return text
    pieces = _MARKS.split(text) if MARK in text else [*[MARK] * len(images), text]
    if (count := pieces.count(MARK)) != len(images):
        raise ValueError(f"{count} marks {MARK} for {len(images)} images")
    rest = iter(images)
    return [
        {"type": "image", "image": next(rest)} if piece == MARK else {"type": "text", "text": piece}
        for piece in pieces
        if piece
    ]


def _plain(message: Mapping[str, Any], field: str) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    parts = [part for _, part in _parts(message, f"{field}.content")]
    if all(part["type"] == "text" for part in parts):
        return {**message, "content": "".join(part["text"] for part in parts)}
    plain = [
        {"type": "text", "text": part["text"]} if part["type"] == "text" else {"type": "image"}
        for part in parts
    ]
    return {**message, "content": plain}


def _parts(message: Mapping[str, Any], field: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise MessageError(field, "is no text and no list of parts")
    for index, part in enumerate(content):
        where = f"{field}[{index}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in OTHER_MEDIA:
            medium = str(kind).partition("_")[0].replace("input", "audio")
            raise MessageError(where, f"{medium} is not taken: images are, and text", medium)
        if kind not in ("text", "image", "image_url"):
            raise MessageError(where, f"a part of type {kind!r} is unknown: text, image, image_url")
        if kind == "text" and not isinstance(part.get("text"), str):
            raise MessageError(where, "a text part has no text")
        yield where, part


def _source(part: Mapping[str, Any], field: str) -> Any:
    if part["type"] == "image_url":
        address = part.get("image_url")
        source = address.get("url") if isinstance(address, Mapping) else address
    else:
        source = next((part[name] for name in _SOURCES if part.get(name) is not None), None)
    if not source or not isinstance(source, str | Mapping):
        raise MessageError(field, "an image part names no image")
    return source
