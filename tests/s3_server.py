"""An S3 server on this host: moto's."""

from __future__ import annotations

import contextlib
import logging
import threading
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from moto.server import ThreadedMotoServer

from tests.patience import PATIENCE

Application = Callable[[Any, Any], Any]


@contextlib.contextmanager
def running_s3() -> Iterator[str]:
    """Its endpoint."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    assert server._server is not None
    server._server.app = one_at_a_time(server._server.app)
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def one_at_a_time(application: Application) -> Application:
    """A write on the condition that the key is new is one step in S3; moto looks, then writes."""
    turn = threading.Lock()

    def call(environ: Any, start_response: Any) -> Any:
        with turn:
            return application(environ, start_response)

    return call


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
