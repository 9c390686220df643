"""Pauses between tries."""

from __future__ import annotations

import random

from sluice.runtime.recovery import Backoff


def test_pauses_double_up_to_the_longest():
    backoff = Backoff(first=0.1, longest=2.0)
    assert [round(backoff.seconds(count), 3) for count in range(7)] == [
        0.1, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0,
    ]  # fmt: skip
    assert backoff.seconds(10**9) == 2.0


def test_scattered_pauses_are_longer_by_a_share():
    backoff, rng = Backoff(first=1.0, longest=8.0, scatter=0.25), random.Random(0)
    drawn = [backoff.seconds(3, rng) for _ in range(200)]
    assert all(4.0 <= pause <= 5.0 for pause in drawn)
    assert len(set(drawn)) > 100
