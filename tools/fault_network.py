"""Parts two processes from each other: by forwarders before ports, or at their own sockets."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import psutil

from sluice.ports import reserve_port
from sluice.stack import LOOPBACK

T = TypeVar("T")

PIECE = 1 << 16
CALL_SECONDS = 60.0
PIDFD_GETFD = 438  # the system call, on all architectures
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # return 0 bytes


@dataclass(eq=False)
class _Link:
    """A connection that is forwarded; `port` is the client's."""

    server: str
    port: int
    client: asyncio.StreamWriter
    flowing: asyncio.Event = field(default_factory=asyncio.Event)
    backend: asyncio.StreamWriter | None = None

    def abort(self) -> None:
        for writer in (self.client, self.backend):
            if writer is not None:
                writer.transport.abort()


@dataclass(frozen=True)
class _Parting:
    pid: int
    server: str
    how: str


class Network:
    """The ports of services: each listens at its own, and is reached by that of its forwarder."""

    def __init__(self, names: list[str]) -> None:
        self._holders = {name: reserve_port(LOOPBACK) for name in names}
        self._listeners = {name: socket.create_server((LOOPBACK, 0)) for name in names}
        self._links: set[_Link] = set()
        self._partings: list[_Parting] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)
        self._thread.start()
        for name in names:
            self._call(self._serve(name))

    def settings(self, name: str) -> dict[str, Any]:
        """Of the server of a service."""
        reached = self._listeners[name].getsockname()[1]
        return {
            "port": self._holders[name].getsockname()[1],
            "advertise": f"{LOOPBACK}:{reached}",
        }

    def part(self, pid: int, server: str, how: str) -> Callable[[], None]:
        """Stall or cut what a process has with a server; returns what undoes it."""
        parting = _Parting(pid, server, how)
        self._call(self._part(parting))
        return lambda: self._call(self._heal(parting))

    def close(self) -> None:
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_SECONDS)
        for held in (*self._holders.values(), *self._listeners.values()):
            held.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_SECONDS)

    async def _serve(self, name: str) -> None:
        await asyncio.start_server(
            lambda reader, writer: self._accept(name, reader, writer), sock=self._listeners[name]
        )

    async def _end(self) -> None:
        for link in list(self._links):
            link.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(
        self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        link = _Link(name, writer.get_extra_info("peername")[1], writer)
        self._links.add(link)
        link.flowing.set()
        try:
            for parting in self._partings:
                if await self._concerns(parting, link):
                    self._apply(parting, link)
            await link.flowing.wait()
            port = self._holders[name].getsockname()[1]
            backend_reader, link.backend = await asyncio.open_connection(LOOPBACK, port)
            await asyncio.gather(
                self._pump(link, reader, link.backend), self._pump(link, backend_reader, writer)
            )
        except OSError:  # nobody listens, or one side is gone: the other is to hear it
            pass
        finally:
            self._links.discard(link)
            link.abort()

    async def _pump(
        self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(PIECE):
            await link.flowing.wait()
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()

    async def _part(self, parting: _Parting) -> None:
        self._partings.append(parting)
        for link in list(self._links):
            if await self._concerns(parting, link):
                self._apply(parting, link)

    async def _heal(self, parting: _Parting) -> None:
        if parting in self._partings:
            self._partings.remove(parting)
        for link in self._links:
            link.flowing.set()

    def _apply(self, parting: _Parting, link: _Link) -> None:
        if parting.how == "cut":
            link.abort()
        else:
            link.flowing.clear()

    async def _concerns(self, parting: _Parting, link: _Link) -> bool:
        if parting.server != link.server:
            return False
        return link.port in await asyncio.to_thread(_ports_of, parting.pid)


def _ports_of(pid: int) -> set[int]:
    """Local ports of the connections of a process."""
    with contextlib.suppress(psutil.Error):
        return {each.laddr.port for each in psutil.Process(pid).net_connections() if each.laddr}
    return set()


def part_processes(one: int, other: int, how: str) -> Callable[[], None] | None:
    """Stall or cut the connections that two processes have; returns what undoes it.

    None if they have none. It does not meet connections that are made later.
    """
    ends = [*_ends(one, other), *_ends(other, one)]
    if not ends:
        return None
    for end in ends:
        if how == "cut":
            with contextlib.suppress(OSError):  # the other end was shut down, and this one knows
                end.shutdown(socket.SHUT_RDWR)
        else:
            program = struct.pack("HP", 1, ctypes.addressof(DROP_ALL))
            end.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)

    def undo() -> None:
        for end in ends:
            with end:
                if how == "stall":
                    end.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)

    return undo


def _ends(pid: int, other: int) -> list[socket.socket]:
    """Duplicates of the sockets by which a process is connected with another one."""
    opposite = {(end.raddr.port, end.laddr.port) for end in _connections(other)}
    return [
        _duplicate(pid, end.fd)
        for end in _connections(pid)
        if (end.laddr.port, end.raddr.port) in opposite
    ]


def _connections(pid: int) -> list[Any]:
    return [each for each in psutil.Process(pid).net_connections("tcp") if each.raddr]


def _duplicate(pid: int, descriptor: int) -> socket.socket:
    """Raises OSError."""
    process = os.pidfd_open(pid)
    try:
        number = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, descriptor, 0)
    finally:
        os.close(process)
    if number < 0:
        raise OSError(ctypes.get_errno(), f"descriptor {descriptor} of process {pid}")
    return socket.socket(fileno=number)
