"""What a loss and an advantage estimator are asked for: closed words, checked before any tensor.

Imports no torch, so that a controller can refuse a bad request. A setting left at None is off
(or takes the algorithm's own default where its comment says so). A setting that would have no
effect for the chosen algorithm is an error that names it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

LossName = Literal[
    "ppo_clip", "gspo", "cispo", "importance_sampling", "reinforce", "dro", "sft", "value"
]
AdvantageName = Literal[
    "grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gae",
    "distillation",
    "provided",
]
KlEstimator = Literal["k1", "k2", "k3", "low_variance"]
Aggregation = Literal["token_mean", "sample_mean", "group_mean", "constant"]
OldLogprobs = Literal["old", "rollout"]
ImportanceLevel = Literal["token", "sequence", "geometric"]
ImportanceMode = Literal["truncate", "clip", "mask", "reject"]
RewardColumn = Literal["reward", "raw_reward"]

_FROZEN = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ImportanceSpec(BaseModel):
    """Correction for tokens sampled by another engine or older weights: exp(old - rollout).

    For reinforce, which has no old policy, exp(current - rollout) without gradient.

    level: one weight per token; the product over a sample (sequence); or its geometric mean.
    mode: truncate caps at `high` (TIS, arXiv 2508.03680 lineage); clip bounds into [low, high];
    mask keeps the weight inside [low, high] and drops the rest (MIS; at token level IcePop,
    arXiv 2510.18855); reject drops the same but weighs what it keeps by 1.
    veto: drop a whole sample when any of its tokens has a weight below this.
    """

    model_config = _FROZEN

    level: ImportanceLevel = "token"
    mode: ImportanceMode = "truncate"
    low: float | None = Field(None, ge=0)
    high: float | None = Field(None, gt=0)
    veto: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.high is None:
            raise ValueError(f"importance.high is required by mode {self.mode}")
        if self.mode == "truncate":
            _refuse(self, ("low",), "importance mode truncate, which has no lower bound")
        elif self.low is None:
            raise ValueError(f"importance.low is required by mode {self.mode}")
        if self.low is not None and self.low > self.high:
            raise ValueError("importance.low is above importance.high")
        return self


class LossSpec(BaseModel):
    """Which loss a token has, and how the losses of a step are weighed.

    ppo_clip needs clip_low (clip_high defaults to it; higher is DAPO's clip-higher); so does gspo.
    cispo needs clip_high (clip_low off = no lower bound). importance_sampling is the unclipped
    ratio; reinforce has no ratio and so no old policy; dro needs dro_beta. sft is the negative
    log-likelihood, value half the squared error of a critic.
    """

    model_config = _FROZEN

    name: LossName
    aggregation: Aggregation = "token_mean"
    constant_length: float | None = Field(None, gt=0)  # tokens per sample, aggregation=constant
    temperature: float | None = Field(None, gt=0)  # None is 1
    old_logprobs: OldLogprobs | None = None  # what the ratio compares with; None is "rollout"
    clip_low: float | None = Field(None, gt=0)
    clip_high: float | None = Field(None, gt=0)
    dual_clip: float | None = Field(None, gt=1)
    value_clip: float | None = Field(None, gt=0)
    dro_beta: float | None = Field(None, gt=0)
    kl_coefficient: float | None = Field(None, ge=0)  # KL to the reference, added to the loss
    kl_estimator: KlEstimator | None = None  # None is k3
    kl_unbiased: bool | None = None  # weigh the KL by current / old (arXiv 2512.02556)
    entropy_coefficient: float | None = None  # loss -= coefficient * entropy
    importance: ImportanceSpec | None = None
    opsm_delta: float | None = Field(None, ge=0)  # off-policy sequence masking (arXiv 2512.02556)

    @property
    def has_kl(self) -> bool:
        return bool(self.kl_coefficient)

    @property
    def has_entropy_gradient(self) -> bool:
        """Whether the entropy must be differentiable; otherwise it is a metric only."""
        return bool(self.entropy_coefficient)

    @property
    def old_column(self) -> str | None:
        """Name of the column the ratio compares with; None when there is no such column."""
        if self.name in _WITHOUT_RATIO:
            return None
        return f"{self.old_logprobs or 'rollout'}_logprobs"

    @model_validator(mode="after")
    def _check(self) -> Self:
        _refuse_unread(self, LOSS_READS[self.name], f"loss {self.name}")
        if self.aggregation != "constant":
            _refuse(self, ("constant_length",), f"aggregation {self.aggregation}")
        elif self.constant_length is None:
            raise ValueError("constant_length is required by aggregation constant")
        _check_needed(self)
        _check_kl(self)
        _check_ratio(self)
        return self


class AdvantageSpec(BaseModel):
    """How rewards become per-token advantages (and returns for a critic).

    grpo: (reward - group mean) / group standard deviation; Dr.GRPO with scale_by_std false.
    rloo: reward - mean of the others in the group. reinforce_plus_plus: discounted return of the
    terminal reward and the token KL, whitened over the batch; its _baseline form subtracts the
    group mean first. gae: PPO's estimator, needs values. distillation: the teacher's log-prob
    minus the student's. provided: the column `advantages` as it came.
    """

    model_config = _FROZEN

    name: AdvantageName
    reward: RewardColumn | None = None  # None is "reward"
    scale_by_std: bool | None = None  # None is true (grpo)
    # None is true for both reinforce_plus_plus forms, false for the others
    whiten: bool | None = None
    gamma: float | None = Field(None, gt=0, le=1)  # None is 1
    gae_lambda: float | None = Field(None, ge=0, le=1)  # None is 1
    kl_coefficient: float | None = Field(None, ge=0)  # KL to the reference, taken from the reward
    kl_estimator: KlEstimator | None = None  # None is k1
    teacher_coefficient: float | None = Field(None, ge=0)  # on-policy distillation, added
    # Which column holds the student in both KLs; None is "rollout"
    old_logprobs: Literal["old", "rollout"] | None = None

    @property
    def has_kl(self) -> bool:
        return bool(self.kl_coefficient)

    @property
    def has_teacher(self) -> bool:
        return self.name == "distillation" or bool(self.teacher_coefficient)

    @property
    def whitens(self) -> bool:
        """Whether the estimator needs the moments of every advantage of the global batch."""
        if self.whiten is not None:
            return self.whiten
        return self.name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline")

    @property
    def compares_siblings(self) -> bool:
        """Whether a sample's advantage depends on the rewards of others of its group."""
        return self.name in ("grpo", "rloo", "reinforce_plus_plus_baseline")

    @property
    def reward_column(self) -> str | None:
        return None if self.name in ("distillation", "provided") else self.reward or "reward"

    @property
    def student_column(self) -> str | None:
        if not (self.has_kl or self.has_teacher):
            return None
        return f"{self.old_logprobs or 'rollout'}_logprobs"

    @model_validator(mode="after")
    def _check(self) -> Self:
        _refuse_unread(self, ADVANTAGE_READS[self.name], f"advantage {self.name}")
        if not self.has_kl:
            _refuse(self, ("kl_estimator",), "an advantage without kl_coefficient")
        if self.student_column is None:
            _refuse(self, ("old_logprobs",), "an advantage that compares no log-probs")
        if self.name == "distillation" and self.teacher_coefficient == 0:
            raise ValueError("teacher_coefficient 0 leaves nothing of advantage distillation")
        return self


def required_columns(spec: LossSpec | AdvantageSpec) -> frozenset[str]:
    """Returns the columns every selected row must have; names as in `sluice.samples`."""
    if isinstance(spec, AdvantageSpec):
        columns = {spec.reward_column, spec.student_column}
        columns |= {"reference_logprobs"} if spec.has_kl else set()
        columns |= {"teacher_logprobs"} if spec.has_teacher else set()
        columns |= {"values"} if spec.name == "gae" else set()
        columns |= {"advantages"} if spec.name == "provided" else set()
    elif spec.name == "value":
        columns = {"returns", "values"} if spec.value_clip is not None else {"returns"}
    else:
        columns = {spec.old_column} | (set() if spec.name == "sft" else {"advantages"})
        columns |= {"reference_logprobs"} if spec.has_kl else set()
        columns |= {"rollout_logprobs"} if spec.importance is not None else set()
    return frozenset(name for name in columns if name is not None)


_WITHOUT_RATIO = ("reinforce", "sft", "value")

# What each loss and each estimator reads; all else is refused. A new setting is named here first.
_OF_ALL = ("name", "aggregation", "constant_length")
_OF_LOGPROBS = (*_OF_ALL, "temperature", "kl_coefficient", "kl_estimator", "entropy_coefficient")
_OF_SAMPLES = (*_OF_LOGPROBS, "kl_unbiased", "importance")
_OF_RATIOS = (*_OF_SAMPLES, "old_logprobs", "opsm_delta")
LOSS_READS: dict[LossName, frozenset[str]] = {
    "ppo_clip": frozenset((*_OF_RATIOS, "clip_low", "clip_high", "dual_clip")),
    "gspo": frozenset((*_OF_RATIOS, "clip_low", "clip_high", "dual_clip")),
    "cispo": frozenset((*_OF_RATIOS, "clip_low", "clip_high")),
    "importance_sampling": frozenset(_OF_RATIOS),
    "reinforce": frozenset(_OF_SAMPLES),
    "dro": frozenset((*_OF_RATIOS, "dro_beta")),
    "sft": frozenset(_OF_LOGPROBS),
    "value": frozenset((*_OF_ALL, "value_clip")),
}
_LOSS_NEEDS: dict[LossName, tuple[str, ...]] = {
    "ppo_clip": ("clip_low",),
    "gspo": ("clip_low",),
    "cispo": ("clip_high",),
    "dro": ("dro_beta",),
}
_OF_TEACHER = ("name", "whiten", "teacher_coefficient", "old_logprobs")
_OF_REWARDS = (*_OF_TEACHER, "reward", "kl_coefficient", "kl_estimator")
ADVANTAGE_READS: dict[AdvantageName, frozenset[str]] = {
    "grpo": frozenset((*_OF_REWARDS, "scale_by_std")),
    "rloo": frozenset(_OF_REWARDS),
    "reinforce_plus_plus": frozenset((*_OF_REWARDS, "gamma")),
    "reinforce_plus_plus_baseline": frozenset((*_OF_REWARDS, "gamma")),
    "gae": frozenset((*_OF_REWARDS, "gamma", "gae_lambda")),
    "distillation": frozenset(_OF_TEACHER),
    "provided": frozenset(_OF_TEACHER),
}


def _refuse_unread(spec: BaseModel, reads: Collection[str], where: str) -> None:
    _refuse(spec, [name for name in type(spec).model_fields if name not in reads], where)


def _refuse(spec: BaseModel, names: Iterable[str], where: str) -> None:
    for name in names:
        if getattr(spec, name) is not None:
            raise ValueError(f"{name} has no effect for {where}; leave it out")


def _check_needed(spec: LossSpec) -> None:
    for name in _LOSS_NEEDS.get(spec.name, ()):
        if getattr(spec, name) is None:
            raise ValueError(f"{name} is required by loss {spec.name}")
    if spec.clip_low is not None and spec.clip_low >= 1:
        raise ValueError("clip_low must be below 1: ratios are clipped to at least 1 - clip_low")


def _check_kl(spec: LossSpec) -> None:
    """The weight makes the gradient of an unbiased estimate that of the KL; k1 has none without."""
    if not spec.has_kl:
        _refuse(spec, ("kl_estimator", "kl_unbiased"), "a loss without kl_coefficient")
        return
    estimator = spec.kl_estimator or "k3"
    if spec.kl_unbiased and estimator in ("k2", "low_variance"):
        raise ValueError(
            f"kl_unbiased has no such effect with kl_estimator {estimator}, which is biased "
            "itself: take k1 or k3"
        )
    if estimator == "k1" and not spec.kl_unbiased:
        without = "; loss sft has no ratio to weigh it by" if spec.name == "sft" else ""
        raise ValueError(
            "kl_estimator k1 has no effect in a loss without kl_unbiased, since its expected "
            f"gradient is 0{without}: take k2, k3 or low_variance"
        )


def _check_ratio(spec: LossSpec) -> None:
    """With the rollout's log-probs as the old policy, the correction is 1 everywhere."""
    if spec.importance is not None and spec.old_column == "rollout_logprobs":
        raise ValueError("importance has no effect with old_logprobs rollout; set old_logprobs old")
