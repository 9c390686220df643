"""The difference of two arrays of bytes: bit-exact, small, and safe when damaged."""

from __future__ import annotations

import struct

import numpy as np
import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.weights import delta
from sluice.weights.delta import DeltaError, Form


def applied(old: np.ndarray, payload: bytes, width: int) -> bytes:
    target = old.copy()
    delta.apply(memoryview(payload), target, width)
    return target.tobytes()


@given(
    width=st.sampled_from([1, 2, 4, 8]),
    count=st.integers(0, 3000),
    share=st.sampled_from([0.0, 0.001, 0.05, 0.4, 1.0]),
    step=st.sampled_from([1, 255, 2**63]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=50)
def test_any_two_arrays_differ_losslessly(
    width: int, count: int, share: float, step: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    old = random.integers(0, 256, count * width, dtype=np.uint8)
    elements = old.view(f"<u{width}").copy()
    moved = random.random(count) < share
    elements[moved] += np.array(step % 2 ** (8 * width), elements.dtype)
    new = elements.view(np.uint8)
    encoded = delta.encode(old, new, width)
    assert applied(old, encoded.payload, width) == new.tobytes()
    assert encoded.changed == int((old.view(f"<u{width}") != elements).sum())


@pytest.mark.parametrize("gap", [1, 254, 255, 256, 257, 70000])
def test_gaps_around_the_end_of_a_byte(gap: int) -> None:
    old = np.zeros(6 * gap + 12, np.uint8)
    new = old.copy()
    new.view("<u2")[::gap] = 3
    new.view("<u2")[-1] = 5
    encoded = delta.encode(old, new, 2)
    assert applied(old, encoded.payload, 2) == new.tobytes()


def test_changes_come_block_by_block_wherever_they_are_cut() -> None:
    old = np.random.default_rng(0).integers(0, 2**16, 300_000, dtype=np.uint16)
    new = old.copy()
    new[1:100_000:2] += 1
    new[250_000::3] -= 7
    payload = delta.encode(old.view(np.uint8), new.view(np.uint8), 2).payload
    assert Form(payload[0]) is Form.SPARSE
    for size in (997, 50_000, 300_000):
        patch = delta.decode(memoryview(payload), len(old), 2)
        found = old.copy()
        for start in range(0, len(old), size):
            block = found[start : start + size]
            same = np.array_equal(block, new[start : start + size])
            assert patch.apply(block, start) is not same
        assert np.array_equal(found, new)


@pytest.mark.parametrize(
    ("rate", "form", "at_most"),
    [(0.0, Form.SAME, 0.001), (1e-6, Form.SPARSE, 0.03), (1e-2, Form.DENSE, 0.75)],
)
def test_the_form_follows_the_size_of_the_step(rate: float, form: Form, at_most: float) -> None:
    torch.manual_seed(0)
    weights = torch.randn(200_000) * 0.02
    moved = weights + rate * torch.sign(torch.randn(200_000))
    old, new = (w.to(torch.bfloat16).view(torch.uint8).numpy() for w in (weights, moved))
    encoded = delta.encode(old, new, 2)
    assert Form(encoded.payload[0]) is form
    assert len(encoded.payload) < at_most * len(new)
    assert applied(old, encoded.payload, 2) == new.tobytes()


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("values", ["neighbours", "any"])
def test_three_elements_of_a_hundred_cost_five_bytes_at_most(width: int, values: str) -> None:
    random = np.random.default_rng(5)
    count, kind = 200_000, f"<u{width}"
    old = random.standard_normal(count).astype("<f4").view("<u4") >> 8 * (4 - width)
    old = old.astype(kind)
    new = old.copy()
    moved = random.choice(count, count * 3 // 100, replace=False)
    if values == "neighbours":
        new[moved] += random.choice([1, -1], len(moved)).astype(kind)
    else:
        new[moved] = random.integers(0, 2 ** (8 * width), len(moved), dtype=kind)
    encoded = delta.encode(old.view(np.uint8), new.view(np.uint8), width)
    assert applied(old.view(np.uint8), encoded.payload, width) == new.tobytes()
    assert len(encoded.payload) <= 0.05 * new.nbytes


def test_what_has_nothing_in_common_costs_no_more_than_its_bytes() -> None:
    random = np.random.default_rng(0)
    old, new = (random.integers(0, 256, 40_000, dtype=np.uint8) for _ in range(2))
    encoded = delta.encode(old, new, 2)
    assert len(encoded.payload) < len(new) + 100
    assert applied(old, encoded.payload, 2) == new.tobytes()


def test_a_damaged_payload_is_an_error_or_other_bytes_never_a_crash() -> None:
    random = np.random.default_rng(1)
    old = random.integers(0, 256, 4000, dtype=np.uint8)
    new = old.copy()
    new[::50] += 1
    payload = delta.encode(old, new, 2).payload
    refused = 0
    for position in range(len(payload)):
        damaged = bytearray(payload)
        damaged[position] ^= 1 << (position % 8)
        try:
            assert applied(old, bytes(damaged), 2) != b""
        except DeltaError:
            refused += 1
    assert refused > len(payload) // 10
    for end in range(len(payload)):
        with pytest.raises(DeltaError):
            applied(old, payload[:end], 2)


def test_a_payload_of_another_tensor_is_refused() -> None:
    old, new = np.zeros(20, np.uint8), np.ones(20, np.uint8)
    payload = delta.encode(old, new, 2).payload
    with pytest.raises(DeltaError, match="10 elements, not 11"):
        delta.apply(memoryview(payload), np.zeros(22, np.uint8), 2)


@pytest.mark.parametrize(
    ("form", "changed", "streams", "message"),
    [
        (Form.SPARSE, 2, [[4, 5], [], [1, 1]], "reaches beyond the tensor"),
        (Form.SPARSE, 1, [[255], [10], [1]], "gaps that do not fit"),
        (Form.SPARSE, 11, [[0] * 11, [], [1] * 11], "counts that do not fit"),
        (9, 0, [], "unknown form 9"),
        (Form.SAME, 0, [[1]], "bytes too many"),
    ],
)
def test_changes_that_fit_no_tensor_of_ten_elements_are_refused(
    form: int, changed: int, streams: list[list[int]], message: str
) -> None:
    long = len(streams[1]) if len(streams) > 1 else 0
    payload = struct.pack("<BQQQ", form, 10, changed, long)
    for index, stream in enumerate(streams):
        raw = np.array(stream, "<u8" if index == 1 else np.uint8).tobytes()
        data = pyarrow.Codec("zstd").compress(raw, asbytes=True) if raw else b""
        payload += struct.pack("<Q", len(data)) + data
    with pytest.raises(DeltaError, match=message):
        applied(np.zeros(10, np.uint8), payload, 1)


def test_changes_up_to_the_last_element_fit() -> None:
    old, new = np.zeros(40, np.uint8), np.zeros(40, np.uint8)
    new[39] = 1
    payload = delta.encode(old, new, 1).payload
    assert applied(old, payload, 1) == new.tobytes()
