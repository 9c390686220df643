"""`sluice check-loss`: the contract of losses, run on one by its name."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from sluice.algo.plugins import PluginSettingError
from sluice.algo.spec import LossSpec
from sluice.config import ConfigError


def check_loss_command(arguments: Sequence[str]) -> int:
    """Print each point of the contract; 0 if all are kept, 1 if not.

    Modules of the working directory can be named. Raises ConfigError for a name or settings that
    are wrong.
    """
    name, *rest = arguments
    settings = {}
    if rest:
        if len(rest) != 2 or rest[0] != "--settings":
            raise ConfigError(f"check-loss takes NAME and --settings JSON, not {' '.join(rest)!r}")
        try:
            settings = json.loads(rest[1])
        except json.JSONDecodeError as error:
            raise ConfigError(f"--settings is no JSON: {error}") from None
        if not isinstance(settings, dict):
            raise ConfigError("--settings must be an object, e.g. '{\"tau\": 1.0}'")
    sys.path.insert(0, str(Path.cwd()))
    try:
        spec = LossSpec(name=name, settings=settings)
    except ValidationError as error:
        raise ConfigError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
    from sluice.algo.contract import check_loss  # it imports torch

    try:
        checks = check_loss(spec)
    except (PluginSettingError, ValueError) as error:
        raise ConfigError(str(error)) from None
    for check in checks:
        print(f"FAIL  {check.name}: {check.problem}" if check.problem else f"ok    {check.name}")
    broken = sum(bool(check.problem) for check in checks)
    print(f"{name}: {broken} of {len(checks)} broken" if broken else f"{name}: keeps the contract")
    return 1 if broken else 0
