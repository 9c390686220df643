"""Ports for programs that take them long after they were chosen."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from sluice import ports

HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_ports_are_none_that_the_kernel_hands_out() -> None:
    lowest = int(HANDED_OUT.read_text().split()[0])
    assert all(ports.free_port("127.0.0.1") < lowest for _ in range(20))


def test_a_port_with_a_listener_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    port = ports.free_port("127.0.0.1")  # one that nobody is given once it is free again
    with socket.create_server(("127.0.0.1", port)):
        monkeypatch.setattr(ports, "UNASKED", range(port, port + 1))
        with pytest.raises(OSError, match="no free port"):
            ports.free_port("127.0.0.1")
    assert ports.free_port("127.0.0.1") == port
