"""Addresses as text, host:port; an IPv6 host stands in brackets there, and nowhere else."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

_HOST = re.compile(r"\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,252})")


def plain_host(host: str) -> str:
    """A host as sockets take it, without brackets."""
    return host.removeprefix("[").removesuffix("]")


def join_address(host: str, port: int) -> str:
    host = plain_host(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, str]:
    """Host and port; the host is empty where there is none."""
    host, _, port = address.rpartition(":")
    return plain_host(host), port


def check_address(address: str) -> None:
    """Raises ValueError unless it is host:port, IPv6 in brackets."""
    host, _, port = address.rpartition(":")
    if not (_HOST.fullmatch(host) and port.isascii() and port.isdecimal()):
        raise ValueError(f"{address[:200]!r} is not host:port")
    if not (len(port) <= 5 and 0 < int(port) < 1 << 16):  # gRPC takes it modulo 65536
        raise ValueError(f"{address[:200]!r}: a port is 1 to 65535")


def _own(address: str) -> str:
    if address:
        check_address(address)
    return address


def _others(address: str) -> str:
    return address if "#" in address else _own(address)


OwnAddress = Annotated[str, AfterValidator(_own)]  # host:port, or empty
ServerAddress = Annotated[str, AfterValidator(_others)]  # FILE#NAME of a services.json, too
