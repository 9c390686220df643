"""Seeds that depend on what a sample is, not on when or where it is drawn."""

from __future__ import annotations

import xxhash


def sample_seed(run_seed: int, group_id: str, index: int) -> int:
    """A non-negative 63-bit seed, the same in every run with this seed."""
    return xxhash.xxh3_64_intdigest(f"{run_seed}/{group_id}/{index}".encode()) >> 1
