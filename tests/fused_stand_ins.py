"""Packages of fused operations that are not installed here: their public calls, by the formula.

Parameters are named and ordered as in flash-attn (flash_attn/flash_attn_interface.py, and
hopper/flash_attn_interface.py of version 3), Liger-Kernel (liger_kernel/ops) and op-plugin
(docs/context of torch_npu), read on 2026-11-25. What is computed is in float64, row by row.
"""

from __future__ import annotations

import sys
import types
from collections import Counter
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch

CALLS: Counter[str] = Counter()
UNBOUNDED = 2147483647


def place(patch: pytest.MonkeyPatch, name: str, **members: object) -> None:
    """An installed package, or module of one, that is not there."""
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(members)
    patch.setitem(sys.modules, name, module)
    if "." in name:
        place(patch, name.rpartition(".")[0])


def place_all(patch: pytest.MonkeyPatch) -> None:
    CALLS.clear()
    place(patch, "flash_attn", flash_attn_varlen_func=flash_attn_varlen_func)
    place(patch, "flash_attn_interface", flash_attn_varlen_func=flash_attn_3_varlen_func)
    place(patch, "liger_kernel.ops.rms_norm", LigerRMSNormFunction=LigerRMSNormFunction)
    place(patch, "liger_kernel.ops.rope", LigerRopeFunction=LigerRopeFunction)
    place(patch, "liger_kernel.ops.swiglu", LigerSiLUMulFunction=LigerSiLUMulFunction)
    place(
        patch,
        "torch_npu",
        npu_fusion_attention=npu_fusion_attention,
        npu_rms_norm=npu_rms_norm,
        npu_rotary_mul=npu_rotary_mul,
        npu_swiglu=npu_swiglu,
    )
    place(patch, "transformer_engine")
    patch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)


def attend_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    queries: list[int],
    keys: list[int],
    scale: float,
    before: int,
) -> torch.Tensor:
    """[T, heads, D]; a query stands `before` keys or less behind what it sees, and is the last."""
    assert query.dtype == key.dtype == value.dtype and query.dtype in (
        torch.bfloat16,
        torch.float16,
    )
    groups = query.shape[1] // key.shape[1]
    wide_query = query.double()
    wide_key = key.double().repeat_interleave(groups, 1)
    wide_value = value.double().repeat_interleave(groups, 1)
    outputs = []
    first_query = first_key = 0
    for rows, columns in zip(queries, keys, strict=True):
        q = wide_query[first_query : first_query + rows]
        k = wide_key[first_key : first_key + columns]
        v = wide_value[first_key : first_key + columns]
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        distance = torch.arange(rows)[:, None] + (columns - rows) - torch.arange(columns)
        scores = scores.masked_fill((distance < 0) | (distance > before), -torch.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        first_query, first_key = first_query + rows, first_key + columns
    assert (first_query, first_key) == (len(query), len(key))
    return torch.cat(outputs).to(query.dtype)


def _flash(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    longest: tuple[int, int],
    scale: float | None,
    window: tuple[int, int],
) -> torch.Tensor:
    CALLS[name] += 1
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert window[1] == (-1 if window[0] == -1 else 0)
    queries, keys = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert longest == (max(queries), max(keys))
    before = UNBOUNDED if window[0] == -1 else window[0]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return attend_rows(q, k, v, queries, keys, scale, before)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: object = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: object = None,
) -> torch.Tensor:
    assert causal and not dropout_p and v.shape[-1] == k.shape[-1] <= 256
    longest = (max_seqlen_q, max_seqlen_k)
    return _flash(
        "flash_attn", q, k, v, cu_seqlens_q, cu_seqlens_k, longest, softmax_scale, window_size
    )


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: object = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch/nn/attention/varlen.py of PyTorch 2.12 and 2.13, read on 2026-11-29."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert window_size[1] == 0 and value.shape[-1] == key.shape[-1] <= 256
    window = (-1, -1) if window_size[0] == -1 else window_size
    longest = (max_q, max_k)
    return _flash("torch_varlen", query, key, value, cu_seq_q, cu_seq_k, longest, scale, window)


def flash_attn_3_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: object = None,
    seqused_k: object = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: object = None,
    q_descale: object = None,
    k_descale: object = None,
    v_descale: object = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    assert causal and v.shape[-1] == k.shape[-1] <= 256
    longest = (max_seqlen_q, max_seqlen_k)
    return _flash(
        "flash_attn_3", q, k, v, cu_seqlens_q, cu_seqlens_k, longest, softmax_scale, window_size
    )


def npu_fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: object = None,
    padding_mask: object = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = UNBOUNDED,
    next_tockens: int = UNBOUNDED,
    inner_precise: int = 0,
    prefix: object = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
) -> tuple[Any, ...]:
    CALLS["npu_fusion_attention"] += 1
    assert input_layout == "TND" and head_num == query.shape[1]
    assert atten_mask is not None and torch.equal(
        atten_mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    )
    assert actual_seq_qlen is not None and actual_seq_kvlen is not None
    assert len(actual_seq_qlen) == len(actual_seq_kvlen) <= 1024
    lengths = [
        torch.tensor([0, *ends]).diff().tolist() for ends in (actual_seq_qlen, actual_seq_kvlen)
    ]
    before = UNBOUNDED
    if sparse_mode == 4:
        assert next_tockens == 0
        before = pre_tockens
    else:
        assert sparse_mode == 3
    made = attend_rows(query, key, value, *lengths, scale, before)
    return made, None, None, None, 0, 0, 0


def normed(hidden: torch.Tensor, epsilon: float) -> torch.Tensor:
    """In float64, by the formula."""
    wide = hidden.double()
    return wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt()


def npu_rms_norm(
    self: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    CALLS["npu_rms_norm"] += 1
    assert gamma.dtype == self.dtype
    made = (normed(self, epsilon) * gamma.double()).to(self.dtype)
    return made, self.float().square().mean(-1, keepdim=True).add(epsilon).rsqrt()


def half_turned(tensor: torch.Tensor) -> torch.Tensor:
    first, second = tensor.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def npu_rotary_mul(
    input: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
) -> torch.Tensor:
    CALLS["npu_rotary_mul"] += 1
    assert rotary_mode == "half" and input.ndim == r1.ndim == 4
    assert input.dtype == r1.dtype == r2.dtype
    wide = input.double()
    return (wide * r1.double() + half_turned(wide) * r2.double()).to(input.dtype)


def npu_swiglu(self: torch.Tensor, dim: int = -1) -> torch.Tensor:
    CALLS["npu_swiglu"] += 1
    assert self.numel() and self.is_contiguous()
    gate, up = self.double().chunk(2, dim=dim)
    return (gate * gate.sigmoid() * up).to(self.dtype)


class LigerRMSNormFunction:
    @staticmethod
    def apply(
        X: torch.Tensor,
        W: torch.Tensor,
        eps: float,
        offset: float = 0.0,
        casting_mode: str = "llama",
        in_place: bool = True,
        row_mode: object = None,
    ) -> torch.Tensor:
        CALLS["liger_rms_norm"] += 1
        assert casting_mode == "llama" and not offset and not in_place and X.dtype == W.dtype
        return (normed(X, eps).to(X.dtype).double() * W.double()).to(X.dtype)


class LigerRopeFunction:
    @staticmethod
    def apply(
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        position_ids: object = None,
        unsqueeze_dim: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        CALLS["liger_rope"] += 1
        assert q.dtype == k.dtype == cos.dtype == sin.dtype and cos.ndim == 3
        assert cos.shape[-1] == q.shape[-1]
        turned = []
        for heads in (q.double(), k.double()):
            made = heads * cos.double()[:, None] + half_turned(heads) * sin.double()[:, None]
            turned.append(made.to(q.dtype))
        return turned[0], turned[1]


class LigerSiLUMulFunction:
    @staticmethod
    def apply(
        a: torch.Tensor, b: torch.Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
    ) -> torch.Tensor:
        CALLS["liger_swiglu"] += 1
        assert gate_multiplier == down_multiplier == 1.0
        wide = a.double()
        return (wide * wide.sigmoid() * b.double()).to(a.dtype)
