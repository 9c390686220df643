"""Pauses between tries."""

from __future__ import annotations

import random

import grpc
import pytest

from sluice.runtime.errors import RemoteError, typed_errors
from sluice.runtime.recovery import Backoff, NotReadyError, is_passing, wait_until_ready
from tests.patience import PATIENCE


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


def call_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    empty = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, empty, empty, details)


@pytest.mark.parametrize(
    ("details", "code", "passing"),
    [
        ("Internal error from Core", grpc.StatusCode.UNKNOWN, True),
        ("a bug of the server", grpc.StatusCode.INTERNAL, False),
    ],
)
def test_a_call_whose_status_the_client_lost_may_be_tried_again(
    details: str, code: grpc.StatusCode, passing: bool
) -> None:
    with pytest.raises(RemoteError) as caught, typed_errors():
        raise call_error(grpc.StatusCode.INTERNAL, details)
    assert caught.value.code is code
    assert is_passing(caught.value) is passing


async def test_a_timeout_of_the_probe_itself_is_no_deadline_that_passed() -> None:
    """Else `not ready in 600 s` is said after the 30 that one call of the probe had."""
    refused = TimeoutError("the call had 30 s")

    async def probe() -> None:
        raise refused

    with pytest.raises(TimeoutError) as caught:
        await wait_until_ready("a registry", probe, PATIENCE, RuntimeError)
    assert caught.value is refused


async def test_a_deadline_that_passes_says_what_was_missing() -> None:
    async def probe() -> None:
        raise NotReadyError("no port")

    with pytest.raises(RuntimeError, match=r"a registry was not ready in 0\.01 s: no port"):
        await wait_until_ready("a registry", probe, 0.01, RuntimeError, every=0.001)
