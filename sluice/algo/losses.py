"""Every loss behind one entry, `compute_loss`: pure, summed, equal under any split of the rows.

What a loss is of a token is in `sluice/algo/surrogates/`; here it is corrected, regularised and
added up.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import xxhash

from sluice.algo.correction import Corrected, Opsm
from sluice.algo.kl import bounded_exp, exp_remainder
from sluice.algo.packed_rows import join_rows
from sluice.algo.spec import LossSpec, required_columns
from sluice.algo.surrogate import Tokens
from sluice.samples.sample import find_column, top_columns
from sluice.side_copies import to_device

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
    columns: float[T] by name, or several numbers a token. top: float[T, K], log-probs of the
    tokens that a teacher named, where the loss reads them; requires grad.
    entropy: float[T] when there is a metric or a bonus to make.
    sample_keys: int64[N], a number of each sample that no split changes; absent is all 0.
    fixed: float[T], what stands for the outputs where they have no gradient; absent is themselves.
    """

    outputs: torch.Tensor
    mask: torch.Tensor
    sample_index: torch.Tensor
    sample_weights: torch.Tensor
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    entropy: torch.Tensor | None = None
    sample_keys: torch.Tensor | None = None
    fixed: torch.Tensor | None = None
    top: torch.Tensor | None = None


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


@dataclass(frozen=True, kw_only=True)
class LossColumns:
    """What `LossInputs` have beside the outputs of a model, over the same tokens and samples."""

    mask: torch.Tensor
    sample_index: torch.Tensor
    sample_weights: torch.Tensor
    columns: Mapping[str, torch.Tensor]
    sample_keys: torch.Tensor

    def inputs(
        self, spec: LossSpec, outputs_T: torch.Tensor, entropy_T: torch.Tensor | None = None
    ) -> LossInputs:
        """Returns the inputs of `compute_loss`, on the device that these columns are on.

        outputs_T: as in `pack_rows`. Raises ValueError where they differ in length.
        """
        top_TK: torch.Tensor | None = None
        if spec.loss.top_count:
            outputs_T, top_TK = outputs_T[:, 0], outputs_T[:, 1:]
        if len(self.mask) != len(outputs_T):
            raise ValueError(f"{len(outputs_T)} outputs for {len(self.mask)} response tokens")
        return LossInputs(
            outputs=outputs_T,
            mask=self.mask,
            sample_index=self.sample_index,
            sample_weights=self.sample_weights,
            columns=self.columns,
            entropy=entropy_T,
            top=top_TK,
            sample_keys=self.sample_keys,
        )


def pack_columns(
    rows: Sequence[PackableRow], spec: LossSpec, dtype: torch.dtype = torch.float32
) -> LossColumns:
    """Returns what a loss reads of rows, in order; dtype: of the weights of samples.

    Raises MissingColumnError naming the first row without a column that `spec` needs, and
    ValueError when a column differs in length from the responses.
    """
    needed = required_columns(spec)
    for row in rows:
        check_columns(needed, row.columns, f"sample {row.sample_id}")
    lengths = [row.loss_mask.shape[0] for row in rows]
    present = {name for row in rows for name in row.columns}
    names = needed | (present & set(METRIC_COLUMNS))
    counts_N = torch.tensor(lengths, dtype=torch.int64)
    return LossColumns(
        mask=join_rows([row.loss_mask for row in rows], dtype=torch.bool).bool(),
        sample_index=torch.repeat_interleave(torch.arange(len(rows)), counts_N),
        sample_weights=torch.tensor([row.loss_weight for row in rows], dtype=dtype),
        columns={name: _pack_column(rows, lengths, name) for name in sorted(names)},
        sample_keys=torch.tensor([_key(row.sample_id) for row in rows], dtype=torch.int64),
    )


def pack_rows(
    rows: Sequence[PackableRow],
    spec: LossSpec,
    outputs_T: torch.Tensor,
    entropy_T: torch.Tensor | None = None,
) -> LossInputs:
    """Returns the inputs of `compute_loss`; `outputs_T` is the responses of `rows` in order.

    For a loss that reads the tokens a teacher named they are float[T, 1 + K], the sampled token's
    first, as `pack_named` has the others. Raises what `pack_columns` and `inputs` do.
    """
    dtype = torch.promote_types(outputs_T.dtype, torch.float32)
    columns = to_device(pack_columns(rows, spec, dtype), outputs_T.device)
    return columns.inputs(spec, outputs_T, entropy_T)


def pack_named(rows: Sequence[PackableRow], spec: LossSpec) -> torch.Tensor | None:
    """Returns the tokens that a teacher named, int64[T, K], rows in order; None if none are read.

    Raises MissingColumnError.
    """
    if not spec.loss.top_count:
        return None
    name, _ = top_columns(spec.loss.top_count)
    for row in rows:
        check_columns([name], row.columns, f"sample {row.sample_id}")
    empty = torch.empty((0, spec.loss.top_count), dtype=torch.int64)
    return torch.cat([empty, *(row.columns[name].long() for row in rows)])


def _key(sample_id: str) -> int:
    return xxhash.xxh64_intdigest(sample_id.encode()) - (1 << 63)


def _pack_column(rows: Sequence[PackableRow], lengths: Sequence[int], name: str) -> torch.Tensor:
    known = find_column(name)
    wide = [known.width] if known is not None and known.width else []
    parts = []
    for row, length in zip(rows, lengths, strict=True):
        values = row.columns.get(name)
        if values is None:
            values = torch.full((length, *wide), torch.nan)
        if values.shape[0] != length:
            raise ValueError(
                f"sample {row.sample_id}: {name} has {len(values)} values "
                f"for {length} response tokens"
            )
        parts.append(values)
    packed = join_rows(parts, *wide)
    return packed.to(torch.promote_types(packed.dtype, torch.float32))


Metrics = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
CORRECTION, LOSS = "correction/", "loss/"  # prefixes of what was measured ahead of a pass


def compute_loss(inputs: LossInputs, spec: LossSpec) -> LossTerms:
    """Sums over samples weight x sum over trained tokens of the loss that `spec` names.

    Equal for any split of whole samples into micro-batches.
    Tokens outside the mask have zero gradient whatever their columns hold, NaN included.
    Raises MissingColumnError, and ValueError for a loss that answers with another shape.
    """
    check_columns(required_columns(spec), inputs.columns, f"loss {spec.name}")
    if spec.has_entropy_gradient and inputs.entropy is None:
        raise ValueError("entropy_coefficient is set but the inputs carry no entropy")
    tokens = read_tokens(inputs, spec)
    loss_T = spec.loss.token_losses(tokens)
    if loss_T.shape != tokens.outputs.shape:
        raise ValueError(
            f"loss {spec.name} answered with shape {list(loss_T.shape)} "
            f"for {list(tokens.outputs.shape)} tokens"
        )
    if spec.loss.head == "policy":
        loss_T = _correct(tokens, spec, loss_T)
        tokens.record("policy_loss", loss_T)
        loss_T = loss_T + _regularisers(tokens, spec, inputs.entropy)
        if spec.loss.has_ratio:
            _record_ratio(tokens)
        _record_mismatch(tokens)
    weight_T = inputs.sample_weights.to(loss_T.dtype)[inputs.sample_index]
    loss = torch.where(inputs.mask, loss_T * weight_T, 0.0).sum()
    return LossTerms(loss=loss, token_count=tokens.count, metrics=tokens.metrics)


def measure_loss(inputs: LossInputs, spec: LossSpec, number: int) -> dict[str, float]:
    """Returns what round `number` measures of some rows ahead of a pass, by `prefix/name`.

    Sums, to be added up over the rows of the pass; of a name in `/max` the largest is meant. Only
    columns are read. `spec.measured` holds the rounds before. Raises MissingColumnError.
    """
    check_columns(required_columns(spec), inputs.columns, f"loss {spec.name}")
    tokens, found = read_tokens(inputs, spec), dict[str, float]()
    if number < spec.loss.rounds:
        for name, value in spec.loss.measure(tokens, number).items():
            found[f"{LOSS}{name}"] = float(value)
    if number == 0:
        for index, corrected, _ in _corrections(tokens, spec):
            if spec.stages[index].measures:
                for name, value in spec.stages[index].measure(corrected).items():
                    found[f"{CORRECTION}{index}/{name}"] = float(value)
    return found


def read_tokens(inputs: LossInputs, spec: LossSpec) -> Tokens:
    """Returns the inputs with untrained positions set to 0, so that nothing there reaches a sum."""
    mask_T = inputs.mask
    dtype = torch.promote_types(inputs.outputs.dtype, torch.float32)

    def kept(values_T: torch.Tensor) -> torch.Tensor:
        mask = mask_T if values_T.ndim == 1 else mask_T[:, None]
        return torch.where(mask, values_T.to(dtype), 0.0)

    fixed_T = kept((inputs.outputs if inputs.fixed is None else inputs.fixed).detach())
    columns = {name: kept(values_T.detach()) for name, values_T in inputs.columns.items()}
    keys_N = inputs.sample_keys
    if keys_N is None:
        keys_N = torch.zeros(len(inputs.sample_weights), dtype=torch.int64, device=mask_T.device)
    return Tokens(
        outputs=kept(inputs.outputs),
        fixed=fixed_T,
        old=columns[spec.old_column] if spec.old_column else fixed_T,
        mask=mask_T,
        sample_index=inputs.sample_index,
        sample_keys=keys_N,
        columns=columns,
        top=None if inputs.top is None else kept(inputs.top),
        measured=_below(spec.measured, LOSS),
    )


def _below(measured: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {k.removeprefix(prefix): v for k, v in measured.items() if k.startswith(prefix)}


def _corrections(tokens: Tokens, spec: LossSpec) -> Iterator[tuple[int, Corrected, torch.Tensor]]:
    """Each stage's number, what it sees, and its factors."""
    kept_T = tokens.mask
    has_own = spec.loss.has_ratio and spec.old_logprobs == "old"
    trainer_T = tokens.old if has_own else tokens.fixed
    rollout_T = tokens.columns.get("rollout_logprobs", trainer_T)
    for index, stage in enumerate(spec.stages):
        corrected = Corrected(
            tokens=tokens,
            log_importance=trainer_T - rollout_T,
            kept=kept_T,
            measured=_below(spec.measured, f"{CORRECTION}{index}/"),
        )
        factor_T = stage.factors(corrected)
        yield index, corrected, factor_T
        kept_T = kept_T & (factor_T != 0)


def _correct(tokens: Tokens, spec: LossSpec, loss_T: torch.Tensor) -> torch.Tensor:
    """Multiplies by the factors of all stages and drops what one of them drops."""
    if not spec.stages:
        return loss_T
    weight_T, dropped_T = torch.ones_like(tokens.fixed), torch.zeros_like(tokens.mask)
    several = len(spec.stages) > 1
    for index, _, factor_T in _corrections(tokens, spec):
        stage, gone_T = spec.stages[index], factor_T == 0
        if isinstance(stage, Opsm):
            tokens.record("opsm_dropped", gone_T)
        else:
            dropped_T = dropped_T | gone_T
            weight_T = weight_T * factor_T
        if several:
            tokens.record(f"correction_{index}_dropped", gone_T)
        loss_T = (loss_T * factor_T).masked_fill(gone_T, 0.0)
    if any(not isinstance(stage, Opsm) for stage in spec.stages):
        tokens.record("importance_weight", weight_T)
        tokens.record("importance_dropped", dropped_T)
    return loss_T


def _regularisers(tokens: Tokens, spec: LossSpec, entropy_T: torch.Tensor | None) -> torch.Tensor:
    """KL to the reference and the entropy bonus; the entropy is otherwise a metric."""
    loss_T = torch.zeros_like(tokens.outputs)
    if spec.kl_coefficient:
        kl_T = spec.kl_form.estimate(tokens.outputs - tokens.columns["reference_logprobs"])
        tokens.record("kl_reference", kl_T)
        if spec.kl_unbiased:
            kl_T = kl_T * bounded_exp(tokens.log_ratio)
        loss_T = loss_T + spec.kl_coefficient * kl_T
    if entropy_T is not None:
        tokens.record("entropy", entropy_T)
        if spec.entropy_coefficient:
            kept_T = torch.where(tokens.mask, entropy_T.to(loss_T.dtype), 0.0)
            loss_T = loss_T - spec.entropy_coefficient * kept_T
    return loss_T


@torch.no_grad()
def _record_ratio(tokens: Tokens) -> None:
    log_ratio_T = tokens.fixed - tokens.old
    tokens.record("ratio", bounded_exp(log_ratio_T))
    tokens.record("kl_old_k1", -log_ratio_T)
    tokens.record("kl_old_k3", exp_remainder(log_ratio_T))


@torch.no_grad()
def _record_mismatch(tokens: Tokens) -> None:
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
