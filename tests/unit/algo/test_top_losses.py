"""Losses over the tokens that a teacher names, against the formulas in numpy, float64."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.backend import Row
from sluice.algo.logprobs import linear_logprobs, token_logprobs
from sluice.algo.losses import LossInputs, MissingColumnError, compute_loss, pack_rows
from sluice.algo.spec import LossSpec, required_columns


def outcomes(logprobs, tail):
    p = np.exp(logprobs)
    if tail == "renormalised":
        return p / p.sum(1, keepdims=True)
    return np.concatenate([p, np.maximum(1 - p.sum(1, keepdims=True), 1e-6)], 1)


def kl(p, q):
    return (p * (np.log(p) - np.log(q))).sum(1)


def divergence(name, teacher, student, beta=0.5):
    if name == "topk_forward_kl":
        return kl(teacher, student)
    if name == "topk_reverse_kl":
        return kl(student, teacher)
    mixture = beta * teacher + (1 - beta) * student
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def log_softmax(logits):
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def inputs_of(teacher, student, mask, weights, index):
    count = teacher.shape[1]
    return LossInputs(
        outputs=torch.zeros(len(mask), dtype=torch.float64, requires_grad=True),
        top=torch.tensor(student, requires_grad=True),
        mask=torch.tensor(mask),
        sample_index=torch.tensor(index),
        sample_weights=torch.tensor(weights),
        columns={
            f"teacher_top_ids/{count}": torch.zeros(len(mask), count, dtype=torch.int32),
            f"teacher_top_logprobs/{count}": torch.tensor(teacher),
        },
    )


@pytest.mark.parametrize("tail", ["bucket", "renormalised"])
@pytest.mark.parametrize("name", ["topk_forward_kl", "topk_reverse_kl", "topk_jsd"])
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(2, 9), scale=st.floats(0.01, 2))
def test_equal_to_the_formula_and_its_differences(name, tail, seed, count, scale):
    rng = np.random.default_rng(seed)
    teacher, student = (
        log_softmax(rng.normal(0, scale, (7, count + 3)))[:, :count] for _ in range(2)
    )
    mask, index = rng.random(7) > 0.3, np.array([0, 0, 0, 1, 1, 2, 2])
    mask[0], weights = True, rng.random(3) + 0.1
    beta = rng.uniform(0.05, 0.95)
    settings = {"top_count": count, "tail": tail} | ({"beta": beta} if name == "topk_jsd" else {})

    def loss(now):
        each = divergence(name, outcomes(teacher, tail), outcomes(now, tail), beta)
        return (each * weights[index])[mask].sum()

    inputs = inputs_of(teacher, student, mask, weights, index)
    terms = compute_loss(inputs, LossSpec(name=name, settings=settings))
    assert terms.loss.item() == pytest.approx(loss(student), rel=1e-9, abs=1e-12)
    (gradient,) = torch.autograd.grad(terms.loss, [inputs.top])
    assert not gradient[~torch.tensor(mask)].any()
    for place in np.argwhere(mask)[:, 0]:
        for number in range(count):
            step = np.zeros_like(student)
            step[place, number] = 1e-6
            wanted = (loss(student + step) - loss(student - step)) / 2e-6
            found = gradient[place, number].item()
            assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["topk_forward_kl", "topk_reverse_kl", "topk_jsd"])
@given(seed=st.integers(0, 2**32 - 1))
def test_with_a_bucket_no_more_than_over_the_whole_vocabulary(name, seed):
    rng = np.random.default_rng(seed)
    teacher, student = (log_softmax(rng.normal(0, 2, (5, 20))) for _ in range(2))
    named = np.argsort(-teacher, 1)[:, :4]
    whole = divergence(name, np.exp(teacher), np.exp(student)).sum()
    parts = [np.take_along_axis(each, named, 1) for each in (teacher, student)]
    spec = LossSpec(name=name, settings={"top_count": 4})
    inputs = inputs_of(*parts, np.ones(5, bool), np.ones(1), np.zeros(5, int))
    assert -1e-12 <= compute_loss(inputs, spec).loss.item() <= whole + 1e-9
    same = inputs_of(parts[0], parts[0], np.ones(5, bool), np.ones(1), np.zeros(5, int))
    assert compute_loss(same, spec).loss.item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", ["topk_forward_kl", "topk_reverse_kl", "topk_jsd"])
def test_a_vocabulary_that_is_named_whole_has_no_tail_to_learn_from(name):
    rng = np.random.default_rng(0)
    teacher, student = (log_softmax(rng.normal(0, 2, (5, 6))) for _ in range(2))
    teacher, student = teacher.astype(np.float32), student.astype(np.float32)
    inputs = inputs_of(teacher, student, np.ones(5, bool), np.ones(1), np.zeros(5, int))
    spec = LossSpec(name=name, settings={"top_count": 6})
    terms = compute_loss(inputs, spec)
    wanted = divergence(name, np.exp(teacher.astype(float)), np.exp(student.astype(float))).sum()
    assert terms.loss.item() == pytest.approx(wanted, rel=1e-4)
    (gradient,) = torch.autograd.grad(terms.loss, [inputs.top])
    assert gradient.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"top_count": 0}, "greater than or equal to 1"),
        ({"top_count": 1025}, "less than or equal to 1024"),
        ({"top_count": 2.5}, "valid integer"),
        ({"tail": "none"}, "bucket"),
        ({"tail": "renormalised", "top_count": 1}, "always certain"),
        ({"beta": 0.5}, "has no effect"),
    ],
)
def test_settings_that_are_wrong_are_refused(settings, problem):
    with pytest.raises(ValueError, match=problem):
        LossSpec(name="topk_forward_kl", settings=settings)


@pytest.mark.parametrize("beta", [0, 1, -1, float("nan")])
def test_a_mixture_of_one_is_refused(beta):
    with pytest.raises(ValueError, match="beta"):
        LossSpec(name="topk_jsd", settings={"beta": beta})


@pytest.mark.parametrize("setting", ["clip_low", "old_logprobs", "importance"])
def test_what_has_no_policy_to_compare_with_refuses_its_settings(setting):
    value = {"clip_low": 0.2, "old_logprobs": "old", "importance": {"high": 2.0}}[setting]
    with pytest.raises(ValueError, match=setting):
        LossSpec(name="topk_forward_kl", **{setting: value})


def test_rows_need_the_columns_of_that_width():
    spec = LossSpec(name="topk_forward_kl", settings={"top_count": 3})
    needed = {"teacher_top_ids/3", "teacher_top_logprobs/3"}
    assert needed == required_columns(spec)
    row = Row(
        sample_id="a",
        group_id="a",
        token_ids=torch.arange(3),
        prompt_length=1,
        loss_mask=torch.ones(2, dtype=torch.bool),
        columns={"teacher_top_ids/2": torch.zeros(2, 2, dtype=torch.int32)},
    )
    with pytest.raises(MissingColumnError, match="teacher_top_ids/3"):
        pack_rows([row], spec, torch.zeros(2, 4))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_rows", [1, 3, 64])
def test_log_probs_of_several_tokens_equal_a_log_softmax_and_its_gradient(temperature, chunk_rows):
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (
        torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in ((9, 5), (11, 5))
    )
    targets = torch.randint(11, (9, 4), generator=generator)
    targets[0] = 2  # the same token several times adds up
    factors = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    plain = ((hidden @ weight.T) / temperature).log_softmax(1).gather(1, targets)
    options = {"temperature": temperature, "chunk_rows": chunk_rows}
    for found, _ in (
        token_logprobs(hidden @ weight.T, targets, **options),
        linear_logprobs(hidden, weight, targets, **options),
    ):
        torch.testing.assert_close(found, plain)
        for gradient, wanted in zip(
            torch.autograd.grad((found * factors).sum(), [hidden, weight]),
            torch.autograd.grad((plain * factors).sum(), [hidden, weight], retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(gradient, wanted)
