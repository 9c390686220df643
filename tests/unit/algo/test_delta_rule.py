"""The chunked delta rule is the recurrence, row by row, whatever stands together in a pack."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import conv1d
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

from sluice.algo.delta_rule import PackChunks, causal_convolution, gated_delta_rule

CPU = torch.device("cpu")
LENGTHS = [5, 1, 70, 64, 1, 129, 3, 65, 63]
HEADS, KEYS, VALUES = 3, 4, 6
Inputs = list[torch.Tensor]


def inputs_of(total: int, dtype: torch.dtype = torch.float64) -> Inputs:
    """Queries, keys, values, decays, strengths."""
    generator = torch.Generator().manual_seed(total)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn((total, HEADS, *shape), generator=generator, dtype=torch.float64)

    made = [draw(KEYS), draw(KEYS), draw(VALUES), -draw().exp() / 4, draw().sigmoid()]
    return [part.to(dtype).requires_grad_() for part in made]


def recurrence(parts: Inputs, lengths: Sequence[int]) -> torch.Tensor:
    """Token by token, as the paper has it: S_t = a_t S_{t-1} (I - b_t k_t k_t') + b_t v_t k_t'."""
    query, key, value, decay, strength = parts
    outputs = []
    ends = torch.tensor(lengths).cumsum(0).tolist()
    for first, last in zip([0, *ends[:-1]], ends, strict=True):
        state = torch.zeros((HEADS, VALUES, KEYS), dtype=value.dtype)
        for t in range(first, last):
            k = key[t] / (key[t].square().sum(-1, keepdim=True) + 1e-6).sqrt()
            q = query[t] / (query[t].square().sum(-1, keepdim=True) + 1e-6).sqrt() / KEYS**0.5
            b, a = strength[t][:, None, None], decay[t].exp()[:, None, None]
            kept = torch.eye(KEYS, dtype=value.dtype) - b * k[:, :, None] * k[:, None, :]
            state = a * state @ kept + b * value[t][:, :, None] * k[:, None, :]
            outputs.append((state @ q[:, :, None])[..., 0])
    return torch.stack(outputs)


def gradients(output: torch.Tensor, parts: Inputs) -> Sequence[torch.Tensor]:
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return torch.autograd.grad((output * weights).sum(), parts)


@pytest.mark.parametrize("size", [None, 1, 2, 16, 64])
def test_chunks_are_the_recurrence(size: int | None) -> None:
    parts = inputs_of(sum(LENGTHS))
    found = gated_delta_rule(*parts, PackChunks.lay_out(LENGTHS, CPU, size=size))
    expected = recurrence(parts, LENGTHS)
    assert found.dtype is torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for got, wanted in zip(gradients(found, parts), gradients(expected, parts), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-10)


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6), size=st.integers(1, 9))
def test_any_rows_in_any_chunks(lengths: list[int], size: int) -> None:
    parts = inputs_of(sum(lengths))
    found = gated_delta_rule(*parts, PackChunks.lay_out(lengths, CPU, size=size))
    torch.testing.assert_close(found, recurrence(parts, lengths), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("module", [modeling_qwen3_next, modeling_qwen3_5])
def test_one_row_is_as_transformers_has_it(module: object) -> None:
    parts = inputs_of(200, torch.float32)
    rule = module.torch_chunk_gated_delta_rule  # type: ignore[attr-defined]
    (expected,), _ = rule(*(part[None] for part in parts), use_qk_l2norm_in_kernel=True)
    found = gated_delta_rule(*parts, PackChunks.lay_out([200], CPU))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_rows_taken_for_one_give_something_else() -> None:
    """The control: what the state of a former row does is far above what rounding does."""
    parts = inputs_of(sum(LENGTHS))
    apart = gated_delta_rule(*parts, PackChunks.lay_out(LENGTHS, CPU))
    together = gated_delta_rule(*parts, PackChunks.lay_out([sum(LENGTHS)], CPU))
    torch.testing.assert_close(apart[:5], together[:5])
    assert (apart[5:] - together[5:]).abs().max() > 0.01


@pytest.mark.parametrize(("decay", "strength"), [(0, 1), (0, 0), (-1e4, 1), (-1e-30, 1e-30)])
def test_extreme_decays_and_strengths(decay: float, strength: float) -> None:
    parts = inputs_of(sum(LENGTHS), torch.float32)
    parts[3] = torch.full_like(parts[3], decay).requires_grad_()
    parts[4] = torch.full_like(parts[4], strength).requires_grad_()
    found = gated_delta_rule(*parts, PackChunks.lay_out(LENGTHS, CPU))
    exact = recurrence([part.double() for part in parts], LENGTHS)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)
    assert all(bool(part.isfinite().all()) for part in gradients(found, parts))


def test_a_number_that_is_none_stays_in_its_row() -> None:
    parts = [part.detach() for part in inputs_of(sum(LENGTHS))]
    parts[2][2] = torch.nan
    found = gated_delta_rule(*parts, PackChunks.lay_out(LENGTHS, CPU))
    assert found[:5].isnan().any()
    assert found[5:].isfinite().all()


@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_the_convolution_begins_anew_with_every_row(width: int) -> None:
    total, channels = sum(LENGTHS), 5
    generator = torch.Generator().manual_seed(width)
    values = torch.randn((total, channels), generator=generator).double().requires_grad_()
    weight = torch.randn((channels, width), generator=generator).double().requires_grad_()
    chunks = PackChunks.lay_out(LENGTHS, CPU)
    found = causal_convolution(values, weight, chunks.positions)
    rows = []
    for row in values.split(LENGTHS):
        padded = torch.nn.functional.pad(row.T, (width - 1, 0))
        rows.append(conv1d(padded[None], weight[:, None], groups=channels)[0].T)
    expected = torch.cat(rows)
    torch.testing.assert_close(found, expected)
    pairs = zip(
        gradients(found, [values, weight]), gradients(expected, [values, weight]), strict=True
    )
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted)


def test_fewer_tokens_than_the_convolution_is_wide() -> None:
    values, weight = torch.ones((2, 1)), torch.tensor([[1.0, 10.0, 100.0, 1000.0]])
    chunks = PackChunks.lay_out([2], CPU)
    assert causal_convolution(values, weight, chunks.positions)[:, 0].tolist() == [1000.0, 1100.0]
