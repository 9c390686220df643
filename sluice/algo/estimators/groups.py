"""Estimators that give all tokens of a sample one advantage, mostly by its siblings' rewards."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Self

from pydantic import Field, model_validator

from sluice.algo.aggregation import Moments, group_relative, leave_one_out
from sluice.algo.estimator import Estimator, Sibling
from sluice.algo.plugins import PluginSettingError, PluginSettings
from sluice.samples.sample import find_column


def episode_means(group: Sequence[Sibling], score: int = 0) -> dict[int | str, float]:
    """Returns the mean score of each episode; exactly rounded, so that no order matters."""
    alone = {sibling.episode: sibling.scores[score] for sibling in group}
    if len(alone) == len(group):
        return alone
    parts: dict[int | str, list[float]] = {}
    for sibling in group:
        parts.setdefault(sibling.episode, []).append(sibling.scores[score])
    return {
        episode: own[0] if len(own) == 1 else Moments.of_values(own).mean
        for episode, own in parts.items()
    }


def group_moments(group: Sequence[Sibling], score: int = 0) -> Moments:
    """Returns those of the scores, of which the ones of an episode weigh one together.

    Episodes of one mean have a spread, then, where their samples differ.
    """
    means = episode_means(group, score)
    whole = Moments.of_values(means.values())
    if len(means) == len(group):
        return whole
    sizes = Counter(each.episode for each in group)
    squares = [(each.scores[score] - whole.mean) ** 2 / sizes[each.episode] for each in group]
    return replace(whole, m2=math.fsum(squares))


class GrpoSettings(PluginSettings):
    """Whether groups of little variance speak as loud as others."""

    scale_by_std: bool = True


class Grpo(Estimator):
    """(r - group mean) / group standard deviation (arXiv 2402.03300); Dr.GRPO unscaled."""

    settings_type = GrpoSettings
    compares_siblings = True

    def relate(self, group: Sequence[Sibling]) -> list[float]:
        scores, moments = [each.scores[0] for each in group], group_moments(group)
        return group_relative(scores, moments, scale_by_std=self.settings.scale_by_std)


class Rloo(Estimator):
    """r - mean of the others in the group (arXiv 2402.14740)."""

    compares_siblings = True

    def relate(self, group: Sequence[Sibling]) -> list[float]:
        means = episode_means(group)
        moments = Moments.of_values(means.values())
        alone = moments.count < 2
        return [
            leave_one_out(mean, moments) + (0.0 if alone else each.scores[0] - mean)
            for each, mean in ((each, means[each.episode]) for each in group)
        ]


class Opo(Estimator):
    """r - the group's mean weighted by length, the optimal baseline (arXiv 2505.23585).

    0 in a group of one.
    """

    compares_siblings = True

    def relate(self, group: Sequence[Sibling]) -> list[float]:
        means = episode_means(group)
        if len(means) < 2:
            return [0.0] * len(group)
        lengths = dict.fromkeys(means, 0)
        for each in group:
            lengths[each.episode] += each.length
        total = sum(lengths.values())
        if not total:
            return [0.0] * len(group)
        baseline = math.fsum(lengths[episode] * mean for episode, mean in means.items()) / total
        baseline = min(max(baseline, min(means.values())), max(means.values()))
        return [each.scores[0] - baseline for each in group]


class RemaxSettings(PluginSettings):
    """Where the reward of the greedy answer to the same prompt stands: a per-sample column."""

    baseline: str = "score/baseline"

    @model_validator(mode="after")
    def _is_a_column(self) -> Self:
        column = find_column(self.baseline)
        if column is None or column.per_token:
            raise ValueError("baseline is no column of one number a sample, e.g. score/baseline")
        return self


class Remax(Estimator):
    """r - reward of the greedy answer to the same prompt (arXiv 2310.10505)."""

    settings_type = RemaxSettings

    @property
    def needed_columns(self) -> tuple[str, ...]:
        return (self.settings.baseline,)

    def scores(self, reward: float, columns: Mapping[str, float]) -> tuple[float, ...]:
        return (reward - columns[self.settings.baseline],)


class PassAtKSettings(PluginSettings):
    """How many answers one may give, and which is right."""

    k: int = Field(gt=0, le=4096)
    threshold: float = Field(1.0, description="A reward of at least this is a right answer.")


class PassAtK(Estimator):
    """The advantage of pass@k in place of pass@1 (arXiv 2508.10751, analytical).

    Of n answers, m wrong: R = 1 - C(m, k) / C(n, k) is the mean reward of k of them together and
    s = sqrt(R (1 - R)). A right one has (1 - R) / s, a wrong one
    (1 - R - C(m - 1, k - 1) / C(n - 1, k - 1)) / s; all have 0 where s is 0.
    """

    settings_type = PassAtKSettings
    compares_siblings = True

    def relate(self, group: Sequence[Sibling]) -> list[float]:
        means, k = episode_means(group), self.settings.k
        count = len(means)
        if k > count:
            raise PluginSettingError("settings.k", f"is {k}, above the {count} answers of a group")
        wrong = sum(mean < self.settings.threshold for mean in means.values())
        mean = 1 - math.comb(wrong, k) / math.comb(count, k)
        deviation = math.sqrt(mean * (1 - mean))
        if deviation == 0:
            return [0.0] * len(group)
        others = math.comb(wrong - 1, k - 1) / math.comb(count - 1, k - 1) if wrong else 0.0
        right_advantage, wrong_advantage = 1 - mean, 1 - mean - others
        return [
            (right_advantage if means[each.episode] >= self.settings.threshold else wrong_advantage)
            / deviation
            for each in group
        ]


class GpgAdvantage(Estimator):
    """(r - group mean) x samples / samples of groups that differ (arXiv 2504.02546).

    The factor makes up for groups without a gradient. Of episodes of several samples each is one.
    """

    compares_siblings = True

    def relate(self, group: Sequence[Sibling]) -> list[float]:
        moments = Moments.of_values(episode_means(group).values())
        # a group that differs at all speaks with all its samples, also one that is at the mean
        scores = [each.scores[0] for each in group]
        if len({*scores}) < 2:
            return [math.nan] * len(group)
        return group_relative(scores, moments, scale_by_std=False)

    def relate_batch(self, scores: Sequence[float], weights: Sequence[float]) -> list[float]:
        both = zip(scores, weights, strict=True)
        speaking = math.fsum(weight for score, weight in both if not math.isnan(score))
        factor = math.fsum(weights) / speaking if speaking else 0.0
        return [0.0 if math.isnan(score) else score * factor for score in scores]


class GdpoSettings(PluginSettings):
    """Weights of the rewards, by per-sample column."""

    rewards: dict[str, float] = Field(min_length=1, max_length=32)

    @model_validator(mode="after")
    def _are_columns(self) -> Self:
        for name, weight in self.rewards.items():
            column = find_column(name)
            if column is None or column.per_token:
                raise ValueError(f"rewards: {name[:80]!r} is no column of one number a sample")
            if weight == 0:
                raise ValueError(f"rewards: {name} has no effect with weight 0; leave it out")
        return self


class Gdpo(Estimator):
    """Every reward normalised in the group by itself, then added up (arXiv 2601.05242).

    sum_j w_j (r_j - mean_j) / (standard deviation_j + 1e-6), whitened over the batch.
    """

    settings_type = GdpoSettings
    compares_siblings = True
    whitens = True
    reads_reward = False
    reads_kl = False

    @property
    def needed_columns(self) -> tuple[str, ...]:
        return tuple(sorted(self.settings.rewards))  # a map that came over the wire has no order

    @property
    def width(self) -> int:
        return len(self.settings.rewards)

    def scores(self, reward: float, columns: Mapping[str, float]) -> tuple[float, ...]:
        return tuple(columns[name] for name in self.needed_columns)

    def relate(self, group: Sequence[Sibling]) -> list[float]:
        totals = [0.0] * len(group)
        for place, name in enumerate(self.needed_columns):
            weight = self.settings.rewards[name]
            moments = group_moments(group, place)
            scores = [each.scores[place] for each in group]
            for index, score in enumerate(group_relative(scores, moments, scale_by_std=True)):
                totals[index] += weight * score
        return totals
