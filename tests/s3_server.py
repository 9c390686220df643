"""An S3 server on this host, moto's, and what can go wrong between it and its clients."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from moto.server import ThreadedMotoServer

from tests.patience import PATIENCE

Application = Callable[[Any, Any], Any]


@dataclass
class Fault:
    """What happens to some requests: `refuse` them with 500 before they take effect, `lose` the
    answer after they did, or `cut` the body of the answer in half."""

    kind: str
    method: str
    part: str  # of the path
    count: int


@dataclass
class Faults:
    """Faults to come, each for so many requests that fit; `met` are those that were hit."""

    coming: list[Fault] = field(default_factory=list)
    met: list[str] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)

    def add(self, kind: str, method: str, part: str, count: int = 1) -> None:
        self.coming.append(Fault(kind, method, part, count))

    def take(self, method: str, path: str) -> str:
        self.calls.append((method, path))
        for fault in self.coming:
            if fault.count and fault.method == method and fault.part in path:
                fault.count -= 1
                self.met.append(fault.kind)
                return fault.kind
        return ""


@contextlib.contextmanager
def running_s3(faults: Faults | None = None) -> Iterator[str]:
    """Its endpoint. It holds nothing yet: moto's objects are those of its whole process, so that
    an earlier server of the same tests may have left some."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    assert server._server is not None
    application = one_at_a_time(server._server.app)
    server._server.app = application if faults is None else faulty(application, faults)
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    reset = urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST")
    with urllib.request.urlopen(reset, timeout=PATIENCE):
        pass
    try:
        yield endpoint
    finally:
        server.stop()


def one_at_a_time(application: Application) -> Application:
    """A write on the condition that the key is new is one step in S3; moto looks, then writes."""
    turn = threading.Lock()

    def call(environ: Any, start_response: Any) -> Any:
        with turn:
            return application(environ, start_response)

    return call


def faulty(application: Application, faults: Faults) -> Application:
    """The same with faults."""

    def call(environ: Any, start_response: Any) -> Any:
        kind = faults.take(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        if kind == "refuse":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("500 Internal Server Error", [("Content-Length", "0")])
            return []
        answer = application(environ, start_response)
        if kind == "lose":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionError("lost")
        return cut(answer, environ["werkzeug.socket"]) if kind == "cut" else answer

    return call


def cut(answer: Any, connection: socket.socket) -> Iterator[bytes]:
    body = b"".join(answer)
    yield body[: len(body) // 2]
    connection.shutdown(socket.SHUT_RDWR)
    raise ConnectionError("cut")


@contextlib.contextmanager
def s3_process() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The endpoint of a server that is a process of its own, which may be stopped."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.s3_server"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process
    finally:
        process.kill()
        process.wait(PATIENCE)


def make_bucket(endpoint: str, name: str) -> None:
    create = urllib.request.Request(f"{endpoint}/{name}", method="PUT")
    with urllib.request.urlopen(create, timeout=PATIENCE):
        pass


def environment(endpoint: str) -> dict[str, str]:
    """What clients find the server by."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }


if __name__ == "__main__":
    with running_s3() as address:
        print(address, flush=True)
        threading.Event().wait()
