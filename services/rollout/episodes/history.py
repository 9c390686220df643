"""How long answers to a prompt were, for the next time it is asked."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

PROMPTS = 65_536  # remembered, those asked last
_NEW_SHARE = 0.5  # of the latest group in the mean; the policy changes from epoch to epoch


class PromptHistory:
    """Mean sampled tokens of the samples of a prompt, by its token ids."""

    def __init__(self, capacity: int = PROMPTS) -> None:
        self._capacity = capacity
        self._means: OrderedDict[int, float] = OrderedDict()  # by hash; a clash misleads a little

    def expected(self, prompt: tuple[int, ...]) -> float:
        """Tokens of a sample, 0 where nothing is known."""
        return self._means.get(hash(prompt), 0.0)

    def learn(self, prompt: tuple[int, ...], lengths: Sequence[int]) -> None:
        """Samples of one group, at least one, have ended."""
        key, mean = hash(prompt), sum(lengths) / len(lengths)
        before = self._means.pop(key, mean)
        self._means[key] = before + _NEW_SHARE * (mean - before)
        if len(self._means) > self._capacity:
            self._means.popitem(last=False)
