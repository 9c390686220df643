"""Where services are, by a services.json, and channels that follow a service which moves.

An address is `host:port`, or `FILE#NAME`: that of a service in a services.json, looked up again
whenever the file changes.
"""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Self

import grpc

from sluice.config import ConfigError

logger = logging.getLogger(__name__)

Stamp = tuple[int, int, int]  # of a file: when it was written, which one it is, its size


def by_name(path: Path, name: str) -> str:
    """The address, as `create_channel` takes it, of a service wherever it is.

    Raises ConfigError where a services.json does not know it now.
    """
    address_of(path, name)
    return f"{path.absolute()}#{name}"


def address_of(path: Path, name: str) -> str:
    """Address in a services.json of a service, or of the only one of a kind."""
    addresses = read_services(path)
    check_known(path, name, addresses)
    return addresses[name]


def check_known(path: Path, name: str, known: Collection[str]) -> None:
    """Raises ConfigError for a name that is none of those of a services.json."""
    if name not in known:
        raise ConfigError(
            f"services: {path} has no {name}, or several; known: {', '.join(sorted(known))}"
        )


def url_of(path: Path, name: str, key: str) -> str:
    """The URL that an entry of a services.json has under `key`. Raises ConfigError."""
    entry = read_entries(path).get(name, {})
    if not isinstance(url := entry.get(key), str):
        raise ConfigError(f"services: {path} has no {name} with a {key}")
    return url


def read_services(path: Path) -> dict[str, str]:
    """Addresses in a services.json by name, and by kind where one entry is of it."""
    entries = read_entries(path)
    return {name: entries[own]["address"] for name, own in names_of(entries).items()}


def names_of(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Names of the entries of a services.json, their own by all that each may be called.

    That is its own, and its kind where no other entry is of it.
    """
    kinds = [entry["kind"] for entry in entries.values()]
    single = {e["kind"]: name for name, e in entries.items() if kinds.count(e["kind"]) == 1}
    return single | {name: name for name in entries}


def read_entries(path: Path) -> dict[str, dict[str, Any]]:
    """What a services.json says of each service, by name. Raises ConfigError."""
    try:
        services = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"services: {path} does not exist; is `sluice up` running? It keeps that file in its "
            "run_dir until it ends: start it there (`sluice up SERVICES.yaml`; a run is resumed on "
            "the store that it had), or name another services.json"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"services: {path} is not a services.json: {error}") from None
    entries = services.values() if isinstance(services, dict) else [None]
    for entry in entries:
        texts = [entry.get(key) for key in ("kind", "address")] if isinstance(entry, dict) else [0]
        if not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"services: {path} is not a services.json: {entry} is no service")
    return dict(services)


class ForwardingChannel(grpc.aio.Channel):
    """A channel that makes its calls on another one."""

    @abstractmethod
    def _current(self) -> grpc.aio.Channel:
        """The one that calls go to now."""

    @abstractmethod
    def _method(self, kind: str, name: str, settings: tuple[tuple, dict[str, Any]]) -> Any:
        """What calls a method, of a kind of `grpc.aio.Channel`, with that one's settings."""

    def unary_unary(self, method: str, *settings: Any, **named: Any) -> Any:
        return self._method("unary_unary", method, (settings, named))

    def unary_stream(self, method: str, *settings: Any, **named: Any) -> Any:
        return self._method("unary_stream", method, (settings, named))

    def stream_unary(self, method: str, *settings: Any, **named: Any) -> Any:
        return self._method("stream_unary", method, (settings, named))

    def stream_stream(self, method: str, *settings: Any, **named: Any) -> Any:
        return self._method("stream_stream", method, (settings, named))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._current().channel_ready()

    async def close(self, grace: float | None = None) -> None:
        await self._current().close(grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class MovingChannel(ForwardingChannel):
    """A channel to wherever a service is by now.

    Each call looks at the file, and goes to the address that it names; one that is under way ends
    where it began, as one to a server that is gone does. While the file is away or lacks the
    service, it is taken to be where it was last.
    """

    def __init__(self, target: str, connect: Callable[[str], grpc.aio.Channel]) -> None:
        """`target` is FILE#NAME. Raises ConfigError where the file does not know the service."""
        file, _, self._name = target.rpartition("#")
        self._file, self._connect = Path(file), connect
        self._stamp: Stamp | None = None
        self._channels: dict[str, grpc.aio.Channel] = {}  # of all addresses that it had
        self._calls: dict[tuple[str, str, str], Any] = {}  # of each, by kind and method
        self._address = address_of(self._file, self._name)

    @property
    def address(self) -> str:
        """Where the service is by now, host:port."""
        stamp = _stamp_of(self._file)
        if stamp is None or stamp == self._stamp:
            return self._address
        try:
            address = address_of(self._file, self._name)
        except ConfigError:  # it is starting, somewhere
            return self._address
        if address != self._address:
            logger.warning("%s has moved from %s to %s", self._name, self._address, address)
        self._address, self._stamp = address, stamp
        return address

    def _current(self) -> grpc.aio.Channel:
        address = self.address
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._connect(address)
        return channel

    def _method(self, kind: str, name: str, settings: tuple[tuple, dict[str, Any]]) -> Any:
        """A callable that calls a method of the service where it is then."""
        positional, named = settings

        def call(*arguments: Any, **options: Any) -> Any:
            channel = self._current()
            key = self._address, kind, name
            found = self._calls.get(key)
            if found is None:
                found = self._calls[key] = getattr(channel, kind)(name, *positional, **named)
            return found(*arguments, **options)

        return call

    async def close(self, grace: float | None = None) -> None:
        """Close the channels to all addresses that the service had."""
        while self._channels:
            await self._channels.popitem()[1].close(grace)


def _stamp_of(file: Path) -> Stamp | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
