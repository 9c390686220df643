"""The likeliest tokens of rows of logits, against a float64 oracle and a plain sort."""

import numpy as np
import pytest
import torch

from sluice.algo.likeliest import NO_TOKEN, find_likeliest
from sluice.algo.logprobs import VocabShard, linear_logprobs, top_logprobs


def sorted_plainly(row: list[float], count: int) -> list[int]:
    return sorted(range(len(row)), key=lambda column: (-row[column], column))[:count]


@pytest.mark.parametrize("count", [1, 3, 17, 40])
@pytest.mark.parametrize("levels", [2, 5, 10**6])
def test_of_equal_logits_those_of_the_lowest_ids_are_taken(count: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(count + levels)
    logits = torch.randint(levels, (50, 40), generator=generator).float()
    values, ids = find_likeliest(logits, count)
    assert ids.tolist() == [sorted_plainly(row, count) for row in logits.tolist()]
    assert torch.equal(values, logits.gather(1, ids))
    # however the rows are cut, and wherever they lie
    for row, found in zip(logits, ids, strict=True):
        assert torch.equal(find_likeliest(row[None].clone(), count)[1][0], found)


def test_banned_tokens_come_last_and_what_is_missing_behind_them() -> None:
    low = -torch.inf
    values, ids = find_likeliest(torch.tensor([[low, 2.0, low], [low, low, low]]), 5)
    assert ids.tolist() == [[1, 0, 2, NO_TOKEN, NO_TOKEN], [0, 1, 2, NO_TOKEN, NO_TOKEN]]
    assert values.tolist() == [[2.0, low, low, low, low], [low] * 5]
    values, ids = find_likeliest(torch.empty(2, 0), 3)  # of a rank that has padding alone
    assert ids.tolist() == [[NO_TOKEN] * 3] * 2 and values.tolist() == [[low] * 3] * 2
    assert find_likeliest(torch.empty(0, 7), 3)[1].shape == (0, 3)


def test_a_logit_that_is_no_number_is_seen_beside_equal_ones() -> None:
    logits = torch.tensor([[1.0, 1.0, torch.nan, 1.0, 1.0], [torch.nan] * 5])
    values, ids = find_likeliest(logits, 3)
    assert ids[0].tolist() == [2, 0, 1] and values[0, 0].isnan()
    assert values[1].isnan().all() and len(set(ids[1].tolist())) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("temperature", "size", "chunk_rows", "cap"),
    [(1.0, 61, 512, None), (0.7, 61, 3, None), (1e-3, 50, 1, None), (0.7, 50, 3, 6.0)],
)
def test_log_probs_are_those_of_the_whole_distribution(
    dtype: torch.dtype, temperature: float, size: int, chunk_rows: int, cap: float | None
) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(23, 16, generator=generator).to(dtype)
    weight, bias = (torch.randn(61, *n, generator=generator).to(dtype) for n in ((16,), ()))
    targets = torch.randint(size, (23,), generator=generator)
    options = {
        "temperature": temperature,
        "vocab": VocabShard(size=size),
        "chunk_rows": chunk_rows,
        "float32": dtype == torch.bfloat16,
        "cap": cap,
    }
    for added in (None, bias):
        found = top_logprobs(hidden, weight, targets, 9, bias_V=added, **options)
        logits = (hidden.double() @ weight.double().t())[:, :size]
        logits = logits if added is None else logits + added.double()[:size]
        logits = logits if cap is None else cap * (logits / cap).tanh()
        table = (logits / temperature).log_softmax(1)
        best, ids = table.topk(9, dim=1)
        close = {"atol": 1e-4 / temperature, "rtol": 1e-5}
        np.testing.assert_allclose(found.top.double(), best, **close)
        assert torch.equal(found.ids, ids)
        given = table.gather(1, targets[:, None])[:, 0]
        np.testing.assert_allclose(found.logprobs.double(), given, **close)
        wrong = table.gather(1, ids.roll(1, 1))
        assert not torch.allclose(found.top.double(), wrong, **close)
    # a token that was sampled has the same number wherever it is named
    found = top_logprobs(hidden, weight, targets, size, **options)
    place = (found.ids == targets[:, None]).nonzero()
    assert torch.equal(found.top[place[:, 0], place[:, 1]], found.logprobs)
    plain, _ = linear_logprobs(hidden, weight, targets, entropy="off", **options)
    assert torch.equal(found.logprobs, plain)


@pytest.mark.parametrize("count", [0, -1, 51])
def test_more_tokens_than_there_are_and_none_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} tokens of a vocabulary of 50"):
        top_logprobs(
            torch.zeros(2, 4),
            torch.zeros(61, 4),
            torch.zeros(2, dtype=torch.int64),
            count,
            vocab=VocabShard(size=50),
        )


def test_numbers_of_any_size_stay_numbers() -> None:
    hidden = torch.tensor([[1e30], [-1e30], [0.0], [1e-38]])
    weight = torch.tensor([[1.0], [-1.0], [0.5], [1.0]])
    found = top_logprobs(hidden, weight, torch.zeros(4, dtype=torch.int64), 2)
    assert found.ids.tolist() == [[0, 3], [1, 2], [0, 1], [0, 3]]
    half = float(np.log(0.5))
    expected = [[half, half], [0.0, -torch.inf], [2 * half, 2 * half], [2 * half, 2 * half]]
    np.testing.assert_allclose(found.top[0:1], expected[0:1], rtol=1e-6)
    assert found.top[1, 0] == 0 and found.top[1, 1] < -1e29
    np.testing.assert_allclose(found.top[2:], expected[2:], rtol=1e-6)
