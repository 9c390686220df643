"""What a loss is: one number a trained token, from log-probs and columns; all else is done for it.

A loss is a class, named in `sluice/algo/plugins.py` or by `package.module:Name`:

    class Soft(Loss):
        settings_type = SoftSettings           # frozen, of PluginSettings

        def token_losses(self, tokens):
            return -(self.settings.heat * tokens.ratio).tanh() * tokens.advantages

It returns the loss of each token, not a mean: weights and the one divisor of a step come after
(`sluice/algo/aggregation.py`), and so no split of the rows changes the gradient. What is to have no
gradient is read from `tokens.fixed`; `detach` would hide it from `sluice check-loss`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

from sluice.algo.kl import bounded_exp
from sluice.algo.plugins import Plugin

if TYPE_CHECKING:
    import torch

LossHead = Literal["policy", "value"]


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The response tokens of whole samples, packed; all but masked ones are 0 everywhere.

    outputs: float[T], log-probs of the tokens (or a critic's values); has the gradient. fixed: the
    same numbers without one. old: float[T], log-probs of the old policy, where the loss has one.
    mask: bool[T]. sample_index: int64[T] in [0, sample_count). columns: float[T] by name, or
    float[T, K]. top: float[T, K], log-probs of the tokens that a teacher named, where the loss has
    a `top_count` of K; has the gradient too. measured: what `Loss.measure` came to over all rows of
    the pass, by name.
    """

    outputs: torch.Tensor
    fixed: torch.Tensor
    old: torch.Tensor
    mask: torch.Tensor
    sample_index: torch.Tensor
    sample_keys: torch.Tensor
    columns: Mapping[str, torch.Tensor]
    top: torch.Tensor | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    metrics: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def sample_count(self) -> int:
        return len(self.sample_keys)

    @property
    def advantages(self) -> torch.Tensor:
        return self.columns["advantages"]

    @cached_property
    def log_ratio(self) -> torch.Tensor:
        """log(current / old), with the gradient."""
        return self.outputs - self.old

    @cached_property
    def ratio(self) -> torch.Tensor:
        """current / old, with the gradient; bounded by exp(+-20)."""
        return bounded_exp(self.log_ratio)

    @cached_property
    def fixed_ratio(self) -> torch.Tensor:
        """The ratio without a gradient."""
        return bounded_exp(self.fixed - self.old)

    @cached_property
    def count(self) -> torch.Tensor:
        """Trained tokens, a scalar."""
        return self.mask.sum().to(self.outputs.dtype)

    @cached_property
    def lengths(self) -> torch.Tensor:
        """Trained tokens of each sample, float[N], at least 1."""
        return self.sample_sums(self.mask.to(self.outputs.dtype)).clamp(min=1)

    def sample_sums(self, values_T: torch.Tensor) -> torch.Tensor:
        """Returns the sum over the trained tokens of each sample, float[N]."""
        kept_T = values_T.masked_fill(~self.mask, 0.0)
        zeros_N = kept_T.new_zeros(self.sample_count)
        return zeros_N.index_add(0, self.sample_index, kept_T)

    def sample_means(self, values_T: torch.Tensor) -> torch.Tensor:
        """Returns at each token the mean over the trained tokens of its sample, float[T]."""
        return (self.sample_sums(values_T) / self.lengths)[self.sample_index]

    @cached_property
    def draws(self) -> torch.Tensor:
        """One number in [0, 1) a token, float64[T]: the same in every split and on every rank.

        Drawn from the sample's key and the place among its trained tokens.
        """
        place_T = self.mask.long().cumsum(0)
        far_N = place_T.new_full((self.sample_count,), len(place_T))
        first_N = far_N.scatter_reduce(0, self.sample_index, place_T, "amin")
        mixed_T = self.sample_keys[self.sample_index] + (place_T - first_N[self.sample_index])
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
            mixed_T = (mixed_T ^ ((mixed_T >> shift) & ((1 << (64 - shift)) - 1))) * factor
        return ((mixed_T >> 11) & ((1 << 53) - 1)).double() / (1 << 53)

    def record(
        self, name: str, values_T: torch.Tensor, among_T: torch.Tensor | None = None
    ) -> None:
        """Adds a metric: the mean of `values_T` over trained tokens (of `among_T` only)."""
        mask_T = self.mask if among_T is None else self.mask & among_T
        total = values_T.detach().to(self.count.dtype).masked_fill(~mask_T, 0.0).sum()
        weight = self.count if among_T is None else mask_T.sum().to(self.count.dtype)
        self.metrics[name] = (total, weight)


class Loss(Plugin, ABC):
    """One term a trained token.

    head: which model it trains. has_ratio: compares with an old policy (`tokens.old`). columns:
    what it reads besides. silent: where all advantages of a sample are 0 so are its loss and
    gradient, which saves its pass. rounds: how often `measure` is asked before the pass.
    """

    head: ClassVar[LossHead] = "policy"
    has_ratio: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = ("advantages",)
    silent: ClassVar[bool] = False
    rounds: ClassVar[int] = 0

    @property
    def needed_columns(self) -> tuple[str, ...]:
        """`columns`, with those that a setting asks for."""
        return self.columns

    @property
    def is_silent(self) -> bool:
        """`silent`, unless a setting says otherwise."""
        return self.silent

    @property
    def top_count(self) -> int:
        """Tokens that a teacher named at each place, whose log-probs it reads; 0 for none.

        Rows then need `top_columns(top_count)` of `sluice.samples.sample`.
        """
        return 0

    @abstractmethod
    def token_losses(self, tokens: Tokens) -> torch.Tensor:
        """Returns the loss of every token, float[T]; what it is of masked ones is not read."""

    def measure(self, tokens: Tokens, number: int) -> dict[str, torch.Tensor]:
        """Returns sums over some rows of the pass, to be added up over all of them.

        Asked in round `number` with the sums of the rounds before in `tokens.measured`, ahead of
        the pass: outputs are the old policy's log-probs. A name that ends in `/max` is not added
        up: the largest is taken. A loss that has `rounds` writes this.
        """
        raise NotImplementedError
