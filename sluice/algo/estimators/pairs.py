"""Preferences as advantages: of two answers to a prompt, the one of higher reward is chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from sluice.algo.estimator import Estimator, Sibling
from sluice.algo.estimators.groups import episode_means
from sluice.algo.plugins import PluginSettingError, PluginSettings


class DpoSettings(PluginSettings):
    """What log-probs of two answers make of a reward, and what its difference makes of a loss."""

    beta: float = Field(0.1, gt=0, description="Factor of log-probs; implicit rewards have it.")
    form: Literal["sigmoid", "ipo"] = "sigmoid"
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="Share of labels that are wrong.")
    reference: bool = Field(True, description="Log-probs count against the reference's.")
    average: bool = Field(False, description="Of log-probs, over the tokens of an answer.")
    margin: float = Field(0.0, ge=0, description="By which the chosen is to be ahead.")
    sft_weight: float = Field(
        0.0, ge=0, description="Of the chosen's mean negative log-prob, added to the loss."
    )

    @model_validator(mode="after")
    def _are_of_the_form(self) -> Self:
        for name in ("label_smoothing", "margin"):
            if self.form == "ipo" and getattr(self, name):
                raise ValueError(f"{name} has no effect for form ipo; leave it out")
        return self


class _Answer(NamedTuple):
    """An episode of a pair. logprob: of all its tokens. reward: the implicit one, h of `Dpo`."""

    episode: int | str
    logprob: float
    reward: float
    length: int


def _find_pair(
    name: str, group: Sequence[Sibling]
) -> tuple[tuple[int | str, list[Sibling]], tuple[int | str, list[Sibling]]] | None:
    """The episodes of (chosen, rejected) and their samples; None where neither is preferred.

    Raises PluginSettingError.
    """
    preferences = episode_means(group)
    if len(preferences) != 2:
        raise PluginSettingError(
            "name", f"{name} is of two answers to a prompt, and a group has {len(preferences)}"
        )
    chosen, rejected = sorted(preferences, key=lambda episode: -preferences[episode])
    if preferences[chosen] == preferences[rejected]:
        return None
    own = {each: [s for s in group if s.episode == each] for each in (chosen, rejected)}
    return (chosen, own[chosen]), (rejected, own[rejected])


def _logistic(z: float) -> tuple[float, float]:
    """(-log sigmoid(z), minus its derivative) of any z."""
    small = math.exp(-abs(z))
    wide = small / (1 + small)  # of the side that z is on
    return math.log1p(small) + max(-z, 0.0), wide if z >= 0 else 1 - wide


class Dpo(Estimator):
    """The gradient of DPO as a policy gradient (arXiv 2305.18290).

    The reward of an answer is h = beta (log p - log p_reference) of its trained tokens. With
    z = h_chosen - h_rejected - margin and e = label_smoothing (conservative DPO) the loss of a pair
    is -(1 - e) log sigmoid(z) - e log sigmoid(-z); form ipo (arXiv 2310.12036):
    (z / beta - 1 / (2 beta))^2. Its derivatives by the two log-probs, which are each other's
    opposite, are known before a pass that starts from the same weights: less those are the
    advantages. SimPO (arXiv 2405.14734) is `average` without a `reference`.

    Loss `reinforce` by a sum over tokens and a mean over pairs (aggregation `constant` of length
    0.5) is exactly DPO where a batch has one optimizer step. Groups whose two answers have one
    reward have advantage 0.
    """

    settings_type = DpoSettings
    compares_siblings = True
    reads_kl = False

    @property
    def needed_columns(self) -> tuple[str, ...]:
        return self.summed_columns

    @property
    def summed_columns(self) -> tuple[str, ...]:
        return ("old_logprobs", "reference_logprobs")[: 1 + self.settings.reference]

    @property
    def width(self) -> int:
        return 1 + len(self.summed_columns)

    def scores(self, reward: float, columns: Mapping[str, float]) -> tuple[float, ...]:
        return (reward, *(columns[name] for name in self.summed_columns))

    def relate(self, group: Sequence[Sibling]) -> list[float]:
        pair = self._pair(group)
        if pair is None:
            return [0.0] * len(group)
        chosen, rejected = pair
        pull = self._loss(chosen.reward - rejected.reward)[1] * self.settings.beta
        sft = self.settings.sft_weight / max(1, chosen.length)
        advantages = {
            chosen.episode: pull / self._terms(chosen.length) + sft,
            rejected.episode: -pull / self._terms(rejected.length),
        }
        return [advantages[each.episode] for each in group]

    def measure(self, group: Sequence[Sibling]) -> Mapping[str, float]:
        pair = self._pair(group)
        if pair is None:
            return {}
        chosen, rejected = pair
        likelihood = -chosen.logprob / max(1, chosen.length)
        loss = self._loss(chosen.reward - rejected.reward)[0]
        return {
            "preference_loss": loss + self.settings.sft_weight * likelihood,
            "accuracy": float(chosen.reward > rejected.reward),
            "reward_chosen": chosen.reward,
            "reward_rejected": rejected.reward,
            "reward_margin": chosen.reward - rejected.reward,
            "logprob_chosen": chosen.logprob,
            "logprob_rejected": rejected.logprob,
        }

    def _pair(self, group: Sequence[Sibling]) -> tuple[_Answer, _Answer] | None:
        """(chosen, rejected); None where neither is preferred. Raises PluginSettingError."""
        pair = _find_pair("dpo", group)
        return None if pair is None else (self._answer(*pair[0]), self._answer(*pair[1]))

    def _answer(self, episode: int | str, own: Sequence[Sibling]) -> _Answer:
        length = sum(each.length for each in own)
        logprob = math.fsum(each.scores[1] for each in own)
        gain = logprob - math.fsum(each.scores[2] for each in own if self.settings.reference)
        return _Answer(episode, logprob, self.settings.beta * gain / self._terms(length), length)

    def _terms(self, length: int) -> int:
        """By how many a sum of log-probs is divided."""
        return max(1, length) if self.settings.average else 1

    def _loss(self, difference: float) -> tuple[float, float]:
        """(loss of a pair, minus its derivative by the difference of the rewards)."""
        settings = self.settings
        if settings.form == "ipo":
            beyond = (difference - 0.5) / settings.beta
            return beyond * beyond, -2 * beyond / settings.beta
        z, wrong = difference - settings.margin, settings.label_smoothing
        (loss, pull), (other, back) = _logistic(z), _logistic(-z)
        return (1 - wrong) * loss + wrong * other, (1 - wrong) * pull - wrong * back


class BradleyTerrySettings(PluginSettings):
    """What is asked of rewards beside their difference."""

    centering: float = Field(
        0.0, ge=0, description="Of the squared sum of both rewards, added to the loss."
    )


class _Scored(NamedTuple):
    """A pair. loss: of it. pulls: minus its derivatives by the rewards of chosen and rejected."""

    chosen: int | str
    rewards: tuple[float, float]
    loss: float
    pulls: tuple[float, float]


class BradleyTerry(Estimator):
    """The gradient of a reward model's loss, for the loss `linear_value`.

    The reward r of an answer is the sum of its samples' values: of the one trained token behind a
    text. The loss of a pair is -log sigmoid(r_chosen - r_rejected - margin) (arXiv 2203.02155; the
    margin, a column, as in arXiv 2307.09288) + centering (r_chosen + r_rejected)^2 (arXiv
    2312.09244). Its derivatives by the two values are known before a pass that starts from the same
    weights: less those are the advantages. By a sum over tokens and a mean over pairs (aggregation
    `constant` of length 0.5) that is exact where a batch has one optimizer step. Groups whose two
    answers have one column `reward` have advantage 0.
    """

    settings_type = BradleyTerrySettings
    compares_siblings = True
    reads_kl = False

    @property
    def needed_columns(self) -> tuple[str, ...]:
        return self.summed_columns

    @property
    def summed_columns(self) -> tuple[str, ...]:
        return ("values",)

    @property
    def width(self) -> int:
        return 3

    def scores(self, reward: float, columns: Mapping[str, float]) -> tuple[float, ...]:
        return reward, columns["values"], columns.get("margin", 0.0)

    def relate(self, group: Sequence[Sibling]) -> list[float]:
        pair = self._pair(group)
        if pair is None:
            return [0.0] * len(group)
        return [pair.pulls[each.episode != pair.chosen] for each in group]

    def measure(self, group: Sequence[Sibling]) -> Mapping[str, float]:
        pair = self._pair(group)
        if pair is None:
            return {}
        chosen, rejected = pair.rewards
        return {
            "preference_loss": pair.loss,
            "accuracy": float(chosen > rejected),
            "reward_chosen": chosen,
            "reward_rejected": rejected,
            "reward_margin": chosen - rejected,
        }

    def _pair(self, group: Sequence[Sibling]) -> _Scored | None:
        """None where neither is preferred. Raises PluginSettingError."""
        pair = _find_pair("bradley_terry", group)
        if pair is None:
            return None
        (episode, preferred), (_, other) = pair
        chosen, rejected = (math.fsum(s.scores[1] for s in own) for own in (preferred, other))
        loss, pull = _logistic(chosen - rejected - preferred[0].scores[2])
        total, centering = chosen + rejected, self.settings.centering
        loss += centering * total * total
        back = 2 * centering * total
        return _Scored(episode, (chosen, rejected), loss, (pull - back, -pull - back))
