"""Tinker's losses by name: what they read of a datum, what the trainer calls them, and their sums.

Tinker adds up the losses of all tokens, and so does aggregation `sum` of the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from services.gateway.errors import RefusedError
from sluice.algo.plugins import PluginSettingError
from sluice.algo.spec import LossSpec
from sluice.samples.sample import Sample

LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {LOW: 0.8, HIGH: 1.2},
    "cispo": {LOW: 0.8, HIGH: 1.2},
    "dro": {"beta": 0.05},
}
LOG_RATIO_LIMIT = 20.0  # as the trainer bounds ratios


@dataclass(frozen=True)
class LossFn:
    """A loss with all its numbers. `spec`: the same to the trainer."""

    name: str
    config: Mapping[str, float]
    spec: LossSpec

    @classmethod
    def parse(cls, name: str, given: Mapping[str, float | str]) -> LossFn:
        """Raises RefusedError."""
        if name not in DEFAULTS:
            known = ", ".join(DEFAULTS)
            raise RefusedError(f"loss_fn {name[:80]!r} is not served here; these are: {known}")
        config = dict(DEFAULTS[name])
        for key, value in given.items():
            if key not in config:
                raise RefusedError(f"loss_fn_config[{key[:80]!r}] is no number of {name}")
            if not isinstance(value, float) or not np.isfinite(value):
                raise RefusedError(f"loss_fn_config[{key!r}] is no finite number")
            config[key] = value
        try:
            spec = LossSpec.model_validate({**_to_trainer(name, config), "aggregation": "sum"})
        except (ValidationError, PluginSettingError) as error:
            raise RefusedError(f"loss_fn_config: {_first_line(error)}") from None
        return cls(name, config, spec)

    def columns(
        self, where: str, tensors: Mapping[str, np.ndarray], length: int
    ) -> dict[str, np.ndarray | float]:
        """What the trainer reads of a row. Raises RefusedError for what is missing or unknown."""
        weighed = self.name == "cross_entropy"
        names = ("weights",) if weighed else ("logprobs", "advantages")
        for name in tensors:
            if name not in names:
                raise RefusedError(
                    f"{where}.loss_fn_inputs[{name[:80]!r}] is not read by {self.name}: "
                    f"target_tokens, {', '.join(names)} are"
                )
        given = dict(tensors)
        if weighed:
            given.setdefault("weights", np.ones(length, np.float32))
        for name in names:
            if name not in given:
                raise RefusedError(f"{where}.loss_fn_inputs lacks {name!r}")
            if len(given[name]) != length:
                raise RefusedError(
                    f"{where}.loss_fn_inputs[{name!r}] has {len(given[name])} numbers for "
                    f"{length} tokens"
                )
            if not np.isfinite(given[name]).all():
                raise RefusedError(
                    f"{where}.loss_fn_inputs[{name!r}] has a number that is not finite"
                )
        floats = {name: given[name].astype(np.float32) for name in names}
        if weighed:
            return {"advantages": floats["weights"]}
        return {"rollout_logprobs": floats["logprobs"], "advantages": floats["advantages"]}

    def total(self, samples: Sequence[Sample], logprobs: Sequence[np.ndarray]) -> float:
        """The sum of the losses of all tokens, of log-probs of the targets."""
        return float(
            sum(self._sum(s.columns, new) for s, new in zip(samples, logprobs, strict=True))
        )

    def _sum(self, columns: Mapping[str, Any], logprobs: np.ndarray) -> float:
        new, advantages = logprobs.astype(np.float64), columns["advantages"].astype(np.float64)
        if self.name == "cross_entropy":
            return float(-(advantages * new).sum())
        log_ratio = new - columns["rollout_logprobs"]
        if self.name == "dro":
            penalty = 0.5 * self.config["beta"] * log_ratio**2
            return float((penalty - advantages * new).sum())
        ratio = np.exp(log_ratio.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
        if self.name == "importance_sampling":
            return float(-(ratio * advantages).sum())
        clipped = ratio.clip(self.config[LOW], self.config[HIGH])
        if self.name == "cispo":
            return float(-(clipped * new * advantages).sum())
        return float(-np.minimum(ratio * advantages, clipped * advantages).sum())


def _to_trainer(name: str, config: Mapping[str, float]) -> dict[str, Any]:
    if name == "cross_entropy":  # weights of tokens, of either sign, stand where advantages do
        return {"name": "reinforce"}
    if name == "ppo":
        return {"name": "ppo", "settings": dict(config)}
    if name == "cispo":
        if not (0 <= config[LOW] < 1 < config[HIGH]):
            raise RefusedError(f"loss_fn_config: cispo takes 0 <= {LOW} < 1 < {HIGH}")
        low = {"clip_low": 1 - config[LOW]} if config[LOW] else {}
        return {"name": "cispo", "clip_high": config[HIGH] - 1, **low}
    if name == "dro":
        return {"name": "dro", "dro_beta": config["beta"]}
    return {"name": name}


def _first_line(error: ValidationError | PluginSettingError) -> str:
    if isinstance(error, ValidationError):
        return str(error.errors(include_url=False)[0]["msg"])
    return str(error)
