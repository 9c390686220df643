"""torch-npu's face over the CPU; the README beside this package says what it does."""

from __future__ import annotations

import torch

from . import devices, npu, watch
from .watch import calls

__all__ = [
    "calls",
    "npu",
    "npu_fusion_attention",
    "npu_rms_norm",
    "npu_rotary_mul",
    "npu_swiglu",
]
__version__ = f"{torch.__version__}.fake"

devices.register(npu)
watch.watch_cuda()


def npu_fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: torch.Tensor,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    actual_seq_qlen: list[int],
    actual_seq_kvlen: list[int],
    sparse_mode: int = 0,
) -> tuple[torch.Tensor]:
    """Causal from the lower right, row by row; transformers imports the name wherever it is."""
    watch.count("npu_fusion_attention")
    assert (input_layout, sparse_mode, keep_prob) == ("TND", 3, 1.0)
    outputs, first_query, first_key = [], 0, 0
    for last_query, last_key in zip(actual_seq_qlen, actual_seq_kvlen, strict=True):
        rows = [query[first_query:last_query], key[first_key:last_key], value[first_key:last_key]]
        count, seen = last_query - first_query, last_key - first_key
        output = torch.nn.functional.scaled_dot_product_attention(
            *(row.transpose(0, 1)[None] for row in rows),
            attn_mask=torch.ones(count, seen, dtype=torch.bool).tril(seen - count),
            scale=scale,
            enable_gqa=True,
        )
        outputs.append(output[0].transpose(0, 1))
        first_query, first_key = last_query, last_key
    return (torch.cat(outputs),)


def npu_rms_norm(
    tensor: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normed tensor, and one over the root mean square."""
    watch.count("npu_rms_norm")
    wide = tensor.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * inverse).to(tensor.dtype) * gamma, inverse


def npu_rotary_mul(
    tensor: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, rotary_mode: str = "half"
) -> torch.Tensor:
    watch.count("npu_rotary_mul")
    assert rotary_mode == "half"
    first, second = tensor.chunk(2, dim=-1)
    return tensor * cosine + torch.cat((-second, first), dim=-1) * sine


def npu_swiglu(tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
    watch.count("npu_swiglu")
    gate, up = tensor.chunk(2, dim=dim)
    return torch.nn.functional.silu(gate) * up


def _autoload() -> None:
    """Called by `import torch`; importing this package has done everything."""
