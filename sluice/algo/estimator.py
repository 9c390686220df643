"""What an advantage estimator is: scores of samples, what siblings make of them, and tokens.

An estimator is a class, named in `sluice/algo/plugins.py` or by `package.module:Name`. A sample has
one or more scores; `relate` turns those of a group into one number a sample; `estimate` gives every
token its advantage. Scores of siblings meet in one place wherever the rows are, so `relate` takes
and returns plain numbers.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from sluice.algo.plugins import Plugin

if TYPE_CHECKING:
    import torch

    from sluice.algo.packed_rows import PackedRows


class Sibling(NamedTuple):
    """A sample as others of its group see it. length: trained tokens. episode: which rollout."""

    scores: tuple[float, ...]
    length: int
    episode: int | str


class Estimator(Plugin, ABC):
    """How rewards become advantages.

    compares_siblings: `relate` is asked. whitens: advantages are whitened over the batch unless the
    caller says otherwise. reads_reward: the reward column. reads_kl: a KL to the reference may be
    taken from the reward; kl_in_score: as one number, of the whole sample.
    """

    compares_siblings: ClassVar[bool] = False
    whitens: ClassVar[bool] = False
    reads_reward: ClassVar[bool] = True
    reads_kl: ClassVar[bool] = True
    kl_in_score: ClassVar[bool] = True

    @property
    def needed_columns(self) -> tuple[str, ...]:
        """Columns besides the reward, per token or per sample."""
        return ()

    @property
    def summed_columns(self) -> tuple[str, ...]:
        """Columns per token of which `scores` is given the sums over trained tokens."""
        return ()

    @property
    def width(self) -> int:
        """How many scores a sample has."""
        return 1

    def scores(self, reward: float, columns: Mapping[str, float]) -> tuple[float, ...]:
        """Returns the scores of a sample; `columns` are its per-sample columns, and those sums."""
        return (reward,)

    def relate(self, group: Sequence[Sibling]) -> list[float]:
        """Returns one number a sample of the whole group, in order.

        Must not depend on the order. An episode counts once, whatever number of samples it has.
        """
        return [sibling.scores[0] for sibling in group]

    def measure(self, group: Sequence[Sibling]) -> Mapping[str, float]:
        """Returns what there is to tell of a whole group; means over groups become metrics."""
        return {}

    def relate_batch(self, scores: Sequence[float], weights: Sequence[float]) -> list[float]:
        """Returns the numbers of all samples of the batch in the light of each other.

        weights: 1 / samples of its episode, so that an episode weighs one.
        """
        return list(scores)

    def estimate(
        self, packed: PackedRows, scores: Sequence[float], kl_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns (advantages_T, returns_T), float64, 0 on untrained tokens; returns may be None.

        kl_T: float64[T], coefficient x KL on trained tokens; only for who does not have it in its
        score. By default every token has its sample's score.
        """
        return packed.spread(scores), None
