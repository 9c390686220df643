"""Losses, advantage estimators, KL forms and corrections by name, each with settings of its own.

A name is one of the tables below or `package.module:Name`. What a table names imports no torch, so
a controller reads settings without it; what a user names is imported where tensors are.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal

from pydantic import ValidationError, field_validator

from sluice.config import Config
from sluice.imports import import_named
from sluice.samples.sample import LARGEST_NUMBER

Kind = Literal["loss", "advantage", "kl", "correction"]

_SURROGATES = "sluice.algo.surrogates"
_ESTIMATORS = "sluice.algo.estimators"
SHIPPED: Mapping[Kind, Mapping[str, str]] = {
    "loss": {
        "ppo_clip": f"{_SURROGATES}.ppo_clip:PpoClip",
        "gspo": f"{_SURROGATES}.gspo:Gspo",
        "gmpo": f"{_SURROGATES}.gmpo:Gmpo",
        "cispo": f"{_SURROGATES}.cispo:Cispo",
        "sapo": f"{_SURROGATES}.sapo:Sapo",
        "dppo": f"{_SURROGATES}.dppo:Dppo",
        "clip_cov": f"{_SURROGATES}.covariance:ClipCov",
        "kl_cov": f"{_SURROGATES}.covariance:KlCov",
        "importance_sampling": f"{_SURROGATES}.importance_sampling:ImportanceSampling",
        "reinforce": f"{_SURROGATES}.reinforce:Reinforce",
        "gpg": f"{_SURROGATES}.reinforce:Gpg",
        "dro": f"{_SURROGATES}.dro:Dro",
        "ppo": f"{_SURROGATES}.ppo_clip:TinkerPpo",
        "sft": f"{_SURROGATES}.sft:Likelihood",
        "cross_entropy": f"{_SURROGATES}.sft:CrossEntropy",
        "topk_forward_kl": f"{_SURROGATES}.distillation:TopForwardKl",
        "topk_reverse_kl": f"{_SURROGATES}.distillation:TopReverseKl",
        "topk_jsd": f"{_SURROGATES}.distillation:TopJsd",
        "value": f"{_SURROGATES}.value:ValueLoss",
        "linear_value": f"{_SURROGATES}.value:LinearValue",
    },
    "advantage": {
        "grpo": f"{_ESTIMATORS}.groups:Grpo",
        "rloo": f"{_ESTIMATORS}.groups:Rloo",
        "opo": f"{_ESTIMATORS}.groups:Opo",
        "remax": f"{_ESTIMATORS}.groups:Remax",
        "pass_at_k": f"{_ESTIMATORS}.groups:PassAtK",
        "gpg": f"{_ESTIMATORS}.groups:GpgAdvantage",
        "gdpo": f"{_ESTIMATORS}.groups:Gdpo",
        "dpo": f"{_ESTIMATORS}.pairs:Dpo",
        "bradley_terry": f"{_ESTIMATORS}.pairs:BradleyTerry",
        "reinforce_plus_plus": f"{_ESTIMATORS}.tokens:ReinforcePlusPlus",
        "reinforce_plus_plus_baseline": f"{_ESTIMATORS}.tokens:ReinforcePlusPlusBaseline",
        "gae": f"{_ESTIMATORS}.tokens:Gae",
        "distillation": f"{_ESTIMATORS}.tokens:Distillation",
        "provided": f"{_ESTIMATORS}.tokens:Provided",
    },
    "kl": {
        "k1": "sluice.algo.kl:K1",
        "k2": "sluice.algo.kl:K2",
        "k3": "sluice.algo.kl:K3",
        "low_variance": "sluice.algo.kl:LowVariance",
    },
    "correction": {
        "weight": "sluice.algo.correction:Weight",
        "reject": "sluice.algo.correction:Reject",
        "opsm": "sluice.algo.correction:Opsm",
        **{
            name: f"sluice.algo.correction_presets:{target}"
            for name, target in {
                "tis": "Tis",
                "mis": "Mis",
                "icepop": "IcePop",
                "decoupled_token_is": "DecoupledTokenIs",
                "decoupled_seq_is": "DecoupledSeqIs",
                "decoupled_seq_is_rs": "DecoupledSeqIsRs",
                "decoupled_geo_rs": "DecoupledGeoRs",
                "decoupled_geo_rs_seq_tis": "DecoupledGeoRsSeqTis",
                "decoupled_geo_rs_token_tis": "DecoupledGeoRsTokenTis",
                "decoupled_k3_rs": "DecoupledK3Rs",
                "decoupled_k3_rs_seq_tis": "DecoupledK3RsSeqTis",
                "decoupled_k3_rs_token_tis": "DecoupledK3RsTokenTis",
                "bypass_ppo_clip_geo_rs": "BypassPpoClipGeoRs",
                "bypass_ppo_clip_k3_rs": "BypassPpoClipK3Rs",
                "bypass_pg_is": "BypassPgIs",
                "bypass_pg_geo_rs": "BypassPgGeoRs",
                "bypass_pg_geo_rs_seq_tis": "BypassPgGeoRsSeqTis",
                "bypass_pg_geo_rs_token_tis": "BypassPgGeoRsTokenTis",
            }.items()
        },
    },
}
BASES: Mapping[Kind, tuple[str, ...]] = {
    "loss": ("sluice.algo.surrogate:Loss",),
    "advantage": ("sluice.algo.estimator:Estimator",),
    "kl": ("sluice.algo.kl:KlForm",),
    "correction": ("sluice.algo.correction:Correction", "sluice.algo.correction:CorrectionPreset"),
}
PLUGIN_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
LONGEST_NAME = 256


class AlgorithmSettings(Config):
    """Base of what a caller sets of an algorithm: numbers of float32, which tensors are."""

    @field_validator("*")
    @classmethod
    def _is_moderate(cls, value: Any) -> Any:
        return _check_size(value)


class PluginSettings(AlgorithmSettings):
    """Base of the settings of a loss, an estimator, a KL form or a correction."""

    @field_validator("*")
    @classmethod
    def _are_moderate(cls, value: Any) -> Any:
        if isinstance(value, Mapping | list | tuple):
            for each in value.values() if isinstance(value, Mapping) else value:
                _check_size(each)
        return value


def _check_size(value: Any) -> Any:
    if isinstance(value, int | float) and abs(value) > LARGEST_NUMBER:
        raise ValueError(f"is beyond {LARGEST_NUMBER:g}")
    return value


class PluginSettingError(ValueError):
    """A setting that is unknown or wrong; `key` is its dotted path below the settings."""

    def __init__(self, key: str, problem: str) -> None:
        self.key, self.problem = key, problem
        super().__init__(f"{key}: {problem}" if key else problem)


class Plugin:
    """What a name stands for: an instance per settings, without state."""

    settings_type: ClassVar[type[PluginSettings]] = PluginSettings

    def __init__(self, settings: PluginSettings) -> None:
        self.settings: Any = settings


def is_shipped(kind: Kind, name: str) -> bool:
    return name in SHIPPED[kind]


def check_name(kind: Kind, name: str) -> None:
    """Raises ValueError for what is neither shipped nor `package.module:Name`."""
    if name in SHIPPED[kind]:
        return
    if len(name) > LONGEST_NAME or not PLUGIN_NAME.fullmatch(name):
        shown = name if len(name) <= 64 else f"{name[:64]}..."
        known = ", ".join(SHIPPED[kind])
        raise ValueError(f"{shown!r} is no {kind}; known: {known}, or package.module:Name")


def check_allowed(name: str, modules: Sequence[str]) -> None:
    """Raises ValueError unless the module of a user's name is an allowed one, or inside one."""
    module = name.partition(":")[0]
    if not any(module == known or module.startswith(f"{known}.") for known in modules):
        allowed = ", ".join(modules) or "none"
        raise ValueError(
            f"{module} is not among the modules this trainer may import (user_modules): {allowed}"
        )


@lru_cache(maxsize=256)  # every step names its own again
def find(kind: Kind, name: str) -> type[Any]:
    """Imports the class. Raises ValueError for a name that is none, or of another kind."""
    check_name(kind, name)
    bases = tuple(import_named(base) for base in BASES[kind])
    module, _, attribute = SHIPPED[kind].get(name, name).partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise ValueError(f"{name}: {error}") from None
    if not isinstance(found, type) or not issubclass(found, bases):
        raise ValueError(f"{name} names no subclass of {bases[0].__module__}.{bases[0].__name__}")
    return found


def build(found: type[Any], values: Mapping[str, Any], where: str) -> Any:
    """Builds it with its settings. Raises PluginSettingError naming the first wrong one."""
    try:
        return found(found.settings_type(**values))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        problem = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            known = ", ".join(found.settings_type.model_fields) or "none"
            problem = f"has no effect for {where}, which reads {known}; leave it out"
        elif first["type"] == "missing":
            problem = f"is required by {where}"
        raise PluginSettingError(key, problem) from None
