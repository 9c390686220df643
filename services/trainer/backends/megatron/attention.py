"""Core attention over a pack of sequences, any context-parallel layout, any device.

Megatron's own attention knows neither packs nor context parallelism without TransformerEngine.
A rank's tokens form runs: consecutive tokens of one sequence. The queries of a run see the keys
of their sequence from its start to the run's end, and the mask is causal from the lower right.
That one description covers a whole pack, the zig-zag and the contiguous layout.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.nn.attention.bias import causal_lower_right

from services.trainer.backends.banded import Scores, attend_banded
from services.trainer.backends.megatron.upstream import current_device
from services.trainer.backends.sparse import ChosenKeys, attend_chosen
from sluice.algo.collectives import Collectives, gather_tokens
from sluice.algo.delta_rule import PackChunks
from sluice.algo.layout import KeyRange
from sluice.fused_operations import Attention, PackRows, attention_kernel


@dataclass
class PackRuns(PackedSeqParams):  # type: ignore[misc]  # Megatron hands it through to attention
    """`order[i]` is where token i of the pack stands when all ranks' tokens are gathered.

    None without context parallelism; else `context` gathers them. deep: float[tokens, 1, hidden]
    each, what images add behind the first layers: here, so that every pass through a layer, also
    one that is made again, finds that of its own pack. positions: int64[1, tokens] of this rank's.
    chunks: of the pack's rows, made by the first layer that needs them. starts: of all sequences
    of the pack, and its end; padding behind them is one more. rows: what a kernel is told of the
    runs, made by the first layer with one. chosen: the keys that indexers chose, by the layer, of
    each run.
    """

    runs: tuple[KeyRange, ...] = ()
    order: torch.Tensor | None = None
    context: Collectives | None = None
    deep: tuple[torch.Tensor, ...] = ()
    positions: torch.Tensor | None = None
    chunks: PackChunks | None = None
    starts: tuple[int, ...] = ()
    rows: PackRows | None = None
    keys: torch.Tensor | None = None
    engine: PackedSeqParams | None = None
    chosen: dict[int, ChosenKeys] = field(default_factory=dict)


class PackAttention(MegatronModule):  # type: ignore[misc]
    """`core_attention` of a Megatron layer; queries [tokens, 1, heads, dim] of this rank."""

    def __init__(self, config: Any, *, softmax_scale: float | None, **_: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.kernel = attention_kernel(config.operations["attention"])
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
        """Returns [tokens, 1, heads * dim of a value]."""
        pack = packed_seq_params
        if pack.order is not None:
            assert pack.context is not None
            both = torch.cat((key, value), dim=-1)
            both = gather_tokens(both, pack.context, gradient="sum")
            key, value = both.index_select(0, pack.order).split(
                (key.shape[-1], value.shape[-1]), dim=-1
            )
        chosen = self.chosen_keys(pack)
        if self.kernel is not None and not chosen:
            return self._attend_kernel(query, key, value, pack, self.kernel).flatten(2)
        own = [(run.start, run.stop) for run in pack.runs]
        seen = [(run.first, run.last) for run in pack.runs]
        runs = zip(
            _stretches(query, own),
            _stretches(key, seen),
            _stretches(value, seen),
            chosen or (None,) * len(own),
            strict=True,
        )
        return torch.cat([self._attend_run(*run) for run in runs]).flatten(2)

    def chosen_keys(self, pack: PackRuns) -> ChosenKeys:
        """Returns the keys of each run that are attended to, where an indexer chooses them."""
        return ()

    def _attend_run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        chosen: torch.Tensor | None,
    ) -> torch.Tensor:
        query, key, value = (heads.permute(1, 2, 0, 3) for heads in (query, key, value))
        return self._attend(query, key, value, chosen).permute(2, 0, 1, 3)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        chosen: torch.Tensor | None,
    ) -> torch.Tensor:
        """Of [1, heads, rows, dim], which stand at the end of as many keys or more."""
        rows, columns = query.shape[2], key.shape[2]
        square = rows == columns
        if chosen is not None:
            return attend_chosen(query, key, value, None, chosen, self.scale)
        return torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if square else causal_lower_right(rows, columns),
            is_causal=square,
            scale=self.scale,
            enable_gqa=True,
        )

    def _attend_kernel(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pack: PackRuns,
        kernel: Attention,
    ) -> torch.Tensor:
        """All layers see the same pack, so what its runs give is made once."""
        if pack.rows is None:
            rows = [run.stop - run.start for run in pack.runs]
            columns = [run.last - run.first for run in pack.runs]
            pack.rows = PackRows(rows, columns, query.device)
            if pack.order is not None:  # runs of one sequence share keys; kernels want them apart
                pack.keys = _key_index(pack.runs).to(query.device)
        if pack.keys is not None:
            key, value = key.index_select(0, pack.keys), value.index_select(0, pack.keys)
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        return kernel(query[:, 0], key[:, 0], value[:, 0], pack.rows, scale, None)[:, None]


class BandedPackAttention(PackAttention):
    """Attention whose softmax has a sink a head, over the last keys alone in some layers."""

    def __init__(self, config: Any, *, layer_number: int, **options: Any) -> None:
        super().__init__(config, layer_number=layer_number, **options)
        self.kernel = None  # none has sinks
        self.window = config.windows[layer_number - 1]
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        sinks = torch.empty(heads, dtype=config.params_dtype, device=current_device())
        self.softmax_offset = torch.nn.Parameter(sinks)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        chosen: torch.Tensor | None,
    ) -> torch.Tensor:
        scores = Scores(self.scale, self.window, self.softmax_offset)
        return attend_banded(query, key, value, scores)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        """Of the sinks, which are cut as the heads are."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
        )


class GatedSelfAttention(SelfAttention):  # type: ignore[misc]
    """Megatron's attention with a gate of its output, under any count of tensor ranks.

    Where several share a key head it gives each its own queries, but the gates of all of them.
    """

    def get_query_key_value_tensors(self, *args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        query, key, value, gate = super().get_query_key_value_tensors(*args, **options)
        heads = query.shape[2]
        sharing = gate.shape[2] // heads  # ranks of one key head
        own = parallel_state.get_tensor_model_parallel_rank() % sharing
        return query, key, value, gate.narrow(2, own * heads, heads)


class HeadsNorm(torch.nn.Module):
    """RMSNorm over all heads of a token, of which each tensor rank has a part.

    Every rank has the whole weight and uses that of its heads, so that Megatron sums its gradient
    over them, as it does of other norms under sequence parallelism.
    """

    def __init__(self, config: Any, heads: int) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        size = heads * config.kv_channels
        ones = torch.ones(size, dtype=config.params_dtype, device=current_device())
        self.weight = torch.nn.Parameter(ones)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """[tokens, 1, heads of this rank, dim], the same of all of them."""
        own = heads.flatten(2).float()
        squares = own.square().sum(-1, keepdim=True)
        # what is summed is of all ranks, and so is its gradient
        squares = reduce_from_tensor_model_parallel_region(squares)
        squares = copy_to_tensor_model_parallel_region(squares)
        normed = own * torch.rsqrt(squares / len(self.weight) + self.eps)
        first = parallel_state.get_tensor_model_parallel_rank() * own.shape[-1]
        weight = self.weight.narrow(0, first, own.shape[-1])
        return (weight * normed.to(heads.dtype)).view(heads.shape)


class NormedSelfAttention(SelfAttention):  # type: ignore[misc]
    """Megatron's attention with norms over all heads of queries, and of keys."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self.q_norm = HeadsNorm(config, config.num_attention_heads)
        self.k_norm = HeadsNorm(config, config.num_query_groups)

    def get_query_key_value_tensors(self, *args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        query, key, *rest = super().get_query_key_value_tensors(*args, **options)
        return self.q_norm(query), self.k_norm(key), *rest


class EnginePackAttention(MegatronModule):  # type: ignore[misc]
    """Transformer Engine's, over the sequences of a pack; it exchanges keys over context ranks
    itself, beside its computation. Of the zig-zag layout, which is its own.
    """

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(config=config)
        extensions = importlib.import_module("megatron.core.extensions.transformer_engine")
        self.inner = extensions.TEDotProductAttention(config=config, **options)

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
        if pack.engine is None:
            starts = torch.tensor(pack.starts, dtype=torch.int32, device=query.device)
            longest = max(b - a for a, b in zip(pack.starts, pack.starts[1:], strict=False))
            pack.engine = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=starts,
                cu_seqlens_kv=starts,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
            )
        output: torch.Tensor = self.inner(
            query[:, 0],
            key[:, 0],
            value[:, 0],
            None,
            attn_mask_type=AttnMaskType.causal,
            packed_seq_params=pack.engine,
        )
        return output.reshape(len(query), 1, -1)


def _stretches(tensor: torch.Tensor, ends: Sequence[tuple[int, int]]) -> Iterator[torch.Tensor]:
    """Cuts along the first dimension; two of them begin at one place, or the first ends before.

    The gradient of a slice is as long as what it is of: that is all up to where others begin.
    """
    starts = sorted({0, *(start for start, _ in ends)})
    lengths = [stop - start for start, stop in pairwise([*starts, len(tensor)])]
    parts = dict(zip(starts, tensor.split(lengths), strict=True))
    for start, stop in ends:
        part = parts[start]
        yield part if len(part) == stop - start else part[: stop - start]


def _key_index(runs: tuple[KeyRange, ...]) -> torch.Tensor:
    return torch.cat([torch.arange(run.first, run.last) for run in runs])
