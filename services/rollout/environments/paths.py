"""Functions and classes of users by `package.module:name`, and which of them may be asked for."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from services.rollout.environments.environment import SettingError


def load(path: str) -> Any:
    """The object at `package.module:name`. Raises ValueError where there is none."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name, None) if name else None
    except ImportError as error:
        raise ValueError(f"{path}: {error}") from None
    if found is None:
        raise ValueError(f"{path} names nothing")
    return found


def load_function(path: str, key: str) -> Any:
    """Raises SettingError with that key."""
    try:
        found = load(path)
    except ValueError as error:
        raise SettingError(key, str(error)) from None
    if not callable(found):
        raise SettingError(key, f"{path} is no function")
    return found


def check_module(path: str, allowed: Sequence[str], key: str) -> None:
    """Raise SettingError unless the module of `path` is one of `allowed`, or inside one."""
    module = path.partition(":")[0]
    if not any(module == name or module.startswith(f"{name}.") for name in allowed):
        known = ", ".join(allowed) or "none"
        raise SettingError(
            key,
            f"{module} is not among the modules this worker may import "
            f"(episodes.user_modules): {known}",
        )


def check_url(url: str, allowed: Sequence[str], key: str) -> None:
    """Raise SettingError unless `url` is below one of `allowed`: scheme, host, port and path.

    An allowed address without a port allows every port.
    """
    wanted = urlsplit(url)
    for base in map(urlsplit, allowed):
        same_place = (wanted.scheme, wanted.hostname) == (base.scheme, base.hostname)
        same_port = base.port is None or wanted.port == base.port
        below = f"{wanted.path}/".startswith(f"{base.path.rstrip('/')}/")
        if same_place and same_port and below and ".." not in wanted.path.split("/"):
            return
    known = ", ".join(allowed) or "none"
    raise SettingError(
        key, f"{url} is not below an address this worker may ask (episodes.reward_urls): {known}"
    )
