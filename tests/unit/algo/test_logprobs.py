"""Log-probs and entropy against log_softmax and autograd in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from sluice.algo import logprobs
from sluice.algo.logprobs import VocabShard, chunks_of_logits, linear_logprobs, token_logprobs
from tests.live_memory import LiveMemory

HIDDEN = 6


def plain(logits, targets, temperature=1.0, size=None, cap=None):
    if cap is not None:
        logits = cap * (logits / cap).tanh()
    scaled = (logits[:, :size] / temperature).log_softmax(-1)
    entropy = -(scaled.exp() * scaled).sum(-1)
    return scaled.gather(1, targets[:, None]).squeeze(1), entropy


def fused(kind, hidden, weight, targets, **options):
    if kind == "linear":
        return linear_logprobs(hidden, weight, targets, **options)
    return token_logprobs(hidden @ weight.T, targets, **options)


def draw(seed, rows, columns, dtype=torch.float64, size=None):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(columns, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, size or columns, (rows,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


@settings(max_examples=40)
@given(
    st.sampled_from(["logits", "linear"]),
    st.integers(0, 2**31),
    st.integers(0, 17),
    st.integers(2, 40),
    st.integers(1, 40),
    st.sampled_from([1.0, 0.6, 2.5]),
    st.sampled_from(["metric", "gradient", "off"]),
    st.booleans(),
    st.sampled_from([None, 1.5, 30.0]),
)
def test_values_and_gradients_equal_autograd(
    kind, seed, rows, columns, chunk, temperature, entropy, padded, cap
):
    size = columns - 1 if padded else None
    leaves = draw(seed, rows, columns, size=size)
    hidden, weight, targets = leaves
    options = {"temperature": temperature, "entropy": entropy, "chunk_rows": chunk, "cap": cap}
    found = fused(kind, hidden, weight, targets, vocab=VocabShard(size=size), **options)
    wanted = plain(hidden @ weight.T, targets, temperature, size, cap)
    torch.testing.assert_close(found[0], wanted[0])
    if entropy == "off":
        assert not found[1].any()
    else:
        torch.testing.assert_close(found[1], wanted[1])
    assert found[1].requires_grad == (entropy == "gradient")
    generator = torch.Generator().manual_seed(seed)
    upstream = torch.randn(2, rows, generator=generator, dtype=torch.float64)
    if entropy != "gradient":
        upstream[1] = 0
    mine = torch.autograd.grad(
        (upstream[0] * found[0]).sum() + (upstream[1] * found[1]).sum(), (hidden, weight)
    )
    theirs = torch.autograd.grad(
        (upstream[0] * wanted[0]).sum() + (upstream[1] * wanted[1]).sum(), (hidden, weight)
    )
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_few_logits_are_made_at_once_unless_they_are_wider_than_their_factors():
    assert chunks_of_logits(5, 4, 20, float32=False) is None
    assert chunks_of_logits(5, 4, 20, float32=True) == {"float32": True, "chunk_rows": 5}
    assert chunks_of_logits(0, 4, 20, float32=True) == {"float32": True, "chunk_rows": 1}
    for wide in (False, True):
        many = chunks_of_logits(7, 3, 20, float32=wide)
        assert many == {"float32": wide, "chunk_rows": None}, "as many rows as suit the device"


@pytest.mark.parametrize("entropy", ["metric", "gradient"])
def test_overwriting_the_logits_gives_the_same_gradient(entropy):
    hidden, weight, targets = draw(0, 9, 21)
    gradients = []
    for reuse in (False, True):
        logits = hidden @ weight.T
        seen = logits.data_ptr()
        found = token_logprobs(logits, targets, entropy=entropy, reuse_logits=reuse, chunk_rows=4)
        logits.register_hook(lambda grad, seen=seen, r=reuse: _check(grad.data_ptr() == seen, r))
        loss = found[0].sum() + (found[1].sum() if entropy == "gradient" else 0)
        gradients.append(torch.autograd.grad(loss, hidden)[0])
    torch.testing.assert_close(*gradients)


def _check(same, expected):
    assert same == expected


@pytest.mark.parametrize("entropy", ["metric", "gradient"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_in_memory_once_or_a_chunk_at_a_time(entropy, dtype):
    """There and back."""
    rows, columns, chunk = 512, 4000, 64
    hidden, weight, targets = draw(9, rows, columns, dtype)
    whole = rows * columns * dtype.itemsize

    def peak(kind, **options):
        with LiveMemory() as memory:
            found = fused(kind, hidden, weight, targets, entropy=entropy, **options)
            (found[0].sum() + (found[1].sum() if entropy == "gradient" else 0)).backward()
        return memory.peak / whole

    assert peak("linear", chunk_rows=chunk) < 3 * chunk / rows
    assert peak("linear", chunk_rows=chunk, float32=True) < 5 * chunk / rows
    assert 1 <= peak("logits", reuse_logits=True) < 1.5
    assert 2 <= peak("logits") < 2.5  # and their gradient beside them


@pytest.mark.parametrize("kind", ["logits", "linear"])
def test_padding_columns_get_no_probability_and_no_gradient(kind):
    hidden, weight, targets = draw(1, 7, 12, size=10)
    with torch.no_grad():
        weight[10:] = 50.0  # would take all the probability
    found = fused(kind, hidden, weight, targets, vocab=VocabShard(size=10))
    found[0].sum().backward()
    torch.testing.assert_close(found[0], plain(hidden @ weight.T, targets, size=10)[0])
    assert not weight.grad[10:].any()
    assert weight.grad[:10].any()


@pytest.mark.parametrize("kind", ["logits", "linear"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_inputs_accumulate_in_float32(kind, dtype):
    """As exact as the given logits allow: a low-precision softmax would be off by 1e-2."""
    hidden, weight, targets = draw(2, 33, 700, dtype)
    found = fused(kind, hidden, weight, targets, entropy="gradient", chunk_rows=8)
    assert found[0].dtype == torch.float32
    # products of the same shapes: a processor may round those of others otherwise
    logits = torch.cat([rows @ weight.T for rows in hidden.split(8 if kind == "linear" else 33)])
    wanted = plain(logits.double(), targets)
    torch.testing.assert_close(found[0].double(), wanted[0], atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(found[1].double(), wanted[1], atol=1e-5, rtol=1e-6)
    (found[0].sum() + found[1].sum()).backward()
    exact_hidden = hidden.detach().double().requires_grad_()
    exact_weight = weight.detach().double().requires_grad_()
    exact = plain(exact_hidden @ exact_weight.T, targets)
    (exact[0].sum() + exact[1].sum()).backward()
    assert hidden.grad.dtype == dtype
    for mine, wanted in ((hidden, exact_hidden), (weight, exact_weight)):
        error = (mine.grad.double() - wanted.grad).norm() / wanted.grad.norm()
        assert error < 8 * torch.finfo(dtype).eps


def test_the_weight_gradient_is_summed_in_float32_over_many_chunks():
    """512 chunks added up in bfloat16 would lose most of what each of them brings."""
    hidden, weight, targets = draw(6, 1024, 5, torch.bfloat16)
    linear_logprobs(hidden, weight, targets, chunk_rows=2)[0].sum().backward()
    exact = weight.detach().double().requires_grad_()
    plain(hidden.detach().double() @ exact.T, targets)[0].sum().backward()
    error = (weight.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert error < torch.finfo(torch.bfloat16).eps


def test_large_logits_neither_overflow_nor_cancel():
    logits = torch.tensor([[1e4, 1e4 - 1, -1e4], [-3e4, -3e4, -3e4]], requires_grad=True)
    found = token_logprobs(logits, torch.tensor([1, 2]), entropy="gradient")
    wanted = plain(logits.double(), torch.tensor([1, 2]))
    torch.testing.assert_close(found[0].double(), wanted[0])
    torch.testing.assert_close(found[1].double(), wanted[1])
    (found[0].sum() + found[1].sum()).backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("entropy", ["metric", "gradient"])
def test_a_banned_token_has_no_entropy(entropy):
    """A logit of -inf weighs 0 x inf in the plain entropy; here it weighs nothing."""
    logits = torch.tensor([[0.5, -torch.inf, 1.0]], requires_grad=True)
    found = token_logprobs(logits, torch.tensor([0]), entropy=entropy)
    kept = plain(logits[:, [0, 2]].detach(), torch.tensor([0]))
    torch.testing.assert_close(found[0].detach(), kept[0])
    torch.testing.assert_close(found[1].detach(), kept[1])
    (found[0].sum() + (found[1].sum() if entropy == "gradient" else 0)).backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 1] == 0


@pytest.mark.parametrize("kind", ["logits", "linear"])
def test_bad_arguments_are_errors(kind):
    hidden, weight, targets = draw(3, 4, 8)
    for temperature in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="temperature"):
            fused(kind, hidden, weight, targets, temperature=temperature)
    with pytest.raises(ValueError, match="chunk_rows"):
        fused(kind, hidden, weight, targets, chunk_rows=0)
    for bad in (-100, 8):
        with pytest.raises(ValueError, match="targets span"):
            fused(kind, hidden, weight, targets.index_fill(0, torch.tensor([1]), bad))
    with pytest.raises(ValueError, match="vocabulary has 6"):
        fused(kind, hidden, weight, targets.fill_(7), vocab=VocabShard(size=6))


def test_linear_refuses_mixed_dtypes():
    hidden, weight, targets = draw(4, 4, 8)
    with pytest.raises(ValueError, match="float64"):
        linear_logprobs(hidden.float(), weight, targets)


def test_a_frozen_output_weight_gets_no_gradient():
    hidden, weight, targets = draw(5, 4, 8)
    linear_logprobs(hidden, weight.detach(), targets)[0].sum().backward()
    expected = torch.autograd.grad(plain(hidden @ weight.detach().T, targets)[0].sum(), hidden)[0]
    torch.testing.assert_close(hidden.grad, expected)


def realistic(rows=64, hidden_size=96, columns=900, seed=0):
    """(hidden, weight, targets) in bfloat16, with logits of the size that trained models have."""
    rng = np.random.default_rng(seed)
    hidden = torch.from_numpy(rng.normal(scale=2.0, size=(rows, hidden_size))).bfloat16()
    weight = torch.from_numpy(rng.normal(scale=0.4, size=(columns, hidden_size))).bfloat16()
    return hidden, weight, torch.from_numpy(rng.integers(0, columns, rows))


def oracle_logprobs(hidden, weight, targets, temperature=1.0):
    """In numpy float64, from the very numbers that bfloat16 holds."""
    logits = hidden.double().numpy() @ weight.double().numpy().T / temperature
    top = logits.max(-1, keepdims=True)
    chosen = np.take_along_axis(logits, targets.numpy()[:, None], 1)
    return (chosen - top - np.log(np.exp(logits - top).sum(-1, keepdims=True)))[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("chunk_rows", [7, 512])
def test_float32_logits_of_bfloat16_factors_are_exact(temperature, chunk_rows):
    case = realistic()
    wanted = oracle_logprobs(*case, temperature)
    options = {"temperature": temperature, "chunk_rows": chunk_rows, "entropy": "off"}
    exact, _ = linear_logprobs(*case, float32=True, **options)
    rounded, _ = linear_logprobs(*case, **options)
    assert np.abs(exact.numpy() - wanted).mean() < 1e-5
    assert np.abs(rounded.numpy() - wanted).mean() > 5e-3  # the check above would see it


def test_float32_logits_have_the_gradient_of_their_factors():
    hidden, weight, targets = realistic(seed=1)
    upstream = torch.randn(len(targets), generator=torch.Generator().manual_seed(0))
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    logprobs, _ = linear_logprobs(*leaves, targets, float32=True, chunk_rows=10)
    found = torch.autograd.grad((upstream * logprobs).sum(), leaves)
    exact = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    wanted_logprobs, _ = plain(exact[0] @ exact[1].T, targets)
    wanted = torch.autograd.grad((upstream.double() * wanted_logprobs).sum(), exact)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == torch.bfloat16
        # what is left is the rounding of the gradient itself, half a unit in the last place
        torch.testing.assert_close(mine.double(), theirs, rtol=2**-8, atol=1e-5)


def test_float32_logits_change_nothing_of_wider_factors():
    leaves = draw(3, 20, 50)
    for options in ({}, {"float32": True}):
        found = linear_logprobs(*leaves, **options)[0]
        torch.testing.assert_close(found, plain(leaves[0] @ leaves[1].T, leaves[2])[0])


def test_a_wide_product_is_asked_for_in_words_that_torch_knows():
    """On a device that has them; the shapes and types are checked without one."""
    hidden, weight = (torch.empty(4, 3, dtype=torch.bfloat16, device="meta") for _ in range(2))
    out = torch.empty(4, 4, device="meta")
    logprobs._make_logits(hidden, weight, out)
    with pytest.raises(RuntimeError):
        logprobs._make_logits(hidden, weight, out.double())


class Launches(TorchDispatchMode):
    """Counts what a host would launch on a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("entropy", ["metric", "gradient"])
def test_a_device_is_told_of_many_logits_at_once(entropy):
    """Of a vocabulary of Qwen's 14,336 rows: launched a few at a time the host sets the pace."""

    def launched(rows):
        hidden = torch.empty(rows, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(151_936, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
        targets = torch.empty(rows, device="meta", dtype=torch.int64)
        with Launches() as launches:
            found = linear_logprobs(hidden, weight, targets, float32=True, entropy=entropy)
            (found[0].sum() + (found[1].sum() if entropy == "gradient" else 0)).backward()
        return launches.count

    assert launched(14_336) < 6_000
    assert launched(2_048) < 1_000


@pytest.mark.parametrize("spread", [1.0, 5.0, 30.0])
def test_gradients_over_a_large_vocabulary_lose_no_digits(spread):
    """Beside float64: a sum of as many float32 numbers one by one is a hundred times further."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(8, 151_936, generator=generator) * spread).requires_grad_()
    targets = torch.randint(0, 151_936, (8,), generator=generator)
    exact = logits.detach().double().requires_grad_()
    (mine,) = torch.autograd.grad(token_logprobs(logits, targets)[0].sum(), logits)
    (wanted,) = torch.autograd.grad(plain(exact, targets)[0].sum(), exact)
    assert (mine - wanted).norm() < 2e-7 * wanted.norm()
