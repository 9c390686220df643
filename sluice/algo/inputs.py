"""What a loss reads and answers: packed response tokens in, one differentiable sum out."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

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
