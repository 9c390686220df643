"""Divergences between a teacher and the student over the tokens that the teacher names at a place.

With q_j and p_j what teacher and student give to the K tokens, the rest of the vocabulary is
either one more outcome (tail `bucket`): q_0 = max(1 - sum q_j, 1e-6), p_0 likewise; or left out
(tail `renormalised`): q_j / sum q and p_j / sum p. A bucket tells how much falls outside, not how
it is spread: with it a divergence is a lower bound of the one over the whole vocabulary (data
processing inequality), which is 0 only where p_j = q_j; without it p may move mass outside unseen.
The student's log-probs have the gradient; the teacher's, and which tokens were sampled, have none.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from sluice.algo.plugins import PluginSettings
from sluice.algo.surrogate import Loss, Tokens
from sluice.samples.sample import MOST_TOP, top_columns

if TYPE_CHECKING:
    import torch

LOWEST_TAIL = 1e-6  # below it 1 - sum p is rounding, and its log no number to learn from


class TopSettings(PluginSettings):
    """top_count: K. tail: what becomes of the other tokens."""

    top_count: int = Field(16, ge=1, le=MOST_TOP)
    tail: Literal["bucket", "renormalised"] = "bucket"

    @model_validator(mode="after")
    def _check(self) -> TopSettings:
        if self.tail == "renormalised" and self.top_count == 1:
            raise ValueError("one token alone, renormalised, is always certain: nothing is learned")
        return self


class JsdSettings(TopSettings):
    """beta: the teacher's share of the mixture."""

    beta: float = Field(0.5, gt=0, lt=1)


class TopDivergence(Loss):
    """A divergence of the two distributions at each place."""

    settings_type = TopSettings
    has_ratio = False
    columns = ()

    @property
    def top_count(self) -> int:
        count: int = self.settings.top_count
        return count

    def token_losses(self, tokens: Tokens) -> torch.Tensor:
        assert tokens.top is not None
        teacher_TK = tokens.columns[top_columns(self.top_count)[1]]
        loss_T = self.divergence(self._outcomes(teacher_TK), self._outcomes(tokens.top))
        tokens.record("kl_teacher", loss_T)
        tokens.record("teacher_tail", -teacher_TK.logsumexp(1).expm1())
        return loss_T

    @abstractmethod
    def divergence(self, teacher_TJ: torch.Tensor, student_TJ: torch.Tensor) -> torch.Tensor:
        """Returns it in nats, float[T], from log-probs of all outcomes."""

    def _outcomes(self, logprobs_TK: torch.Tensor) -> torch.Tensor:
        total_T1 = logprobs_TK.logsumexp(1, keepdim=True)
        if self.settings.tail == "renormalised":
            return logprobs_TK - total_T1
        tail_T1 = (-total_T1.expm1()).clamp(min=LOWEST_TAIL).log()
        outcomes_TJ = logprobs_TK.new_empty(len(logprobs_TK), self.top_count + 1)
        outcomes_TJ[:, :-1], outcomes_TJ[:, -1:] = logprobs_TK, tail_T1
        return outcomes_TJ


def _kl(first_TJ: torch.Tensor, second_TJ: torch.Tensor) -> torch.Tensor:
    return (first_TJ.exp() * (first_TJ - second_TJ)).sum(1)


class TopForwardKl(TopDivergence):
    """KL(teacher || student) = sum_j q_j (log q_j - log p_j): covers all the teacher may say."""

    def divergence(self, teacher_TJ: torch.Tensor, student_TJ: torch.Tensor) -> torch.Tensor:
        return _kl(teacher_TJ, student_TJ)


class TopReverseKl(TopDivergence):
    """KL(student || teacher) = sum_j p_j (log p_j - log q_j): keeps to what the teacher says most.

    Its whole gradient, where the advantage `distillation` has an estimate from one token.
    """

    def divergence(self, teacher_TJ: torch.Tensor, student_TJ: torch.Tensor) -> torch.Tensor:
        return _kl(student_TJ, teacher_TJ)


class TopJsd(TopDivergence):
    """beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p (arXiv 2306.13649)."""

    settings_type = JsdSettings

    def divergence(self, teacher_TJ: torch.Tensor, student_TJ: torch.Tensor) -> torch.Tensor:
        beta: float = self.settings.beta
        weighed_TJ = teacher_TJ + math.log(beta)
        mixture_TJ = weighed_TJ.logaddexp(student_TJ + math.log1p(-beta))
        return beta * _kl(teacher_TJ, mixture_TJ) + (1 - beta) * _kl(student_TJ, mixture_TJ)
