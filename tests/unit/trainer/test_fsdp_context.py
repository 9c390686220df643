"""Attention of rows cut over context ranks is that of whole rows, by masks over positions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.trainer.backend import Row
from services.trainer.backends.fsdp.config import FsdpConfig
from services.trainer.backends.fsdp.context import ContextLayout, attend_context, pack_context
from sluice.fused_operations import attention_kernel
from sluice.side_copies import to_device
from tests.fused_stand_ins import CALLS, place_all

HEADS, KV_HEADS, SIZE = 4, 2, 16
LENGTHS = (1, 700, 9, 70, 2)  # shorter than chunks of zig-zag, and longer than a block of queries


def make_rows(lengths: tuple[int, ...] = LENGTHS) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    return [
        Row(
            sample_id=f"{index}",
            group_id="0",
            token_ids=torch.randint(50, (length,), generator=generator),
            prompt_length=max(1, length // 3),
            loss_mask=torch.ones(length - max(1, length // 3), dtype=torch.bool),
        )
        for index, length in enumerate(lengths)
    ]


def lay_out(rows: list[Row], kind: Any, size: int) -> list[ContextLayout]:
    """What every rank of a group of `size` has."""
    settings = FsdpConfig(context=size, cp_layout=kind)
    places: list[Any] = [SimpleNamespace(rank=rank, size=size) for rank in range(size)]
    return [pack_context(rows, settings, place) for place in places]


def places_of(layouts: list[ContextLayout], rows: list[Row], kind: Any) -> torch.Tensor:
    """Where the tokens of the rows, row by row, stand among those of all ranks, by numbering."""
    count, numbered = 0, []
    for row in rows:
        numbers = torch.arange(count + 1, count + 1 + len(row.token_ids))
        numbered.append(row._replace(token_ids=numbers))
        count += len(numbers)
    found = torch.cat([layout.token_ids for layout in lay_out(numbered, kind, len(layouts))])
    return torch.stack([(found == number).nonzero()[0, 0] for number in range(1, count + 1)])


def attend_whole(
    heads: tuple[torch.Tensor, ...],
    rows: list[Row],
    places: torch.Tensor,
    window: int | None,
    sinks: torch.Tensor | None,
    cap: float | None = None,
) -> torch.Tensor:
    """[tokens of all rows, heads, SIZE] in float64, one row at a time, by the formula."""
    query, key, value = (part[0].double().index_select(1, places) for part in heads)
    made, start = [], 0
    for row in rows:
        part = slice(start, start := start + len(row.token_ids))
        scores = query[:, part] @ key[:, part].repeat_interleave(2, 0).transpose(1, 2) * 0.3
        scores = scores if cap is None else cap * (scores / cap).tanh()
        distance = torch.arange(len(row.token_ids))
        distance = distance[:, None] - distance
        seen = (distance >= 0) & (distance < (window or 10**9))
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            column = sinks.double()[:, None, None].expand(*scores.shape[:2], 1)
            scores = torch.cat([scores, column], dim=2)
        weights = scores.softmax(-1)[..., : scores.shape[1]]
        made.append((weights @ value[:, part].repeat_interleave(2, 0)).transpose(0, 1))
    return torch.cat(made)


def attend_parts(
    layouts: list[ContextLayout], heads: tuple[torch.Tensor, ...], **options: Any
) -> torch.Tensor:
    """[tokens of all ranks, heads, SIZE]: each rank's attention, given the keys of all."""
    _, key, value = heads
    whole, outputs = torch.cat((key, value), dim=-1)[0].transpose(0, 1), []
    for rank, layout in enumerate(layouts):
        length = len(layout.token_ids)
        part = slice(rank * length, (rank + 1) * length)

        def gather(local: torch.Tensor, part: slice = part) -> torch.Tensor:
            assert torch.equal(local, whole[part])
            return whole

        layout.context.all_gather = gather  # type: ignore[method-assign]
        local = [each[:, :, part] for each in heads]
        made, _ = attend_context(
            torch.nn.Identity(), *local, None, packed_layout=layout, scaling=0.3, **options
        )
        outputs.append(made[0])
    return torch.cat(outputs)


def draw_heads(tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    counts = (HEADS, KV_HEADS, KV_HEADS)
    return tuple(torch.randn(1, count, tokens, SIZE, dtype=dtype) for count in counts)


@pytest.mark.parametrize(
    ("sinks", "cap"), [(None, None), (torch.tensor([0.5, -1.0, 2.0, 0.0]), None), (None, 0.8)]
)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
def test_parts_of_rows_see_what_whole_rows_do(
    kind: str, size: int, window: int | None, sinks: torch.Tensor | None, cap: float | None
) -> None:
    rows = make_rows()
    layouts = lay_out(rows, kind, size)
    places = places_of(layouts, rows, kind)
    heads = draw_heads(size * len(layouts[0].token_ids), torch.float32)
    options = {"sliding_window": window, "s_aux": sinks, "softcap": cap}
    found = attend_parts(layouts, heads, **options)[places]
    wanted = attend_whole(heads, rows, places, window, sinks, cap)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "implementation", ["flash_attn", "flash_attn_3", "npu_fusion_attention", "torch_varlen"]
)
@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
def test_a_kernel_takes_all_runs_of_a_rank_at_once(
    monkeypatch: pytest.MonkeyPatch, implementation: str, kind: str
) -> None:
    place_all(monkeypatch)
    rows = make_rows()
    layouts = lay_out(rows, kind, 2)
    places = places_of(layouts, rows, kind)
    heads = draw_heads(2 * len(layouts[0].token_ids), torch.bfloat16)
    for window in (None, 40):
        CALLS.clear()
        options = {"kernel": attention_kernel(implementation), "sliding_window": window}
        found = attend_parts(layouts, heads, **options)[places]
        assert CALLS[implementation] == 2, "one a rank"
        wanted = attend_whole(heads, rows, places, window, None)
        torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=2e-2)
    CALLS.clear()
    for unknown in ({"s_aux": torch.zeros(HEADS)}, {"softcap": 50.0}):
        attend_parts(layouts, heads, kernel=attention_kernel(implementation), **unknown)
        assert not CALLS, "kernels know no sinks, and cap nothing"


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
def test_every_response_token_is_predicted_once_by_the_token_before_it(
    kind: str, size: int
) -> None:
    rows = make_rows()
    layouts = lay_out(rows, kind, size)
    places = places_of(layouts, rows, kind).tolist()
    targets = [int(t) for row in rows for t in row.token_ids[row.prompt_length :]]
    starts, predictors = 0, []
    for row in rows:
        length = len(row.token_ids)
        predictors += places[starts + row.prompt_length - 1 : starts + length - 1]
        starts += length
    owned = torch.cat([layout.own for layout in layouts])
    assert sorted(owned.tolist()) == list(range(len(targets)))
    for rank, layout in enumerate(layouts):
        assert layout.places.tolist() == predictors
        assert layout.targets.tolist() == [targets[index] for index in layout.own.tolist()]
        local = [rank * len(layout.token_ids) + slot for slot in layout.predictors.tolist()]
        assert local == [predictors[index] for index in layout.own.tolist()]
        assert layout.longest == max(LENGTHS)


def test_a_layout_moves_whole() -> None:
    """As to an accelerator: to the device without memory, which every machine has."""
    layout = lay_out(make_rows(), "zigzag", 2)[1]
    moved = to_device(layout, torch.device("meta"))
    tensors = [moved.token_ids, moved.own, moved.places, moved.predictors, moved.targets]
    tensors += [moved.joined.queries, moved.joined.keys, *(b.keys for b in moved.buckets)]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.joined.rows.queries == layout.joined.rows.queries
    assert moved.context is layout.context
