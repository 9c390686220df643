"""Nonces by which processes find out whether they see the same store.

<place>/checks/<nonce>      written by one process, read by others, removed by whoever asked
"""

from __future__ import annotations

import re
import time
from contextlib import suppress

from sluice.durable import write_new
from sluice.place import Place, directory_of

FOLDER = "checks"
LEFT_SECONDS = 3600.0  # after which nobody asks for a nonce any more
NONCE = re.compile(r"[0-9a-f]{32}")


def write_nonce(place: Place, nonce: str) -> None:
    """Leave a nonce in a place, and clear old ones of processes that died. Raises OSError."""
    if (directory := directory_of(place)) is not None:
        folder = directory / FOLDER
        folder.mkdir(exist_ok=True)
        write_new(folder / nonce, nonce.encode())
        for path in folder.iterdir():
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - LEFT_SECONDS:
                    path.unlink()
        return
    from sluice.bucket import ObjectBucket  # nobody else needs obstore

    bucket = ObjectBucket(str(place))
    bucket.put(f"{FOLDER}/{nonce}", nonce.encode())
    bucket.delete(info.key for info in bucket.list(FOLDER) if info.age > LEFT_SECONDS)


def has_nonce(place: Place, nonce: str) -> bool:
    """Return whether a nonce is in a place. Raises OSError."""
    try:
        if (directory := directory_of(place)) is not None:
            return (directory / FOLDER / nonce).read_bytes() == nonce.encode()
        from sluice.bucket import ObjectBucket  # nobody else needs obstore

        return ObjectBucket(str(place)).get(f"{FOLDER}/{nonce}") == nonce.encode()
    except FileNotFoundError:
        return False


def remove_nonce(place: Place, nonce: str) -> None:
    """Remove a nonce; one that is not there is no error. Raises OSError."""
    if (directory := directory_of(place)) is not None:
        (directory / FOLDER / nonce).unlink(missing_ok=True)
        return
    from sluice.bucket import ObjectBucket  # nobody else needs obstore

    ObjectBucket(str(place)).delete([f"{FOLDER}/{nonce}"])
