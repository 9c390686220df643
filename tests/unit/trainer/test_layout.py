"""The packed layout against the attention it stands for: every token sees its own past."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from services.trainer.backend import Row
from services.trainer.backends.packing import (
    AGAIN_FACTOR,
    LONG_TOKENS,
    PASS_TOKENS,
    PackedLayout,
    pack,
    split_rows,
)
from services.trainer.backends.reference.attention import attend
from sluice.fused_operations import attention_kernel
from tests.fused_stand_ins import CALLS, place_all

GROUPS = st.lists(
    st.tuples(
        st.integers(1, 20),  # prompt
        st.lists(st.integers(1, 90), min_size=1, max_size=6),  # responses
        st.booleans(),  # whether its last row has another prompt
    ),
    min_size=1,
    max_size=4,
)


def make_rows(groups: list[tuple[int, list[int], bool]]) -> list[Row]:
    random = np.random.default_rng(len(groups))
    rows = []
    for group, (prompt_length, responses, differs) in enumerate(groups):
        prompt = random.integers(0, 1000, prompt_length)
        for index, length in enumerate(responses):
            if differs and index == len(responses) - 1:
                prompt = random.integers(0, 1000, prompt_length + 1)
            tokens = np.concatenate([prompt, random.integers(0, 1000, length)])
            rows.append(
                Row(
                    sample_id=f"{group}/{index}",
                    group_id=str(group),
                    token_ids=torch.from_numpy(tokens),
                    prompt_length=len(prompt),
                    loss_mask=torch.ones(length, dtype=torch.bool),
                )
            )
    return rows


def pasts(layout: PackedLayout) -> list[list[int]]:
    """What each packed token sees, as token ids in the order of positions, by running attention.

    Values are one-hot in the packed position and scores are 0, so that an output is nonzero
    exactly where the token looked.
    """
    tokens = len(layout.token_ids)
    zeros, eye = torch.zeros(1, 1, tokens, 8), torch.eye(tokens)[None, None]
    out, _ = attend(torch.nn.Identity(), zeros, zeros, eye, None, scaling=1.0, packed_layout=layout)
    seen = []
    for looked in out[0, :, 0] > 0:
        where = looked.nonzero()[:, 0]
        order = layout.position_ids[where].argsort()
        assert layout.position_ids[where][order].tolist() == list(range(len(where)))
        seen.append(layout.token_ids[where][order].tolist())
    return seen


@settings(max_examples=40)
@given(groups=GROUPS)
def test_every_response_token_is_predicted_from_exactly_its_own_past(
    groups: list[tuple[int, list[int], bool]],
) -> None:
    check_pasts(make_rows(groups))


@pytest.mark.parametrize(
    "group",
    [
        (30, [600, 600, 590, 300, 70, 5, 1], True),  # causal, with others of their length or alone
        (700, [560, 540, 540, 513, 512, 90, 3], False),  # behind a longer prompt: in blocks
        (520, [1100, 521, 521], False),
    ],
)
def test_long_rows_see_exactly_their_own_past(group: tuple[int, list[int], bool]) -> None:
    check_pasts(make_rows([group, (5, [4, 4], False)]))


def check_pasts(rows: list[Row]) -> None:
    layout = pack(rows)
    seen = pasts(layout)
    at = 0
    for row in rows:
        tokens = row.token_ids.tolist()
        for position in range(row.prompt_length, len(tokens)):
            assert layout.targets[at] == tokens[position]
            assert seen[int(layout.predictors[at])] == tokens[:position]
            at += 1
    assert at == len(layout.targets)


@settings(max_examples=40)
@given(groups=GROUPS)
def test_prompts_stand_once_and_padding_is_bounded(
    groups: list[tuple[int, list[int], bool]],
) -> None:
    rows = make_rows(groups)
    layout = pack(rows)
    prompts = {(r.group_id, tuple(r.token_ids[: r.prompt_length].tolist())) for r in rows}
    needed = sum(len(prompt) for _, prompt in prompts)
    needed += sum(row.response_length - 1 for row in rows)
    assert len(layout.token_ids) == needed
    assert layout.longest == max(len(row.token_ids) for row in rows)
    for bucket in layout.buckets:
        real = int(bucket.queries.count_nonzero()) + bucket.count  # padding stands at 0
        assert len(bucket.queries) < 2 * real


def pairs_of(layout: PackedLayout) -> int:
    """Pairs of a query and a key that the attention of a pack looks at."""
    pairs = 0
    for bucket in layout.buckets:
        before = bucket.key_length - bucket.query_length
        each = bucket.query_length * bucket.key_length
        if bucket.mask is None:  # a block looks at keys that its last query sees
            block = min(LONG_TOKENS, bucket.query_length) if before else 1
            each = bucket.query_length * (before + (bucket.query_length + block) // 2)
        pairs += bucket.count * each
    return pairs


@pytest.mark.parametrize(
    ("prompt", "responses"),
    [(128, [2048] * 4), (128, [4000, 8000]), (900, [901, 3000, 2000]), (4000, [2049, 1025, 600])],
)
def test_long_rows_are_attended_as_cheaply_together_as_apart(
    prompt: int, responses: list[int]
) -> None:
    layout = pack(make_rows([(prompt, responses, False)]))
    apart = sum((prompt + response) ** 2 // 2 for response in responses)
    assert pairs_of(layout) <= 1.01 * apart
    masks = [bucket.mask for bucket in layout.buckets if bucket.mask is not None]
    assert all(mask.shape[-2] <= LONG_TOKENS for mask in masks)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 100, PASS_TOKENS // AGAIN_FACTOR, 2000, 9000]),  # prompt
            st.lists(st.integers(1, 3000), min_size=1, max_size=5),  # responses
            st.just(False),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_passes_have_every_row_once_and_never_a_long_prompt_twice(
    groups: list[tuple[int, list[int], bool]],
) -> None:
    rows = make_rows(groups)
    parts = list(split_rows(rows))
    assert sorted(row.sample_id for part in parts for row in part) == [r.sample_id for r in rows]
    places: dict[int, list[int]] = {group: [] for group in range(len(groups))}
    for index, part in enumerate(parts):
        for group in {int(row.group_id) for row in part}:
            places[group].append(index)
    for group, (prompt, _, _) in enumerate(groups):
        assert len(places[group]) == 1 or prompt * AGAIN_FACTOR <= PASS_TOKENS
    if all(prompt * AGAIN_FACTOR <= PASS_TOKENS for prompt, _, _ in groups):
        longest = max(len(row.token_ids) for row in rows)
        assert all(len(pack(part).token_ids) < PASS_TOKENS + longest for part in parts)
        assert all(len(pack(part).token_ids) > PASS_TOKENS - 2 * len(part) for part in parts[:-1])


@pytest.mark.parametrize(
    "implementation", ["flash_attn", "flash_attn_3", "npu_fusion_attention", "torch_varlen"]
)
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("window", [None, 40])
def test_a_kernel_attends_as_torch_does(
    monkeypatch: pytest.MonkeyPatch, implementation: str, shares: bool, window: int | None
) -> None:
    """Runs, rows behind their prompts, padded buckets and long ones; masks stay torch's."""
    place_all(monkeypatch)
    groups = [(30, [90, 90, 70, 5, 1], True), (600, [560, 540, 40], False), (3, [7], False)]
    layout = pack(make_rows(groups), shares_prompts=shares)
    torch.manual_seed(0)
    heads, kv_heads, tokens = 4, 2, len(layout.token_ids)
    query, key, value = (
        torch.randn(1, count, tokens, 16, dtype=torch.bfloat16)
        for count in (heads, kv_heads, kv_heads)
    )
    if window is not None and shares:
        return  # refused, with and without a kernel
    kernel = attention_kernel(implementation)
    options = {"scaling": 0.3, "sliding_window": window, "packed_layout": layout}
    given = (torch.nn.Identity(), query, key, value, None)
    wanted, _ = attend(*given, **options)
    assert not CALLS
    found, _ = attend(*given, **options, kernel=kernel)
    assert 0 < CALLS[implementation] <= len(layout.buckets)
    assert (CALLS[implementation] == len(layout.buckets)) == (not shares)
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("unknown", [{"s_aux": torch.zeros(2)}, {"softcap": 0.5}])
def test_no_kernel_makes_scores_that_have_sinks_or_a_cap(
    monkeypatch: pytest.MonkeyPatch, unknown: dict[str, Any]
) -> None:
    place_all(monkeypatch)
    layout = pack(make_rows([(30, [9, 5], False)]), shares_prompts=False)
    heads = [torch.randn(1, 2, len(layout.token_ids), 16, dtype=torch.bfloat16) for _ in range(3)]
    kernel = attention_kernel("flash_attn")
    attend(torch.nn.Identity(), *heads, None, packed_layout=layout, kernel=kernel, **unknown)
    assert not CALLS


class Masks(TorchFunctionMode):
    """Sees what PyTorch's attention is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if function is torch.nn.functional.scaled_dot_product_attention and "attn_mask" in named:
            self.seen.append(named["attn_mask"])
        return function(*args, **named)


def test_layers_of_a_pass_share_a_mask_to_add_and_all_numbers_stay() -> None:
    layout = pack(make_rows([(5, [5, 4, 4, 2], False)]))
    (bucket,) = (each for each in layout.buckets if each.mask is not None)
    heads = torch.randn(1, 2, len(layout.token_ids), 8)
    with Masks() as masks:
        for _ in range(2):
            attend(torch.nn.Identity(), heads, heads, heads, None, packed_layout=layout)
        narrow = heads.bfloat16()
        attend(torch.nn.Identity(), narrow, narrow, narrow, None, packed_layout=layout)
    added, again, shown = masks.seen
    assert added is again and added.dtype == torch.float32 and shown is bucket.mask
    lengths = (bucket.query_length, bucket.key_length, bucket.key_length)
    of_bucket = [torch.randn(bucket.count, 2, n, 8, requires_grad=True) for n in lengths]
    made = []
    for mask in (bucket.mask, added):
        out = torch.nn.functional.scaled_dot_product_attention(*of_bucket, attn_mask=mask)
        made.append([out, *torch.autograd.grad(out.square().sum(), of_bucket)])
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))
