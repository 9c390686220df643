"""Core attention over a pack of sequences, any context-parallel layout, any device.

Megatron's own attention knows neither packs nor context parallelism without TransformerEngine.
A rank's tokens form runs: consecutive tokens of one sequence. The queries of a run see the keys
of their sequence from its start to the run's end, and the mask is causal from the lower right.
That one description covers a whole pack, the zig-zag and the contiguous layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch.nn.attention.bias import causal_lower_right

from sluice import operations, platform
from sluice.algo.collectives import Collectives, gather_tokens
from sluice.algo.delta_rule import PackChunks


@dataclass(frozen=True)
class KeyRange:
    """Local tokens start..stop see keys first..last of the whole pack (ends exclusive)."""

    start: int
    stop: int
    first: int
    last: int


@dataclass
class PackRuns(PackedSeqParams):  # type: ignore[misc]  # Megatron hands it through to attention
    """`order[i]` is where token i of the pack stands when all ranks' tokens are gathered.

    None without context parallelism; else `context` gathers them. deep: float[tokens, 1, hidden]
    each, what images add behind the first layers: here, so that every pass through a layer, also
    one that is made again, finds that of its own pack. positions: int64[1, tokens] of this rank's.
    chunks: of the pack's rows, made by the first layer that needs them.
    """

    runs: tuple[KeyRange, ...] = ()
    order: torch.Tensor | None = None
    context: Collectives | None = None
    deep: tuple[torch.Tensor, ...] = ()
    positions: torch.Tensor | None = None
    chunks: PackChunks | None = None
    cache: dict[str, torch.Tensor] = field(default_factory=dict)


class PackAttention(MegatronModule):  # type: ignore[misc]
    """`core_attention` of a Megatron layer; queries [tokens, 1, heads, dim] of this rank."""

    def __init__(self, config: Any, *, softmax_scale: float | None, **_: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.kernel = operations.packed_attention(platform.current().device_type)
        assert not config.attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None = None,
        /,
        *,
        packed_seq_params: PackRuns,
        **_: object,
    ) -> torch.Tensor:
        """Returns [tokens, 1, heads * dim]."""
        pack = packed_seq_params
        if pack.order is not None:
            assert pack.context is not None
            both = torch.cat((key, value), dim=-1)
            both = gather_tokens(both, pack.context, gradient="sum")
            key, value = both.index_select(0, pack.order).split(
                (key.shape[-1], value.shape[-1]), dim=-1
            )
        if self.kernel is not None:
            return self._attend_kernel(query, key, value, pack).flatten(2)
        parts = [self._attend_run(query, key, value, run) for run in pack.runs]
        return torch.cat(parts).flatten(2)

    def _attend_run(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, run: KeyRange
    ) -> torch.Tensor:
        rows, columns = run.stop - run.start, run.last - run.first
        square = rows == columns
        output = torch.nn.functional.scaled_dot_product_attention(
            query[run.start : run.stop].permute(1, 2, 0, 3),
            key[run.first : run.last].permute(1, 2, 0, 3),
            value[run.first : run.last].permute(1, 2, 0, 3),
            attn_mask=None if square else causal_lower_right(rows, columns),
            is_causal=square,
            scale=self.scale,
            enable_gqa=True,
        )
        return output.permute(2, 0, 1, 3)

    def _attend_kernel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pack: PackRuns
    ) -> torch.Tensor:
        assert self.kernel is not None
        if pack.order is not None:  # runs of one sequence share keys; the kernel wants them apart
            index = _cached(pack, "keys", query.device, lambda: _key_index(pack.runs))
            key, value = key.index_select(0, index), value.index_select(0, index)
        rows = [run.stop - run.start for run in pack.runs]
        columns = [run.last - run.first for run in pack.runs]
        output = self.kernel(
            query[:, 0],
            key[:, 0],
            value[:, 0],
            _cached(pack, "rows", query.device, lambda: _offsets(rows)),
            _cached(pack, "columns", query.device, lambda: _offsets(columns)),
            max(rows),
            max(columns),
            softmax_scale=self.scale,
            causal=True,
        )
        return output[:, None]


def _cached(
    pack: PackRuns, name: str, device: torch.device, make: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """All layers see the same pack, so what its runs give is made once."""
    if name not in pack.cache:
        pack.cache[name] = make().to(device)
    return pack.cache[name]


def _offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def _key_index(runs: tuple[KeyRange, ...]) -> torch.Tensor:
    return torch.cat([torch.arange(run.first, run.last) for run in runs])
