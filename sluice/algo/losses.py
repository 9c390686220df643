"""Every loss behind one entry, `compute_loss`: pure, summed, equal under any split of the rows.

Formulas: PPO arXiv 1707.06347, dual clip 1912.09729, DAPO clip-higher 2503.14476, GSPO 2507.18071,
CISPO 2506.13585, DRO 2405.19107.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from sluice.algo.correction import (
    SequenceSums,
    below_veto,
    importance_weights,
    needs_sequence_sums,
    opsm_dropped,
    sum_sequences,
)
from sluice.algo.kl import bounded_exp, estimate_kl, exp_remainder
from sluice.algo.spec import LossSpec, required_columns

# Read for metrics where a row has them; rows without them are NaN and left out of the mean.
METRIC_COLUMNS = ("rollout_logprobs", "old_logprobs")


class MissingColumnError(ValueError):
    """A row lacks a column that the loss or the estimator reads."""

    def __init__(self, columns: Iterable[str], where: str) -> None:
        self.columns = tuple(sorted(columns))
        super().__init__(f"{where} lacks {', '.join(self.columns)}")


def check_columns(needed: Iterable[str], present: Container[str], where: str) -> None:
    """Raises MissingColumnError, which names `where`, for columns that are not among `present`."""
    if missing := [name for name in needed if name not in present]:
        raise MissingColumnError(missing, where)


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Response tokens of a micro-batch, packed; under context parallelism gathered before.

    outputs: float[T], log-probs of the tokens, or a critic's values; requires grad.
    mask: bool[T], the tokens trained on; whatever other tensors hold elsewhere is not read.
    sample_index: int64[T], the sample of each token, in [0, N).
    sample_weights: float[N], factor of each sample's summed token losses (see aggregation.py).
    columns: float[T] by name. entropy: float[T] when there is a metric or a bonus to make.
    """

    outputs: torch.Tensor
    mask: torch.Tensor
    sample_index: torch.Tensor
    sample_weights: torch.Tensor
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    entropy: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """Sums that add up over micro-batches and ranks; nothing is divided yet.

    loss: scalar with a graph (also of a micro-batch without tokens), sum_i w_i sum_t loss_it.
    token_count: scalar, the trained tokens.
    metrics: name -> (sum, weight) as detached scalars; the mean is total sum / total weight.
    """

    loss: torch.Tensor
    token_count: torch.Tensor
    metrics: Mapping[str, tuple[torch.Tensor, torch.Tensor]]


class PackableRow(Protocol):
    """The part of a sample that a loss needs; per-token tensors cover the response."""

    @property
    def sample_id(self) -> str: ...
    @property
    def loss_mask(self) -> torch.Tensor: ...
    @property
    def columns(self) -> Mapping[str, torch.Tensor]: ...
    @property
    def loss_weight(self) -> float: ...


def pack_rows(
    rows: Sequence[PackableRow],
    spec: LossSpec,
    outputs_T: torch.Tensor,
    entropy_T: torch.Tensor | None = None,
) -> LossInputs:
    """Returns the inputs of `compute_loss`; `outputs_T` is the responses of `rows` in order.

    Raises MissingColumnError naming the first row without a column that `spec` needs, and
    ValueError when a column or the outputs differ in length from the responses.
    """
    needed = required_columns(spec)
    for row in rows:
        check_columns(needed, row.columns, f"sample {row.sample_id}")
    lengths = [row.loss_mask.shape[0] for row in rows]
    if sum(lengths) != len(outputs_T):
        raise ValueError(f"{len(outputs_T)} outputs for {sum(lengths)} response tokens")
    present = {name for row in rows for name in row.columns}
    names = needed | (present & set(METRIC_COLUMNS))
    device = outputs_T.device
    counts_N = torch.tensor(lengths, dtype=torch.int64)
    index_T = torch.repeat_interleave(torch.arange(len(rows)), counts_N)
    masks = [torch.empty(0, dtype=torch.bool), *(row.loss_mask for row in rows)]
    return LossInputs(
        outputs=outputs_T,
        mask=torch.cat(masks).bool().to(device),
        sample_index=index_T.to(device),
        sample_weights=torch.tensor(
            [row.loss_weight for row in rows],
            dtype=torch.promote_types(outputs_T.dtype, torch.float32),
        ).to(device),
        columns={name: _pack_column(rows, lengths, name).to(device) for name in sorted(names)},
        entropy=entropy_T,
    )


def _pack_column(rows: Sequence[PackableRow], lengths: Sequence[int], name: str) -> torch.Tensor:
    parts = [torch.empty(0)]
    for row, length in zip(rows, lengths, strict=True):
        values = row.columns.get(name)
        if values is None:
            values = torch.full((length,), torch.nan)
        if values.shape[0] != length:
            raise ValueError(
                f"sample {row.sample_id}: {name} has {len(values)} values "
                f"for {length} response tokens"
            )
        parts.append(values)
    return torch.cat(parts)


Metrics = dict[str, tuple[torch.Tensor, torch.Tensor]]


def compute_loss(inputs: LossInputs, spec: LossSpec) -> LossTerms:
    """Sums over samples weight x sum over trained tokens of the loss that `spec` names.

    Equal for any split of whole samples into micro-batches.
    Tokens outside the mask have zero gradient whatever their columns hold, NaN included.
    Raises MissingColumnError.
    """
    check_columns(required_columns(spec), inputs.columns, f"loss {spec.name}")
    if spec.has_entropy_gradient and inputs.entropy is None:
        raise ValueError("entropy_coefficient is set but the inputs carry no entropy")
    tokens = _Tokens.read(inputs)
    loss_T = _value_loss(tokens, spec) if spec.name == "value" else _policy_loss(tokens, spec)
    weight_T = inputs.sample_weights.to(loss_T.dtype)[inputs.sample_index]
    loss = (loss_T * weight_T).sum()  # untrained tokens were made 0 when they were read
    return LossTerms(loss=loss, token_count=tokens.count, metrics=tokens.metrics)


@dataclass(frozen=True, kw_only=True)
class _Tokens:
    """Inputs with untrained positions set to 0, so that nothing there can reach a sum."""

    inputs: LossInputs
    outputs: torch.Tensor
    columns: dict[str, torch.Tensor]
    count: torch.Tensor
    metrics: Metrics

    @classmethod
    def read(cls, inputs: LossInputs) -> _Tokens:
        mask_T = inputs.mask
        outputs_T = inputs.outputs
        dtype = torch.promote_types(outputs_T.dtype, torch.float32)
        return cls(
            inputs=inputs,
            outputs=torch.where(mask_T, outputs_T.to(dtype), 0.0),
            columns={
                name: torch.where(mask_T, values_T.detach().to(dtype), 0.0)
                for name, values_T in inputs.columns.items()
            },
            count=mask_T.sum().to(dtype),
            metrics={},
        )

    def record(
        self, name: str, values_T: torch.Tensor, among_T: torch.Tensor | None = None
    ) -> None:
        """Add the metric: mean of `values_T` over trained tokens (of `among_T` only)."""
        mask_T = self.inputs.mask if among_T is None else self.inputs.mask & among_T
        total = torch.where(mask_T, values_T.detach().to(self.count.dtype), 0.0).sum()
        weight = self.count if among_T is None else mask_T.sum().to(self.count.dtype)
        self.metrics[name] = (total, weight)


def _policy_loss(tokens: _Tokens, spec: LossSpec) -> torch.Tensor:
    inputs, logprobs_T = tokens.inputs, tokens.outputs
    old_T = tokens.columns[spec.old_column] if spec.old_column else logprobs_T.detach()
    log_importance_T = _log_importance(tokens, spec, old_T)
    sums = None
    if needs_sequence_sums(spec):
        terms = (
            inputs.mask.to(logprobs_T.dtype),
            logprobs_T.detach() - old_T,
            log_importance_T,
            below_veto(log_importance_T, spec.importance).to(logprobs_T.dtype),
        )
        sums = sum_sequences(torch.stack(terms), inputs.sample_index, len(inputs.sample_weights))
    loss_T = _surrogate(tokens, spec, old_T, sums)
    if spec.importance is not None:
        weight_T, dropped_T = importance_weights(
            log_importance_T, inputs.sample_index, sums, spec.importance
        )
        loss_T = loss_T * weight_T
        tokens.record("importance_weight", weight_T)
        tokens.record("importance_dropped", dropped_T)
    if spec.opsm_delta is not None:
        assert sums is not None
        far_T = opsm_dropped(
            tokens.columns["advantages"], inputs.sample_index, sums, spec.opsm_delta
        )
        loss_T = loss_T.masked_fill(far_T, 0.0)
        tokens.record("opsm_dropped", far_T)
    tokens.record("policy_loss", loss_T)
    loss_T = loss_T + _regularisers(tokens, spec, old_T)
    _record_mismatch(tokens)
    return loss_T


def _surrogate(
    tokens: _Tokens, spec: LossSpec, old_T: torch.Tensor, sums: SequenceSums | None
) -> torch.Tensor:
    logprobs_T = tokens.outputs
    if spec.name == "sft":
        tokens.record("negative_logprob", -logprobs_T)
        return -logprobs_T
    advantages_T = tokens.columns["advantages"]
    if spec.name == "reinforce":
        return -advantages_T * logprobs_T
    log_ratio_T = logprobs_T - old_T
    _record_ratio(tokens, log_ratio_T)
    if spec.name == "dro":
        assert spec.dro_beta is not None
        return 0.5 * spec.dro_beta * log_ratio_T.square() - advantages_T * logprobs_T
    if spec.name == "importance_sampling":
        return -bounded_exp(log_ratio_T) * advantages_T
    if spec.name == "cispo":
        return _cispo(tokens, spec, bounded_exp(log_ratio_T.detach()))
    if spec.name == "gspo":
        assert sums is not None
        # The sample's mean log ratio in value, each token's own gradient (GSPO-token, eq. 14):
        # equal to the sequence form where a sample has one advantage, right where it has many.
        mean_T = sums.mean(sums.log_ratio)[tokens.inputs.sample_index]
        log_ratio_T = mean_T + logprobs_T - logprobs_T.detach()
    return _clipped(tokens, spec, bounded_exp(log_ratio_T))


def _clipped(tokens: _Tokens, spec: LossSpec, ratio_T: torch.Tensor) -> torch.Tensor:
    """-min(r A, clip(r) A), for A < 0 at most -c A with dual clip; zero gradient where clipped."""
    assert spec.clip_low is not None
    advantages_T = tokens.columns["advantages"]
    low = 1 - spec.clip_low
    high = 1 + (spec.clip_low if spec.clip_high is None else spec.clip_high)
    clipped_T = ratio_T.clamp(low, high)
    loss_T = -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    tokens.record("clipped_low", (ratio_T < low) & (advantages_T < 0))
    tokens.record("clipped_high", (ratio_T > high) & (advantages_T > 0))
    if spec.dual_clip is not None:
        bound_T = -spec.dual_clip * advantages_T
        beyond_T = (advantages_T < 0) & (loss_T > bound_T)
        loss_T = torch.where(beyond_T, bound_T, loss_T)
        tokens.record("clipped_dual", beyond_T)
    return loss_T


def _cispo(tokens: _Tokens, spec: LossSpec, ratio_T: torch.Tensor) -> torch.Tensor:
    """-stopgrad(clip(r)) A log p: every token keeps a gradient, only its weight is bounded."""
    assert spec.clip_high is not None
    low = 0.0 if spec.clip_low is None else 1 - spec.clip_low
    high = 1 + spec.clip_high
    tokens.record("clipped_low", ratio_T < low)
    tokens.record("clipped_high", ratio_T > high)
    return -ratio_T.clamp(low, high) * tokens.columns["advantages"] * tokens.outputs


def _regularisers(tokens: _Tokens, spec: LossSpec, old_T: torch.Tensor) -> torch.Tensor:
    """KL to the reference and the entropy bonus; the entropy is otherwise a metric."""
    logprobs_T, entropy_T = tokens.outputs, tokens.inputs.entropy
    loss_T = torch.zeros_like(logprobs_T)
    if spec.kl_coefficient:
        kl_T = estimate_kl(
            logprobs_T, tokens.columns["reference_logprobs"], spec.kl_estimator or "k3"
        )
        tokens.record("kl_reference", kl_T)
        if spec.kl_unbiased:
            kl_T = kl_T * bounded_exp(logprobs_T - old_T)
        loss_T = loss_T + spec.kl_coefficient * kl_T
    if entropy_T is not None:
        tokens.record("entropy", entropy_T)
        if spec.entropy_coefficient:
            kept_T = torch.where(tokens.inputs.mask, entropy_T.to(loss_T.dtype), 0.0)
            loss_T = loss_T - spec.entropy_coefficient * kept_T
    return loss_T


def _value_loss(tokens: _Tokens, spec: LossSpec) -> torch.Tensor:
    """Half the squared error; with value_clip the larger of it and that of the clipped value."""
    values_T, returns_T = tokens.outputs, tokens.columns["returns"]
    loss_T = 0.5 * (values_T - returns_T).square()
    if spec.value_clip is not None:
        old_T = tokens.columns["values"]
        moved_T = (values_T - old_T).clamp(-spec.value_clip, spec.value_clip)
        clipped_T = 0.5 * (old_T + moved_T - returns_T).square()
        tokens.record("clipped_value", clipped_T > loss_T)
        loss_T = torch.maximum(loss_T, clipped_T)
    tokens.record("value_loss", loss_T)
    tokens.record("value", values_T)
    tokens.record("return", returns_T)
    return loss_T


def _log_importance(tokens: _Tokens, spec: LossSpec, old_T: torch.Tensor) -> torch.Tensor:
    if spec.importance is None:
        return torch.zeros_like(old_T)
    return old_T - tokens.columns["rollout_logprobs"]


@torch.no_grad()
def _record_ratio(tokens: _Tokens, log_ratio_T: torch.Tensor) -> None:
    ratio_T = bounded_exp(log_ratio_T)
    tokens.record("ratio", ratio_T)
    tokens.record("kl_old_k1", -log_ratio_T)
    tokens.record("kl_old_k3", exp_remainder(log_ratio_T))


@torch.no_grad()
def _record_mismatch(tokens: _Tokens) -> None:
    """How far the trainer's log-probs of the sampled tokens are from the engine's.

    The trainer's are those of the weights that sampled (`old_logprobs`) where they were computed,
    else of this pass. Rows without rollout log-probs (NaN) are left out.
    """
    rollout_T = tokens.columns.get("rollout_logprobs")
    if rollout_T is None:
        return
    trainer_T = tokens.columns.get("old_logprobs", tokens.outputs)
    trainer_T = torch.where(trainer_T.isnan(), tokens.outputs, trainer_T)
    difference_T = trainer_T - rollout_T
    present_T = ~rollout_T.isnan()
    tokens.record("rollout_mismatch", difference_T.abs(), present_T)
    tokens.record("rollout_mismatch_k3", exp_remainder(difference_T), present_T)
