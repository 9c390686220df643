"""Where a store is: a directory that all processes share, or a bucket."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from sluice.config import Config

SCHEMES = ("s3://", "memory://")  # memory: of one process, for tests
BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
AMBIGUOUS = re.compile(r"[%?#\\\x00-\x1f\x7f]|^\s|\s$")  # `%2e%2e` is `..` in a URL, a tab nothing
ONE_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/(?!/)")  # s3:/bucket, a directory called s3:
LONGEST_PREFIX = 900  # bytes; keys have 1,024

Place = Path | str  # a bucket is a URL


def place_of(value: object) -> Place:
    """Read a directory, `file:///directory`, or `s3://bucket/prefix`.

    Raises ValueError for anything else: a URL of another kind, or text that can be no path.
    """
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{value!r} is neither a directory nor an s3:// URL")
    text = os.fspath(value)
    if not isinstance(text, str) or "\0" in text:
        raise ValueError(f"{text!r} can be no path")
    if ONE_SLASH.match(text):
        raise ValueError(f"{text[:200]!r} has one slash where a URL has two, as s3://bucket/prefix")
    if not is_bucket(text):
        if text.startswith("file://") and not text.startswith("file:///"):
            raise ValueError(f"{text[:200]!r} names no directory, as file:///directory does")
        return Path(text.removeprefix("file://"))
    if not text.startswith(SCHEMES):
        raise ValueError(f"{text[:200]!r} is neither a directory nor an s3:// URL")
    text = text.rstrip("/")
    name, _, prefix = text.partition("://")[2].partition("/")
    parts = prefix.split("/") if prefix else []
    if not BUCKET.fullmatch(name) or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{text[:200]!r} names no bucket and prefix, as s3://bucket/prefix does")
    if AMBIGUOUS.search(prefix):
        raise ValueError(f"{text[:200]!r} has a character that no prefix may have: one of % ? # \\")
    if len(prefix.encode(errors="surrogatepass")) > LONGEST_PREFIX:
        raise ValueError(f"{text[:200]!r}... is longer than the {LONGEST_PREFIX} bytes of a prefix")
    return text


StorePlace = Annotated[Path | str, BeforeValidator(place_of)]


def _checked(value: str) -> str:
    if value:
        place_of(value)
    return value


PlaceText = Annotated[str, AfterValidator(_checked)]  # empty is none


def is_bucket(location: Place) -> bool:
    """Return whether it is no directory, so that ranks have to upload what they write."""
    text = str(location)
    return isinstance(location, str) and "://" in text and not text.startswith("file://")


def directory_of(location: Place) -> Path | None:
    """Return a place as a directory; None for a bucket."""
    return None if is_bucket(location) else Path(str(location).removeprefix("file://"))


def within(place: Place, *names: str) -> Place:
    """Return what lies in a place under these names."""
    directory = directory_of(place)
    return "/".join([str(place), *names]) if directory is None else directory.joinpath(*names)


class StoreCacheConfig(Config):
    """Files of a bucket on this host, for a `store` that is one; all processes of it may share
    them. What is read is compared with its digest, from here too."""

    directory: Path = Field(
        Path(tempfile.gettempdir()) / f"sluice-{os.getuid()}",
        description="Default: below the system's directory for temporary files.",
    )
    gib: float = Field(16.0, gt=0, description="Beyond that the least recently used go.")

    @property
    def max_bytes(self) -> int:
        return int(self.gib * 2**30)


def is_plain_name(name: str) -> bool:
    """Return whether a name from a file names another file of the same directory."""
    plain = Path(name).name == name not in ("", "..") and name.isprintable()
    return plain and len(name.encode()) < 256
