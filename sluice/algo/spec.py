"""What a loss and an advantage estimator are asked for, checked before any tensor.

Imports no torch, so that a controller can refuse a bad request. A setting left at None is off
(or takes the algorithm's own default where its comment says so). A setting that would have no
effect for the chosen algorithm is an error that names it. What `package.module:Name` reads is known
where tensors are: `check` says there what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, PrivateAttr, model_validator

from sluice.algo.correction import (
    Correction,
    CorrectionPreset,
    Opsm,
    OpsmSettings,
    Reject,
    RejectSettings,
    Weight,
    WeightSettings,
)
from sluice.algo.estimator import Estimator
from sluice.algo.kl import KlForm
from sluice.algo.plugins import (
    SHIPPED,
    AlgorithmSettings,
    Kind,
    PluginSettingError,
    build,
    check_name,
    find,
    is_shipped,
)
from sluice.algo.surrogate import Loss, LossHead
from sluice.config import Config
from sluice.samples.sample import LEAST_TEMPERATURE, MOST_TEMPERATURE, top_columns

Aggregation = Literal["token_mean", "sample_mean", "group_mean", "constant", "sum"]
OldLogprobs = Literal["old", "rollout"]
ImportanceLevel = Literal["token", "sequence", "geometric"]
ImportanceMode = Literal["truncate", "clip", "mask", "reject"]
RewardColumn = Literal["reward", "raw_reward"]
Settings = dict[str, JsonValue]


class ImportanceSpec(AlgorithmSettings):
    """Correction for tokens sampled by another engine or older weights: exp(old - rollout).

    For reinforce, which has no old policy, exp(current - rollout) without gradient.

    level: one weight per token; the product over a sample (sequence); or its geometric mean.
    mode: truncate caps at `high` (TIS, arXiv 2508.03680 lineage); clip bounds into [low, high];
    mask keeps the weight inside [low, high] and drops the rest (MIS; at token level IcePop,
    arXiv 2510.18855); reject drops the same but weighs what it keeps by 1.
    veto: drop a whole sample when any of its tokens has a weight below this.
    """

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


class CorrectionSpec(AlgorithmSettings):
    """A stage, or a preset of several, by name; see `sluice/algo/correction.py`."""

    name: str
    settings: Settings = Field(default_factory=dict)


class LossSpec(AlgorithmSettings):
    """Which loss a token has, and how the losses of a step are weighed.

    name: of `sluice/algo/plugins.py`, or `package.module:Name` of a `Loss` that the trainer may
    import. settings: the loss's own; those that have a field of their own below may stand there.
    corrections: applied in order; `importance` and `opsm_delta` are short for two of them.
    """

    name: str
    aggregation: Aggregation = "token_mean"
    # Tokens per sample, aggregation=constant; at its ends gradients are still float32 numbers.
    constant_length: float | None = Field(None, ge=1e-9, le=1e9)
    temperature: float | None = Field(None, ge=LEAST_TEMPERATURE, le=MOST_TEMPERATURE)  # None is 1
    old_logprobs: OldLogprobs | None = None  # what the ratio compares with; None is "rollout"
    clip_low: float | None = Field(None, gt=0)
    clip_high: float | None = Field(None, gt=0)
    dual_clip: float | None = Field(None, gt=1)
    value_clip: float | None = Field(None, gt=0)
    dro_beta: float | None = Field(None, gt=0)
    kl_coefficient: float | None = Field(None, ge=0)  # KL to the reference, added to the loss
    kl_estimator: str | None = None  # a KL form; None is k3
    kl_unbiased: bool | None = None  # weigh the KL by current / old (arXiv 2512.02556)
    entropy_coefficient: float | None = None  # loss -= coefficient * entropy
    importance: ImportanceSpec | None = None
    opsm_delta: float | None = Field(None, ge=0)  # off-policy sequence masking (arXiv 2512.02556)
    settings: Settings | None = None
    corrections: tuple[CorrectionSpec, ...] | None = Field(None, max_length=16)
    kl_settings: Settings | None = None

    _measured: Mapping[str, float] = PrivateAttr(default_factory=dict)

    @property
    def measured(self) -> Mapping[str, float]:
        """What was summed over all rows of the pass ahead of it, by `prefix/name`."""
        return self._measured

    def with_measured(self, measured: Mapping[str, float]) -> Self:
        """Returns this loss for the rows that were measured."""
        copied = self.model_copy()
        copied._measured = dict(measured)
        return copied

    @property
    def plugins(self) -> dict[str, str]:
        """Names of users' classes, by the field that has them."""
        found = {"name": ("loss", self.name), "kl_estimator": ("kl", self.kl_estimator or "k3")}
        for index, stage in enumerate(self.corrections or ()):
            found[f"corrections.{index}.name"] = ("correction", stage.name)
        return _users(found)

    @property
    def has_kl(self) -> bool:
        return bool(self.kl_coefficient)

    @property
    def has_entropy_gradient(self) -> bool:
        """Whether the entropy must be differentiable; otherwise it is a metric only."""
        return bool(self.entropy_coefficient)

    @cached_property
    def loss(self) -> Loss:
        """The loss with its settings. Raises PluginSettingError and ValueError."""
        built: Loss = _build(self, "loss", self.name, LOSS_SETTINGS, self.settings)
        return built

    @cached_property
    def kl_form(self) -> KlForm:
        """Raises PluginSettingError and ValueError."""
        name = self.kl_estimator or "k3"
        form: KlForm = _build_named("kl", name, self.kl_settings or {}, "kl_settings")
        return form

    @cached_property
    def stages(self) -> tuple[Correction, ...]:
        """The corrections in order, presets unfolded. Raises PluginSettingError and ValueError."""
        found = list(_legacy_stages(self))
        for index, stage in enumerate(self.corrections or ()):
            found += _stages_of(self, stage, f"corrections.{index}")
        return tuple(found)

    @property
    def old_column(self) -> str | None:
        """Name of the column the ratio compares with; None when there is no such column."""
        if not self.loss.has_ratio:
            return None
        return f"{self.old_logprobs or 'rollout'}_logprobs"

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_names(self, {"name": ("loss", self.name), "kl_estimator": ("kl", self.kl_estimator)})
        for index, stage in enumerate(self.corrections or ()):
            _check_names(self, {f"corrections.{index}.name": ("correction", stage.name)})
        if self.aggregation != "constant":
            _refuse(self, ("constant_length",), f"aggregation {self.aggregation}")
        elif self.constant_length is None:
            raise ValueError("constant_length is required by aggregation constant")
        if self.corrections is not None:
            _refuse(self, ("importance", "opsm_delta"), "corrections, which have stages for it")
        if not self.plugins:
            self.check()
        return self

    def check(self) -> None:
        """Raises PluginSettingError and ValueError for settings that the loss does not read."""
        where = f"loss {self.name}"
        _refuse(self, [n for n in _COMMON if n not in _commons_of(self.loss)], where)
        if self.clip_low is not None and self.clip_low >= 1:
            raise ValueError(
                "clip_low must be below 1: ratios are clipped to at least 1 - clip_low"
            )
        _check_kl(self)
        _check_stages(self)


class OverlongSpec(AlgorithmSettings):
    """Soft punishment of long responses (DAPO, arXiv 2503.14476), added to the reward.

    0 up to max_length - buffer tokens of response, from there falling to -penalty at max_length,
    and -penalty beyond.
    """

    max_length: int = Field(gt=0, le=1 << 31)
    buffer: int = Field(gt=0, le=1 << 31)
    penalty: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.buffer > self.max_length:
            raise ValueError("buffer is longer than max_length")
        return self

    def punish(self, length: int) -> float:
        """Returns what a response of so many tokens has added to its reward, 0 or less."""
        beyond = length - (self.max_length - self.buffer)
        return -self.penalty * min(max(beyond / self.buffer, 0.0), 1.0)


class AdvantageSpec(AlgorithmSettings):
    """How rewards become per-token advantages (and returns for a critic).

    name: of `sluice/algo/plugins.py`, or `package.module:Name` of an `Estimator` that the trainer
    may import. settings: the estimator's own; those that have a field of their own below may stand
    there.
    """

    name: str
    reward: RewardColumn | None = None  # None is "reward"
    scale_by_std: bool | None = None  # None is true (grpo)
    # None is true for both reinforce_plus_plus forms and gdpo, false for the others
    whiten: bool | None = None
    gamma: float | None = Field(None, gt=0, le=1)  # None is 1
    gae_lambda: float | None = Field(None, ge=0, le=1)  # None is 1
    kl_coefficient: float | None = Field(None, ge=0)  # KL to the reference, taken from the reward
    kl_estimator: str | None = None  # a KL form; None is k1
    teacher_coefficient: float | None = Field(None, ge=0)  # on-policy distillation, added
    # Which column holds the student in both KLs; None is "rollout"
    old_logprobs: Literal["old", "rollout"] | None = None
    settings: Settings | None = None
    overlong: OverlongSpec | None = None
    kl_settings: Settings | None = None

    @property
    def plugins(self) -> dict[str, str]:
        """Names of users' classes, by the field that has them."""
        found = {
            "name": ("advantage", self.name),
            "kl_estimator": ("kl", self.kl_estimator or "k1"),
        }
        return _users(found)

    @property
    def has_kl(self) -> bool:
        return bool(self.kl_coefficient)

    @property
    def has_teacher(self) -> bool:
        return self.name == "distillation" or bool(self.teacher_coefficient)

    @cached_property
    def estimator(self) -> Estimator:
        """The estimator with its settings. Raises PluginSettingError and ValueError."""
        fields, settings = ADVANTAGE_SETTINGS, self.settings
        built: Estimator = _build(self, "advantage", self.name, fields, settings)
        return built

    @cached_property
    def kl_form(self) -> KlForm:
        """Raises PluginSettingError and ValueError."""
        name = self.kl_estimator or "k1"
        form: KlForm = _build_named("kl", name, self.kl_settings or {}, "kl_settings")
        return form

    @property
    def whitens(self) -> bool:
        """Whether the estimator needs the moments of every advantage of the global batch."""
        return self.estimator.whitens if self.whiten is None else self.whiten

    @property
    def compares_siblings(self) -> bool:
        """Whether a sample's advantage depends on the rewards of others of its group."""
        return self.estimator.compares_siblings

    @property
    def reward_column(self) -> str | None:
        return self.reward or "reward" if self.estimator.reads_reward else None

    @property
    def student_column(self) -> str | None:
        if not (self.has_kl or self.has_teacher):
            return None
        return f"{self.old_logprobs or 'rollout'}_logprobs"

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = {"name": ("advantage", self.name), "kl_estimator": ("kl", self.kl_estimator)}
        _check_names(self, names)
        if not self.has_kl:
            _refuse(self, ("kl_estimator", "kl_settings"), "an advantage without kl_coefficient")
        if self.student_column is None:
            _refuse(self, ("old_logprobs",), "an advantage that compares no log-probs")
        if self.name == "distillation" and self.teacher_coefficient == 0:
            raise ValueError("teacher_coefficient 0 leaves nothing of advantage distillation")
        if not self.plugins:
            self.check()
        return self

    def check(self) -> None:
        """Raises PluginSettingError and ValueError for what the estimator does not read."""
        estimator, where = self.estimator, f"advantage {self.name}"
        if not estimator.reads_reward:
            _refuse(self, ("reward", "overlong"), where)
        if not estimator.reads_kl:
            _refuse(self, ("kl_coefficient", "kl_estimator"), where)
        if self.has_kl:
            _ = self.kl_form


@dataclass(frozen=True, kw_only=True)
class LossTraits:
    """What a controller must know of a loss. rounds: of measuring ahead of the pass."""

    columns: frozenset[str]
    head: LossHead
    silent: bool
    rounds: int


@dataclass(frozen=True, kw_only=True)
class AdvantageTraits:
    """What a controller must know of an estimator. width: numbers a sample is compared by."""

    columns: frozenset[str]
    compares_siblings: bool
    whitens: bool
    width: int


def loss_traits(spec: LossSpec) -> LossTraits:
    """Raises PluginSettingError and ValueError for settings that the loss does not read."""
    spec.check()
    plain = not (spec.has_kl or spec.has_entropy_gradient)
    measuring = any(stage.measures for stage in spec.stages)
    return LossTraits(
        columns=required_columns(spec),
        head=spec.loss.head,
        silent=plain and spec.loss.is_silent,
        rounds=max(spec.loss.rounds, int(measuring)),
    )


def advantage_traits(spec: AdvantageSpec) -> AdvantageTraits:
    """Raises PluginSettingError and ValueError for what the estimator does not read."""
    spec.check()
    return AdvantageTraits(
        columns=required_columns(spec),
        compares_siblings=spec.compares_siblings,
        whitens=spec.whitens,
        width=spec.estimator.width,
    )


def required_columns(spec: LossSpec | AdvantageSpec) -> frozenset[str]:
    """Returns the columns every selected row must have; names as in `sluice.samples`."""
    if isinstance(spec, AdvantageSpec):
        columns = {spec.reward_column, spec.student_column, *spec.estimator.needed_columns}
        columns |= {"reference_logprobs"} if spec.has_kl else set()
        columns |= {"teacher_logprobs"} if spec.has_teacher else set()
    else:
        columns = {spec.old_column, *spec.loss.needed_columns}
        if spec.loss.top_count:
            columns |= set(top_columns(spec.loss.top_count))
        columns |= {"reference_logprobs"} if spec.has_kl else set()
        columns |= {name for stage in spec.stages for name in stage.columns}
    return frozenset(name for name in columns if name is not None)


def known_columns(spec: LossSpec | AdvantageSpec) -> frozenset[str]:
    """Returns `required_columns`, or nothing where only the trainer knows them."""
    return frozenset() if spec.plugins else required_columns(spec)


# Settings of losses and estimators that have a field of their own, from before there were plug-ins.
LOSS_SETTINGS = ("clip_low", "clip_high", "dual_clip", "value_clip", "dro_beta")
ADVANTAGE_SETTINGS = ("scale_by_std", "gamma", "gae_lambda")

# What is done around a loss, by what it is; all else is refused.
_OF_LOGPROBS = (
    "temperature",
    "kl_coefficient",
    "kl_estimator",
    "kl_settings",
    "entropy_coefficient",
)
_OF_SAMPLES = (*_OF_LOGPROBS, "kl_unbiased", "importance", "corrections")
_COMMON = (*_OF_SAMPLES, "old_logprobs", "opsm_delta")


def _commons_of(loss: Loss) -> Sequence[str]:
    if loss.head == "value":
        return ()
    if loss.has_ratio:
        return _COMMON
    return _OF_SAMPLES if "advantages" in loss.columns else _OF_LOGPROBS


def _users(names: Mapping[str, tuple[Any, str]]) -> dict[str, str]:
    return {key: name for key, (kind, name) in names.items() if not is_shipped(kind, name)}


def _check_names(spec: Config, names: Mapping[str, tuple[Any, str | None]]) -> None:
    for key, (kind, name) in names.items():
        if name is not None:
            try:
                check_name(kind, name)
            except ValueError as error:
                raise PluginSettingError(key, str(error)) from None


def _build(
    spec: Config,
    kind: Kind,
    name: str,
    own_fields: Sequence[str],
    settings: Mapping[str, Any] | None,
) -> Any:
    """Builds what `name` stands for, of `settings` and of the fields of the spec that are its."""
    found, where = find(kind, name), f"{kind} {name}"
    given = {field: getattr(spec, field) for field in own_fields}
    given = {field: value for field, value in given.items() if value is not None}
    shipped = name in SHIPPED[kind]
    for field in given:
        if not shipped or field not in found.settings_type.model_fields:
            raise ValueError(f"{field} has no effect for {where}; leave it out")
        if field in (settings or {}):
            raise PluginSettingError(f"settings.{field}", f"is given as {field} too")
    try:
        return build(found, {**given, **(settings or {})}, where)
    except PluginSettingError as error:
        if error.key in own_fields and error.key not in (settings or {}):
            raise ValueError(f"{error.key} {error.problem}") from None
        raise PluginSettingError(f"settings.{error.key}", error.problem) from None


def _build_named(kind: Kind, name: str, settings: Mapping[str, Any], path: str) -> Any:
    try:
        return build(find(kind, name), settings, f"{kind} {name}")
    except PluginSettingError as error:
        raise PluginSettingError(f"{path}.{error.key}", error.problem) from None


def _legacy_stages(spec: LossSpec) -> Iterable[Correction]:
    """`importance` and `opsm_delta` as stages."""
    importance = spec.importance
    if importance is not None:
        assert importance.high is not None
        if importance.mode != "reject":
            values = importance.model_dump(include={"level", "mode", "low", "high"})
            yield Weight(WeightSettings(**values))
        else:
            low = -math.log(importance.high)
            high = -math.log(importance.low) if importance.low else None
            yield Reject(RejectSettings(level=importance.level, low=low, high=high))
        if importance.veto is not None:
            yield Reject(RejectSettings(level="worst", high=-math.log(importance.veto)))
    if spec.opsm_delta is not None:
        yield Opsm(OpsmSettings(delta=spec.opsm_delta))


def _stages_of(spec: LossSpec, stage: CorrectionSpec, path: str) -> Sequence[Correction]:
    preset = _build_named("correction", stage.name, stage.settings, f"{path}.settings")
    if not isinstance(preset, CorrectionPreset):
        return [preset]
    if preset.for_ratio is not None and preset.for_ratio != spec.loss.has_ratio:
        kind = "with" if preset.for_ratio else "without"
        raise PluginSettingError(f"{path}.name", f"{stage.name} is for a loss {kind} a ratio")
    if preset.old is not None and preset.old != (spec.old_logprobs or "rollout"):
        needed = f"{stage.name} is for old_logprobs {preset.old}"
        raise PluginSettingError(f"{path}.name", needed)
    return preset.stages()


def _refuse(spec: Config, names: Iterable[str], where: str) -> None:
    for name in names:
        if getattr(spec, name) is not None:
            raise ValueError(f"{name} has no effect for {where}; leave it out")


def _check_kl(spec: LossSpec) -> None:
    """The weight makes the gradient of an unbiased estimate that of the KL; k1 has none without."""
    if not spec.has_kl:
        names = ("kl_estimator", "kl_settings", "kl_unbiased")
        _refuse(spec, names, "a loss without kl_coefficient")
        return
    estimator, form = spec.kl_estimator or "k3", spec.kl_form
    if spec.kl_unbiased and not form.unbiased:
        raise ValueError(
            f"kl_unbiased has no such effect with kl_estimator {estimator}, which is biased "
            "itself: take k1 or k3"
        )
    if not form.has_gradient and not spec.kl_unbiased:
        loss = spec.loss
        has_none = not loss.has_ratio and "advantages" not in loss.columns
        without = f"; loss {spec.name} has no ratio to weigh it by" if has_none else ""
        raise ValueError(
            f"kl_estimator {estimator} has no effect in a loss without kl_unbiased, since its "
            f"expected gradient is 0{without}: take k2, k3 or low_variance"
        )


def _check_stages(spec: LossSpec) -> None:
    """With the rollout's log-probs as the old policy, the ratio is the correction already."""
    against_rollout = spec.loss.has_ratio and spec.old_logprobs != "old"
    if spec.importance is not None and against_rollout:
        raise ValueError("importance has no effect with old_logprobs rollout; set old_logprobs old")
    by_policy = ""  # what the current policy decides on, so that nobody knows it ahead of a pass
    for stage in spec.stages:
        name = type(stage).__name__.lower()
        if stage.weighs and against_rollout:
            raise PluginSettingError(
                "corrections",
                f"a {name} is in the ratio already with old_logprobs rollout; set old_logprobs old",
            )
        if stage.has_ratio and not spec.loss.has_ratio:
            raise PluginSettingError(
                "corrections", f"{name} compares with an old policy, which {spec.name} has not"
            )
        if stage.measures and spec.old_logprobs != "old":
            raise PluginSettingError(
                "corrections", "batch_normalized needs old_logprobs old: columns, known ahead"
            )
        if stage.measures and by_policy:
            raise PluginSettingError(
                "corrections",
                f"batch_normalized comes before {by_policy}: what that drops is not known ahead",
            )
        if stage.has_ratio:
            by_policy = name
