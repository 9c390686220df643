"""Draws against float64 probabilities, and their independence of neighbours."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.engine.interface import Sampling
from services.rollout.engine.reference.drawing import Drawn, DrawSettings, draw, uniform
from sluice.algo.logprobs import token_logprobs
from sluice.samples.sample import LEAST_TEMPERATURE, MOST_TEMPERATURE

CPU = torch.device("cpu")


def draw_each(logits: torch.Tensor, samplings: list[Sampling], seeds: list[int]) -> Drawn:
    counts = [1] * len(samplings)
    positions = torch.zeros(len(seeds), dtype=torch.int64)
    return draw(logits, DrawSettings.of(samplings, counts, seeds, CPU), positions)


def draw_many(logits: torch.Tensor, count: int, **sampling: float) -> torch.Tensor:
    """Histogram of `count` draws by seeds 0, 1 ... from one row of logits."""
    one = Sampling(max_new_tokens=1, **sampling)
    rows = DrawSettings.of([one], [count], list(range(count)), CPU)
    positions = torch.full((count,), 7)
    tokens = draw(logits.expand(count, -1), rows, positions).tokens
    return torch.bincount(tokens, minlength=logits.shape[-1]).double()


def probabilities(
    logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> torch.Tensor:
    """The definition, token by token, in float64."""
    p = (logits.double() / temperature).softmax(-1)
    if top_k:
        p = p * (logits >= logits.topk(top_k).values[-1])
        p = p / p.sum()
    kept, mass = torch.zeros_like(p), 0.0
    for token in p.argsort(descending=True).tolist():
        if mass >= top_p:
            break
        kept[token] = p[token]
        mass += float(p[token])
    return kept / kept.sum()


def chi_square_excess(histogram: torch.Tensor, p: torch.Tensor) -> float:
    """Standard deviations of chi-square above its mean; bins of under 5 expected are merged."""
    assert histogram[p == 0].sum() == 0, "a token of no probability was drawn"
    expected = p * histogram.sum()
    small = expected < 5
    rest_seen, rest_expected = histogram[small].sum(), expected[small].sum()
    terms = (histogram - expected)[~small] ** 2 / expected[~small]
    total, degrees = float(terms.sum()), int((~small).sum()) - 1
    if rest_expected > 5:
        total += float((rest_seen - rest_expected) ** 2 / rest_expected)
        degrees += 1
    return (total - degrees) / math.sqrt(2 * degrees)


@pytest.mark.parametrize("width", [7, 1100])  # one level and two levels of search
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_p": 0.6},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
    ],
)
def test_draws_follow_the_distribution(width: int, sampling: dict) -> None:
    logits = torch.randn(width, generator=torch.Generator().manual_seed(1)) * 1.5
    histogram = draw_many(logits, 6000, **sampling)
    assert abs(chi_square_excess(histogram, probabilities(logits, **sampling))) < 4


def test_the_check_above_would_see_a_slightly_wrong_temperature() -> None:
    logits = torch.randn(7, generator=torch.Generator().manual_seed(1)) * 1.5
    histogram = draw_many(logits, 6000, temperature=1.25)
    assert chi_square_excess(histogram, probabilities(logits)) > 4


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_p": 0.6},
        {"top_k": 3},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.7, "top_k": 5, "top_p": 0.9},
    ],
)
@pytest.mark.parametrize("width", [7, 1100])
def test_log_probs_are_before_truncation_and_off_by_the_mass_that_it_keeps(
    width: int, sampling: dict
) -> None:
    """As docs/rollout.md says; trainer and engine agree all the same. The oracle is numpy's."""
    logits = np.random.default_rng(width).normal(scale=2.0, size=width).astype(np.float32)
    temperature = sampling.get("temperature", 1.0)
    scaled = logits.astype(np.float64) / temperature
    whole = scaled - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())
    count = 4000
    settings = DrawSettings.of(
        [Sampling(max_new_tokens=1, **sampling)], [count], list(range(count)), CPU
    )
    rows = torch.from_numpy(logits).expand(count, -1)
    drawn = draw(rows, settings, torch.zeros(count, dtype=torch.int64))
    tokens = drawn.tokens.numpy()
    np.testing.assert_allclose(drawn.logprobs.numpy(), whole[tokens], atol=2e-6)
    trained, _ = token_logprobs(rows, drawn.tokens, temperature=temperature)
    np.testing.assert_allclose(trained.numpy(), drawn.logprobs.numpy(), atol=2e-6)
    kept = np.exp(probabilities(torch.from_numpy(logits), **sampling).numpy()) > 1
    mass = np.exp(whole[kept]).sum()  # Z of the page
    assert kept[tokens].all() and mass < 1
    if "top_k" not in sampling:
        assert mass >= sampling["top_p"]
    histogram = torch.bincount(drawn.tokens, minlength=width).double()
    corrected = torch.from_numpy(np.where(kept, np.exp(whole) / mass, 0.0))
    assert abs(chi_square_excess(histogram, corrected)) < 4


@pytest.mark.parametrize("width", [7, 1100])
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.7}, {"top_k": 3}, {"top_k": 5, "top_p": 0.8}]
)
def test_what_is_forbidden_is_not_drawn_and_log_probs_are_of_all_tokens(
    width: int, sampling: dict
) -> None:
    """The others keep their proportions, of which top-k and top-p cut. The oracle is numpy's."""
    logits = np.random.default_rng(width).normal(scale=2.0, size=width).astype(np.float32)
    likeliest = int(logits.argmax())
    scaled = logits.astype(np.float64) / sampling.get("temperature", 1.0)
    whole = scaled - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())
    count = 4000
    settings = DrawSettings.of(
        [Sampling(max_new_tokens=1, **sampling)], [count], list(range(count)), CPU
    )
    forbidden = torch.tensor([[likeliest, 3, -1, width, 2**31 - 1]]).expand(count, -1)
    rows = torch.from_numpy(logits).expand(count, -1)
    drawn = draw(rows, settings, torch.zeros(count, dtype=torch.int64), forbidden)
    left = torch.from_numpy(logits).clone()
    left[[likeliest, 3]] = -1e9
    histogram = torch.bincount(drawn.tokens, minlength=width).double()
    assert abs(chi_square_excess(histogram, probabilities(left, **sampling))) < 4
    np.testing.assert_allclose(drawn.logprobs.numpy(), whole[drawn.tokens.numpy()], atol=2e-6)
    trained, _ = token_logprobs(rows, drawn.tokens, temperature=sampling.get("temperature", 1.0))
    np.testing.assert_allclose(trained.numpy(), drawn.logprobs.numpy(), atol=2e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_would_end_for_sure_draws_another_and_its_neighbour_as_before(
    temperature: float,
) -> None:
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(4))
    logits[0, 2] = 500.0  # the others weigh nothing beside it in float32
    samplings = [Sampling(max_new_tokens=1, temperature=temperature)] * 2
    settings = DrawSettings.of(samplings, [1, 1], [5, 6], CPU)
    positions = torch.zeros(2, dtype=torch.int64)
    free = draw(logits, settings, positions)
    drawn = draw(logits, settings, positions, torch.tensor([[2], [-1]]))
    assert int(free.tokens[0]) == 2 != int(drawn.tokens[0])
    assert float(drawn.logprobs[0]) == pytest.approx(float(logits[0, drawn.tokens[0]]) - 500)
    assert drawn.tokens[1] == free.tokens[1]
    assert drawn.logprobs[1].equal(free.logprobs[1])
    if temperature == 0:
        rest = logits[0].clone()
        rest[2] = -1e9
        assert drawn.tokens[0] == rest.argmax()


def test_uniform_numbers_are_uniform_and_uncorrelated_over_seeds_and_positions() -> None:
    seeds, positions = torch.arange(200)[:, None], torch.arange(200)[None, :]
    numbers = uniform(seeds.expand(200, 200), positions.expand(200, 200))
    assert 0 <= float(numbers.min()) < float(numbers.max()) < 1
    counts = torch.histc(numbers.flatten(), 50, 0, 1)
    assert chi_square_excess(counts, torch.full((50,), 0.02, dtype=torch.float64)) < 4
    for one, other in (
        (numbers[:-1], numbers[1:]),
        (numbers[:, :-1], numbers[:, 1:]),
        (numbers[:-1, 1:], numbers[1:, :-1]),
    ):
        correlation = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]
        assert abs(float(correlation)) < 4 / math.sqrt(one.numel())


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    width=st.sampled_from([5, 40, 700, 1100]),
    top_k=st.sampled_from([0, 1, 2, 20, 200, 5000]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.95, 0.999999, 1.0]),
    coarse=st.booleans(),
)
def test_truncation_keeps_exactly_the_set_of_the_definition(
    seed: int, width: int, top_k: int, top_p: float, coarse: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(width, generator=generator) * 2
    if coarse:  # values that are equal, as bfloat16 makes them
        logits = (logits * 2).round() / 2
    histogram = draw_many(logits, 100, top_k=top_k, top_p=top_p)
    p = logits.double().softmax(-1)
    kept = torch.ones(width, dtype=torch.bool)
    if 0 < top_k < width:
        kept = logits >= logits.topk(top_k).values[-1]
    drawn = histogram > 0
    assert not bool((drawn & ~kept).any())
    # Mass of strictly likelier tokens below top_p (with slack for float32): may be drawn.
    likelier = torch.stack([p[kept & (logits > value)].sum() for value in logits])
    assert bool((likelier[drawn] / p[kept].sum() < top_p + 1e-5).all())


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), width=st.sampled_from([13, 1100]), data=st.data())
def test_a_row_draws_the_same_alone_and_among_others(
    seed: int, width: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(6, width, generator=generator) * 4).round() / 2
    kinds = st.builds(
        Sampling,
        max_new_tokens=st.just(1),
        temperature=st.sampled_from([0.0, 0.5, 1.0]),
        top_k=st.sampled_from([0, 1, 7, 300]),
        top_p=st.sampled_from([0.3, 0.99, 1.0]),
    )
    samplings = data.draw(st.lists(kinds, min_size=6, max_size=6))
    seeds = list(range(seed, seed + 6))
    together = draw_each(logits, samplings, seeds)
    for row in range(6):
        alone = draw_each(logits[row : row + 1], [samplings[row]], [seeds[row]])
        assert alone.tokens[0] == together.tokens[row]
        assert alone.logprobs[0] == pytest.approx(float(together.logprobs[row]), abs=1e-6)
        assert alone.logprobs_t1[0] == pytest.approx(float(together.logprobs_t1[row]), abs=1e-6)


def test_greedy_rows_take_the_likeliest_token_and_report_temperature_1() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    greedy, hot = Sampling(max_new_tokens=1, temperature=0), Sampling(max_new_tokens=1)
    for samplings in ([greedy] * 4, [greedy, hot, greedy, hot]):
        drawn = draw_each(logits, samplings, [1, 2, 3, 4])
        for row, sampling in enumerate(samplings):
            if sampling is greedy:
                assert drawn.tokens[row] == logits[row].argmax()
                expected = float(logits[row].double().log_softmax(-1).max())
                assert float(drawn.logprobs[row]) == pytest.approx(expected, abs=1e-6)
                assert float(drawn.logprobs_t1[row]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_told_and_change_no_other(bad: float) -> None:
    samplings = [Sampling(max_new_tokens=1, top_p=0.9), Sampling(max_new_tokens=1)] * 2
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(3))
    whole = draw_each(logits, samplings, [1, 2, 3, 4])
    assert whole.broken is None
    logits[1, 4] = bad
    drawn = draw_each(logits, samplings, [1, 2, 3, 4])
    assert drawn.broken is not None and drawn.broken.tolist() == [False, True, False, False]
    for name in ("tokens", "logprobs", "logprobs_t1"):
        left, right = getattr(drawn, name), getattr(whole, name)
        assert torch.equal(left[~drawn.broken], right[~drawn.broken])
    logits[1, 4] = float("-inf")  # a token that cannot be is no fault
    assert draw_each(logits, samplings, [1, 2, 3, 4]).broken is None


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": LEAST_TEMPERATURE},
        {"temperature": MOST_TEMPERATURE},
        {"top_p": 1e-300},
        {"top_p": 1 - 1e-16},
        {"top_k": 2**31 - 1},
    ],
)
def test_the_ends_of_what_may_be_asked_give_tokens(sampling: dict) -> None:
    logits = 1e4 * torch.randn(2, 50, generator=torch.Generator().manual_seed(5))
    drawn = draw_each(logits, [Sampling(max_new_tokens=1, **sampling)] * 2, [1, 2])
    assert drawn.broken is None and bool(drawn.logprobs.isfinite().all())
    if sampling in ({"temperature": LEAST_TEMPERATURE}, {"top_p": 1e-300}):
        assert torch.equal(drawn.tokens, logits.argmax(-1))
