"""Corrections that have a name of their own, as stages.

TIS (https://fengyao.notion.site/off-policy-rl), MIS, IcePop (arXiv 2510.18855), and those of
`RolloutCorrectionConfig` in verl: `decoupled` is for `old_logprobs: old`, `bypass_ppo` for
`old_logprobs: rollout`, `bypass_pg` for a loss without a ratio. Bounds called `*_low` and `*_high`
are of ratios, as there; rejections there look at -l, so a band is of the inverse ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from sluice.algo.correction import (
    Correction,
    CorrectionPreset,
    Reject,
    RejectSettings,
    Weight,
    WeightSettings,
)
from sluice.algo.plugins import PluginSettings

Level = Literal["token", "sequence", "geometric"]


def _weight(level: Level, **settings: Any) -> Weight:
    return Weight(WeightSettings(level=level, **settings))


def _geometric_band(low: float, high: float) -> Reject:
    bounds = {"low": math.log(low), "high": math.log(high)}
    return Reject(RejectSettings(statistic="k1", level="geometric", **bounds))


def _geometric_k3(bound: float) -> Reject:
    return Reject(RejectSettings(statistic="k3", level="geometric", high=bound))


class TisSettings(PluginSettings):
    """Where weights end."""

    level: Level = "token"
    high: float = Field(2.0, gt=0)
    batch_normalized: bool = False


class Tis(CorrectionPreset):
    """Truncated importance sampling: min(w, high)."""

    settings_type = TisSettings

    def stages(self) -> Sequence[Correction]:
        values = self.settings
        return [_weight(values.level, high=values.high, batch_normalized=values.batch_normalized)]


class BandSettings(PluginSettings):
    """Weights that are kept."""

    low: float = Field(0.5, gt=0)
    high: float = Field(2.0, gt=0)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low > self.high:
            raise ValueError("low is above high")
        return self


class MisSettings(BandSettings):
    """Weights that are kept, of what."""

    level: Level = "sequence"


class Mis(CorrectionPreset):
    """Masked importance sampling: w inside [low, high], else nothing."""

    settings_type = MisSettings

    def stages(self) -> Sequence[Correction]:
        values = self.settings
        return [_weight(values.level, mode="mask", low=values.low, high=values.high)]


class IcePop(CorrectionPreset):
    """MIS of tokens."""

    settings_type = BandSettings

    def stages(self) -> Sequence[Correction]:
        return [_weight("token", mode="mask", low=self.settings.low, high=self.settings.high)]


class IsSettings(PluginSettings):
    """Where weights end."""

    is_threshold: float = Field(2.0, gt=0)
    batch_normalized: bool = False


class SequenceBandSettings(IsSettings):
    """Where weights end, and which samples are kept."""

    rs_low: float = Field(0.5, gt=0)
    rs_high: float = Field(2.0, gt=0)


class GeometricSettings(PluginSettings):
    """Which samples are kept, by the geometric mean of their ratios."""

    rs_low: float = Field(0.999, gt=0)
    rs_high: float = Field(1.001, gt=0)


class GeometricIsSettings(GeometricSettings, IsSettings):
    """Which samples are kept, and where weights end."""


class K3Settings(PluginSettings):
    """Which samples are kept, by the mean of k3."""

    rs_threshold: float = Field(0.01, gt=0)


class K3IsSettings(K3Settings, IsSettings):
    """Which samples are kept, and where weights end."""


class VerlPreset(CorrectionPreset):
    """A weight of `level` if that is set, then a rejection by the settings that there are."""

    level: Level | None = None

    def stages(self) -> Sequence[Correction]:
        values, stages = self.settings, list[Correction]()
        if self.level is not None:
            normalized = values.batch_normalized
            stages.append(
                _weight(self.level, high=values.is_threshold, batch_normalized=normalized)
            )
        if isinstance(values, K3Settings):
            stages.append(_geometric_k3(values.rs_threshold))
        elif isinstance(values, GeometricSettings):
            stages.append(_geometric_band(values.rs_low, values.rs_high))
        elif isinstance(values, SequenceBandSettings):
            bounds = {"low": math.log(values.rs_low), "high": math.log(values.rs_high)}
            stages.append(Reject(RejectSettings(statistic="k1", level="sequence", **bounds)))
        return stages


class DecoupledTokenIs(VerlPreset):
    """Token weights, truncated."""

    settings_type, level, old = IsSettings, "token", "old"


class DecoupledSeqIs(VerlPreset):
    """Sequence weights, truncated."""

    settings_type, level, old = IsSettings, "sequence", "old"


class DecoupledSeqIsRs(VerlPreset):
    """Sequence weights, truncated; samples outside a band of their summed k1 are dropped."""

    settings_type, level, old = SequenceBandSettings, "sequence", "old"


class DecoupledGeoRs(VerlPreset):
    """Samples outside a band of their mean k1 are dropped."""

    settings_type, old = GeometricSettings, "old"


class DecoupledGeoRsSeqTis(VerlPreset):
    """Sequence weights, truncated; samples outside a band of their mean k1 are dropped."""

    settings_type, level, old = GeometricIsSettings, "sequence", "old"


class DecoupledGeoRsTokenTis(VerlPreset):
    """Token weights, truncated; samples outside a band of their mean k1 are dropped."""

    settings_type, level, old = GeometricIsSettings, "token", "old"


class DecoupledK3Rs(VerlPreset):
    """Samples of a mean k3 above a bound are dropped."""

    settings_type, old = K3Settings, "old"


class DecoupledK3RsSeqTis(VerlPreset):
    """Sequence weights, truncated; samples of a mean k3 above a bound are dropped."""

    settings_type, level, old = K3IsSettings, "sequence", "old"


class DecoupledK3RsTokenTis(VerlPreset):
    """Token weights, truncated; samples of a mean k3 above a bound are dropped."""

    settings_type, level, old = K3IsSettings, "token", "old"


class BypassPpoClipGeoRs(VerlPreset):
    """Samples outside a band of their mean k1 are dropped; the ratio is to the engine."""

    settings_type, old, for_ratio = GeometricSettings, "rollout", True


class BypassPpoClipK3Rs(VerlPreset):
    """Samples of a mean k3 above a bound are dropped; the ratio is to the engine."""

    settings_type, old, for_ratio = K3Settings, "rollout", True


class BypassPgIs(VerlPreset):
    """REINFORCE with sequence weights, truncated."""

    settings_type, level, for_ratio = IsSettings, "sequence", False


class BypassPgGeoRs(VerlPreset):
    """REINFORCE on samples inside a band of their mean k1."""

    settings_type, for_ratio = GeometricSettings, False


class BypassPgGeoRsSeqTis(VerlPreset):
    """REINFORCE with sequence weights, truncated, on samples inside a band of their mean k1."""

    settings_type, level, for_ratio = GeometricIsSettings, "sequence", False


class BypassPgGeoRsTokenTis(VerlPreset):
    """REINFORCE with token weights, truncated, on samples inside a band of their mean k1."""

    settings_type, level, for_ratio = GeometricIsSettings, "token", False
