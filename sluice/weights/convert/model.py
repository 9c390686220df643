"""The rules of the model that a directory describes."""

from __future__ import annotations

import json
from pathlib import Path

from sluice.weights.checkpoint import shard_paths
from sluice.weights.convert.hf_source import read_names
from sluice.weights.convert.known import RECORD
from sluice.weights.errors import DamagedFileError, MissingFileError
from sluice.weights.rules import WeightMap, family_of, read_shape

CRITIC = "ForTokenClassification"
STACKED = ".experts.gate_up_proj"


def read_weights(config: dict[str, object], checkpoint: Path) -> WeightMap:
    """The rules of a model, by its `config.json` and the names in an HF checkpoint of it.

    Names tell apart checkpoints with a tensor for each expert and with one of all. A torch_dist
    checkpoint that was converted from the latter says so in its record.
    """
    family = family_of(config)
    architectures = config["architectures"]
    critic = isinstance(architectures, list) and str(architectures[0]).endswith(CRITIC)
    stacked = any(name.endswith(STACKED) for name in _names(checkpoint))
    shape = read_shape(family, config, value_head=critic, stacked_experts=stacked)
    return WeightMap(family, shape)


def _names(checkpoint: Path) -> list[str]:
    try:
        return [name for path in shard_paths(checkpoint) for name in read_names(path)]
    except MissingFileError:
        pass
    try:
        report = json.loads((checkpoint / RECORD).read_bytes())["report"]
        return [str(name) for name in report["converted"]]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(RECORD, f"is malformed: {error}") from error
