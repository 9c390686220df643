"""The files that this process has open, of those that a test made.

Of all that it has, what earlier tests left is closed whenever garbage is collected.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def open_below(directory: Path) -> list[Path]:
    """The path of each descriptor of a file below a directory; of one that is gone, too."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile, as the one that lists them
            found.append(descriptor.readlink())
    return [path for path in found if path.is_relative_to(directory)]
