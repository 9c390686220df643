"""Losses that break the contract, each in one way, and one that keeps it."""

import torch
from pydantic import Field

from sluice.algo.plugins import PluginSettings
from sluice.algo.surrogate import Loss


class HeatSettings(PluginSettings):
    heat: float = Field(1.0, gt=0)


class Right(Loss):
    settings_type = HeatSettings
    silent = True

    def token_losses(self, tokens):
        return -(self.settings.heat * tokens.ratio).tanh() * tokens.advantages


class MeanNotSum(Right):
    """Divides by the tokens of the micro-batch."""

    def token_losses(self, tokens):
        return super().token_losses(tokens) / tokens.count.clamp(min=1)


class BatchMean(Right):
    """Centres by a mean over the micro-batch."""

    def token_losses(self, tokens):
        return super().token_losses(tokens) - tokens.ratio.mean()


class ReadsMasked(Right):
    """Divides by a sample's length with the tokens that are not trained on."""

    def token_losses(self, tokens):
        ones = torch.ones_like(tokens.outputs)
        lengths = ones.new_zeros(tokens.sample_count).index_add(0, tokens.sample_index, ones)
        return super().token_losses(tokens) / lengths[tokens.sample_index]


class ReadsNeighbour(Right):
    """Takes the next token's ratio, of whatever sample it is."""

    def token_losses(self, tokens):
        return -tokens.ratio.roll(-1) * tokens.advantages


class InPlaceDetach(Right):
    """Detaches the outputs themselves."""

    def token_losses(self, tokens):
        tokens.outputs.detach_()
        return super().token_losses(tokens)


class InPlaceClamp(Right):
    """Clamps the columns of all who come after."""

    def token_losses(self, tokens):
        tokens.advantages.clamp_(-0.1, 0.1)
        return super().token_losses(tokens)


class HiddenDetach(Right):
    """Half of its gradient is cut off where nobody is told."""

    def token_losses(self, tokens):
        return -tokens.ratio * tokens.advantages * tokens.ratio.detach()


class NotSilent(Right):
    """Says that zero advantages are silent, and pulls to the old policy all the same."""

    def token_losses(self, tokens):
        return tokens.log_ratio.square() - tokens.ratio * tokens.advantages


class Scalar(Right):
    def token_losses(self, tokens):
        return super().token_losses(tokens).sum()


class Logarithm(Right):
    """No number where the advantage is negative."""

    def token_losses(self, tokens):
        return -tokens.advantages.log() * tokens.ratio


class Dice(Right):
    def token_losses(self, tokens):
        return super().token_losses(tokens) * torch.rand(())


class NoLoss:
    pass
