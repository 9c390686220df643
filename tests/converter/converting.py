"""A conversion in a process of its own: `python -m tests.converter.converting SOURCE TARGET TO N`.

N: what the vocabulary is to be a multiple of.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sluice.weights.convert.conversion import convert
from sluice.weights.convert.options import ConvertOptions

if __name__ == "__main__":
    source, target, to, multiple = sys.argv[1:]
    options = {"to": to, "vocab_multiple": int(multiple), "sync": False}
    options |= {"max_file_bytes": 60_000, "workers": 1}  # points count in one thread
    convert(Path(source), Path(target), ConvertOptions(**options))
