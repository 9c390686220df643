"""The packed layout against the attention it stands for: every token sees its own past."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.backend import Row
from services.trainer.backends.reference.model import PackedLayout, attend, pack

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


@settings(max_examples=40, deadline=None)
@given(groups=GROUPS)
def test_every_response_token_is_predicted_from_exactly_its_own_past(
    groups: list[tuple[int, list[int], bool]],
) -> None:
    rows = make_rows(groups)
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


@settings(max_examples=40, deadline=None)
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
        padded = bucket.count * bucket.query_length
        real = padded if bucket.kept is None else len(bucket.kept)
        assert padded < 2 * real or padded == real
