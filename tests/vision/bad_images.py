"""Images that no policy may be shown, and a directory of files for prompts to name."""

from __future__ import annotations

import base64
import io
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

MAX_COUNT, MAX_BYTES = 3, 60_000
LIMITS = {"max_count": MAX_COUNT, "max_bytes": MAX_BYTES}


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(seed: int, *size: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, size, dtype=np.uint8))


GOOD = encoded(noise(0, 20, 40, 3))


def bomb(side: int) -> bytes:
    """A PNG of a few bytes that says it has side x side pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(1000))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    )


def files() -> dict[str, tuple[bytes, str]]:
    """What is wrong with the bytes of a file, by what it is, and the reason."""
    picture = noise(1, 20, 40, 3)
    frames = [noise(seed, 16, 16, 3) for seed in range(3)]
    flipped = bytearray(GOOD)
    flipped[len(GOOD) // 2] ^= 1
    return {
        "cut": (GOOD[:-40], "IMAGE_BROKEN"),
        "flipped": (bytes(flipped), "IMAGE_BROKEN"),
        "text": (b"GIF89a is not taken", "IMAGE_BROKEN"),
        "30000 x 30000": (bomb(30_000), "IMAGE_TOO_LARGE"),
        "2^31 - 1": (bomb(2**31 - 1), "IMAGE_TOO_LARGE"),
        "bytes": (encoded(noise(2, 200, 200, 3)), "IMAGE_TOO_LARGE"),
        "CMYK": (encoded(picture.convert("CMYK"), "JPEG"), "IMAGE_MODE"),
        "alpha": (encoded(picture.convert("RGBA")), "IMAGE_MODE"),
        "gray alpha": (encoded(picture.convert("LA")), "IMAGE_MODE"),
        "palette": (encoded(picture.convert("P")), "IMAGE_MODE"),
        "thin": (encoded(noise(3, 1, 300, 3)), "IMAGE_SHAPE"),
        "animated": (
            encoded(frames[0], save_all=True, append_images=frames[1:]),
            "IMAGE_ANIMATED",
        ),
    }


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def part(source: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": source}}


def inline() -> dict[str, tuple[list[dict[str, Any]], str]]:
    """Parts of a message that a body itself holds, and the reason."""
    found = {name: ([part(url(data))], reason) for name, (data, reason) in files().items()}
    return found | {
        "too many": ([part(url(GOOD))] * (MAX_COUNT + 1), "TOO_MANY_IMAGES"),
        "no comma": ([part("data:image/png;base64")], "IMAGE_BROKEN"),
        "no base64": ([part("data:image/png;base64,%%%")], "IMAGE_BROKEN"),
        "address": ([part("https://example.com/a.png")], "IMAGE_ADDRESS"),
        "ftp": ([part("ftp://example.com/a.png")], "IMAGE_ADDRESS"),
        "video": ([{"type": "video_url", "video_url": {"url": url(GOOD)}}], "MEDIA_UNSUPPORTED"),
        "audio": ([{"type": "input_audio", "input_audio": {"data": ""}}], "MEDIA_UNSUPPORTED"),
        "placeholder": (
            [part(url(GOOD)), {"type": "text", "text": "<|image_pad|>"}],
            "IMAGE_PLACES",
        ),
        "video placeholder": ([{"type": "text", "text": "<|video_pad|>"}], "IMAGE_PLACES"),
    }


def make_files(root: Path) -> None:
    """Files below `root/pictures`, and one beside it that nobody may see."""
    pictures = root / "pictures"
    (pictures / "folder.png").mkdir(parents=True)
    (pictures / "good.png").write_bytes(GOOD)
    (root / "secret.png").write_bytes(GOOD)
    (pictures / "link.png").symlink_to(root / "secret.png")
    (pictures / "up").symlink_to(root)
    (pictures / "round.png").symlink_to(pictures / "round.png")
    os.mkfifo(pictures / "pipe.png")


def named(root: Path) -> Mapping[str, tuple[list[dict[str, Any]], str]]:
    """Parts that name files, and the reason."""
    names = {
        "missing.png": "IMAGE_NOT_FOUND",
        "folder.png": "IMAGE_NOT_FOUND",
        "pipe.png": "IMAGE_NOT_FOUND",
        "round.png": "IMAGE_NOT_FOUND",
        "a" * 5000: "IMAGE_NOT_FOUND",
        "a\0.png": "IMAGE_NOT_FOUND",
        "good.png\0": "IMAGE_NOT_FOUND",
        "../secret.png": "IMAGE_OUTSIDE",
        "x/../../secret.png": "IMAGE_OUTSIDE",
        "link.png": "IMAGE_OUTSIDE",
        "up/secret.png": "IMAGE_OUTSIDE",
        str(root / "secret.png"): "IMAGE_OUTSIDE",
        "file://" + str(root / "secret.png"): "IMAGE_OUTSIDE",
        "/dev/zero": "IMAGE_OUTSIDE",
        "../" * 1000 + "etc/passwd": "IMAGE_OUTSIDE",
    }
    return {
        f"file {number}": ([{"type": "image", "image": name}], reason)
        for number, (name, reason) in enumerate(names.items())
    }
