"""What runs inside Ray: an actor for each process of a stack, and one that knows where all are.

Each cell owns one `python -m services.X` as its child, starts it again where it was, and takes it
along when it dies. Nothing of Sluice is imported here: the code travels to a node by value, and a
node whose Python lacks Sluice says so in one line.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

BEAT_SECONDS = 0.5
CALL_SECONDS = 5.0
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
LASTING_SECONDS = 30.0  # a process that ran for so long is not failing in a row
MEETING_SECONDS = 3.0  # a rank that has not asked for so long is gone
LINGERING_SECONDS = 10.0  # for which the process before may keep its port
PROBE = "import services, sluice"


class Registry:
    """Who is where. Soft state: cells announce themselves at every beat."""

    def __init__(self, services_file: str) -> None:
        self._file = Path(services_file)
        self._entries: dict[str, dict[str, Any]] = {}
        self._written = ""
        self._coming: dict[str, dict[int, tuple[float, str]]] = {}  # by trainer: of each rank
        self._met: dict[str, dict[int, tuple[str, str]]] = {}  # by trainer: who has yet to hear

    def announce(self, name: str, entry: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Take what a cell says of itself; returns what all have said.

        The ports of the one before stay known, for an actor that is started again on its node.
        One that began before another of its name is not heard: its node was taken for lost.
        """
        before = self._entries.get(name, {})
        if before.get("since", 0.0) > entry["since"]:
            return self._entries
        if before.get("node") == entry["node"]:
            entry = {**entry, "ports": {**before["ports"], **entry["ports"]}}
        self._entries[name] = entry
        shown = {
            name: each["shown"] for name, each in sorted(self._entries.items()) if each["shown"]
        }
        text = json.dumps(shown, indent=1)
        if text != self._written:
            partial = self._file.with_name(f".{self._file.name}.partial")
            partial.write_text(text)
            partial.replace(self._file)
            self._written = text
        return self._entries

    def entries(self) -> dict[str, dict[str, Any]]:
        """Return what all have said."""
        return self._entries

    def meet(self, trainer: str, rank: int, count: int, where: str) -> str:
        """Return where rank 0 of this round listens, once all its ranks ask; empty before.

        `where` is the address at which this rank would listen, another one in every round.
        """
        met = self._met.setdefault(trainer, {})
        asked, first = met.pop(rank, ("", ""))
        if asked == where:  # or it was another process that met them, and has died since
            return first
        now, coming = time.monotonic(), self._coming.setdefault(trainer, {})
        coming[rank] = now, where
        for other, (at, _) in list(coming.items()):
            if now - at > MEETING_SECONDS:
                del coming[other]
        if len(coming) < count:
            return ""
        met.clear()
        met.update({other: (own, coming[0][1]) for other, (_, own) in coming.items()})
        coming.clear()
        return met.pop(rank)[1]


class NotYetKnownError(Exception):
    """Somebody whose address a process is told is not up yet."""


class Cell:
    """Owns one process of a stack.

    spec: name, kind and settings of it; for a rank, its trainer, number and their count.
    """

    def __init__(self, registry: Any, spec: dict[str, Any]) -> None:
        import ray

        self._ray, self._registry, self._spec = ray, registry, spec
        self._name, self._run_dir = str(spec["name"]), Path(spec["run_dir"])
        self._ip = ray.util.get_node_ip_address()
        self._held: dict[str, socket.socket] = {}  # ports, while this actor lives
        self._used: dict[str, str] = {}  # addresses that the child was told
        self._since = 0.0  # when this actor first asked, later than any of its name before
        self._child: subprocess.Popen[bytes] | None = None
        self._starts, self._failure, self._stopping = 0, "", threading.Event()
        self._deaths, self._told = 0, ""  # in a row, and what the last one said
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()  # and lives as long as this actor: a child dies with its thread

    def state(self) -> dict[str, Any]:
        """Return where it is, and what of its process."""
        alive = self._child is not None and self._child.poll() is None
        return {
            "node": self._ip,
            "actor": os.getpid(),
            "pid": self._child.pid if alive and self._child is not None else 0,
            "starts": self._starts,
            "failure": self._failure,
        }

    def read_log(self, offset: int, size: int) -> bytes:
        """Return bytes of what the process has logged; none behind the end."""
        try:
            with self._log.open("rb") as file:
                file.seek(offset)
                return file.read(size)
        except FileNotFoundError:
            return b""

    def stop(self, seconds: float) -> None:
        """End the process for good: SIGTERM, and SIGKILL after so long."""
        self._stopping.set()
        child = self._child
        if child is not None and child.poll() is None:
            child.send_signal(signal.SIGTERM)
            child.send_signal(signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(seconds)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        self._thread.join(CALL_SECONDS)

    def _live(self) -> None:
        """Until it is stopped. A full disk, or a file half written, is met like a death."""
        while not self._stopping.is_set():
            try:
                self._run()
            except (OSError, ValueError, LookupError) as error:
                traceback.print_exc()
                self._note_death(f"{type(error).__name__}: {error}", lasted=False)

    def _note_death(self, told: str, *, lasted: bool) -> None:
        """Count it, give up after too many, and pause."""
        self._deaths, self._told = 0 if lasted else self._deaths + 1, told
        if self._deaths > self._spec["restarts"]:
            self._failure = f"{self._name} died too often: {told}"
        self._stopping.wait(min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self._deaths, 10)))

    def _run(self) -> None:
        self._failure = self._failure or self._unfit()
        while not self._stopping.is_set():
            known = self._announce()
            if self._failure:
                self._stopping.wait(BEAT_SECONDS)
                continue
            try:
                command, environment = self._command(known)
            except NotYetKnownError:
                self._stopping.wait(BEAT_SECONDS)
                continue
            began = time.monotonic()
            self._start(command, environment)
            code = self._watch()
            lasted = time.monotonic() - began > LASTING_SECONDS
            told = f"ended with {code} on {self._ip}: {self._last_line()} (log: {self._log})"
            self._note_death(told, lasted=lasted)

    def _leave_to(self, newer: dict[str, Any]) -> None:
        """End here: the node was silent, and Ray has started this actor again on another one."""
        if not self._since or newer.get("since", 0.0) <= self._since:
            return
        print(f"{self._name}: another one runs on {newer.get('node')}; this one ends", flush=True)
        if self._child is not None and self._child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
        os._exit(1)

    def _unfit(self) -> str:
        """Say why nothing can be started here; empty if it can."""
        directory = self._spec["directory"]
        try:
            probe = subprocess.run(
                [sys.executable, "-c", PROBE],
                cwd=directory,
                env=self._environment(),
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{self._name}: node {self._ip} cannot start {sys.executable}: {error}"
        if probe.returncode:
            why = (probe.stderr.strip().splitlines() or ["no output"])[-1]
            return f"{self._name}: {sys.executable} of node {self._ip} lacks Sluice: {why}"
        marker = Path(self._spec["marker"])
        if not marker.exists():
            return f"{self._name}: node {self._ip} does not see {marker}: run_dir is not shared"
        return ""

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self._spec["environment"]}

    @property
    def _log(self) -> Path:
        return self._run_dir / "logs" / f"{self._name}.log"

    @property
    def _address_file(self) -> Path:
        return self._run_dir / "services" / f"{self._name}.address.json"

    def _last_line(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no output"

    def _announce(self) -> dict[str, dict[str, Any]]:
        """Tell the registry; returns all it knows, nothing while it is being restarted."""
        try:
            if not self._since:
                call = self._registry.entries.remote()
                known = self._ray.get(call, timeout=CALL_SECONDS).get(self._name, {})
                self._since = max(time.time(), known.get("since", 0.0) + 1.0)  # clocks differ
        except self._ray.exceptions.RayError:
            return {}
        shown: dict[str, Any] = {}
        pid = self._child.pid if self._child is not None and self._child.poll() is None else 0
        if pid and self._spec["kind"] != "rank":
            with contextlib.suppress(OSError, ValueError, KeyError):
                found = json.loads(self._address_file.read_text())
                if found["pid"] == pid:
                    shown = {**self._spec["shown"], **found, "host": self._ip}
                    shown["since"] = self._since
        entry = {
            "shown": shown,
            "since": self._since,
            "node": self._ip,
            "ports": {name: held.getsockname()[1] for name, held in self._held.items()},
            "failure": self._failure,
            "deaths": self._deaths,
            "told": self._told,
        }
        try:
            call = self._registry.announce.remote(self._name, entry)
            answer: dict[str, dict[str, Any]] = self._ray.get(call, timeout=CALL_SECONDS)
        except self._ray.exceptions.RayError:  # a file that all nodes see tells it, too
            with contextlib.suppress(OSError, ValueError):
                services = json.loads((self._run_dir / "services.json").read_text())
                self._leave_to(services.get(self._name, {}))
            return {}
        self._leave_to(answer.get(self._name, {}))
        return answer

    def _port(self, what: str, known: dict[str, dict[str, Any]]) -> int:
        """A port of this node that nobody else is given: that of the actor before, if it is free.

        It is bound and not listened at; only a server that names it can have it.
        """
        if what not in self._held:
            before = known.get(self._name, {})
            wanted = before.get("ports", {}).get(what, 0) if before.get("node") == self._ip else 0
            deadline = time.monotonic() + LINGERING_SECONDS
            while wanted and what not in self._held and time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    self._held[what] = _bound(self._ip, wanted)
                    break
                self._stopping.wait(BEAT_SECONDS)
            if what not in self._held:
                self._held[what] = _bound(self._ip, 0)
        return int(self._held[what].getsockname()[1])

    def _command(self, known: dict[str, dict[str, Any]]) -> tuple[list[str], dict[str, str]]:
        """Return how the child is started. Raises NotYetKnownError."""
        if self._spec["kind"] == "rank":
            return self._rank_command(known)
        config = dict(self._spec["config"])
        server = {"host": self._ip, **config["server"], "parent": os.getpid()}
        for name in ("port", "metrics_port"):
            server[name] = server.get(name) or self._port(name, known)
        config["server"] = server
        if section := self._spec["http_section"]:
            given = config.get(section, {})
            config[section] = {**given, "port": given.get("port") or self._port(section, known)}
        if self._spec["kind"] == "trainer" and config.get("ranks", {}).get("launch") == "external":
            port = config["ranks"].get("listen_port") or self._port("ranks", known)
            config["ranks"] = {"listen_host": self._ip, **config["ranks"], "listen_port": port}
        self._used = {}
        if self._spec["kind"] == "rollout" and "router" not in config:
            router = self._spec["router"]
            _address_of(router, known)
            config["router"] = f"{self._run_dir / 'services.json'}#{router}"
        if leader := self._spec.get("leader"):  # of an engine over several nodes
            engine = config["engine"]
            leader = f"{self._run_dir / 'services.json'}#{leader}"
            config["engine"] = {**engine, "sglang": {**engine["sglang"], "leader": leader}}
        file = self._run_dir / "services" / f"{self._name}.yaml"
        file.write_text(json.dumps(config, indent=1))  # which is YAML, too
        self._address_file.unlink(missing_ok=True)
        return [sys.executable, "-m", self._spec["module"], "--config", str(file)], {}

    def _rank_command(self, known: dict[str, dict[str, Any]]) -> tuple[list[str], dict[str, str]]:
        trainer, rank, count = self._spec["trainer"], self._spec["rank"], self._spec["count"]
        self._used = {trainer: _address_of(trainer, known)}
        held = self._held.pop("master", None)
        if held is not None:
            held.close()
        where = f"{self._ip}:{self._port('master', {})}"
        met = ""
        while not met and not self._stopping.is_set():
            with contextlib.suppress(self._ray.exceptions.RayError):
                call = self._registry.meet.remote(trainer, rank, count, where)
                met = self._ray.get(call, timeout=CALL_SECONDS)
            if not met:
                self._stopping.wait(BEAT_SECONDS)
        file = self._run_dir / "services" / f"{trainer}.yaml"
        ranks = json.loads(file.read_text())["ranks"]
        host, _, port = met.rpartition(":")
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": "0",  # Ray shows each the devices that are its own
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
        }
        if self._ip.startswith("127."):
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        controller = f"{ranks['listen_host']}:{ranks['listen_port']}"
        command = [sys.executable, "-m", "services.trainer.rank", "--config", str(file)]
        return [*command, "--controller", controller, "--parent", str(os.getpid())], environment

    def _start(self, command: list[str], environment: dict[str, str]) -> None:
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(
                command,
                cwd=self._spec["directory"],
                env={**self._environment(), "OMP_WAIT_POLICY": "passive", **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._starts += 1
        print(f"{self._name}: process {self._child.pid} on {self._ip}, start {self._starts}")

    def _watch(self) -> int:
        """Return the exit code, once there is one; ends a child whose neighbours have moved."""
        assert self._child is not None
        while self._child.poll() is None:
            known = self._announce()
            for name, address in self._used.items():
                now = known.get(name, {}).get("shown", {}).get("address", address)
                if now != address and not self._stopping.is_set():
                    self._child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(BEAT_SECONDS)
        print(f"{self._name}: ended with {self._child.returncode}")
        return int(self._child.returncode)


def _bound(host: str, port: int) -> socket.socket:
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, port))
    except BaseException:
        held.close()
        raise
    return held


def _address_of(name: str, known: dict[str, dict[str, Any]]) -> str:
    shown = known.get(name, {}).get("shown", {})
    if "address" not in shown:
        raise NotYetKnownError(name)
    return str(shown["address"])
