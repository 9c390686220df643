"""Log-probs and entropy from hidden states and the output weight, never holding all logits.

Forward and backward each make the logits of one chunk of rows at a time; backward recomputes
them (4/3 of the multiplications of the plain formula) and turns them into their gradient in
place, after the linear cross-entropies of Liger and Cut Your Losses (arXiv 2411.09009).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from sluice.algo.logprobs import (
    WHOLE_VOCAB,
    EntropyMode,
    RowGradients,
    RowOptions,
    RowSums,
    VocabShard,
    check_options,
    row_blocks,
)

DEFAULT_CHUNK_ROWS = 512  # enough rows for a full-speed matrix product
SUB_BLOCKS = 16  # temporaries beside a chunk's logits are at most 2/16 of them


def linear_logprobs(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    temperature: float = 1.0,
    entropy: EntropyMode = "metric",
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
    vocab: VocabShard = WHOLE_VOCAB,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_logprobs(hidden @ weight.T, targets)` within about chunk_rows x V x 4 bytes.

    hidden_TH: float[T, H]. weight_VH: float[V, H], same dtype, no bias. The gradient of the weight
    is summed over chunks in float32 or better, as is that of the hidden states over ranks.
    With `vocab.collectives` the weight is one shard of the vocabulary and the hidden states are
    the same on all its ranks: forward runs one MAX and one SUM all-reduce, backward one SUM
    all-reduce of the hidden states' gradient (if they need one).
    """
    if hidden_TH.dtype != weight_VH.dtype:
        raise ValueError(f"hidden is {hidden_TH.dtype} but the weight {weight_VH.dtype}")
    options = check_options(
        temperature, entropy, chunk_rows, vocab, targets_T, len(weight_VH), hidden_TH.device
    )
    apply: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _LinearLogprobs.apply
    return apply(hidden_TH, weight_VH, targets_T, options)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: torch.Tensor,
        weight_VH: torch.Tensor,
        targets_T: torch.Tensor,
        options: RowOptions,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        real_VH = weight_VH[: options.vocab.real_columns(len(weight_VH))]
        sums = RowSums(hidden_TH, len(hidden_TH), options)
        buffer_RV = _chunk_buffer(hidden_TH, real_VH, options)
        for rows in row_blocks(len(hidden_TH), options.chunk_rows):
            logits_RV = buffer_RV[: rows.stop - rows.start]
            torch.mm(hidden_TH[rows], real_VH.t(), out=logits_RV)
            for part in _sub_blocks(logits_RV, options):
                at = rows.start + part.start
                sums.add_rows(at, logits_RV[part], targets_T[at : rows.start + part.stop])
        logprobs_T, entropy_T, log_total_T = sums.finish()
        ctx.save_for_backward(hidden_TH, weight_VH, targets_T, entropy_T, sums.max_T, log_total_T)
        ctx.options = options
        if options.entropy != "gradient":
            ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_T: torch.Tensor, grad_entropy_T: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        hidden_TH, weight_VH, targets_T, entropy_T, max_T, log_total_T = ctx.saved_tensors
        options: RowOptions = ctx.options
        real = options.vocab.real_columns(len(weight_VH))
        real_VH = weight_VH[:real]
        dtype = log_total_T.dtype
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden_TH = hidden_TH.new_empty(hidden_TH.shape) if needs_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=dtype) if needs_weight else None
        gradients = RowGradients(grad_logprobs_T, grad_entropy_T, entropy_T, max_T, log_total_T)
        buffer_RV = _chunk_buffer(hidden_TH, real_VH, options)
        for rows in row_blocks(len(hidden_TH), options.chunk_rows):
            chunk_RV = buffer_RV[: rows.stop - rows.start]
            torch.mm(hidden_TH[rows], real_VH.t(), out=chunk_RV)
            for part in _sub_blocks(chunk_RV, options):
                whole = slice(rows.start + part.start, rows.start + part.stop)
                gradients.write(whole, chunk_RV[part], targets_T[whole], chunk_RV[part], options)
            if grad_hidden_TH is not None:
                torch.mm(chunk_RV, real_VH, out=grad_hidden_TH[rows])
            if grad_weight_VH is not None:
                _add_product(grad_weight_VH[:real], chunk_RV.t(), hidden_TH[rows])
        if grad_hidden_TH is not None and options.vocab.collectives is not None:
            whole_TH = options.vocab.collectives.all_reduce(grad_hidden_TH.to(dtype), "sum")
            grad_hidden_TH = whole_TH.to(hidden_TH.dtype)
        return (
            grad_hidden_TH,
            None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype),
            None,
            None,
        )


def _chunk_buffer(
    hidden_TH: torch.Tensor, real_VH: torch.Tensor, options: RowOptions
) -> torch.Tensor:
    rows = min(options.chunk_rows, len(hidden_TH))
    return hidden_TH.new_empty(rows, len(real_VH))


def _sub_blocks(chunk_RV: torch.Tensor, options: RowOptions) -> list[slice]:
    rows = min(options.block_rows, max(1, len(chunk_RV) // SUB_BLOCKS))
    return row_blocks(len(chunk_RV), rows)


def _add_product(sum_MN: torch.Tensor, left_MK: torch.Tensor, right_KN: torch.Tensor) -> None:
    """sum += left @ right, the sum in float32 or better whatever the factors are."""
    if sum_MN.dtype == left_MK.dtype:
        sum_MN.addmm_(left_MK, right_KN)
    else:
        sum_MN.add_(left_MK @ right_KN)
