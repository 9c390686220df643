"""What a user may write: a loss, an estimator, a KL form and a correction, all with torch."""

import torch
from pydantic import Field

from sluice.algo.correction import Correction
from sluice.algo.estimator import Estimator
from sluice.algo.kl import KlForm
from sluice.algo.plugins import PluginSettings
from sluice.algo.surrogate import Loss


class HeatSettings(PluginSettings):
    heat: float = Field(gt=0)


class Soft(Loss):
    settings_type = HeatSettings
    columns = ("advantages", "reference_logprobs")

    def token_losses(self, tokens):
        pull = torch.tanh(tokens.outputs - tokens.columns["reference_logprobs"])
        return self.settings.heat * pull - tokens.ratio * tokens.advantages


class Ranked(Estimator):
    """The share of the group's rewards that are below a sample's."""

    settings_type = HeatSettings
    compares_siblings = True

    def relate(self, group):
        rewards = torch.tensor([each.scores[0] for each in group])
        shares = (rewards[None, :] < rewards[:, None]).double().mean(1)
        return (self.settings.heat * shares).tolist()

    def measure(self, group):
        return {"best": max(each.scores[0] for each in group)}


class Absolute(KlForm):
    def estimate(self, difference_T):
        return torch.abs(difference_T)


class Cap(Correction):
    settings_type = HeatSettings
    weighs = True

    def factors(self, corrected):
        return torch.exp(corrected.log_importance).clamp(max=self.settings.heat)


class Wrong(Loss):
    def token_losses(self, tokens):
        return tokens.outputs.sum()


class Misspelt(Loss):
    def token_losses(self, tokens):
        return tokens.ratios
