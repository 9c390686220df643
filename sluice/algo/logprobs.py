"""Log-probs and entropy of given tokens, from logits or from hidden states and the output weight.

Neither keeps a softmax in memory: forward walks over blocks of rows and keeps two numbers a row;
backward recomputes the block's probabilities straight into the gradient. `linear_logprobs` never
holds all logits either: forward and backward each make those of one chunk of rows at a time (4/3
of the multiplications of the plain formula) and turn them into their gradient in place, after the
linear cross-entropies of Liger and Cut Your Losses (arXiv 2411.09009).

The vocabulary may be sharded over a process group: forward runs one MAX and one SUM all-reduce
whatever the sizes and settings; backward none, but for that of the hidden states' gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable

from sluice import platform
from sluice.algo.collectives import Collectives
from sluice.algo.likeliest import find_likeliest, merge_likeliest

EntropyMode = Literal["off", "metric", "gradient"]

CPU_BLOCK_BYTES = 2**20  # stays in a core's cache from the first touch to the last
DEVICE_BLOCK_BYTES = 2**28  # few kernel launches, little beside the logits
DEVICE_CHUNK_BYTES = 2**29  # likewise, and sums of the weight's gradient are few
LOWEST_LOG_WEIGHT = -1e4  # exp of it is 0; keeps 0 x -inf out of the entropy of banned tokens
LOWEST_MAX = -1e30  # of a shard where every token is padding or banned
DEFAULT_CHUNK_ROWS = 512  # of linear_logprobs: enough for a full-speed matrix product on a CPU
SUB_BLOCKS = 16  # on a CPU temporaries beside a chunk's logits are at most 2/16 of them


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """Which token ids the columns (or the rows of the output weight) stand for.

    start: token id of the first column. size: ids from this on are padding, which gets no
    probability and no gradient; None for no padding. collectives: over the ranks that hold the
    other columns; None when all are here.
    """

    start: int = 0
    size: int | None = None
    collectives: Collectives | None = None

    def real_columns(self, columns: int) -> int:
        """Counts how many of the first `columns` columns are no padding."""
        return columns if self.size is None else max(0, min(columns, self.size - self.start))


WHOLE_VOCAB = VocabShard()


@dataclass(frozen=True, kw_only=True)
class _RowOptions:
    """What rows of logits are turned into; hashable, so that it can pass through autograd."""

    temperature: float
    entropy: EntropyMode
    chunk_rows: int
    block_rows: int  # rows of elementwise work at a time: two buffers of them fit in a chunk
    vocab: VocabShard
    sub_blocks: int  # that a chunk is worked through in, at least
    float32: bool = False  # logits of linear_logprobs, whatever they are products of
    cap: float | None = None  # logits x are cap * tanh(x / cap)


def token_logprobs(
    logits_TV: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    temperature: float = 1.0,
    entropy: EntropyMode = "metric",
    chunk_rows: int | None = None,
    vocab: VocabShard = WHOLE_VOCAB,
    reuse_logits: bool = False,
    cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (logprobs_T, entropy_T) in nats, float32 (float64 for float64 logits).

    logits_TV: float[T, V], any float dtype; accumulation is float32 or better. targets_T: int64[T]
    token ids in [0, vocabulary), or int64[T, K] for the log-probs of K tokens a row, then
    float[T, K]. The distribution is softmax(logits / temperature), of logits that are brought
    within `cap` first where it is given, as cap * tanh(logits / cap).
    entropy: "metric" carries no gradient, "gradient" does, "off" answers zeros and saves a pass.
    chunk_rows: temporaries take at most chunk_rows x V x 4 bytes; None chooses for the device.
    reuse_logits: backward overwrites `logits_TV` with its gradient instead of allocating one;
    only when nobody reads the logits afterwards.
    Raises ValueError for a temperature that is not positive and, on a CPU, bad targets.
    """
    options = _check_options(
        temperature, entropy, chunk_rows, vocab, targets_T, logits_TV.shape[1], logits_TV.device
    )
    options = replace(options, cap=cap)
    apply: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _TokenLogprobs.apply
    return apply(logits_TV, targets_T, options, reuse_logits)


def linear_logprobs(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    temperature: float = 1.0,
    entropy: EntropyMode = "metric",
    chunk_rows: int | None = None,
    vocab: VocabShard = WHOLE_VOCAB,
    float32: bool = False,
    cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `token_logprobs(hidden @ weight.T, targets)` within about chunk_rows x V x 4 bytes.

    hidden_TH: float[T, H]. weight_VH: float[V, H], same dtype, no bias. The gradient of the weight
    is summed over chunks in float32 or better, as is that of the hidden states over ranks.
    chunk_rows: None chooses for the device, as `chunk_rows_of` does.
    float32: the logits are not rounded to the dtype of their factors, which in bfloat16 puts the
    log-probs of a large model off by 1e-2 (arXiv 2506.13585, section 3.2).
    With `vocab.collectives` the weight is one shard of the vocabulary and the hidden states are
    the same on all its ranks: forward runs one MAX and one SUM all-reduce, backward one SUM
    all-reduce of the hidden states' gradient (if they need one).
    """
    if hidden_TH.dtype != weight_VH.dtype:
        raise ValueError(f"hidden is {hidden_TH.dtype} but the weight {weight_VH.dtype}")
    chunk_rows = (
        chunk_rows_of(hidden_TH.device, len(weight_VH)) if chunk_rows is None else chunk_rows
    )
    options = _check_options(
        temperature, entropy, chunk_rows, vocab, targets_T, len(weight_VH), hidden_TH.device
    )
    options = replace(options, float32=float32, cap=cap)
    apply: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _LinearLogprobs.apply
    return apply(hidden_TH, weight_VH, targets_T, options)


def chunks_of_logits(
    rows: int, columns: int, most_logits: int, *, float32: bool
) -> dict[str, Any] | None:
    """How `linear_logprobs` is to be asked for rows x columns logits; None: make them at once.

    At once are those of `most_logits` entries or fewer, for `token_logprobs`. As few that are asked
    for in `float32` of narrower factors are one chunk: `linear_logprobs` alone does not round them.
    """
    is_small = rows * columns <= most_logits
    if is_small and not float32:
        return None
    return {"float32": float32, "chunk_rows": max(1, rows) if is_small else None}


@dataclass(frozen=True)
class TopLogprobs:
    """What is said of given tokens, and which are likeliest at their places.

    logprobs: float[T], of the tokens. ids: integer[T, K], the likeliest, falling, of equals the
    lower id first. top: float[T, K], their log-probs.
    """

    logprobs: torch.Tensor
    ids: torch.Tensor
    top: torch.Tensor

    def split(self, lengths: Sequence[int]) -> list[TopLogprobs]:
        """Cuts into so many places each, as they leave the device: float32 and int32."""
        parts = (
            self.logprobs.float().cpu().split(list(lengths)),
            self.ids.int().cpu().split(list(lengths)),
            self.top.float().cpu().split(list(lengths)),
        )
        # a part that is kept must not keep the whole
        return [TopLogprobs(*(each.clone() for each in of)) for of in zip(*parts, strict=True)]


@torch.no_grad()
def top_logprobs(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_T: torch.Tensor,
    count: int,
    *,
    bias_V: torch.Tensor | None = None,
    temperature: float = 1.0,
    chunk_rows: int | None = None,
    vocab: VocabShard = WHOLE_VOCAB,
    float32: bool = False,
    cap: float | None = None,
) -> TopLogprobs:
    """Finds the `count` likeliest tokens at each place beside `linear_logprobs`; no gradient.

    One pass over the logits, in as much memory as there. With `vocab.collectives` two all-gathers
    of `count` numbers a place follow the all-reduces. Raises ValueError for more tokens than the
    vocabulary has, besides what `linear_logprobs` does.
    """
    chunk_rows = (
        chunk_rows_of(hidden_TH.device, len(weight_VH)) if chunk_rows is None else chunk_rows
    )
    options = _check_options(
        temperature, "off", chunk_rows, vocab, targets_T, len(weight_VH), hidden_TH.device
    )
    whole = len(weight_VH) if vocab.size is None else vocab.size
    if not 1 <= count <= whole and (vocab.size is not None or vocab.collectives is None):
        raise ValueError(f"{count} tokens of a vocabulary of {whole}")
    options = replace(options, float32=float32, cap=cap)
    real = vocab.real_columns(len(weight_VH))
    real_VH = _factor(weight_VH[:real]) if float32 else weight_VH[:real]
    targets_T1 = targets_T[:, None]
    sums = _RowSums(hidden_TH, targets_T1, options)
    values_TK = sums.max_T.new_empty(len(hidden_TH), count)
    ids_TK = torch.empty(values_TK.shape, dtype=torch.int64, device=values_TK.device)
    buffer_RV = _chunk_buffer(hidden_TH, real_VH, options)
    for rows in _row_blocks(len(hidden_TH), options.chunk_rows):
        logits_RV = buffer_RV[: rows.stop - rows.start]
        _make_logits(hidden_TH[rows], real_VH, logits_RV)
        if bias_V is not None:
            logits_RV.add_(bias_V[:real])
        for part in _sub_blocks(logits_RV, options):
            whole_part = slice(rows.start + part.start, rows.start + part.stop)
            sums.add_rows(whole_part.start, logits_RV[part], targets_T1[whole_part])
            values_TK[whole_part], ids_TK[whole_part] = find_likeliest(logits_RV[part], count)
    logprobs_T, _, log_total_T = sums.finish(targets_T)
    ids_TK += vocab.start
    if vocab.collectives is not None:
        values_TK, ids_TK = merge_likeliest(values_TK, ids_TK, vocab.collectives)
    if cap is not None:
        _bring_within(values_TK, cap)
    if temperature != 1:
        values_TK = values_TK / temperature
    top_TK = values_TK - sums.max_T[:, None] - log_total_T[:, None]
    return TopLogprobs(logprobs_T, ids_TK, top_TK)


def float32_logits(hidden_TH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    """Computes hidden @ weight.T, float32[T, V], also of narrower factors; without a gradient."""
    out_TV = hidden_TH.new_empty(len(hidden_TH), len(weight_VH), dtype=_wide(weight_VH.dtype))
    _make_logits(hidden_TH, _factor(weight_VH), out_TV)
    return out_TV


def chunk_rows_of(device: torch.device, columns: int) -> int:
    """Returns how many rows of logits `linear_logprobs` makes at a time, unasked.

    Those of 512 MiB where each kernel is launched by a host, but no fewer than on a CPU.
    """
    if device.type == "cpu":
        return DEFAULT_CHUNK_ROWS
    return max(DEFAULT_CHUNK_ROWS, DEVICE_CHUNK_BYTES // (4 * max(1, columns)))


def _check_options(
    temperature: float,
    entropy: EntropyMode,
    chunk_rows: int | None,
    vocab: VocabShard,
    targets_T: torch.Tensor,
    columns: int,
    device: torch.device,
) -> _RowOptions:
    """Returns options with every default chosen, after the checks `token_logprobs` promises."""
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be positive and finite, not {temperature}")
    budget = CPU_BLOCK_BYTES if device.type == "cpu" else DEVICE_BLOCK_BYTES
    fitting_rows = max(2, budget // (4 * max(1, columns)))
    if chunk_rows is None:
        chunk_rows = fitting_rows
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows must be positive, not {chunk_rows}")
    whole = vocab.size
    if whole is None and vocab.collectives is None:
        whole = columns
    if targets_T.device.type == "cpu" and targets_T.numel():  # elsewhere it would be a sync
        low, high = int(targets_T.min()), int(targets_T.max())
        if low < 0 or (whole is not None and high >= whole):
            raise ValueError(f"targets span {low}..{high} but the vocabulary has {whole} tokens")
    return _RowOptions(
        temperature=temperature,
        entropy=entropy,
        chunk_rows=chunk_rows,
        block_rows=max(1, min(chunk_rows, fitting_rows) // 2),
        sub_blocks=SUB_BLOCKS if device.type == "cpu" else 1,
        vocab=vocab,
    )


class _RowSums:
    """The running numbers of T rows: local maximum, sum of weights, and what the entropy needs."""

    def __init__(
        self, like_TV: torch.Tensor, targets_TK: torch.Tensor, options: _RowOptions
    ) -> None:
        rows, count = targets_TK.shape
        dtype = _wide(like_TV.dtype)
        self.max_T = torch.full((rows,), LOWEST_MAX, dtype=dtype, device=like_TV.device)
        # sums of weights and of weighted logits, then the logits of the targets: one all-reduce
        self.sums_NT = torch.zeros(2 + count, rows, dtype=dtype, device=like_TV.device)
        self.options = options

    def add_rows(
        self, start: int, logits_RV: torch.Tensor, targets_RK: torch.Tensor, *, owned: bool = False
    ) -> None:
        """Rows start..start+R of this shard, without padding columns.

        owned: they are products that nobody else reads, and are overwritten.
        """
        if logits_RV.shape[1] == 0:
            return
        stop = start + len(logits_RV)
        dtype, options = self.max_T.dtype, self.options
        scaled_RV = logits_RV.to(dtype, copy=not owned)
        finite = owned and scaled_RV is logits_RV  # products; what is narrower may have overflown
        if options.cap is not None:
            _bring_within(scaled_RV, options.cap)
        if options.temperature != 1:
            scaled_RV.div_(options.temperature)
        max_R = torch.amax(scaled_RV, dim=1, out=self.max_T[start:stop]).clamp_(min=LOWEST_MAX)
        local_RK, owned_RK = _local_targets(targets_RK, logits_RV.shape[1], options.vocab)
        found_RK = scaled_RV.gather(1, local_RK)
        self.sums_NT[2:, start:stop] = torch.where(owned_RK, found_RK, 0.0).t()
        scaled_RV.sub_(max_R[:, None])
        if options.entropy == "off":
            torch.sum(scaled_RV.exp_(), dim=1, out=self.sums_NT[0, start:stop])
            return
        if not finite:
            scaled_RV.clamp_(min=LOWEST_LOG_WEIGHT)
        weights_RV = scaled_RV.exp()
        torch.sum(weights_RV, dim=1, out=self.sums_NT[0, start:stop])
        torch.sum(weights_RV.mul_(scaled_RV), dim=1, out=self.sums_NT[1, start:stop])

    def finish(self, like_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(log-probs shaped as `like_T`, entropy_T, log_total_T), after the two all-reduces.

        A token's probability is exp(x - max - log_total); the two are never added up, which
        would cost the digits of large logits.
        """
        collectives = self.options.vocab.collectives
        if collectives is not None:
            local_T = self.max_T.clone()
            collectives.all_reduce(self.max_T, "max")
            shift_T = local_T - self.max_T
            weight_T = shift_T.exp()
            # sum e^(x - M) (x - M), M the maximum of all shards, from the sums around this one's
            self.sums_NT[1].addcmul_(self.sums_NT[0], shift_T).mul_(weight_T)
            self.sums_NT[0].mul_(weight_T)
            collectives.all_reduce(self.sums_NT, "sum")
        total_T, weighted_T, target_KT = self.sums_NT[0], self.sums_NT[1], self.sums_NT[2:]
        log_total_T = total_T.log()
        if like_T.ndim == 1:  # no view, which whoever wraps a model's outputs would warn of
            logprobs_T = target_KT[0] - self.max_T - log_total_T
        else:
            logprobs_T = (target_KT - self.max_T - log_total_T).t().contiguous()
        if self.options.entropy == "off":
            return logprobs_T, torch.zeros_like(log_total_T), log_total_T
        return logprobs_T, log_total_T - weighted_T / total_T, log_total_T


@dataclass(frozen=True)
class _RowGradients:
    """Gradients of both outputs and what backward needs of each row; float[T]."""

    logprobs: torch.Tensor  # float[T, K]
    entropies: torch.Tensor  # gradient of the entropy; read only in mode "gradient"
    entropy: torch.Tensor
    max: torch.Tensor
    log_total: torch.Tensor

    def write(
        self,
        rows: slice,
        logits_RV: torch.Tensor,
        targets_RK: torch.Tensor,
        out_RV: torch.Tensor,
        options: _RowOptions,
    ) -> None:
        """d(outputs)/d(logits) of these rows into `out_RV`, which may be `logits_RV` itself.

        d logp / dx = 1[target] - p and dH / dx = -p (log p + H), both over the temperature; of
        capped logits times the slope of the cap. Logits as wide as what is summed are overwritten
        where `out_RV` is narrower.
        """
        dtype = self.log_total.dtype
        work_RV = out_RV.copy_(logits_RV) if out_RV.dtype == dtype else logits_RV.to(dtype)
        slope_RV = None
        if options.cap is not None:
            slope_RV = 1 - _bring_within(work_RV, options.cap).div(options.cap).square_()
        if options.temperature != 1:
            work_RV.div_(options.temperature)
        scaled_RK = self.logprobs[rows] / options.temperature
        scaled_R1 = scaled_RK.sum(1, keepdim=True)
        local_RK, owned_RK = _local_targets(targets_RK, work_RV.shape[1], options.vocab)
        work_RV.sub_(self.max[rows, None]).sub_(self.log_total[rows, None])
        if options.entropy == "gradient":
            entropy_R1 = self.entropies[rows, None] / options.temperature
            work_RV.clamp_(min=LOWEST_LOG_WEIGHT)
            weights_RV = work_RV.exp()
            work_RV.add_(self.entropy[rows, None]).mul_(entropy_R1).add_(scaled_R1)
            work_RV.mul_(weights_RV).neg_()
        else:
            work_RV.exp_().mul_(-scaled_R1)
        if work_RV.shape[1]:
            work_RV.scatter_add_(1, local_RK, torch.where(owned_RK, scaled_RK, 0.0))
        if slope_RV is not None:
            work_RV.mul_(slope_RV)
        if work_RV is not out_RV:
            out_RV.copy_(work_RV)


def _local_targets(
    targets_RK: torch.Tensor, columns: int, vocab: VocabShard
) -> tuple[torch.Tensor, torch.Tensor]:
    """(column of each target, clamped into range; bool whether it is in this shard)."""
    local_RK = targets_RK - vocab.start
    owned_RK = (local_RK >= 0) & (local_RK < columns)
    return local_RK.clamp(0, max(0, columns - 1)), owned_RK


def _bring_within(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(logits / cap), in place."""
    return logits.div_(cap).tanh_().mul_(cap)


def _columns(values_T: torch.Tensor) -> torch.Tensor:
    """One number a row as one column."""
    return values_T[:, None] if values_T.ndim == 1 else values_T


def _row_blocks(rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: torch.Tensor,
        targets_T: torch.Tensor,
        options: _RowOptions,
        reuse_logits: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        real = options.vocab.real_columns(logits_TV.shape[1])
        targets_TK = _columns(targets_T)
        sums = _RowSums(logits_TV, targets_TK, options)
        for rows in _row_blocks(len(logits_TV), options.block_rows):
            sums.add_rows(rows.start, logits_TV[rows, :real], targets_TK[rows])
        logprobs_T, entropy_T, log_total_T = sums.finish(targets_T)
        ctx.save_for_backward(logits_TV, targets_TK, entropy_T, sums.max_T, log_total_T)
        ctx.options, ctx.reuse_logits = options, reuse_logits
        if options.entropy != "gradient":
            ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_T: torch.Tensor, grad_entropy_T: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        logits_TV, targets_TK, entropy_T, max_T, log_total_T = ctx.saved_tensors
        options: _RowOptions = ctx.options
        grad_TV = logits_TV.detach() if ctx.reuse_logits else torch.empty_like(logits_TV)
        real = options.vocab.real_columns(logits_TV.shape[1])
        gradients = _RowGradients(
            _columns(grad_logprobs_T), grad_entropy_T, entropy_T, max_T, log_total_T
        )
        for rows in _row_blocks(len(logits_TV), options.block_rows):
            gradients.write(
                rows, logits_TV[rows, :real], targets_TK[rows], grad_TV[rows, :real], options
            )
        grad_TV[:, real:] = 0
        return grad_TV, None, None, None


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: torch.Tensor,
        weight_VH: torch.Tensor,
        targets_T: torch.Tensor,
        options: _RowOptions,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        real_VH = weight_VH[: options.vocab.real_columns(len(weight_VH))]
        real_VH = _factor(real_VH) if options.float32 else real_VH
        targets_TK = _columns(targets_T)
        sums = _RowSums(hidden_TH, targets_TK, options)
        buffer_RV = _chunk_buffer(hidden_TH, real_VH, options)
        for rows in _row_blocks(len(hidden_TH), options.chunk_rows):
            logits_RV = buffer_RV[: rows.stop - rows.start]
            _make_logits(hidden_TH[rows], real_VH, logits_RV)
            for part in _sub_blocks(logits_RV, options):
                at = rows.start + part.start
                targets_RK = targets_TK[at : rows.start + part.stop]
                sums.add_rows(at, logits_RV[part], targets_RK, owned=True)
        logprobs_T, entropy_T, log_total_T = sums.finish(targets_T)
        ctx.save_for_backward(hidden_TH, weight_VH, targets_TK, entropy_T, sums.max_T, log_total_T)
        ctx.options = options
        if options.entropy != "gradient":
            ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_T: torch.Tensor, grad_entropy_T: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        hidden_TH, weight_VH, targets_TK, entropy_T, max_T, log_total_T = ctx.saved_tensors
        options: _RowOptions = ctx.options
        real = options.vocab.real_columns(len(weight_VH))
        real_VH = _factor(weight_VH[:real]) if options.float32 else weight_VH[:real]
        dtype = log_total_T.dtype
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden_TH = hidden_TH.new_empty(hidden_TH.shape) if needs_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=dtype) if needs_weight else None
        gradients = _RowGradients(
            _columns(grad_logprobs_T), grad_entropy_T, entropy_T, max_T, log_total_T
        )
        buffer_RV = _chunk_buffer(hidden_TH, real_VH, options)
        narrow_RV = buffer_RV
        if buffer_RV.dtype != real_VH.dtype:
            narrow_RV = torch.empty_like(buffer_RV, dtype=real_VH.dtype)
        for rows in _row_blocks(len(hidden_TH), options.chunk_rows):
            chunk_RV = buffer_RV[: rows.stop - rows.start]
            gradient_RV = narrow_RV[: rows.stop - rows.start]
            _make_logits(hidden_TH[rows], real_VH, chunk_RV)
            for part in _sub_blocks(chunk_RV, options):
                whole = slice(rows.start + part.start, rows.start + part.stop)
                into_RV = gradient_RV[part]
                gradients.write(whole, chunk_RV[part], targets_TK[whole], into_RV, options)
            if grad_hidden_TH is not None:
                _multiply(gradient_RV, real_VH, grad_hidden_TH[rows])
            if grad_weight_VH is not None:
                factor_RH = hidden_TH[rows].to(real_VH.dtype)
                _add_product(grad_weight_VH[:real], gradient_RV.t(), factor_RH)
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
    hidden_TH: torch.Tensor, real_VH: torch.Tensor, options: _RowOptions
) -> torch.Tensor:
    rows = min(options.chunk_rows, len(hidden_TH))
    dtype = _wide(real_VH.dtype) if options.float32 else real_VH.dtype
    return hidden_TH.new_empty(rows, len(real_VH), dtype=dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _factor(weight_VH: torch.Tensor) -> torch.Tensor:
    """The weight as float32 products are made with it: in float32 where no narrower one will do."""
    device = platform.current()
    wide = device.has_wide_products and weight_VH.device.type == device.device_type
    return weight_VH if wide else weight_VH.to(_wide(weight_VH.dtype))


def _make_logits(hidden_RH: torch.Tensor, weight_VH: torch.Tensor, out_RV: torch.Tensor) -> None:
    hidden_RH = hidden_RH.to(weight_VH.dtype)
    if out_RV.dtype == weight_VH.dtype:
        torch.mm(hidden_RH, weight_VH.t(), out=out_RV)
    else:
        torch.mm(hidden_RH, weight_VH.t(), out_dtype=out_RV.dtype, out=out_RV)


def _multiply(left_MK: torch.Tensor, right_KN: torch.Tensor, out_MN: torch.Tensor) -> None:
    if out_MN.dtype == right_KN.dtype:
        torch.mm(left_MK, right_KN, out=out_MN)
    else:
        out_MN.copy_(left_MK @ right_KN)


def _sub_blocks(chunk_RV: torch.Tensor, options: _RowOptions) -> list[slice]:
    rows = min(options.block_rows, max(1, len(chunk_RV) // options.sub_blocks))
    return _row_blocks(len(chunk_RV), rows)


def _add_product(sum_MN: torch.Tensor, left_MK: torch.Tensor, right_KN: torch.Tensor) -> None:
    """sum += left @ right, the sum in float32 or better whatever the factors are."""
    if sum_MN.dtype == left_MK.dtype:
        sum_MN.addmm_(left_MK, right_KN)
    else:
        sum_MN.add_(left_MK @ right_KN)
