"""The weight store at a location: a directory, or a bucket by its URL."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from sluice.weights.store import WeightStore

if TYPE_CHECKING:
    from sluice.weights.bucket import BucketWeightStore

AnyWeightStore: TypeAlias = "WeightStore | BucketWeightStore"


def is_bucket(location: str) -> bool:
    """Whether it is no directory of a file system, so that ranks have to upload what they write."""
    return "://" in location and not location.startswith("file://")


def open_store(
    location: Path | str, *, durable: bool = True, scratch: Path | None = None
) -> AnyWeightStore:
    """A directory, `file:///directory`, or `s3://bucket/prefix` (needs the extra `s3`).

    `scratch` is a directory of this host for files on their way to a bucket; the default is
    below the system's temporary directory. Raises ValueError for a URL of another kind.
    """
    text = str(location)
    if not is_bucket(text):
        return WeightStore(text.removeprefix("file://"), durable=durable)
    if not text.startswith("s3://"):
        raise ValueError(f"{text!r} is neither a directory nor an s3:// URL")
    from sluice.weights.bucket import BucketWeightStore  # nobody else needs obstore

    return BucketWeightStore(text, scratch or Path(tempfile.gettempdir()) / "sluice-weights")
