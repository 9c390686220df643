"""Addresses as text, host:port; an IPv6 host stands in brackets there, and nowhere else."""

from __future__ import annotations


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
