"""What the tests of this session measured: mean rewards at the begin and at the end of each run."""

LEARNED: dict[str, tuple[float, float]] = {}
