"""Finds environments by name, functions and classes of users by `package.module:name`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol
from urllib.parse import unquote, urlsplit

from pydantic import ValidationError

from services.rollout.environments.environment import (
    Environment,
    SettingError,
    TextTokenizer,
)
from sluice.config import Config

ENVIRONMENTS = {
    "verifiers": "services.rollout.openai.verifiers.environment:VerifiersEnvironment",
    "tools": "services.rollout.environments.tools:ToolsEnvironment",
    "prompts": "services.rollout.environments.prompts:PromptsEnvironment",
    "reasoning_gym": "services.rollout.environments.reasoning_gym:ReasoningGymEnvironment",
}


def load(path: str) -> Any:
    """Imports the object at `package.module:name`. Raises ValueError where there is none."""
    module, _, name = path.partition(":")
    try:
        target = getattr(importlib.import_module(module), name, None) if name else None
    except ImportError as error:
        raise ValueError(f"{path}: {error}") from None
    if target is None:
        raise ValueError(f"{path} names nothing")
    return target


def load_function(path: str, key: str) -> Any:
    """Imports a function. Raises SettingError with that key where there is none."""
    try:
        function = load(path)
    except ValueError as error:
        raise SettingError(key, str(error)) from None
    if not callable(function):
        raise SettingError(key, f"{path} is no function")
    return function


def load_environment(path: str) -> type[Environment]:
    """Imports the class at `package.module:Class`. Raises ValueError where there is none."""
    environment_type = load(path)
    if not isinstance(environment_type, type) or not issubclass(environment_type, Environment):
        raise ValueError(f"{path} names no Environment")
    for name in ("name", "settings_type", "placement"):
        if not hasattr(environment_type, name):
            raise ValueError(f"{path} does not say its {name}; see Environment")
    return environment_type


@dataclass(frozen=True)
class Allowed:
    """Limits what requests may name: modules of users, reward services, and directories.

    services: the services.json by which services may be named as FILE#NAME.
    """

    modules: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    services: Path | None = None
    roots: tuple[Path, ...] = ()

    def check(self, environment_type: type[Environment], settings: Config) -> None:
        """Raises SettingError for what the settings name and must not."""
        for key, path in environment_type.functions(settings).items():
            self.check_module(path, key)
        for key, url in environment_type.urls(settings).items():
            self.check_url(url, key)
        for key, path in environment_type.paths(settings).items():
            self.check_path(path, key)

    def check_module(self, path: str, key: str) -> None:
        """Raises SettingError unless the module of `path` is an allowed one, or inside one."""
        module = path.partition(":")[0]
        if not any(module == name or module.startswith(f"{name}.") for name in self.modules):
            allowed = ", ".join(self.modules) or "none"
            raise SettingError(
                key,
                f"{module} is not among the modules this worker may import "
                f"(episodes.user_modules): {allowed}",
            )

    def check_url(self, url: str, key: str) -> None:
        """Raises SettingError unless `url` is below an allowed one: scheme, host, port and path.

        An allowed address without a port allows every port. A service of `services` is allowed.
        """
        if "://" not in url:
            self._check_service(url, key)
            return
        try:
            wanted = urlsplit(url)
            port = wanted.port
        except ValueError as error:
            raise SettingError(key, f"{url[:200]!r}: {error}") from None
        parts = unquote(wanted.path).replace("\\", "/").split("/")
        for base in map(urlsplit, self.urls):
            same_place = (wanted.scheme, wanted.hostname) == (base.scheme, base.hostname)
            same_port = base.port is None or port == base.port
            below = f"{wanted.path}/".startswith(f"{base.path.rstrip('/')}/")
            if same_place and same_port and below and ".." not in parts:
                return
        allowed = ", ".join(self.urls) or "none"
        raise SettingError(
            key,
            f"{url} is not below an address this worker may ask (episodes.reward_urls): {allowed}",
        )

    def _check_service(self, name: str, key: str) -> None:
        file = name.rpartition("#")[0]
        if self.services is None or Path(file).absolute() != self.services.absolute():
            known = self.services or "none"
            raise SettingError(
                key, f"{name[:200]!r} is not a service of the worker's services.json: {known}"
            )

    def check_path(self, path: str, key: str) -> None:
        """Raises SettingError unless a directory is below an allowed one, links followed."""
        try:
            found = Path(path).resolve()
            if any(found.is_relative_to(root.resolve()) for root in self.roots):
                return
        # ValueError: a name that no file can have; RuntimeError: links in a circle, before 3.13
        except (OSError, ValueError, RuntimeError) as error:
            raise SettingError(key, f"{path[:200]!r}: {error}") from None
        allowed = ", ".join(map(str, self.roots)) or "none"
        raise SettingError(
            key,
            f"{path[:200]!r} is not below a directory that requests may name "
            f"(episodes.tokenizer_roots): {allowed}",
        )


NOTHING_ALLOWED = Allowed()


class Configured(Protocol):
    """Has settings of a type of its own."""

    settings_type: ClassVar[type[Config]]


def parse_settings(configured: type[Configured], values: Mapping[str, Any]) -> Config:
    """Builds the settings. Raises SettingError naming the first unknown or wrong key."""
    try:
        return configured.settings_type(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        keys = ", ".join(configured.settings_type.model_fields)
        unknown = first["type"] == "extra_forbidden"
        message = f"unknown key; known: {keys}" if unknown else first["msg"]
        raise SettingError(key, message) from None


def create_environment(
    path: str, values: Mapping[str, Any], tokenizer: TextTokenizer | None = None
) -> Environment:
    """Builds an environment. Raises SettingError for a wrong setting."""
    environment_type = load_environment(path)
    return environment_type(parse_settings(environment_type, values), tokenizer)
