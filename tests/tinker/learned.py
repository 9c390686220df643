"""What the tests of this session measured."""

LEARNED: dict[str, float] = {}
