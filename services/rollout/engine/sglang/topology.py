"""Servers that make up one engine of several processes: nodes, prefill and decode, encoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from services.rollout.engine.sglang.commands import Arguments, Launch, command

Role = Literal["regular", "prefill", "decode"]


@dataclass(frozen=True, kw_only=True)
class ServerGroup:
    """Servers of one role. A server spans `hosts`; `replicas` of it stand on ports of their own.

    `arguments` are SGLang's and win over the shared ones.
    """

    role: Role
    hosts: tuple[str, ...]
    port: int
    replicas: int = 1
    arguments: Arguments = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Encoders:
    """Encoder-only servers, one on each (host, port); `backend` as SGLang's argument."""

    places: tuple[tuple[str, int], ...]
    backend: str = "zmq_to_scheduler"
    arguments: Arguments = field(default_factory=dict)

    @property
    def urls(self) -> list[str]:
        return [f"http://{host}:{port}" for host, port in self.places]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A whole engine. Encoders come up first: the others are given their URLs.

    `transfer_backend` moves the cache from prefill to decode servers. Ports from
    `bootstrap_port` on are taken where prefill servers meet decode servers, those from
    `encoder_bootstrap_port` on where encoders that come later register, `dist_port` on where
    the nodes of a server meet; all count up by server.
    """

    python: str
    arguments: Arguments
    groups: tuple[ServerGroup, ...]
    encoders: Encoders | None = None
    transfer_backend: str = "mooncake"
    bootstrap_port: int = 8998
    encoder_bootstrap_port: int = 9998
    dist_port: int = 20000


def launches(topology: Topology) -> list[Launch]:
    """Every process in the order of their start. Raises ValueError for groups that cannot work."""
    roles = {group.role for group in topology.groups}
    if ("prefill" in roles) != ("decode" in roles):
        raise ValueError("prefill and decode servers need each other")
    found = _encoder_launches(topology)
    number = 0
    for group in topology.groups:
        for replica in range(group.replicas):
            found += _server_launches(topology, group, replica, number)
            number += 1
    return found


def encoder_arguments(
    shared: Arguments, host: str, port: int, backend: str, own: Arguments
) -> dict[str, Any]:
    """Of an encoder-only server; what concerns decoding is left out of the shared ones."""
    kept = {name: value for name, value in shared.items() if name not in _DECODING}
    return {
        **kept,
        "host": host,
        "port": port,
        "encoder_only": True,
        "encoder_transfer_backend": backend,
        **own,
    }


_DECODING = (
    "language_only",
    "encoder_urls",
    "weight_version",
    "skip_tokenizer_init",
    "incremental_streaming_output",
    "max_running_requests",
    "chunked_prefill_size",
    "context_length",
    "enable_return_routed_experts",
)


def _encoder_launches(topology: Topology) -> list[Launch]:
    encoders = topology.encoders
    if encoders is None:
        return []
    return [
        Launch(
            role="encoder",
            url=f"http://{host}:{port}",
            command=command(
                topology.python,
                encoder_arguments(
                    topology.arguments, host, port, encoders.backend, encoders.arguments
                ),
            ),
        )
        for host, port in encoders.places
    ]


def _server_launches(
    topology: Topology, group: ServerGroup, replica: int, number: int
) -> list[Launch]:
    """One server: a process on every host of the group, of which the first listens."""
    port = group.port + replica
    shared = {
        **topology.arguments,
        **_role_arguments(topology, group.role, number),
        **_encoder_urls(topology, group.role, number),
        **group.arguments,
        "port": port,
    }
    return [
        Launch(
            role=group.role,
            url=f"http://{group.hosts[0]}:{port}",
            command=command(
                topology.python, {**shared, "host": host, **_nodes(topology, group, rank, number)}
            ),
        )
        for rank, host in enumerate(group.hosts)
    ]


def _role_arguments(topology: Topology, role: Role, number: int) -> dict[str, Any]:
    if role == "regular":
        return {}
    arguments: dict[str, Any] = {
        "disaggregation_mode": role,
        "disaggregation_transfer_backend": topology.transfer_backend,
    }
    if role == "prefill":
        arguments["disaggregation_bootstrap_port"] = topology.bootstrap_port + number
    return arguments


def _encoder_urls(topology: Topology, role: Role, number: int) -> dict[str, Any]:
    """Whoever reads prompts needs the encoders: prefill and regular servers, not decode ones."""
    if topology.encoders is None or role == "decode":
        return {}
    return {
        "language_only": True,
        "encoder_urls": topology.encoders.urls,
        "encoder_transfer_backend": topology.encoders.backend,
        "encoder_bootstrap_port": topology.encoder_bootstrap_port + number,
    }


def _nodes(topology: Topology, group: ServerGroup, rank: int, number: int) -> dict[str, Any]:
    if len(group.hosts) == 1:
        return {}
    return {
        "nnodes": len(group.hosts),
        "node_rank": rank,
        "dist_init_addr": f"{group.hosts[0]}:{topology.dist_port + number}",
    }


def bootstrap_urls(topology: Topology) -> Sequence[str]:
    """Where an encoder that comes back on another port is made known, one a server."""
    found: list[str] = []
    number = 0
    for group in topology.groups:
        for _ in range(group.replicas):
            if group.role != "decode":
                port = topology.encoder_bootstrap_port + number
                found.append(f"http://{group.hosts[0]}:{port}")
            number += 1
    return found
