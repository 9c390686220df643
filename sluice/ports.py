"""Ports that a supervisor takes for its services, and keeps for the next one."""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import yaml

from sluice.address import plain_host
from sluice.durable import replace_file
from sluice.stack import HTTP_SECTIONS
from sluice.weights.errors import FileDigestError
from sluice.weights.manifest import seal, unseal
from sluice.yaml_values import load_yaml

logger = logging.getLogger(__name__)

LINGERING_SECONDS = 10.0  # for which processes of a killed supervisor may keep their ports
POLL_SECONDS = 0.05
UNASKED = range(20000, 32000)  # that no kernel hands out by itself
_SEAL = "digest"  # of the file of ports


def write_ports(path: Path, ports: dict[str, dict[str, int]]) -> None:
    """Keep them for a supervisor after this one. Raises OSError."""
    replace_file(path, seal({"ports": ports}, _SEAL), temporary=path.parent, sync=False)


def read_ports(path: Path) -> dict[str, dict[str, int]]:
    """By service and name; none where there was no supervisor before.

    Where the file is damaged, those that stand in the services' configurations.
    """
    try:
        found = unseal(path.read_bytes(), _SEAL, path.name)["ports"]
        return {
            str(service): {str(name): int(port) for name, port in ports.items()}
            for service, ports in found.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, FileDigestError) as error:
        logger.warning("%s: %s; ports are read from the configurations beside it", path, error)
        return {each.stem: _configured_ports(each) for each in path.parent.glob("*.yaml")}


_DAMAGED = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
    yaml.YAMLError,
)


def _configured_ports(path: Path) -> dict[str, int]:
    """The ports of a configuration that a supervisor filled in; none where it is damaged."""
    try:
        config = load_yaml(path.read_bytes())
        ports = {name: config["server"].get(name) for name in ("port", "metrics_port")}
        ports |= {name: (config.get(name) or {}).get("port") for name in HTTP_SECTIONS}
        return {name: int(port) for name, port in ports.items() if port is not None}
    except _DAMAGED as error:
        logger.warning("%s: %s; the service gets new ports", path, error)
        return {}


async def take_port(host: str, wanted: int) -> socket.socket:
    """A port of the host: the wanted one, unless somebody else keeps it. Raises as reserve_port."""
    deadline = time.monotonic() + LINGERING_SECONDS
    while wanted:
        try:
            return reserve_port(host, wanted)
        except OverflowError:
            break
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                break
            await asyncio.sleep(POLL_SECONDS)
    return reserve_port(host)


def reserve_port(host: str, port: int = 0) -> socket.socket:
    """Binds a port of `host`, a free one by default, and does not listen there.

    Until the socket is closed, only a server that names the port and sets SO_REUSEADDR, as ours
    do, can have it: no process that asks for any port, or connects from one, is given it while
    the server is down. Raises OSError, and UnicodeError for text that is no name of a host.
    """
    name = plain_host(host) or None  # none is all interfaces
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, address = found[0][0], found[0][4]
    holder = socket.socket(family)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind(address)
    except BaseException:
        holder.close()
        raise
    return holder


def free_port(host: str, count: int = 1) -> int:
    """Finds a port that nobody listens at, of those that no kernel hands out by itself.

    With `count` it is the first of so many in a row. It is for programs of others, which take it
    long after it was chosen. Raises OSError.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    firsts = UNASKED[: len(UNASKED) - count + 1]
    for port in random.sample(firsts, len(firsts)):
        with ExitStack() as probes, suppress(OSError):
            for each in range(port, port + count):
                probes.enter_context(socket.socket(family)).bind((plain_host(host), each))
            return port
    raise OSError(errno.EADDRINUSE, f"no free port at {host}")
