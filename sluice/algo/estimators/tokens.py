"""Estimators that tell the tokens of a sample apart, and those that take no reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from sluice.algo.aggregation import Moments, group_relative
from sluice.algo.estimator import Estimator, Sibling
from sluice.algo.estimators.groups import episode_means
from sluice.algo.plugins import PluginSettings

if TYPE_CHECKING:
    import torch

    from sluice.algo.packed_rows import PackedRows


class ReturnSettings(PluginSettings):
    """How much later rewards count."""

    gamma: float = Field(1.0, gt=0, le=1)


class ReinforcePlusPlus(Estimator):
    """Discounted return of the terminal reward and the token KL, whitened (arXiv 2501.03262)."""

    settings_type = ReturnSettings
    whitens = True
    kl_in_score = False

    def estimate(
        self, packed: PackedRows, scores: Sequence[float], kl_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return packed.returns(scores, kl_T, self.settings.gamma), None


class ReinforcePlusPlusBaseline(ReinforcePlusPlus):
    """The same, of the reward less its group's mean."""

    compares_siblings = True

    def relate(self, group: Sequence[Sibling]) -> list[float]:
        moments = Moments.of_values(episode_means(group).values())
        return group_relative([each.scores[0] for each in group], moments, scale_by_std=False)


class GaeSettings(ReturnSettings):
    """How much later rewards count, and how far the critic is not trusted."""

    gae_lambda: float = Field(1.0, ge=0, le=1)


class Gae(Estimator):
    """PPO's estimator (arXiv 1506.02438); needs the values of a critic."""

    settings_type = GaeSettings
    kl_in_score = False

    @property
    def needed_columns(self) -> tuple[str, ...]:
        return ("values",)

    def estimate(
        self, packed: PackedRows, scores: Sequence[float], kl_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        settings = self.settings
        return packed.generalized(scores, kl_T, settings.gamma, settings.gae_lambda)


class Distillation(Estimator):
    """Nothing but the teacher's log-prob minus the student's, which is added outside."""

    reads_reward = False
    reads_kl = False

    def estimate(
        self, packed: PackedRows, scores: Sequence[float], kl_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return packed.zeros(), None


class Provided(Estimator):
    """The column `advantages` as it came."""

    reads_reward = False
    reads_kl = False

    @property
    def needed_columns(self) -> tuple[str, ...]:
        return ("advantages",)

    def estimate(
        self, packed: PackedRows, scores: Sequence[float], kl_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return packed.masked(packed.column("advantages")), None
