"""Corrections for tokens that other weights or another engine sampled, applied one after another.

Each stage gives every token a factor of its loss; 0 leaves the token out. `Weight` and `Reject`
look at l = log-prob under the trainer's old policy - under the rollout engine. A loss that has no
old policy of the trainer's own (`old_logprobs: rollout`, or none at all) compares the current one,
without a gradient.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from sluice.algo.kl import LOG_RATIO_LIMIT, bounded_exp, exp_remainder
from sluice.algo.plugins import Plugin, PluginSettings
from sluice.algo.surrogate import Tokens

if TYPE_CHECKING:
    import torch

SMALLEST_MEAN = 1e-8  # weights of a smaller mean are left as they are


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """The tokens, and what the stages before made of them.

    log_importance: float[T], l of the module's text, 0 on masked tokens. kept: bool[T], trained
    tokens that no stage has left out. measured: by name, of this stage.
    """

    tokens: Tokens
    log_importance: torch.Tensor
    kept: torch.Tensor
    measured: Mapping[str, float]


class Correction(Plugin, ABC):
    """One stage.

    columns: what it reads. has_ratio: it compares the current policy with the old one, and so
    needs a loss that does. weighs: its factor stands for the ratio of the old policy to the
    engine's, which a loss against `rollout_logprobs` has already.
    """

    columns: ClassVar[tuple[str, ...]] = ("rollout_logprobs",)
    has_ratio: ClassVar[bool] = False
    weighs: ClassVar[bool] = False

    @property
    def measures(self) -> bool:
        """Whether `measure` is asked, over all rows ahead of the pass."""
        return False

    @abstractmethod
    def factors(self, corrected: Corrected) -> torch.Tensor:
        """Returns the factor of each token's loss, float[T], without a gradient; 0 drops it."""

    def measure(self, corrected: Corrected) -> dict[str, torch.Tensor]:
        """Returns sums over some rows of the pass, to be added up over all of them."""
        raise NotImplementedError


class CorrectionPreset(Plugin, ABC):
    """A name for several stages; settings become theirs."""

    for_ratio: ClassVar[bool | None] = None  # of losses with (without) a ratio alone
    old: ClassVar[str | None] = None  # the old_logprobs that it is for

    @abstractmethod
    def stages(self) -> Sequence[Correction]:
        """Returns them in order."""


class WeightSettings(PluginSettings):
    """level: a weight per token, the product over a sample (sequence), or its geometric mean.

    mode: truncate caps at `high`; clip bounds into [low, high]; mask keeps the weight inside and
    drops the rest. batch_normalized: divided by the mean over the batch of what is left by the
    stages before: of tokens, or of samples where a sample has one weight.
    """

    level: Literal["token", "sequence", "geometric"] = "token"
    mode: Literal["truncate", "clip", "mask"] = "truncate"
    low: float | None = Field(None, ge=0)
    high: float = Field(gt=0)
    batch_normalized: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.mode == "truncate" and self.low is not None:
            raise ValueError("low has no effect with mode truncate; leave it out")
        if self.mode != "truncate" and self.low is None:
            raise ValueError(f"low is required by mode {self.mode}")
        if self.low is not None and self.low > self.high:
            raise ValueError("low is above high")
        return self


class Weight(Correction):
    """exp(l): TIS, MIS and IcePop are its modes."""

    settings_type = WeightSettings
    weighs = True

    @property
    def measures(self) -> bool:
        return bool(self.settings.batch_normalized)

    def factors(self, corrected: Corrected) -> torch.Tensor:
        weight_T = self._weights(corrected)
        if not self.settings.batch_normalized:
            return weight_T
        count = corrected.measured.get("count", 0.0)  # none ahead of the pass, where it is measured
        mean = corrected.measured["weight"] / count if count else 1.0
        return weight_T / mean if mean > SMALLEST_MEAN else weight_T

    def measure(self, corrected: Corrected) -> dict[str, torch.Tensor]:
        weight_T = self._weights(corrected).double().masked_fill(~corrected.kept, 0.0)
        if self.settings.level == "token":
            return {"weight": weight_T.sum(), "count": corrected.kept.sum().double()}
        tokens = corrected.tokens
        kept_N = tokens.sample_sums(corrected.kept.double())
        mean_N = tokens.sample_sums(weight_T) / kept_N.clamp(min=1)
        return {"weight": mean_N.sum(), "count": (kept_N > 0).sum().double()}

    def _weights(self, corrected: Corrected) -> torch.Tensor:
        settings, log_T = self.settings, corrected.log_importance
        if settings.level == "geometric":
            log_T = corrected.tokens.sample_means(log_T)
        elif settings.level == "sequence":
            log_T = corrected.tokens.sample_sums(log_T)[corrected.tokens.sample_index]
        weight_T = bounded_exp(log_T)
        low = 0.0 if settings.low is None else settings.low
        if settings.mode != "mask":
            return weight_T.clamp(low, settings.high)
        return weight_T.masked_fill((weight_T < low) | (weight_T > settings.high), 0.0)


class RejectSettings(PluginSettings):
    """What lies outside [low, high] is dropped; bounds are nats, None is no bound.

    statistic: k1 = -l, k2 = l^2 / 2, k3 = exp(l) - 1 - l, estimates of KL(engine || trainer).
    level: of each token; summed over a sample (sequence); its mean (geometric); or a sample with
    any token outside (worst).
    """

    statistic: Literal["k1", "k2", "k3"] = "k1"
    level: Literal["token", "sequence", "geometric", "worst"] = "token"
    low: float | None = None
    high: float | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low is None and self.high is None:
            raise ValueError("low or high is required: without a bound nothing is dropped")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError("low is above high")
        if self.statistic != "k1" and self.low is None and (self.high or 0.0) < 0:
            raise ValueError(f"high is below 0, which drops everything: {self.statistic} never is")
        if self.statistic != "k1" and self.high is None and (self.low or 0.0) <= 0:
            raise ValueError(f"low has no effect: {self.statistic} is never below 0")
        return self


class Reject(Correction):
    """1 inside a band of a statistic, 0 outside."""

    settings_type = RejectSettings

    def factors(self, corrected: Corrected) -> torch.Tensor:
        settings, tokens = self.settings, corrected.tokens
        log_T = corrected.log_importance.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        if settings.statistic == "k1":
            statistic_T = -log_T
        elif settings.statistic == "k2":
            statistic_T = 0.5 * log_T.square()
        else:
            statistic_T = exp_remainder(log_T)
        if settings.level == "sequence":
            statistic_T = tokens.sample_sums(statistic_T)[tokens.sample_index]
        elif settings.level == "geometric":
            statistic_T = tokens.sample_means(statistic_T)
        low = -math.inf if settings.low is None else settings.low
        high = math.inf if settings.high is None else settings.high
        outside_T = ((statistic_T < low) | (statistic_T > high)).to(statistic_T.dtype)
        if settings.level == "worst":
            outside_T = (tokens.sample_sums(outside_T) > 0).to(outside_T.dtype)[tokens.sample_index]
        return 1 - outside_T


class OpsmSettings(PluginSettings):
    """Nats a token by which a sample may have left the old policy."""

    delta: float = Field(ge=0)


class Opsm(Correction):
    """Drops bad tokens of samples that the policy has left: mean(old - current) > delta and A < 0.

    Off-policy sequence masking of DeepSeek-V3.2 (arXiv 2512.02556).
    """

    settings_type = OpsmSettings
    columns = ("advantages",)
    has_ratio = True

    def factors(self, corrected: Corrected) -> torch.Tensor:
        tokens = corrected.tokens
        drift_T = tokens.sample_means(tokens.old - tokens.fixed)
        far_T = (drift_T > self.settings.delta) & (tokens.advantages < 0)
        return 1 - far_T.to(drift_T.dtype)
