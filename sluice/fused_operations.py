"""The operations of `operations.OPERATIONS` themselves, each called as its package has it.

Packages are imported when an implementation of theirs is first asked for.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention, silu

MASK_SIZE = 2048  # of the mask that npu_fusion_attention takes for all lengths
MOST_ROWS = 1024  # that it takes at once


@dataclass(frozen=True)
class PackRows:
    """Rows of a pack that are attended apart: so many queries, which end where their keys do."""

    queries: Sequence[int]
    keys: Sequence[int]
    device: torch.device

    @cached_property
    def query_starts(self) -> torch.Tensor:
        """int32[rows + 1]"""
        return _starts(self.queries).to(self.device)

    @cached_property
    def key_starts(self) -> torch.Tensor:
        """int32[rows + 1]"""
        return (
            self.query_starts if self.queries is self.keys else _starts(self.keys).to(self.device)
        )

    def split(self, count: int) -> Iterator[PackRows]:
        """Cuts them into parts of at most `count` rows."""
        for first in range(0, len(self.queries), count):
            part = slice(first, first + count)
            yield PackRows(self.queries[part], self.keys[part], self.device)


def _starts(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


# (queries [T, heads, D], keys [S, kv heads, D], values [S, kv heads, E], rows, scale, window)
# -> [T, heads, E]. A query sees the keys of its row up to its own; of those the last `window`.
Attention = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, PackRows, float, int | None], torch.Tensor
]


def attention_kernel(implementation: str) -> Attention | None:
    """Returns the kernel for packs; None where torch's attention runs, row by row or padded."""
    if implementation in ("flash_attn", "flash_attn_3"):
        return _FlashAttention(implementation)
    if implementation == "torch_varlen":
        return _torch_varlen
    return _npu_attention if implementation == "npu_fusion_attention" else None


@dataclass(frozen=True)
class _FlashAttention:
    """Of version 2 or 3, whose causal masks are lower right."""

    implementation: str

    @cached_property
    def _kernel(self) -> Callable[..., Any]:
        module = "flash_attn_interface" if self.implementation == "flash_attn_3" else "flash_attn"
        kernel: Callable[..., Any] = importlib.import_module(module).flash_attn_varlen_func
        return kernel

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: PackRows,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        query, key, value, width = _alike(query, key, value)
        made = self._kernel(
            query,
            key,
            value,
            rows.query_starts,
            rows.key_starts,
            max(rows.queries),
            max(rows.keys),
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
        )
        output: torch.Tensor = made[0] if isinstance(made, tuple) else made  # the first ones of 3
        return output[..., :width]


def _torch_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: PackRows,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """A window whose right is 0 is causal, from the lower right."""
    query, key, value, width = _alike(query, key, value)
    kernel = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    # torch 2.11 takes heads that share keys as they come
    options = {"enable_gqa": True} if "enable_gqa" in _parameters(kernel) else {}
    output: torch.Tensor = kernel(
        query,
        key,
        value,
        rows.query_starts,
        rows.key_starts,
        max(rows.queries),
        max(rows.keys),
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )
    return output[..., :width]


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _npu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: PackRows,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Sparse mode 3 is the causal mask from the lower right, 4 that with a window."""
    query, key, value, width = _alike(query, key, value)
    kernel = importlib.import_module("torch_npu").npu_fusion_attention
    sparse: dict[str, int] = {"sparse_mode": 3}
    if window is not None:
        sparse = {"sparse_mode": 4, "pre_tockens": window - 1, "next_tockens": 0}
    outputs = []
    first_query = first_key = 0
    for part in rows.split(MOST_ROWS):
        last_query, last_key = first_query + sum(part.queries), first_key + sum(part.keys)
        outputs.append(
            kernel(
                query[first_query:last_query],
                key[first_key:last_key],
                value[first_key:last_key],
                query.shape[1],
                "TND",
                atten_mask=_npu_mask(query.device),
                scale=scale,
                keep_prob=1.0,
                actual_seq_qlen=_starts(part.queries)[1:].tolist(),
                actual_seq_kvlen=_starts(part.keys)[1:].tolist(),
                **sparse,
            )[0]
        )
        first_query, first_key = last_query, last_key
    return torch.cat(outputs)[..., :width]


@cache
def _npu_mask(device: torch.device) -> torch.Tensor:
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device).triu_(1)


def attend_masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """PyTorch's attention of [N, heads, R, D] to [N, kv heads, K, D], what a mask shows of it.

    Of its kernels those for devices take no mask where heads share keys: each has its own there.
    Otherwise all scores would lie in memory.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.device.type != "cpu":
        key, value = (heads.repeat_interleave(groups, 1) for heads in (key, value))
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _alike(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Kernels take tensors of one dtype, autocast or not, and values as wide as keys."""
    dtype, width = query.dtype, value.shape[-1]
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
    if width < key.shape[-1]:
        value = pad(value, (0, key.shape[-1] - width))
    return query.to(dtype), key.to(dtype), value.to(dtype), width


def rms_norm(
    implementation: str, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Divides by the root of the mean square over the last dimension, and multiplies by a weight.

    The first is in float32, and its result in the dtype of `hidden`; that of the product follows
    from both.
    """
    if implementation == "plain":
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        return weight * normed.to(hidden.dtype)
    if implementation == "closed_form":
        scaled: torch.Tensor = _RmsNorm.apply(hidden, weight, epsilon)
        return scaled
    alike = weight.dtype == hidden.dtype
    inner = weight if alike else torch.ones_like(weight, dtype=hidden.dtype)
    if implementation == "npu_rms_norm":
        made = importlib.import_module("torch_npu").npu_rms_norm(hidden, inner, epsilon)[0]
    elif implementation == "liger":
        function = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
        # offset of the weight, which of its casts, and no gradient in place of what came in
        made = function.apply(hidden, inner, epsilon, 0.0, "llama", False)
    else:
        assert implementation == "torch_rms_norm"
        made = torch.nn.functional.rms_norm(hidden, inner.shape, inner if alike else None, epsilon)
    result: torch.Tensor = made if alike else weight * made
    return result


class _RmsNorm(torch.autograd.Function):
    """The same, with a gradient that is not that of each of its steps.

    Of x with weights w, and n = r x with r = 1 / sqrt(mean(x^2) + epsilon): a gradient g of w n is
    r (g w - n mean(g w n)) of x.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        wide = hidden.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        normed = wide * inverse
        ctx.save_for_backward(normed, inverse, weight)
        ctx.dtype = hidden.dtype
        return weight * normed.to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normed, inverse, weight = ctx.saved_tensors
        wide = gradient.float()
        along = wide * normed
        of_weight = (
            along.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        )
        weight = weight.float()
        shares = (along @ weight).div_(len(weight)).unsqueeze(-1)
        of_hidden = (wide * weight).addcmul_(normed, shares, value=-1).mul_(inverse)
        return of_hidden.to(ctx.dtype), of_weight, None


def rotate(
    implementation: str,
    query: torch.Tensor,
    key: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns queries and keys [B, heads, T, D] by angles [B, T, D], an element and the one half of D
    behind it together (arXiv 2104.09864)."""
    if implementation == "plain":
        return _turn(query, cosine, sine), _turn(key, cosine, sine)
    if implementation == "closed_form":
        angles = (cosine.unsqueeze(1), sine.unsqueeze(1))
        return _Rotation.apply(query, *angles), _Rotation.apply(key, *angles)
    query, key = query.to(cosine.dtype), key.to(cosine.dtype)
    if implementation == "npu_rotary_mul":
        kernel = importlib.import_module("torch_npu").npu_rotary_mul
        cosine, sine = cosine.unsqueeze(1), sine.unsqueeze(1)
        return kernel(query, cosine, sine), kernel(key, cosine, sine)
    assert implementation == "liger"
    function = importlib.import_module("liger_kernel.ops.rope").LigerRopeFunction
    turned: tuple[torch.Tensor, torch.Tensor] = function.apply(query, key, cosine, sine)
    return turned


def _turn(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return heads * cosine.unsqueeze(1) + turned * sine.unsqueeze(1)


class _Rotation(torch.autograd.Function):
    """The same, whose gradient is turned back."""

    @staticmethod
    def forward(
        ctx: Any, heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.dtype = heads.dtype
        return _turn_halves(heads, cosine, sine.chunk(2, dim=-1), 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cosine, sine = ctx.saved_tensors
        second_first = sine.chunk(2, dim=-1)[::-1]
        return _turn_halves(gradient, cosine, second_first, -1).to(ctx.dtype), None, None


def _turn_halves(
    heads: torch.Tensor, cosine: torch.Tensor, sines: Sequence[torch.Tensor], sign: int
) -> torch.Tensor:
    """`sines` are those of the one half and of the other; sign: -1 turns back."""
    first, second = heads.chunk(2, dim=-1)
    turned = heads * cosine
    halves = turned.chunk(2, dim=-1)
    halves[0].addcmul_(second, sines[0], value=-sign)
    halves[1].addcmul_(first, sines[1], value=sign)
    return turned


def swiglu(implementation: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up (arXiv 2002.05202)."""
    if implementation == "plain" or not gate.numel():  # kernels take no empty tensor
        return silu(gate) * up
    if implementation == "npu_swiglu":
        both = torch.cat((gate, up), dim=-1)
        made: torch.Tensor = importlib.import_module("torch_npu").npu_swiglu(both, dim=-1)
        return made
    assert implementation == "liger"
    function = importlib.import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction
    product: torch.Tensor = function.apply(gate, up)
    return product
